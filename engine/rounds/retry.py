"""Runs a phase, and repeats the tasks that fail.

A first failure may be the worker's fault, so the task is run again. After a second failure its clients are run in
halves, until the clients that fail alone are found and named. Where the memory of a device ran out twice, the driver is
told instead, which makes all blocks smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..cohorts.tasks import TrainingTask
from ..errors import BlockTooLarge, ClientFailed, EvaluationFailed, OutOfMemory
from ..reduction.tree import PartialSum, TaskResult
from .pool import Failure, Outcome, Phase, Pool, Results

Log = Callable[[str], None]


class Retry:
    def __init__(
        self, pool: Pool, on_failure: str, log: Log, remedy: Callable[[], str] = str, at_once: bool = True
    ) -> None:
        """on_failure: "fail" ends the run at a client that fails alone, "drop" leaves it out. log: log callback.

        remedy: returns the clause with the remedy for the message about memory that runs out. at_once: whether the
        clients of a block are trained at once, so that a smaller block needs less memory.
        """
        self.pool, self.on_failure, self.log, self.remedy, self.at_once = pool, on_failure, log, remedy, at_once
        self.repeated = 0  # tasks that failed for the first time, and were run again

    def run(self, phase: Phase) -> Results:
        """Begin a phase, and return its results.

        They raise ClientFailed where clients fail alone and `on_failure` is "fail", OutOfMemory where memory is too
        small for one client or for an evaluation, BlockTooLarge where that of a device is too small for a block, and
        EvaluationFailed where an evaluation fails twice.
        """
        return self._results(phase, self.pool.run_phase(phase))

    def _results(self, phase: Phase, outcomes: Iterable[Outcome]) -> Results:
        once: list[Failure] = []
        twice: list[Failure] = []
        yield from self._successes(outcomes, once)
        if once:
            self.repeated += len(once)
            repeated = self.pool.run_phase(phase.again([failure.task for failure in once]))
            yield from self._successes(repeated, twice)
        for failure in twice:
            if failure.kind == "device" and self.at_once and largest_block(failure.task) > 1:
                raise BlockTooLarge(f"{failure.task.description} failed twice on {failure.where}: {failure.cause}")
        errors: list[ClientFailed] = []
        for failure in twice:
            try:
                yield self._search_failure(phase, failure)
            except ClientFailed as error:
                errors.append(error)
        if errors:
            first, names = errors[0], sorted({client for error in errors for client in error.clients})
            raise ClientFailed(first.round, tuple(names), first.cause, first.where) from first.__cause__

    def _successes(self, outcomes: Iterable[Outcome], failures: list[Failure]) -> Results:
        """The results of the tasks that succeeded; failures are logged and collected in `failures`."""
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                self.log(f"{outcome.task.description} failed on {outcome.for_log}")
                failures.append(outcome)
            else:
                yield outcome

    def _search_failure(self, phase: Phase, failure: Failure) -> TaskResult:
        """The result of a task that failed twice, without the clients that fail alone if they may be dropped."""
        task = failure.task
        if not isinstance(task, TrainingTask):
            if failure.for_memory:
                what = f"{task.description} failed on {failure.where} for lack of memory: {failure.cause}"
                remedy = getattr(task, "memory_remedy", "lower evaluate.batch or engine.workers")
                raise OutOfMemory(f"{what}; {remedy}, or choose a smaller model")
            raise EvaluationFailed(f"{task.description} failed on {failure.where}: {failure.cause}") from failure.reason
        guilty, last = self._failing_alone(phase, task, np.arange(len(task.clients)), failure)
        names = tuple(int(task.clients[i]) for i in guilty)
        if not names:
            return self._whole_or_in_halves(phase, task, failure)
        if last.for_memory:  # of the machines, not of these clients, which are therefore not dropped
            raise self._no_memory(task, last)
        if self.on_failure == "fail":
            raise ClientFailed(task.round, names, last.cause, last.where) from last.reason
        self.log(f"round {task.round}: goes on without {', '.join(map(str, names))}, which failed alone: {last.cause}")
        rest = np.setdiff1d(np.arange(len(task.clients)), guilty)
        result = self._run_one(phase, task.subset(rest)) if len(rest) else TaskResult.nothing(task)
        if isinstance(result, Failure):
            clients = tuple(task.clients.tolist())
            raise ClientFailed(task.round, clients, result.cause, result.where) from result.reason
        return result._replace(dropped=dict(zip(task.position[guilty].tolist(), names, strict=True)))

    def _no_memory(self, task: TrainingTask, failure: Failure) -> OutOfMemory:
        what = f"round {task.round}: one client alone failed on {failure.where}"
        return OutOfMemory(f"{what} for lack of memory: {failure.cause}; {self.remedy()}")

    def _whole_or_in_halves(self, phase: Phase, task: TrainingTask, failure: Failure) -> TaskResult:
        """The result of a task whose clients all succeed in smaller groups: it failed by chance, or it is too large."""
        result = self._run_one(phase, task)
        if isinstance(result, TaskResult):
            return result
        why = f", {self.remedy()}" if failure.for_memory else ""
        self.log(f"{task.description}: all of its clients run well in smaller groups{why}")
        return self._in_halves(phase, task, result)

    def _failing_alone(
        self, phase: Phase, task: TrainingTask, places: np.ndarray, known: Failure
    ) -> tuple[list[int], Failure]:
        """(positions of the clients that fail alone, the last failure). known: the failure of the task with these
        positions."""
        whole = len(places) == len(task.clients) and len(places) > 1
        result = known if whole else self._run_one(phase, task.subset(places))
        if isinstance(result, TaskResult):
            return [], known
        if len(places) == 1:
            return [int(places[0])], result
        left, right = np.array_split(places, 2)
        first, result = self._failing_alone(phase, task, left, result)
        second, result = self._failing_alone(phase, task, right, result)
        return first + second, result

    def _in_halves(self, phase: Phase, task: TrainingTask, failure: Failure) -> TaskResult:
        """The result of a task that fails only as a whole, for example for lack of memory: the joined results of its
        largest parts that succeed."""
        if len(task.clients) == 1:
            if failure.for_memory:
                raise self._no_memory(task, failure)
            clients = (int(task.clients[0]),)
            raise ClientFailed(task.round, clients, failure.cause, failure.where) from failure.reason
        results = []
        for places in np.array_split(np.arange(len(task.clients)), 2):
            part = task.subset(places)
            result = self._run_one(phase, part)
            results.append(self._in_halves(phase, part, result) if isinstance(result, Failure) else result)
        return TaskResult.join(results)

    def _run_one(self, phase: Phase, task: TrainingTask) -> TaskResult | Failure:
        """Run one task while nothing else is under way."""
        (outcome,) = self.pool.run_phase(phase.again([task]))
        assert not isinstance(outcome, PartialSum)
        return outcome


def largest_block(task: Any) -> int:
    """The largest number of clients that a task trains at once; 0 for other tasks."""
    return int(np.diff((0, *task.cuts)).max()) if isinstance(task, TrainingTask) else 0
