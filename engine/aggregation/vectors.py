"""The vectors of a message, on which rules of aggregation act, and the pieces in which workers go through them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.aggregation.contract import Vectors
from ...algorithms.contract import Message
from ...algorithms.tree import Tree

PIECE = 8192
"""The number of coordinates in a piece of a vector. It is part of the definition of a Gram matrix: sums over other
pieces have other last bits."""
MOST_TASKS = 64
"""The largest number of tasks in one pass over the rows."""
PARTS = ("delta", "sent", "averaged", "norm2")
"""The fields of a message whose leaves are vectors."""


class Span(NamedTuple):
    """Consecutive numbers of one leaf of a message."""

    leaf: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


class Vector(NamedTuple):
    """One vector of a message.

    name: for messages. spans: the numbers that it consists of. follows: numbers that get the weights that were found
    for this vector, but take no part in finding them. weighted: whether the federation's client weights count. plain:
    the leaves among these that are averaged uniformly all the same: they get what the rule decides with equal client
    weights. statistics: running statistics, which follow too, but only into a mean, see `passes.RowsOf`.
    """

    name: str
    spans: tuple[Span, ...]
    follows: tuple[Span, ...] = ()
    weighted: bool = True
    plain: frozenset[int] = frozenset()
    statistics: tuple[Span, ...] = ()

    @property
    def length(self) -> int:
        """P."""
        return sum(span.length for span in self.spans)


def vector_leaves(message: Message) -> list[Tensor]:
    """The leaves of a message that are vectors, in order: all but its facts."""
    return [leaf for part in PARTS for leaf in pytree.tree_leaves(getattr(message, part))]


def with_vector_leaves(message: Message, leaves: Sequence[Any]) -> Message:
    """The message with other leaves in the place of its vectors."""
    rest = iter(leaves)
    changed = {part: pytree.tree_map(lambda _: next(rest), getattr(message, part)) for part in PARTS}
    return message._replace(**changed)


def vectors_of(message: Message, how: Vectors, buffers: int) -> list[Vector]:
    """The vectors of a message. buffers: the number of tensors at the end of `delta` that are running statistics."""
    found: list[Vector] = []
    leaf = 0
    for part in PARTS:
        trees = pytree.tree_leaves(getattr(message, part), is_leaf=lambda node: isinstance(node, Tree))
        for tree in trees:
            name = part if part == "delta" else f"{part}{len(found)}"
            if part == "delta" and isinstance(tree, Tree):
                found += _of_displacement(tree, leaf, buffers)
            else:
                size = (tree.flat if isinstance(tree, Tree) else tree).numel()
                found.append(Vector(name, (Span(leaf, 0, size),), weighted=part != "sent"))
            leaf += 1
    if how == "each" or not found:
        return found
    first = [vector for vector in found if vector.name.startswith("delta")] or found[:1]
    name, decide, rest = "delta", first, [vector for vector in found if vector not in first]
    if how == "joined":
        name, decide, rest = "all", found, []
    weighted = any(vector.weighted for vector in found)
    plain = frozenset(span.leaf for vector in found for span in vector.spans if not vector.weighted)
    spans, follows = (tuple(span for vector in part for span in vector.spans) for part in (decide, rest))
    statistics = tuple(span for vector in found for span in vector.statistics)
    return [Vector(name, spans, follows, weighted, plain if weighted else frozenset(), statistics)]


def _of_displacement(tree: Tree, leaf: int, buffers: int) -> list[Vector]:
    """The vectors of `delta`: one, or one for each group of a min-max problem."""
    names, sizes = tree.layout.names, tree.layout.sizes
    ends = np.cumsum([0, *sizes])
    last = len(names) - buffers
    statistics = (Span(leaf, int(ends[last]), int(ends[-1])),) if buffers else ()
    primal: list[Span] = []
    dual: list[Span] = []
    for number in range(last):
        group = dual if names[number].startswith("dual.") else primal
        begin, end = int(ends[number]), int(ends[number + 1])
        if group and group[-1].end == begin:
            group[-1] = group[-1]._replace(end=end)
        else:
            group.append(Span(leaf, begin, end))
    if not dual or not primal:
        return [Vector("delta", tuple(primal or dual), statistics=statistics)]
    return [Vector("delta", tuple(primal), statistics=statistics), Vector("delta.dual", tuple(dual))]


class Piece(NamedTuple):
    """Up to PIECE consecutive numbers of a vector. vector: its number. first: their first place in the vector.
    follows: whether they only follow the vector. plain, statistic: whether they are in `Vector.plain` or `statistics`.
    """

    vector: int
    span: Span
    first: int
    follows: bool = False
    plain: bool = False
    statistic: bool = False


def pieces_of(vectors: Sequence[Vector], also_following: bool) -> list[Piece]:
    """All pieces of the vectors, in order. also_following: also those that take no part in finding weights."""
    found: list[Piece] = []
    for number, vector in enumerate(vectors):
        groups = (vector.spans, vector.follows, vector.statistics) if also_following else (vector.spans,)
        for group, spans in enumerate(groups):
            first = 0
            for span in spans:
                for begin in range(span.begin, span.end, PIECE):
                    part = Span(span.leaf, begin, min(begin + PIECE, span.end))
                    plain, statistic = span.leaf in vector.plain, group == 2
                    found.append(Piece(number, part, first, group > 0, plain, statistic))
                    first += part.length
    return found


def in_tasks(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """The pieces of each task: consecutive ones, of about the same number of coordinates in each task."""
    if not pieces:
        return []
    ends = np.cumsum([piece.span.length for piece in pieces])
    share = max(PIECE, -(-int(ends[-1]) // MOST_TASKS))
    tasks = (ends - 1) // share
    cuts = [0, *(np.flatnonzero(np.diff(tasks)) + 1).tolist(), len(pieces)]
    return [tuple(pieces[begin:end]) for begin, end in pairwise(cuts)]


def spans_of(vectors: Sequence[Vector], leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
    """For each vector the numbers of its spans, and of those that follow. leaves: of a message, flat."""
    spans = [(*vector.spans, *vector.follows) for vector in vectors]
    return tuple(tuple(leaves[span.leaf][span.begin : span.end].clone() for span in each) for each in spans)


def shaped(flat: Sequence[Tensor], samples: Sequence[Tensor]) -> list[Tensor]:
    """Flat leaves in the shapes and dtypes, and on the devices, of the samples."""
    return [leaf.view(sample.shape).to(sample.device, sample.dtype) for leaf, sample in zip(flat, samples, strict=True)]


def grouped(norms2: np.ndarray, single: Sequence[Vector], vectors: Sequence[Vector]) -> tuple[np.ndarray, np.ndarray]:
    """((S, V) the squared norms of vectors that consist of the single ones; (S, V) bool: whether these are finite, and
    those of what follows the vectors). norms2: (S, V') of the single ones."""
    found, sound = [], []
    for vector in vectors:
        own, all_of_it = set(vector.spans), {*vector.spans, *vector.follows}
        found.append(norms2[:, [i for i, one in enumerate(single) if set(one.spans) <= own]].sum(axis=1))
        parts = norms2[:, [i for i, one in enumerate(single) if set(one.spans) <= all_of_it]]
        sound.append(np.isfinite(parts).all(axis=1) & np.isfinite(found[-1]))
    return np.stack(found, axis=1), np.stack(sound, axis=1)
