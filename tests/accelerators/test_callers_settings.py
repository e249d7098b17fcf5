"""What the calling process has set in torch, and what its other threads do, does not enter a run, and stays."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fedfleet.engine import run
from fedfleet.engine.accelerators import settings
from fedfleet.engine.accelerators.settings import applied
from fedfleet.engine.api import new_run, rounds
from fedfleet.engine.clients.modules import evaluating, noted_draws
from fedfleet.engine.runs.expected_columns import columns
from fedfleet.workloads import counted
from fedfleet.workloads.drawing import initial

from ..engine.setups import execute_together
from ..test_conformance import Few, few

_C: Any = torch._C
WAIT = 30.0
"""Seconds after which a thread that is waited for counts as lost."""


@contextmanager
def value(read: Callable[[], Any], write: Callable[[Any], object], new: Any):
    """A setting of the caller; it must be there at the end of what runs in it."""
    before = read()
    write(new)
    try:
        yield
        assert read() == new
    finally:
        write(before)


@contextmanager
def precision(backend: str, operation: str, new: str):
    read = lambda: _C._get_fp32_precision_getter(backend, operation)  # noqa: E731
    with value(read, lambda value: _C._set_fp32_precision_setter(backend, operation, value), new):
        yield


@contextmanager
def flushed():
    torch.set_flush_denormal(True)
    try:
        yield
        assert (torch.tensor(1e-310, dtype=torch.float64) * 1.0).item() == 0.0
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def two_precisions():
    with precision("generic", "all", "tf32"), precision("mkldnn", "matmul", "bf16"):
        yield


@contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        with torch.device("meta"):
            yield
            assert torch.empty(1).is_meta
        assert torch.empty(1).is_meta
    finally:
        torch.set_default_device(None)


@contextmanager
def saved(pack: Callable[[Any], Any]):
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        yield
        assert _C._autograd._top_saved_tensors_default_hooks(False)


def anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype": lambda: value(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": default_device,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
    "threads": lambda: value(torch.get_num_threads, torch.set_num_threads, 3),
    "deterministic": lambda: value(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomalies": lambda: value(anomalies, lambda pair: torch.set_anomaly_enabled(*pair), (True, False)),
    "matmul": lambda: value(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "precisions": two_precisions,
    "denormal numbers": flushed,
    "saved tensors": lambda: saved(torch.zeros_like),
    "oneDNN": lambda: value(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled, False),
    "attention": lambda: value(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
}
"""What a caller may have set, by name; the context fails if it is no longer set at its end."""


def state() -> dict[str, Any]:
    """The settings under which code runs."""
    made = {**enumerate_read("process", settings.of_process), **enumerate_read("thread", settings.of_thread)}
    made["grad"], made["inference"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    made["device"] = torch.empty(0).device
    made["hooks"] = bool(_C._autograd._top_saved_tensors_default_hooks(False))
    return made


def enumerate_read(name: str, of: Callable[..., Any]) -> dict[str, Any]:
    second = False if of is settings.of_process else 1
    return {f"{name} {number}": setting.read() for number, setting in enumerate(of(settings.CPU, second))}


@dataclass(frozen=True)
class Watched(Few):
    """Notes the settings under which its rows are loaded, and its test rows are evaluated."""

    seen: list[Any] = field(default_factory=list, hash=False, compare=False)

    def load(self):
        self.seen.append(state())
        return super().load()

    def summary(self, means, columns):
        self.seen.append(state())
        return super().summary(means, columns)


def small(workload: Any = None, count: int = 2, seed: int = 0) -> Any:
    made = few("scaffold", workload or Few(), rounds=count, engine={"dtype": "float32"})
    return made.model_copy(update={"seed": seed, "evaluate": made.evaluate.model_copy(update={"every": 1})})


@pytest.fixture(scope="module")
def alone() -> dict[int, str]:
    """The digests of the models of runs that nothing disturbed, by seed."""
    return {seed: run(small(seed=seed)).model_sha256 for seed in range(3)}


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    """The settings that `Watched` notes in a run of a process that has set nothing."""
    workload = Watched()
    run(small(workload))
    loaded, first, second = workload.seen
    assert loaded["grad"]
    assert first == second == {**loaded, "grad": False}
    return workload.seen


@pytest.mark.parametrize("name", CALLERS)
def test_what_the_caller_has_set_does_not_enter_a_run_and_stays(name, alone, plain):
    workload = Watched()
    with CALLERS[name]():
        outside, told = state(), []
        result = run(small(workload), observers=[lambda record: told.append(state())])
        assert state() == outside
        assert told == [outside] * 2  # code of the caller that is called between two rounds
        evaluated = result.evaluate()
        found = columns(small())
    assert result.model_sha256 == alone[0]
    assert workload.seen == [*plain, plain[1], plain[1]]  # of the run, and of the evaluation after it
    assert evaluated["eval/accuracy"] == result.metrics["eval/accuracy"]
    assert found is not None
    assert "eval/accuracy" in found


def test_rounds_that_alternate_with_settings_of_the_caller(alone):
    first, second = rounds(small(seed=0)), rounds(small(seed=1))
    next(first)
    with ExitStack() as stack:
        stack.enter_context(CALLERS["default dtype"]())
        next(second)
        stack.enter_context(CALLERS["threads"]())
        next(first)
        assert torch.get_num_threads() == 3
        assert first.finish().model_sha256 == alone[0]
        stack.enter_context(CALLERS["no_grad"]())
    assert second.finish().model_sha256 == alone[1]
    assert torch.get_default_dtype() == torch.float32


def test_members_that_run_together(alone):
    with CALLERS["default dtype"](), CALLERS["precisions"]():
        results: list[Any] = execute_together([new_run(small(seed=seed), None, None) for seed in range(3)])
    assert {seed: result.model_sha256 for seed, result in enumerate(results)} == alone


@dataclass(frozen=True)
class Meeting(Few):
    """Its network is built only when another run in another thread builds one, or when it is clear that none will."""

    met: ClassVar[threading.Barrier] = threading.Barrier(2)

    def build(self):
        if threading.current_thread() is not threading.main_thread() and not self.met.broken:
            with suppress(threading.BrokenBarrierError):
                self.met.wait(0.3)
        return super().build()


def test_runs_in_threads_have_the_bits_of_runs_alone(alone):
    """Both would build their initial models at the same time, and draw from the same generator."""
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda seed: run(small(Meeting(), seed=seed)).model_sha256, range(3))
        assert dict(enumerate(found)) == alone


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(WAIT)


def test_a_model_follows_from_its_seed_whatever_another_thread_draws():
    def build(meanwhile: Callable[[], Any]) -> nn.Module:
        first = nn.Linear(3, 4)
        in_another_thread(meanwhile)
        weights = nn.Parameter(torch.rand(5) + nn.functional.dropout(torch.ones(5)) + torch.randperm(5))
        return nn.ParameterDict({"first": first.weight, "second": nn.Linear(4, 2).weight, "third": weights})

    quiet = initial(lambda: build(lambda: None), 7)
    before = torch.get_rng_state()
    drawn = torch.rand(3)
    torch.set_rng_state(before)
    other: list[torch.Tensor] = []
    busy = initial(lambda: build(lambda: other.append(torch.rand(3))), 7)
    for name, weights in quiet.named_parameters():
        assert torch.equal(weights, busy.get_parameter(name))
    assert torch.equal(other[0], drawn)
    torch.set_rng_state(before)
    torch.rand(3)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    initial(lambda: build(lambda: torch.rand(3)), 7)
    assert torch.equal(torch.get_rng_state(), after)


def test_draws_of_another_thread_do_not_refuse_a_run(alone):
    drawn: list[Any] = []

    @dataclass(frozen=True)
    class Disturbed(Few):
        """While its losses are computed for the first times, another thread draws."""

        def losses(self, p, batch):
            if len(drawn) < 2:
                drawn.append(in_another_thread(lambda: torch.rand(1)))
            return super().losses(p, batch)

    assert run(small(Disturbed())).model_sha256 == alone[0]
    assert len(drawn) == 2


def seeds_itself() -> nn.Module:
    """A module whose author seeds, keeps and forks the global generator."""
    first = nn.Linear(3, 4).weight
    torch.manual_seed(0)
    second = nn.Linear(3, 4).weight
    state = torch.get_rng_state()
    third = torch.rand(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fourth = torch.rand(3)
    torch.set_rng_state(state)
    last = [nn.Parameter(each) for each in (third, fourth, torch.rand(3), torch.rand(2))]
    return nn.ParameterList([first, second, *last])


def test_a_model_that_seeds_the_global_generator_leaves_it_alone():
    """It has the weights that it has where the generator is really the global one."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(counted.key(7, "init")))
        expected = list(seeds_itself().parameters())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    elsewhere: list[torch.Tensor] = []

    def build() -> nn.Module:
        elsewhere.append(in_another_thread(torch.get_rng_state))
        return seeds_itself()

    found = list(initial(build, 7).parameters())
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(elsewhere[0], before)
    assert vars(torch.random)["default_generator"] is torch.default_generator


def test_modules_that_another_thread_calls_are_not_touched():
    theirs = nn.Dropout(0.5)
    with evaluating():
        in_another_thread(lambda: theirs(torch.ones(3)))
        assert theirs.training
    with noted_draws() as found:
        in_another_thread(lambda: theirs(torch.ones(3)))
    assert found == []


def test_a_turn_lasts_until_it_is_left():
    order: list[str] = []
    began, waits = threading.Event(), threading.Event()

    def other() -> None:
        began.wait(WAIT)
        waits.set()
        with applied():
            order.append(f"other {torch.get_default_dtype()}")

    thread = threading.Thread(target=other)
    thread.start()
    with CALLERS["default dtype"]():
        with applied():
            began.set()
            waits.wait(WAIT)
            with applied():  # within itself
                order.append("first")
            order.append(f"again {torch.get_default_dtype()}")
        thread.join(WAIT)
        assert torch.get_default_dtype() == torch.float64
        assert order == ["first", "again torch.float32", "other torch.float32"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have():
    began, end = threading.Event(), threading.Event()

    def other() -> None:
        with applied():
            began.set()
            end.wait(WAIT)

    thread = threading.Thread(target=other)
    thread.start()
    began.wait(WAIT)
    child = os.fork()
    if not child:
        with applied():
            os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end.set()
    thread.join()
    assert code == 7
