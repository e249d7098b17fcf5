"""A run in process and without tracking needs only torch, numpy, pyarrow, pydantic, PyYAML and xxhash."""

import json
import subprocess
import sys
from pathlib import Path

from .bare import without

MISSING = "ray optuna mlflow torchvision sklearn scipy pandas matplotlib sqlalchemy rich click safetensors"
SCRIPT = (
    without(MISSING)
    + """
import json

from torch import Tensor

from fedfleet import ConfigError, Experiment, run

experiment = Experiment.model_validate({
    "workload": "quadratic",
    "method": "fedavg",
    "federation": {"clients": 6, "cohort": 3, "rounds": 4, "local": {"steps": 2}},
    "engine": {"backend": "local", "block": 2},
    "tracking": {"uri": "none"},
})
results = [run(experiment), run(experiment)]
assert all(isinstance(value, Tensor) for result in results for value in result.model.values())
for needs_another_package in (results[0].plot, results[0].to_pandas):
    try:
        needs_another_package()
    except ConfigError as error:
        assert "is not installed; install it (pip install" in str(error), error
    else:
        sys.exit("it is installed")
print(json.dumps([[r.run_id, r.records.num_rows, len(r.model), r.model_sha256] for r in results]))
"""
)


def test_in_process_run_without_the_other_packages(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for run_id, rounds, tensors, sha in results:
        assert run_id
        assert rounds == 4
        assert tensors >= 1
        assert len(bytes.fromhex(sha)) == 32
    assert results[0][3] == results[1][3]
