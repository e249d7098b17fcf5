"""How a cohort is divided into blocks and tasks, and what a worker receives for each task.

A block is the clients that run at once (vectorised). A task is a run of consecutive blocks that one worker takes at a
time, and whose sums it returns as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..config.schema import Local
from ..reduction.tree import TreeNode, TreeShape

FEWEST_TASKS, MOST_TASKS = 20, 128
"""Limits of the number of tasks in a round with enough blocks. Each task costs a message as long as the model."""

BLOCKS, SUM_BYTES = 8, 1 << 22
"""The most blocks in a task of an asynchronous run, and the most bytes of their sums where it has more than one. Each
block has a sum of its own, because its neighbours in the tree are often for other updates."""


def most_blocks(sum_bytes: int) -> int:
    """The most blocks in a task of an asynchronous run. sum_bytes: of the sums of a block."""
    return max(1, min(BLOCKS, SUM_BYTES // max(1, sum_bytes)))


class ClientTask(NamedTuple):
    """Consecutive blocks of clients: `clients` in order, with a cut after every position in `cuts`."""

    index: int
    clients: np.ndarray  # (c,) int64
    cuts: tuple[int, ...]  # the ends of the blocks; the last one is c


def steps_of(sizes: np.ndarray, local: Local) -> np.ndarray:
    """(c,) the numbers of local steps of clients with `sizes` (c,) examples."""
    if local.epochs is None:
        return np.full(len(sizes), local.steps, dtype=np.int64)
    return local.epochs * -(-sizes // local.examples)


def plan_tasks(
    clients: np.ndarray, sizes: np.ndarray, local: Local, block: int, steps: np.ndarray | None = None
) -> list[ClientTask]:
    """The tasks of clients with `sizes` (c,) examples, in blocks of at most `block` clients. steps: (c,) the local
    steps that each takes, None for those of `local`.

    The sizes of blocks differ by at most one client. Clients with the most steps come first, so that no worker begins
    a long task at the end of a round, and so that clients of similar length share a block.
    """
    steps = steps_of(sizes, local) if steps is None else steps
    ordered = clients[np.lexsort((clients, -steps))]
    ends = block_ends(len(ordered), block)
    edges = task_edges(len(ends) - 1)
    tasks = []
    for index, (begin, end) in enumerate(pairwise(edges)):
        first = ends[begin]
        cuts = tuple(cut - first for cut in ends[begin + 1 : end + 1])
        tasks.append(ClientTask(index, ordered[first : ends[end]], cuts))
    return tasks


def block_ends(clients: int, block: int) -> list[int]:
    """0 and the ends of the blocks of so many clients, one block at least. The first blocks are the larger ones."""
    count = max(1, -(-clients // block))
    each, larger = divmod(clients, count)
    return [number * each + min(number, larger) for number in range(count + 1)]


def task_edges(blocks: int) -> list[int]:
    """The blocks at which tasks begin, and the number of blocks at the end.

    If there are few blocks, each one is a task. Otherwise the first quarter of the tasks has half of the blocks, the
    next quarter has half of the rest, and so on, so that workers that pull tasks finish together.
    """
    count = min(max(FEWEST_TASKS, blocks // 8), MOST_TASKS)
    if blocks <= count:
        return list(range(blocks + 1))
    shares = np.cumsum(np.repeat([8, 4, 2, 1], count // 4))
    return sorted({0, *np.rint(shares / shares[-1] * blocks).astype(int).tolist()})


PER_CLIENT = ("visits", "weights", "read", "write", "position", "steps", "targets")
"""The fields of a `TrainingTask` that have an entry for each client."""


DrawKey = tuple[int, bytes, bytes, bytes]
"""What the batches of a task follow from: its round, clients, how often each has taken part, and how many steps each
takes."""


class TrainingTask(NamedTuple):
    """A task with what the driver knows of its clients; the arrays are (c,)."""

    task: ClientTask
    round: int
    warm_start: bool  # whether it belongs to the pass before round 1
    visits: np.ndarray  # how often each client has taken part before
    weights: np.ndarray  # of each client's delta; those of a cohort sum to its size
    read: np.ndarray  # the row of each client's state in the store, -1 for a first visit
    write: np.ndarray  # the row for its new state
    position: np.ndarray  # of each client in the cohort, in ascending client number: the row of its message
    branch: TreeNode | None = None  # of the task's tree, if these are not all of the task's blocks
    steps: np.ndarray | None = None  # that each client takes, if some take fewer than all
    targets: np.ndarray | None = None  # the update that uses each client's message, -1 for none; None for `round`
    public: int = 0  # which of the public states in the phase's broadcast the clients read

    @staticmethod
    def of(
        task: ClientTask,
        when: tuple[int, bool],
        sampled: np.ndarray,
        columns: tuple[np.ndarray, ...],
        steps: np.ndarray | None = None,
    ) -> TrainingTask:
        """`when`: (round, warm_start). `columns`: visits, weights, read and write of `sampled`, each (S,); `sampled`
        is in ascending order. `steps`: (S,), see the field."""
        positions = np.searchsorted(sampled, task.clients)
        visits, weights, read, write = (column[positions] for column in columns)
        taken = None if steps is None else steps[positions]
        return TrainingTask(task, *when, visits, weights, read, write, positions, steps=taken)

    @property
    def index(self) -> int:
        return self.task.index

    @property
    def clients(self) -> np.ndarray:
        return self.task.clients

    @property
    def draw_key(self) -> DrawKey:
        steps = b"" if self.steps is None else self.steps.tobytes()
        return self.round, self.clients.tobytes(), self.visits.tobytes(), steps

    @property
    def cuts(self) -> tuple[int, ...]:
        return self.task.cuts

    @property
    def updates(self) -> np.ndarray | int:
        """(c,) the number of the update that uses each client's message, -1 for none; one number if it is the same for
        all, as in a synchronous round."""
        return self.round if self.targets is None else self.targets

    @property
    def description(self) -> str:
        """The task in words, for log lines."""
        return f"round {self.round}, task {self.index}, clients {', '.join(map(str, self.clients))}"

    def subset(self, positions: np.ndarray) -> TrainingTask:
        """The same task with the clients at these positions only.

        Blocks keep their number, also those without clients: sums are added in the same order whoever is absent.
        """
        return self._some(positions, tuple(int((positions < cut).sum()) for cut in self.cuts))

    def blocks(self, branch: TreeNode, begin: int, end: int) -> TrainingTask:
        """The task's blocks [begin, end), which are those below `branch` of its tree."""
        first = self.cuts[begin - 1] if begin else 0
        cuts = tuple(cut - first for cut in self.cuts[begin:end])
        return self._some(slice(first, self.cuts[end - 1]), cuts)._replace(branch=branch)

    def _some(self, clients: np.ndarray | slice, cuts: tuple[int, ...]) -> TrainingTask:
        """The same task with some of its clients. clients: their positions in the task."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in PER_CLIENT}
        some = {name: column[clients] for name, column in columns.items() if column is not None}
        return self._replace(task=ClientTask(self.index, self.clients[clients], cuts), **some)


class Broadcast(NamedTuple):
    """What all tasks of a phase read: the leaves of the public state, or of the model for an evaluation. In an
    asynchronous run these may be the leaves of several public states, one after another.

    A worker that has received a `version` does not receive it again.
    """

    version: int
    leaves: list[np.ndarray]


def tree_shape(tasks: Sequence[Any]) -> TreeShape:
    """The shape of the tree of a phase with these tasks."""
    return TreeShape([len(task.cuts) if isinstance(task, TrainingTask) else 1 for task in tasks])
