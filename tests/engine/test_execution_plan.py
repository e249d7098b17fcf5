"""The execution plan is decided once: it is given, read from a checkpoint, chosen by the rule for short runs, read from
the cache, or measured."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedfleet.engine import resume, run
from fedfleet.engine.clients.local_training import LocalTrainer
from fedfleet.engine.clients.worker import Data
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.kernels import library, operators
from fedfleet.engine.kernels.library import NoKernels
from fedfleet.engine.planning import autotune, execution_plan
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from fedfleet.engine.storage.lock import Lock

from ..faults.runs import Watch, interrupt
from .setups import STEPS, digits


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with suppress(NoKernels):
        library.library()  # else each thread of a test would build it in the folder below
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        operators, "library", lambda: True
    )  # kernels are built in another test, and the networks here have no convolution
    monkeypatch.setattr(execution_plan, "WORTH", 0)
    return tmp_path / "cache"


def played(experiment, out: Path | None = None) -> tuple[Any, str]:
    log = Watch()
    result = run(experiment, out, [log])
    return result, log.told[0]


def auto(**engine: Any):
    return digits("scaffold", STEPS, **{"block": "auto", **engine})


def never(*args: Any) -> Any:
    raise AssertionError("must not be measured")


def plan_execution(
    experiment, measure=never, directory: Path | None = None, resumed: bool = False
) -> tuple[ExecutionPlan, str]:
    run_spec = RunSpec.of("run", experiment, str(directory) if directory else None, resumed)
    run_spec, told = execution_plan.plan_execution(run_spec, run_spec.split(), measure)
    assert run_spec.execution_plan is not None
    return run_spec.execution_plan, told


@pytest.mark.long
def test_measured_once_then_remembered_to_the_same_bits(tmp_path: Path, cache: Path, monkeypatch):
    first, told = played(auto(), tmp_path / "run")
    assert "measured, ms per client: 1 torch " in told
    (kept,) = (cache / "paths").iterdir()
    monkeypatch.setattr(autotune, "time_plan", never)
    again, told = played(auto())
    assert told.endswith("(measured before)")
    assert first.model_sha256 == again.model_sha256
    recorded = json.loads((tmp_path / "run/plan.json").read_text())
    assert {recorded[key] == json.loads(kept.read_text())[key] for key in ("block", "kernels")} == {True}
    assert "plan: blocks of" in (tmp_path / "run/run.log").read_text()


def test_another_method_model_or_batch_is_measured_anew_and_another_step_size_or_worker_is_not():
    asked = []

    def measure(run_spec, split, candidates):
        asked.append(run_spec)
        return {ExecutionPlan(3, "torch"): 1.0}

    base = auto()
    method = {**base.method, "rule": {"name": "sgd", "lr": 0.3}}
    same = [base, base.model_copy(update={"method": method, "seed": 4}), auto(workers=2, backend="ray")]
    model = {**base.workload, "model": {"name": "mlp", "hidden": [8]}}
    others = [
        base.model_copy(update={"method": {"name": "fedavg"}}),
        base.model_copy(update={"workload": model}),
        digits("scaffold", {"steps": 3, "batch": 9}, block="auto"),
        auto(dtype="float64"),
    ]
    for experiment in same:
        assert plan_execution(experiment, measure)[0] == (3, "torch")
    assert len(asked) == 1
    for experiment in others:
        plan_execution(experiment, measure)
    assert len(asked) == 1 + len(others)


def test_a_resumed_run_goes_on_as_it_began(tmp_path: Path, cache: Path, monkeypatch):
    """A resumed run keeps its plan, even if the cache has another one by then."""
    plan = auto().federation.model_copy(update={"rounds": 4})
    experiment = auto().model_copy(update={"federation": plan})

    def chosen(run_spec, split, candidates):
        return {ExecutionPlan(5, "torch"): 1.0}

    monkeypatch.setattr("fedfleet.engine.runs.host.measure", chosen)
    whole = run(experiment)

    kept = experiment.checkpoint.model_copy(update={"every": 1})
    stopped = experiment.model_copy(update={"checkpoint": kept})
    with pytest.raises(Interrupted):
        run(stopped, tmp_path / "run", [Watch(r2=interrupt)])
    (known,) = (cache / "paths").iterdir()
    known.write_text(json.dumps({"block": 2, "kernels": "torch"}))
    log = Watch()
    again = resume(experiment, tmp_path / "run", [log])
    assert any("blocks of 5 clients" in text and "as the run began" in text for text in log.told)
    assert again.model_sha256 == whole.model_sha256
    anew = Watch()  # whether its bits differ depends on the processor
    run(experiment, observers=[anew])
    assert any("blocks of 2 clients" in text for text in anew.told)


def test_short_runs_go_by_the_rule_and_what_is_given_is_taken(monkeypatch):
    assert plan_execution(auto(block=4, kernels="torch"))[1] == "plan: blocks of 4 clients, torch kernels (as given)"
    monkeypatch.setattr(execution_plan, "WORTH", 10**9)
    assert plan_execution(auto()) == (
        (9, "torch"),
        "plan: blocks of 9 clients, torch kernels (too short a run to measure)",
    )


def test_runs_of_large_networks_are_measured_with_fewer_steps(monkeypatch):
    monkeypatch.undo()
    made = auto()
    plan = made.federation
    steps = execution_plan.WORTH_OF_LARGE
    local = plan.local.taking(steps=steps // plan.cohort)
    made = made.model_copy(update={"federation": plan.model_copy(update={"rounds": 1, "local": local})})
    run_spec, count = RunSpec.of("run", made), steps // plan.cohort * plan.cohort
    split, work = run_spec.split(), count * run_spec.multiplications_of_batch()
    assert count < execution_plan.WORTH
    monkeypatch.setattr(execution_plan, "WORTH_OF_LARGE", count)
    assert not execution_plan.worth_measuring(run_spec, split)
    monkeypatch.setattr(execution_plan, "LARGE", work)
    assert execution_plan.worth_measuring(run_spec, split)
    monkeypatch.setattr(execution_plan, "WORTH_OF_LARGE", count + 1)
    assert not execution_plan.worth_measuring(run_spec, split)
    monkeypatch.setattr(execution_plan, "WORTH_OF_LARGE", count)
    monkeypatch.setattr(RunSpec, "multiplications_of_batch", lambda run_spec: math.inf)
    assert not execution_plan.worth_measuring(run_spec, split)


def test_candidates():
    run_spec = RunSpec.of("run", digits("fedavg", STEPS, block="auto"))
    plan = run_spec.experiment.federation.model_copy(update={"clients": 100, "cohort": 100})
    run_spec = RunSpec.of("run", run_spec.experiment.model_copy(update={"federation": plan}))
    blocks = (1, 3, 5, 9, 13, 25)
    assert execution_plan.candidates(run_spec) == [
        ExecutionPlan(block, name) for block in blocks for name in ("torch", "chain")
    ]
    other = RunSpec.of(
        "run", run_spec.experiment.model_copy(update={"workload": {"name": "regularised", "of": "digits"}})
    )
    assert {c.kernels for c in execution_plan.candidates(other)} == {"torch", "native"}
    double = run_spec.experiment.model_copy(
        update={"engine": run_spec.experiment.engine.model_copy(update={"dtype": "float64"})}
    )
    assert {c.kernels for c in execution_plan.candidates(RunSpec.of("run", double))} == {"torch"}


def test_the_first_within_noise_is_taken():
    assert execution_plan.quickest({ExecutionPlan(1, "torch"): 1.02, ExecutionPlan(4, "torch"): 1.0}) == (1, "torch")
    assert execution_plan.quickest({ExecutionPlan(1, "torch"): 1.1, ExecutionPlan(4, "native"): 1.0}) == (4, "native")


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
def test_no_block_is_taken_for_which_there_is_no_memory(error, monkeypatch):
    real = LocalTrainer.train_block

    def train_block(self, public, client, steps, batches):
        if len(steps) > 2:
            raise error
        return real(self, public, client, steps, batches)

    monkeypatch.setattr(LocalTrainer, "train_block", train_block)
    run_spec = RunSpec.of("run", auto(kernels="torch"))
    ran = autotune.measure(run_spec, run_spec.split(), execution_plan.candidates(run_spec))
    assert list(ran) == [(1, "torch"), (2, "torch")]


def test_where_nothing_runs_the_rule_holds():
    """If no candidate can be measured, the rule for short runs decides, and the run itself reports what is wrong."""
    assert plan_execution(auto(), lambda *_: {})[0] == (9, "torch")


def planned_by_two(measures: list[Any]) -> set[Any]:
    """The plans that two threads find, each with a lock of its own, as two processes have. All kernels are proven
    before: a proof sets hooks of the process, so that threads prove in turns (`settings.applied`)."""
    found, run_specs = [], [RunSpec.of("run", auto()) for _ in measures]
    splits = [run_spec.split() for run_spec in run_specs]
    for run_spec, split in zip(run_specs, splits, strict=True):
        execution_plan.kernels_to_try(run_spec, split)

    def plan(*given: Any) -> None:
        found.append(execution_plan.plan_execution(*given)[0].execution_plan)

    threads = [threading.Thread(target=plan, args=given) for given in zip(run_specs, splits, measures, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    return set(found)


def test_of_two_processes_one_measures(cache: Path, monkeypatch: pytest.MonkeyPatch):
    measured, kept_out = [], threading.Event()

    class Observed(Lock):
        def take(self) -> bool:
            if not (taken := super().take()):
                kept_out.set()
            return taken

    monkeypatch.setattr(execution_plan, "Lock", Observed)

    def measure(block: int) -> Any:
        def one(*_):
            measured.append(block)
            assert kept_out.wait(300)
            return {ExecutionPlan(block, "torch"): 1.0}

        return one

    assert planned_by_two([measure(2), measure(3)]) == {(measured[0], "torch")}
    assert len(measured) == 1
    assert len(list((cache / "paths").iterdir())) == 1  # the lock is gone


def test_of_two_processes_that_measure_at_once_the_first_one_counts(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Where one does not wait for the other, as on file systems without locks."""
    monkeypatch.setattr(execution_plan, "PATIENCE", 0.0)
    both = threading.Barrier(2)

    def measure(block: int) -> Any:
        def one(*_):
            both.wait()
            return {ExecutionPlan(block, "torch"): 1.0}

        return one

    assert len(planned_by_two([measure(2), measure(3)])) == 1
    assert len(list((cache / "paths").iterdir())) == 1


@pytest.mark.parametrize("text", ["", "[1]", '{"block": 0, "kernels": "torch"}', '{"block": 2, "kernels": "x"}'])
def test_a_damaged_answer_is_told(text, cache: Path):
    plan_execution(auto(), lambda *_: {ExecutionPlan(2, "torch"): 1.0})
    (kept,) = (cache / "paths").iterdir()
    kept.write_text(text)
    with pytest.raises(ConfigError, match=r"is damaged .*; remove it"):
        plan_execution(auto())


def test_a_cache_that_cannot_be_written_costs_the_memory_only(cache: Path):
    cache.write_text("a file, not a folder")
    chosen, told = plan_execution(auto(), lambda *_: {ExecutionPlan(2, "torch"): 1.0})
    assert chosen == (2, "torch")
    assert "measured, but not stored" in told


def test_a_hopeless_plan_is_timed_once():
    passes = iter([3.0, 1.0, 1.0, 1.0])
    assert autotune.fastest(passes, best=1.4) == 3.0
    assert list(passes) == [1.0, 1.0, 1.0]
    assert autotune.fastest(iter([3.0, 1.0, 2.0]), best=1.6) == 1.0
    assert autotune.fastest(iter([3.0, 1.0, 2.0]), best=math.inf) == 1.0


def test_hopeless_kernels_are_tried_as_long_as_larger_blocks_help(monkeypatch: pytest.MonkeyPatch):
    seconds = {
        **{(1, "torch"): 9.0, (2, "torch"): 30.0, (3, "torch"): 12.0, (5, "torch"): 11.5, (9, "torch"): 1.0},
        **{(1, "chain"): 3.0, (2, "chain"): 4.0, (3, "chain"): 4.1, (5, "chain"): 3.9, (9, "chain"): 3.8},
    }
    monkeypatch.setattr(autotune, "time_plan", lambda run_spec, data, plan, *given: iter([seconds[tuple(plan)]]))
    run_spec = RunSpec.of("run", auto())
    plans = [ExecutionPlan(block, name) for block in (1, 2, 3, 5, 9) for name in ("torch", "chain")]
    ran = autotune.measure(run_spec, run_spec.split(), plans)
    assert [plan.block for plan in ran if plan.kernels == "torch"] == [1, 2, 3, 5]  # 11.5 after 12.0: it is given up
    assert [plan.block for plan in ran if plan.kernels == "chain"] == [1, 2, 3, 5, 9]


def test_plans_are_measured_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch):
    """Each plan takes a second: as many as the limit has seconds are measured, and the one under way is finished."""
    now = 0.0

    def takes_a_second(run_spec: RunSpec, data: object, plan: ExecutionPlan, *given: object) -> Iterator[float]:
        nonlocal now
        now += 1.0
        yield 1.0

    monkeypatch.setattr(autotune, "time_plan", takes_a_second)
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: now))
    run_spec = RunSpec.of("run", auto())
    plans = [ExecutionPlan(block, "torch") for block in range(1, 21)]
    assert len(autotune.measure(run_spec, run_spec.split(), plans)) == autotune.SECONDS + 1


def test_all_kernels_are_tried_for_a_client_alone_however_long_it_takes(monkeypatch: pytest.MonkeyPatch):
    now = 0.0

    def takes_long(run_spec: RunSpec, data: object, plan: ExecutionPlan, *given: object) -> Iterator[float]:
        nonlocal now
        now += 2 * autotune.SECONDS
        yield {"torch": 3.0, "channels_last": 2.0, "native": 4.0}[plan.kernels]

    monkeypatch.setattr(autotune, "time_plan", takes_long)
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: now))
    run_spec, kinds = RunSpec.of("run", auto()), ("torch", "channels_last", "native")
    plans = [ExecutionPlan(block, kernels) for block in (1, 3) for kernels in kinds]
    found = autotune.measure(run_spec, run_spec.split(), plans)
    assert [*found] == plans[:3]
    assert execution_plan.quickest(found) == (1, "channels_last")


def test_long_passes_are_few(monkeypatch: pytest.MonkeyPatch):
    run_spec = RunSpec.of("run", auto())
    split = run_spec.split()
    data = Data.of(split.train, split.test, split.client_index)
    counts = []
    for enough in (math.inf, 0.0):
        monkeypatch.setattr(autotune, "ENOUGH", enough)
        counts.append(len([*autotune.time_plan(run_spec, data, ExecutionPlan(3, "torch"))]))
    assert counts == [autotune.REPEATS, 1]


def test_measuring_leaves_the_callers_threads_alone():
    before = torch.get_num_threads()
    run_spec = RunSpec.of("run", auto(threads=2 if before == 1 else 1, kernels="torch"))
    assert autotune.measure(run_spec, run_spec.split(), execution_plan.candidates(run_spec)[:1])
    assert torch.get_num_threads() == before
