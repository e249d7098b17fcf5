#!/usr/bin/env bash
# A session of 15 minutes on a machine with a GPU, in two commands of at most 6 minutes each. What matters most runs
# first, every step is bounded, and results are kept as they come.
#
#     benchmarks/gpu_session.sh 1 OUT    # tests, and the small works with all plans beside the yardsticks
#     benchmarks/gpu_session.sh 2 OUT    # the large works, states of clients, processes on one card, and the goal
#
# GPU_PYTHON is the interpreter (default: python3). The package need not be installed.
set -u
part=${1:?the part, 1 or 2}; out=${2:?a folder for results}
python=${GPU_PYTHON:-python3}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
mkdir -p "$out"

measure() { # name, seconds, arguments of gpu.py
  local name=$1 limit=$2; shift 2
  timeout -k 5 "$limit" "$python" benchmarks/gpu.py --rounds 8 --seconds 4 --out "$out/$name" "$@" 2>&1 | tee "$out/$name.log"
}

case $part in
1)
  at_once=$("$python" -c 'import xdist' 2>/dev/null && echo "-n 12")
  measure small 170 --works w1,w2,w3
  timeout -k 5 180 "$python" -m pytest -m gpu -q -rs -p no:cacheprovider -o addopts= $at_once tests/accelerators \
    2>&1 | tail -60 | tee "$out/tests.log"
  ;;
2)
  measure states 50 --works w1-scaffold,w1-fedmuon_bc,w1-fedmud
  measure large 190 --works lstm,vit,resnet18
  measure goal 80 --works none --goal cifar-cnn
  measure shared 40 --works w1 --modes none --workers 1,2,4
  ;;
*)
  echo "the part is 1 or 2, got $part" >&2; exit 2
  ;;
esac
