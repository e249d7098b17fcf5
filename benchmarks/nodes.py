"""Measures two Ray nodes with one worker each against one node with two workers, in turns.

    python benchmarks/nodes.py
    python benchmarks/nodes.py --repeats 5 --rounds 80

The nodes are Ray processes on this machine, so the figure tells what the pool of several nodes costs; it contains no
network. The work is w1 with FedAvg. Both clusters run for the whole measurement; only one of them has a run at a time.
Each line gives the median clients per second over the rounds after the first two, and whether both runs ended with the
same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pyarrow.parquet as parquet
import yaml

STORE = 200 * 2**20
"""Bytes of a node's object store."""
WARMUP = 2


def experiment(rounds: int) -> dict[str, object]:
    return {
        "plugins": ["fedfleet.tune.bench.works"],
        "workload": "w1",
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.05}},
        "federation": {"clients": 1000, "cohort": 100, "rounds": rounds, "local": {"steps": 5, "batch": 10}},
        "engine": {"workers": 2, "block": 1, "kernels": "chain", "placement": "spread"},
        "evaluate": {"every": 0},
        "tracking": {"uri": "none"},
    }


@contextmanager
def cluster(processors: list[int]) -> Iterator[str]:
    """A cluster with one node for each entry of `processors`, in a process of its own. Yields its address."""
    folder = tempfile.mkdtemp(prefix="ff-")
    code = f"""
import ray._private.utils
ray._private.utils.write_ray_address = lambda *arguments: None  # other programs on this machine do not join
from ray.cluster_utils import Cluster
common = dict(object_store_memory={STORE})
head = dict(num_cpus={processors[0]}, include_dashboard=False, temp_dir={folder!r}, **common)
cluster = Cluster(initialize_head=True, head_node_args=head)
for count in {processors[1:]}:
    cluster.add_node(num_cpus=count, **common)
print("ADDRESS", cluster.address, flush=True)
input()
cluster.shutdown()
"""
    environment = {"RAY_worker_niceness": "0", **os.environ}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, env=environment)
    try:
        assert process.stdout is not None
        addresses = (line.split()[1].decode() for line in process.stdout if line.startswith(b"ADDRESS "))
        address = next(addresses, None)
        if address is None:
            sys.exit("the cluster did not start")
        yield address
    finally:
        process.communicate(b"\n")
        shutil.rmtree(folder, ignore_errors=True)


def measure(address: str, config: Path, out: Path) -> tuple[float, str]:
    """Median clients per second, and the digest of the last model."""
    command = [str(Path(sys.executable).with_name("fedfleet")), "run", str(config), "--address", address]
    done = subprocess.run([*command, "--out", str(out), "--json"], check=True, stdout=subprocess.PIPE, text=True)
    rows = parquet.read_table(out / "rounds.parquet").to_pylist()[WARMUP:-1]  # the last round evaluates
    digest = json.loads(done.stdout.splitlines()[-1])["model_sha256"]
    return median(row["client/count"] / row["time/seconds"] for row in rows), digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ff-") as made, cluster([2]) as one_node, cluster([1, 1]) as two_nodes:
        config = Path(made) / "w1.yaml"
        config.write_text(yaml.safe_dump(experiment(asked.rounds + WARMUP + 1)))
        for repeat in range(asked.repeats):
            one, first = measure(one_node, config, Path(made) / f"{repeat}-one")
            two, second = measure(two_nodes, config, Path(made) / f"{repeat}-two")
            same = "the same bits" if first == second else "OTHER BITS"
            print(f"one node {one:.0f} clients/s, two nodes {two:.0f}, ratio {two / one:.3f}, {same}", flush=True)


if __name__ == "__main__":
    main()
