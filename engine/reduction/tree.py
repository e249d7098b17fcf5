"""The sums of a phase, in the order of a binary tree over its tasks and over the blocks of each task.

Neighbours are added in pairs, then pairs of pairs, and so on. A node without a neighbour goes up unchanged. The tree
depends only on the configuration. So a worker may add its blocks, a node of the cluster the sums of its workers, and
the driver the rest: the bits are the same wherever and whenever this is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

K = TypeVar("K")
T = TypeVar("T")
Leaves = list[np.ndarray]
FACTS = ("loss", "steps", "gradients", "weight")
"""The names of the sums over clients besides those of their messages."""
TIMES = ("state", "data", "reduce")
NAMES = (*FACTS, *TIMES, "seconds")
"""The names of the sums that every task of a synchronous round returns."""


class Sums(NamedTuple):
    """Sums over the messages of some clients, float64, and sums of what is known of these clients, by the names in
    FACTS."""

    leaves: Leaves
    facts: dict[str, float]


Target = tuple[int, int]
"""(a block of a task, the update that uses messages of this block)."""


class TaskResult(NamedTuple):
    """The result of a task: float64 sums over its clients, or over the examples of an evaluation.

    leaves: of the sum; None if it is still where it was added. facts: further sums, by name. clients: arrays with one
    entry per client, or per row of an evaluation. dropped: the clients that failed and were left out, by their
    `TrainingTask.position`. branch: of the task's own tree, where this is the result of one branch of the task. apart:
    the sums of an asynchronous run, whose clients work for several updates; there are no `leaves` then. notes:
    sentences for the log of the run, about what the worker found.
    """

    index: int
    leaves: Leaves | None
    facts: dict[str, float] = {}  # noqa: RUF012 never written to
    clients: dict[str, np.ndarray] = {}  # noqa: RUF012 never written to
    dropped: dict[int, int] = {}  # noqa: RUF012 never written to
    branch: TreeNode | None = None
    apart: dict[Target, Sums] = {}  # noqa: RUF012 never written to
    notes: tuple[str, ...] = ()

    @staticmethod
    def nothing(task: Any) -> TaskResult:
        """The result of a task without clients."""
        return TaskResult(task.index, [], branch=task.branch)

    @staticmethod
    def join(parts: Sequence[TaskResult]) -> TaskResult:
        """The result of a task whose parts ran one after the other."""
        first, *others = parts
        for other in others:
            first = add_results(first, other)
        return first


def add_results(left: TaskResult, right: TaskResult) -> TaskResult:
    """The sums of two results, with the index of the left one. The clients of the left one come first."""
    return left._replace(
        leaves=None if left.leaves is None or right.leaves is None else add_leaves(left.leaves, right.leaves),
        facts=united(left.facts, right.facts, lambda a, b: a + b),
        clients=united(left.clients, right.clients, lambda a, b: np.concatenate([a, b])),
        dropped={**left.dropped, **right.dropped},
        apart=united(left.apart, right.apart, add_sums),
        notes=tuple(dict.fromkeys(left.notes + right.notes)),
    )


def united(left: dict[K, T], right: dict[K, T], add: Callable[[T, T], T]) -> dict[K, T]:
    """The entries of both dictionaries; those of keys that both have are added."""
    return {**left, **{key: add(left[key], value) if key in left else value for key, value in right.items()}}


def add_sums(left: Sums, right: Sums) -> Sums:
    """See `add_leaves`."""
    return Sums(add_leaves(left.leaves, right.leaves), united(left.facts, right.facts, lambda a, b: a + b))


def add_leaves(left: Leaves, right: Leaves) -> Leaves:
    """The sums of two lists of arrays, either of which may be empty.

    They are written into the left arrays if these own their memory.
    """
    if not left or not right:
        return left or right
    pairs = zip(left, right, strict=True)
    return [np.add(a, b, out=a if a.flags.owndata and a.flags.writeable else None) for a, b in pairs]


class TreeNode(NamedTuple):
    """A node of the tree: (0, b) is block b; (level, place) is the parent of (level - 1, 2 place) and its neighbour."""

    level: int
    place: int


class TreeShape:
    """The shape of the tree over tasks with `blocks[i]` blocks. The roots of all tasks are on the level `depth`."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = list(blocks)
        self.depth = max((count - 1).bit_length() for count in self.blocks)
        self.root = TreeNode(self.depth + (len(self.blocks) - 1).bit_length(), 0)

    def node_of(self, task: Any) -> TreeNode:
        """The node of a task, or of its result. Both have an `index` and a `branch`, see `TaskResult`."""
        if task.branch is None:
            return TreeNode(self.depth, task.index)
        return TreeNode(task.branch.level, (task.index << (self.depth - task.branch.level)) + task.branch.place)

    def above(self, at: TreeNode) -> Iterator[TreeNode]:
        """The ancestors of a node, the nearest first."""
        while at != self.root:
            at = TreeNode(at.level + 1, at.place >> 1)
            yield at

    def empty(self, at: TreeNode) -> bool:
        """Whether there is no block below the node."""
        if at.level >= self.depth:
            return at.place << (at.level - self.depth) >= len(self.blocks)
        task, place = divmod(at.place, 1 << (self.depth - at.level))
        return task >= len(self.blocks) or place << at.level >= self.blocks[task]


class TreeReducer(Generic[T]):
    """Adds values of nodes in the order of the tree, whatever the order in which they arrive."""

    def __init__(self, shape: TreeShape, add: Callable[[T, T], T]) -> None:
        """add(left, right): the sum of two neighbours."""
        self.shape, self.add = shape, add
        self.parts: dict[TreeNode, T] = {}  # sums that wait for their neighbours

    def put(self, at: TreeNode, value: T) -> None:
        """Add the value of a node, and go up the tree as long as the neighbour's value is known."""
        while at != self.shape.root:
            neighbour = TreeNode(at.level, at.place ^ 1)
            if not self.shape.empty(neighbour):
                if neighbour not in self.parts:
                    break
                other = self.parts.pop(neighbour)
                value = self.add(other, value) if at.place % 2 else self.add(value, other)
            at = TreeNode(at.level + 1, at.place >> 1)
        self.parts[at] = value

    def total(self) -> T:
        """The sum of all values, once all have arrived."""
        return self.parts[self.shape.root]


def add_sparse(parts: Mapping[int, T], add: Callable[[T, T], T]) -> T:
    """The sum over some blocks in the order of the tree over all of them. parts: the number of a block on the lowest
    level -> its value; blocks that are not there count as blocks without clients. add: as for `TreeReducer`."""
    level = dict(sorted(parts.items()))
    while len(level) > 1 or 0 not in level:
        above: dict[int, T] = {}
        for place, value in level.items():
            above[place >> 1] = add(above[place >> 1], value) if place >> 1 in above else value
        level = above
    return level[0]


class PartialSum(NamedTuple):
    """The sums of a node of the tree."""

    at: TreeNode
    leaves: Leaves


class RoundTotals(NamedTuple):
    """The sums of a phase.

    `leaves`: float64 sums of the messages' leaves. `facts`: sums by name. `clients`: arrays by name with one entry per
    client. `dropped`: the clients that were left out: they failed, `federation.without` names them, or they send
    nothing. `seconds`: the
    time in which the driver added up these sums. `notes`: sentences for the log, see `TaskResult`.
    """

    leaves: list[np.ndarray]
    facts: dict[str, float]
    clients: dict[str, np.ndarray]
    dropped: tuple[int, ...]
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @staticmethod
    def of_nobody(shapes: Sequence[tuple[int, ...]]) -> RoundTotals:
        """The sums of a round without clients. shapes: of the messages' leaves."""
        clients = {"id": np.zeros(0, np.int64), **{name: np.zeros(0) for name in ("loss", "norm2", "steps")}}
        return RoundTotals([np.zeros(shape) for shape in shapes], dict.fromkeys(NAMES, 0.0), clients, ())

    def record(self, count: int, train: float, workers: int) -> dict[str, float]:
        """The columns of a round. `count`: the clients in the mean; `train`, `workers`: see `time_columns`."""
        return {
            **({"train/loss": self.facts["loss"] / count} if count else {}),
            "client/count": count,
            "client/dropped": len(self.dropped),
            "client/steps": self.facts["steps"],
            "client/gradients": self.facts["gradients"],
            **({"client/looks": looks} if (looks := self.facts.get("looks")) else {}),
            **time_columns(self.facts, train, workers),
            "time/sum": self.seconds,
        }

    def digests(self, sampled: np.ndarray) -> np.ndarray | None:
        """(S, DIGEST) bytes: the digests of the rows of `sampled`, in that order; zeros for dropped clients."""
        found = self.clients.get("digest")
        if found is None:
            return None
        ordered = np.zeros((len(sampled), found.shape[1]), dtype=np.uint8)
        ordered[np.searchsorted(sampled, self.clients["id"])] = found
        return ordered


def reduce_in_order(shape: TreeShape, results: Iterable[TaskResult | PartialSum]) -> RoundTotals:
    """Add the results as they arrive, in the order of the tree over the tasks."""
    numbers, leaves = TreeReducer(shape, add_results), TreeReducer(shape, add_leaves)
    seconds = 0.0
    for result in results:
        began = time.perf_counter()
        if isinstance(result, PartialSum):
            leaves.put(*result)
        else:
            if result.leaves is not None:
                leaves.put(shape.node_of(result), result.leaves)
            numbers.put(shape.node_of(result), result._replace(leaves=[]))
        seconds += time.perf_counter() - began
    began, total = time.perf_counter(), numbers.total()
    sums = [np.array(leaf) for leaf in leaves.total()]
    seconds += time.perf_counter() - began
    return RoundTotals(sums, total.facts, total.clients, tuple(total.dropped.values()), seconds, total.notes)


def time_columns(facts: dict[str, float], train: float, workers: int) -> dict[str, float]:
    """The columns time/… that say how the workers spent their time.

    `train`: the seconds that the driver waited for them; `workers`: their number.
    """
    parts = {name: facts[name] for name in TIMES}
    columns = {"train": train, "workers": facts["seconds"], **parts}
    columns |= {"compute": facts["seconds"] - sum(parts.values()), "wait": max(workers * train - facts["seconds"], 0.0)}
    return {f"time/{name}": value for name, value in columns.items()}
