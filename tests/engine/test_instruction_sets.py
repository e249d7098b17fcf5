"""The compiled kernels are right when they are compiled for AVX2, whose vectors and tiles are not those of AVX-512.

The tests of the kernels run again, in a process whose library is compiled for AVX2. On a processor with AVX-512 nothing
else would run that code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedfleet.engine.kernels import library

ROOT = Path(__file__).parents[2]
REPEATED = (
    "test_attention.py::test_attention_is_the_definition",
    "test_attention.py::test_a_block_is_its_clients",
    "test_fused_chain.py::test_loss_and_gradient_are_torchs",
    "test_fused_chain.py::test_strides_do_not_matter",
    "test_fused_chain.py::test_what_is_not_finite_goes_where_torch_has_it_go",
    "test_channels_last.py::test_convolutions_are_torchs",
    "test_channels_last.py::test_minimal_filtering_does_not_lose_what_is_not_finite",
    "test_kernels.py::test_convolution_is_torchs",
    "test_own_orthogonal.py::test_iterations_are_torchs",
    "test_own_orthogonal.py::test_rounding_errors_are_those_of_the_arithmetic",
    "test_own_orthogonal.py::test_a_step_in_one_call_is_the_step",
    "test_descent.py::test_at_once_is_step_by_step",
)
PROGRAM = """
import sys
import pytest
from fedfleet.engine.kernels import library
library.FLAGS = tuple("-march=haswell" if flag.startswith("-march") else flag for flag in library.FLAGS)
assert library.instruction_set() == "AVX2", library.instruction_set()
sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.long
@pytest.mark.usefixtures("own_kernels")
def test_kernels_compiled_for_avx2_are_torchs():
    if " avx2 " not in f"{library.processor()} ":
        pytest.skip("this processor has no AVX2")
    tests = [f"tests/engine/{name}" for name in REPEATED]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *tests], capture_output=True, text=True, env=ours, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
