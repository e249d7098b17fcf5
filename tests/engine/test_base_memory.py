"""A base is read tensor by tensor, so that it is never twice in the memory of a process. Linux says how much
memory a process has had at most.

TOLERANCE: two of the largest tensor, as it is in the file and as the run has it, and 16 MiB for what Python allocates
besides. Two copies of the base would be more than twice that. A digest, of which no copy is kept, needs less than a
quarter of the base, which is twelve of its largest tensors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long
WIDTH, LAYERS = 512, 12
SLACK = 16 << 20
PEAK = """
import json, re, sys
from pathlib import Path
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.run_spec import RunSpec

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

run_spec = RunSpec.of("id", experiment(json.loads(sys.argv[1])))
run_spec.workload.outline
run_spec.workload.stored()  # what is imported and built on the way
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
{measured}
print(json.dumps([status("VmHWM") - before, len(found)]))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """(the folder of a Llama of random numbers, the bytes of its tensors, those of the largest)."""
    from fedfleet.workloads.models.pretrained import transformers

    folder = tmp_path_factory.mktemp("base")
    config = transformers().LlamaConfig(
        vocab_size=97, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=32, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        network = transformers().AutoModelForCausalLM.from_config(config)
        network.save_pretrained(folder)
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    sizes = [value.nbytes for value in network.parameters()]
    return folder, sum(sizes), max(sizes)


def settings(folder: Path, **engine: object) -> dict[str, object]:
    return {
        "workload": {
            "name": "characters",
            "path": str(folder / "text.txt"),
            "length": 16,
            "model": {"name": "pretrained", "folder": str(folder)},
            "adapter": {"name": "lora", "rank": 2},
        },
        "method": {"name": "fedavg", "rule": {"name": "adamw", "lr": 0.01}},
        "federation": {"clients": 50, "cohort": 2, "rounds": 1, "local": {"steps": 1, "batch": 2}},
        "engine": engine,
        "evaluate": {"every": 0},
        "tracking": {"uri": "none", "model": False},
    }


def peak(folder: Path, measured: str) -> tuple[int, int]:
    """(the bytes by which the memory of a process grows at most, how many tensors it found). measured: what it does."""
    code = PEAK.replace("{measured}", measured)
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(settings(folder, backend="local"))], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    grown, count = json.loads(done.stdout.splitlines()[-1])
    return grown, count


def test_a_base_is_in_memory_once(base: tuple[Path, int, int]):
    folder, size, largest = base
    grown, count = peak(folder, "found = run_spec.frozen")
    assert count == 9 * LAYERS + 3
    assert 0.9 * size < grown < size + 2 * largest + SLACK


def test_the_digest_of_a_base_needs_no_more_than_one_tensor(base: tuple[Path, int, int]):
    folder, size, _ = base
    grown, count = peak(folder, "found = run_spec.frozen_facts['tensors']")
    assert count == 9 * LAYERS + 3
    assert grown < 0.25 * size


def test_the_driver_reads_a_base_into_shared_memory(base: tuple[Path, int, int], ray_here: None):
    """What this process has had at most is the base in shared memory, which counts as its own, and some tensors."""
    from fedfleet.engine.backends.ray.arrow_columns import put, shared
    from fedfleet.engine.config.schema import experiment
    from fedfleet.engine.run_spec import RunSpec

    folder, size, largest = base
    run_spec = RunSpec.of("id", experiment(settings(folder, backend="ray")))
    lazy = run_spec.frozen_one_by_one
    shared(put({"warm": lazy["lm_head.weight"]}))
    Path("/proc/self/clear_refs").write_text("5")
    before, private = status("VmRSS"), status("RssAnon")
    found = shared(put(lazy))
    assert status("VmHWM") - before < size + 2 * largest + SLACK
    assert status("RssAnon") - private < 2 * largest + SLACK
    assert all(torch.equal(value, lazy[name]) for name, value in found.items())
    assert sum(value.nbytes for value in found.values()) > 0.99 * size


def status(name: str) -> int:
    """A size in the status of this process, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
