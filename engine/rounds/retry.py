"""Tasks that fail: once is the worker's fault, twice is looked into, and a client that fails again alone is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..backends.base import Call, Failure, Fleet
from ..cohorts.tasks import Broadcast, TrainingTask
from ..errors import ClientFailed, EvaluationFailed, OutOfMemory
from ..reduction.tree import PartialSum, TaskResult

STRIKES = 2
Tell = Callable[[str], None]


class Dispatch:
    """on_failure: "fail" or "drop"; tell: is told what a log should have; remedy: what a user is told where memory
    runs out."""

    def __init__(self, fleet: Fleet, on_failure: str, tell: Tell, remedy: Callable[[], str] = str) -> None:
        self.fleet, self.on_failure, self.tell, self.remedy = fleet, on_failure, tell, remedy

    def run(
        self, call: Call, tasks: Sequence[Any], shared: Broadcast, meanwhile: Callable[[], Any] | None = None
    ) -> Iterator[TaskResult | PartialSum]:
        """The results of all tasks, in any order, each once; then sums that did not come with them. meanwhile: what
        this process may do while the workers work."""
        self.fleet.start(call, shared)
        for task in tasks:
            self.fleet.put(task)
        self.fleet.go()
        if meanwhile is not None:
            meanwhile()
        strikes: Counter[int] = Counter()
        twice: list[tuple[Any, Failure]] = []
        left = len(tasks)
        while left:
            task, result = self.fleet.get()
            if isinstance(result, TaskResult):
                left -= 1
                yield result
                continue
            strikes[task.index] += 1
            self.tell(f"{task.description} failed on {result.told}")
            if strikes[task.index] < STRIKES:
                self.fleet.put(task)
            else:
                left -= 1
                twice.append((task, result))
        failed: list[ClientFailed] = []
        for task, failure in twice:
            try:
                yield self._look_into(task, failure)
            except ClientFailed as error:
                failed.append(error)
        if failed:
            first, names = failed[0], sorted({client for error in failed for client in error.clients})
            raise ClientFailed(first.round, tuple(names), first.cause, first.where) from first.__cause__
        yield from self.fleet.rest()

    def _look_into(self, task: Any, failure: Failure) -> TaskResult:
        """Run a task's clients in halves until those that fail alone are found."""
        if not isinstance(task, TrainingTask):
            if failure.kind == "memory":
                what = f"{task.description} failed on {failure.where} for want of memory: {failure.cause}"
                raise OutOfMemory(f"{what}; lower evaluate.batch or engine.workers, or choose a smaller model")
            raise EvaluationFailed(
                f"{task.description} failed on {failure.where}: {failure.cause}"
            ) from failure.reason()
        guilty, last = self._search(task, np.arange(len(task.task.clients)), failure)
        names = tuple(int(task.task.clients[i]) for i in guilty)
        if not names:
            return self._whole_or_halves(task, failure)
        if last.kind == "memory":  # of the machines, not of these clients: they are not dropped
            raise self._no_memory(task, last)
        if self.on_failure == "fail":
            raise ClientFailed(task.round, names, last.cause, last.where) from last.reason()
        self.tell(f"round {task.round}: goes on without {', '.join(map(str, names))}, which failed alone: {last.cause}")
        rest = np.setdiff1d(np.arange(len(task.task.clients)), guilty)
        if not len(rest):
            return TaskResult.nothing(task.index, names)
        result = self._try(task.subset(rest))
        if isinstance(result, Failure):
            clients = tuple(task.task.clients.tolist())
            raise ClientFailed(task.round, clients, result.cause, result.where) from result.reason()
        return result._replace(dropped=names)

    def _no_memory(self, task: TrainingTask, failure: Failure) -> OutOfMemory:
        what = f"round {task.round}: one client alone failed on {failure.where}"
        return OutOfMemory(f"{what} for want of memory: {failure.cause}; {self.remedy()}")

    def _whole_or_halves(self, task: TrainingTask, failure: Failure) -> TaskResult:
        """A task whose clients all run well in smaller groups: bad luck, twice, or too large as it is."""
        again = self._try(task)
        if isinstance(again, TaskResult):
            return again
        why = f", {self.remedy()}" if failure.kind == "memory" else ""
        self.tell(f"{task.description}: all of its clients run well in smaller groups{why}")
        return self._in_halves(task, again)

    def _search(self, task: TrainingTask, places: np.ndarray, known: Failure) -> tuple[list[int], Failure]:
        """(places of the clients that fail alone, the last failure seen)."""
        result = self._try(task.subset(places)) if len(places) < len(task.task.clients) or len(places) == 1 else known
        if isinstance(result, TaskResult):
            return [], known
        if len(places) == 1:
            return [int(places[0])], result
        left, right = np.array_split(places, 2)
        first, result = self._search(task, left, result)
        second, result = self._search(task, right, result)
        return first + second, result

    def _in_halves(self, task: TrainingTask, failure: Failure) -> TaskResult:
        """A task that fails only as a whole (for want of memory, say), from the largest parts that do not."""
        if len(task.task.clients) == 1:
            if failure.kind == "memory":
                raise self._no_memory(task, failure)
            clients = (int(task.task.clients[0]),)
            raise ClientFailed(task.round, clients, failure.cause, failure.where) from failure.reason()
        parts = np.array_split(np.arange(len(task.task.clients)), 2)
        results = [kept(self._try(task.subset(part))) for part in parts]
        for i, result in enumerate(results):
            if isinstance(result, Failure):
                results[i] = self._in_halves(task.subset(parts[i]), result)
        return TaskResult.join([result for result in results if isinstance(result, TaskResult)])

    def _try(self, task: TrainingTask) -> TaskResult | Failure:
        """One task, nothing else under way."""
        self.fleet.put(task)
        return self.fleet.get()[1]


def kept(result: TaskResult | Failure) -> TaskResult | Failure:
    """With leaves of its own: a fleet may use their memory for the same task's next part."""
    if isinstance(result, Failure) or result.leaves is None:
        return result
    return result._replace(leaves=[np.array(leaf) for leaf in result.leaves])
