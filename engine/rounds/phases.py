"""Has the pool of a run run one phase after another, and logs what workers find in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch.utils import _pytree as pytree

from ..accelerators.notes import notes_in
from ..aggregation.passes import PassTask
from ..cohorts.tasks import Broadcast, TrainingTask, tree_shape
from ..reduction.round_totals import RoundTotals, reduce_in_order
from ..reduction.tree import TaskResult
from .pool import Phase
from .retry import Retry


class Phases:
    """The phases of a run. Its pool is there once `start` has been called."""

    def __init__(self, log: Callable[[str], None]) -> None:
        """log: adds a line to the log of the run."""
        self.log = log
        self.version = 0  # of the last broadcast
        self.notes: set[str] = set()  # that the log has

    def start(self, retry: Retry) -> None:
        """retry: runs phases on the pool, and failed tasks again."""
        self.retry, self.pool = retry, retry.pool

    def next_version(self) -> int:
        """The version of a further broadcast."""
        self.version += 1
        return self.version

    def run(self, call: Any, tasks: list[Any], state: Any, meanwhile: Callable[[], Any] | None = None) -> RoundTotals:
        """Run the tasks of a phase that read `state`, and add up their results; meanwhile: see `Retry.run`."""
        broadcast = Broadcast(self.next_version(), [leaf.cpu().numpy() for leaf in pytree.tree_leaves(state)])
        empty = [isinstance(task, TrainingTask) and not len(task.clients) for task in tasks]  # all of them are silent
        work = [task for task, nobody in zip(tasks, empty, strict=True) if not nobody]
        results = [TaskResult.nothing(task, ()) for task, nobody in zip(tasks, empty, strict=True) if nobody]
        phase = Phase(call, work, broadcast, tree_shape(tasks))
        return reduce_in_order(phase.shape, chain(results, self.retry.run(phase, meanwhile)))

    def run_pass(self, tasks: Sequence[PassTask]) -> Iterator[TaskResult]:
        """Run a pass over the messages of a round."""
        phase = Phase("aggregate", tasks, Broadcast(self.next_version(), []), tree_shape(tasks))
        for result in self.retry.run(phase):
            assert isinstance(result, TaskResult)
            yield result

    def tell_notes(self, number: int, facts: Mapping[str, float]) -> None:
        """Log what workers found on their devices, each sentence once. number: of the round. facts: of a task or of a
        round."""
        for note in notes_in(facts):
            self.tell_once(number, note, note)

    def tell_once(self, number: int, note: str, kind: str) -> None:
        """Log a sentence on a round, unless the log has one of this kind."""
        if kind not in self.notes:
            self.notes.add(kind)
            self.log(f"round {number}: {note}")
