"""The native kernels agree with torch's operations: values and gradients, for one client, for a block, and in whole
runs.

TOLERANCE: float32 sums in another order, relative to the largest entry, as in test_blocks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.kernels import library, operators
from fedfleet.engine.kernels.operators import Conv, Native
from fedfleet.engine.runs.prepare import prepare

from .setups import run_and_count

TOLERANCE = 1e-5
CONVS = [  # inputs, outputs, side, padding, height, width: all tile widths, odd sizes, rows longer than a vector
    (1, 6, 5, 2, 28, 28),
    (6, 16, 5, 0, 14, 14),
    (3, 11, 3, 1, 7, 33),
    (2, 9, 1, 0, 5, 16),
    (4, 1, 2, 1, 3, 3),
    (3, 5, 4, 3, 9, 20),
    (2, 3, 7, 6, 8, 17),
    (5, 13, 3, 2, 40, 1),
]

pytestmark = pytest.mark.usefixtures("own_kernels")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max() / second.abs().max().clamp(min=1e-3))


def gradients(f, *tensors):
    """(value, gradients of the sum of the values' squares)."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("sizes", CONVS)
def test_convolution_is_torchs(sizes, biased):
    inputs, outputs, side, padding, height, width = sizes
    tensors = [drawn(3, 4, inputs, height, width), drawn(3, outputs, inputs, side, side)]
    tensors += [drawn(3, outputs)] if biased else []

    def conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.conv2d(x, weight, bias, padding=padding)

    with Native().around_losses():
        assert "Conv" in type(conv(*[t[0].requires_grad_() for t in tensors]).grad_fn).__name__
        alone = [gradients(conv, *(t[i] for t in tensors)) for i in range(3)]
        block = gradients(vmap(conv), *tensors)
    for i in range(3):
        expected = gradients(conv, *(t[i] for t in tensors))
        for value, own, together in zip(expected, alone[i], [t[i] for t in block], strict=True):
            assert torch.equal(own, together)
            assert apart(own, value) < TOLERANCE


def test_weights_shared_by_a_block_and_a_vmap_inside_a_vmap():
    x, weight = drawn(2, 3, 4, 1, 9, 9), drawn(5, 1, 3, 3)
    with Native().around_losses():
        nested = vmap(vmap(lambda a: F.conv2d(a, weight)))(x)
    assert apart(nested, F.conv2d(x.flatten(0, 2), weight).view(nested.shape)) < TOLERANCE


def test_what_does_not_fit_is_torchs(monkeypatch):
    monkeypatch.setattr(Conv, "apply", None)
    x, weight = drawn(2, 4, 9, 9), drawn(4, 4, 3, 3)
    with Native().around_losses():
        F.conv2d(x, weight, stride=2)
        F.conv2d(x, weight, dilation=2)
        F.conv2d(x, weight, padding=(1, 0))
        F.conv2d(x, weight, padding="same")
        F.conv2d(x, weight[:, :1], groups=4)
        F.conv2d(x, weight[..., :2])
        F.conv2d(x.double(), weight.double())
        with pytest.raises(TypeError):
            F.conv2d(x, weight)


@pytest.mark.parametrize("sides", [(8, 8), (7, 5), (2, 3)])
def test_pooling_of_evaluations_is_torchs_to_the_bit(sides, monkeypatch):
    """With NaN, infinities and zeros of both signs. Where a gradient is asked for, torch computes it."""
    x = drawn(3, 4, *sides)
    x[0] = torch.tensor([torch.nan, -torch.inf, 0.0, -0.0, 1.0])[torch.arange(x[0].numel()) % 5].view(x[0].shape)
    x[1] = 0.0 * x[1]
    called = list[str]()
    monkeypatch.setattr(operators, "call", lambda name, *given: (called.append(name), library.call(name, *given)))
    with Native().around_losses(), torch.no_grad():
        found = [F.max_pool2d(x, 2), nn.MaxPool2d((2, 2), 2)(x), torch.max_pool2d(x, 2, [2, 2])]
    assert called == ["max_pool"] * 3
    expected = F.max_pool2d(x, 2)
    assert expected.isnan().any()
    for each in found:
        assert torch.equal(each.isnan(), expected.isnan())
        assert torch.equal(each.nan_to_num(7).view(torch.int32), expected.nan_to_num(7).view(torch.int32))
    with Native().around_losses():
        assert F.max_pool2d(x.requires_grad_(), 2).requires_grad


def test_other_pooling_is_torchs(monkeypatch):
    monkeypatch.setattr(operators, "call", None)
    x = drawn(2, 3, 6, 6)
    with Native().around_losses(), torch.no_grad():
        pooled = [
            F.max_pool2d(x, 3),
            F.max_pool2d(x, 2, 1),
            F.max_pool2d(x, 2, padding=1),
            F.max_pool2d(x, 2, dilation=2),
        ]
        assert [each.shape[-1] for each in [*pooled, F.max_pool2d(x, 2, ceil_mode=True)]] == [2, 5, 4, 2, 3]
        assert len(F.max_pool2d(x, 2, return_indices=True)) == 2
        assert F.max_pool2d(x.double(), 2).dtype == torch.float64
        assert F.max_pool2d(x.mT, 2).shape == (2, 3, 3, 3)
        assert F.max_pool2d(x[0], 2).shape == (3, 3, 3)
        assert vmap(lambda each: F.max_pool2d(each, 2))(x.unsqueeze(1)).shape == (2, 1, 3, 3, 3)
        with pytest.raises(RuntimeError, match="too small"):
            F.max_pool2d(x[..., :1], 2)


def lenet(backend: Any = "local", workers: Any = 1, method: Any = "scaffold", batch: Any = 8, **engine: Any):
    """Run LeNet on synthetic FashionMNIST with ten unequal clients, four of them in each round."""
    return experiment(
        {
            "workload": {"name": "fashion_mnist", "stand_in": 120, "model": "lenet", "partition": "dirichlet"},
            "method": {"name": method, "rule": {"name": "sgd", "lr": 0.05}},
            "federation": {"clients": 6, "cohort": 4, "rounds": 2, "local": {"epochs": 1, "batch": batch}},
            "engine": {"backend": backend, "workers": workers, "block": 2, "kernels": "native", **engine},
            "evaluate": {"every": 0, "batch": 50},
            "tracking": {"uri": "none"},
        }
    )


def test_a_run_with_own_kernels_is_the_run_with_torchs(monkeypatch: pytest.MonkeyPatch):
    ways = ({}, {"block": 1}, {"kernels": "torch"}, {"kernels": "torch"})
    results, calls = zip(*(run_and_count(lenet(**way), operators, "call", monkeypatch) for way in ways), strict=True)
    assert [count > 0 for count in calls] == [True, True, False, False]
    own, alone, torchs, again = (torch.cat([t.flatten() for t in r.model.values()]) for r in results)
    assert torch.equal(torchs, again)
    for other in (own, alone):
        assert apart(other, torchs) < TOLERANCE


@pytest.mark.long
def test_workers_and_backends_agree_to_the_bit_with_own_kernels(ray_here):
    results = [run(lenet()), run(lenet("ray", 1)), run(lenet("ray", 2))]
    assert len({result.model_sha256 for result in results}) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"dtype": "float64"}, "float32 on processors"), ({"device": "cuda"}, "float32 on processors")],
)
def test_where_they_cannot_be_had(change, sentence):
    with pytest.raises(ConfigError, match=f"engine.kernels: .*{sentence}.*choose torch"):
        prepare(lenet(**change), "run")


BROKEN = {"no compiler": "/nowhere/c++", "a compiler that fails": "false"}


@pytest.mark.parametrize("compiler", BROKEN.values(), ids=BROKEN)
def test_without_a_compiler_one_sentence(compiler, tmp_path, monkeypatch):
    """In a separate process, because a library that was loaded stays loaded."""
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path))
    program = "from fedfleet.tune.cli import main; main()"
    arguments = ["run", "digits", "engine.kernels=native", "engine.backend=local", "tracking.uri=none"]
    command = [sys.executable, "-c", program, *arguments, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: engine.kernels: must fit the run: they cannot be compiled here (")
    assert done.stderr.strip().endswith("), got native; choose torch or auto")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def compiler(folder: Path, name: str, acts: str) -> str:
    """A script in the place of a compiler. The variable `made` has the name of the file that it shall make."""
    script = folder / name
    script.write_text(f"#!/bin/sh\nfor made; do :; done\n{acts}\n")
    script.chmod(0o755)
    return str(script)


def test_a_compilation_that_is_killed_leaves_nothing(tmp_path, monkeypatch):
    """The next one removes the folder of a process that was killed, and not that of one that compiles."""
    monkeypatch.setattr(library, "check_compiler", lambda compiler: None)
    cache, ready, end = tmp_path / "kernels", tmp_path / "ready", tmp_path / "end"
    os.mkfifo(ready)
    os.mkfifo(end)
    waits = compiler(tmp_path, "waits", f"echo a > $made; echo a > $TMPDIR/own; echo a > {ready}; read line < {end}")
    makes = compiler(tmp_path, "makes", "echo all > $made")
    program = "import sys; from pathlib import Path; from fedfleet.engine.kernels import library as found; "
    program += "found.check_compiler = lambda compiler: None; found.build(sys.argv[1], Path(sys.argv[2]), 'x')"
    processes = []
    for _ in range(2):
        processes.append(subprocess.Popen([sys.executable, "-c", program, waits, str(cache)]))
        assert ready.read_text() == "a\n"
    processes[0].kill()
    processes[0].wait()
    made = library.build(makes, cache, "y")
    (others,) = (path for path in cache.iterdir() if path != made)  # of the process that still compiles
    assert sorted(path.name for path in others.iterdir()) == ["made.so", "own"]
    processes[1].kill()
    processes[1].wait()
    library.build(makes, cache, "y")
    assert list(cache.iterdir()) == [made]
    os.close(os.open(end, os.O_WRONLY | os.O_NONBLOCK))  # ends the scripts


@pytest.mark.long
def test_two_processes_build_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path))
    program = "from fedfleet.engine.kernels.library import library; library().conv_forward"
    both = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"]
