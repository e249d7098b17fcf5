"""Each client's stream of batches: its own rows, shuffled anew every pass, continued from round to round.

A pass over n rows has ceil(n / B) batches, the last one short. Local steps number K per visit, so visit v takes batches
vK … vK + K - 1 of the stream, wherever passes begin and end. The shuffle of pass e is counted by (seed, client, e).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...workloads import counted
from ...workloads.base import ClientIndex
from ..cohorts.tasks import steps_of
from ..config.schema import Local
from ..kernels.library import library
from ..kernels.operators import check_status


class Stream(NamedTuple):
    """The batches of some clients for one visit; K is the longest client's number of steps."""

    rows: Tensor  # (c, K, B) int64, rows of the training set; short batches repeat their first row
    weight: Tensor | None  # (c, K, B) float64, 1 / examples in the batch, 0 on repeats; None if all batches are full
    steps: Tensor  # (c,) int64
    keys: Tensor  # (c, K) int64, this step's source of randomness


def stream(
    client_index: ClientIndex, clients: np.ndarray, visits: np.ndarray, local: Local, seed: int, own: bool = False
) -> Stream:
    """`visits`: (c,) how often each client took part before; own: by draw.cpp, which gives the same."""
    who, visits = clients.astype(np.int64), visits.astype(np.int64)
    offsets, ends = (client_index.offsets[clients + beyond].astype(np.int64) for beyond in (0, 1))
    sizes = ends - offsets
    steps = steps_of(sizes, local).astype(np.int64)
    shape = (len(who), int(steps.max()), min(local.batch, int(sizes.max())))
    each = (who, offsets, sizes, visits, steps)
    rows, weight, keys = (_drawn if own else _shuffled)(client_index.rows, each, shape, local.batch, seed)
    return Stream(rows, weight, torch.from_numpy(steps), keys)


def _drawn(
    all: np.ndarray, each: tuple[np.ndarray, ...], shape: tuple[int, int, int], batch: int, seed: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `_shuffled`."""
    _, offsets, sizes, *_ = each
    if sizes.min() < 1 or offsets.min() < 0 or (offsets + sizes).max() > len(all):
        raise IndexError(f"a client's rows must lie among all {len(all)}, and it must have one at least")
    rows, weight, keys = np.empty(shape, np.int64), np.empty(shape), np.empty(shape[:2], np.int64)
    full = np.empty(1, np.int64)
    given = [np.ascontiguousarray(array, dtype=np.int64) for array in (*each, all)]
    arrays = (ctypes.c_void_p(array.ctypes.data) for array in (*given, rows, weight, keys, full))
    purposes = (int(counted.key(seed, purpose)) for purpose in ("order", "step"))
    check_status(library().draw(*arrays, *map(ctypes.c_int64, (*shape, batch, *purposes))))
    return torch.from_numpy(rows), None if full[0] else torch.from_numpy(weight), torch.from_numpy(keys)


def _shuffled(
    all: np.ndarray, each: tuple[np.ndarray, ...], shape: tuple[int, int, int], batch: int, seed: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(rows, weight, keys) of a Stream of this shape (c, K, B). all: rows of all clients; each: (c,) a client's number,
    where its rows begin among all, how many there are, its visits before, the steps of one; batch: of its examples."""
    who, offsets, sizes, visits, steps = each
    first, passes = visits * steps, -(-sizes // batch)
    shuffled, start = _shuffles(who, sizes, first, steps, passes, seed)
    step, held = np.arange(shape[1]), passes[:, None]
    number = first[:, None] + np.minimum(step, steps[:, None] - 1)  # (c, K) batches of the whole stream
    origin = start[:, None] + (number // held - number[:, :1] // held) * sizes[:, None]
    within = ((number % held) * batch)[..., None] + np.arange(shape[2])  # (c, K, B)
    real = within < sizes[:, None, None]
    full = bool(real.all())
    if not full:
        within = np.where(real, within, within[..., :1])
    rows = all[shuffled[origin[..., None] + within] + offsets[:, None, None]]
    weight = None if full else torch.from_numpy(real / real.sum(-1, keepdims=True))
    keys = counted.key(seed, "step", who[:, None], first[:, None] + step)
    return torch.from_numpy(rows), weight, torch.from_numpy(keys)


def _shuffles(
    who: np.ndarray, sizes: np.ndarray, first: np.ndarray, steps: np.ndarray, passes: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(all permutations that the visits need, end to end; (c,) where each client's first one begins)."""
    begin = first // passes
    counts = (first + steps - 1) // passes - begin + 1  # passes that a visit touches
    client = np.repeat(np.arange(len(who)), counts)
    epoch = begin[client] + np.arange(len(client)) - (counts.cumsum() - counts)[client]
    lengths = sizes[client]
    starts = lengths.cumsum() - lengths
    segment = np.repeat(np.arange(len(client)), lengths)
    place = np.arange(len(segment)) - starts[segment]
    draws = counted.key(counted.key(seed, "order", who[client], epoch)[segment], place)
    # One sort for all: the segment in the high bits, 43 random ones below.
    order = np.argsort((segment << 43) | counted.high_bits(draws, 43), kind="stable")
    return place[order], starts[counts.cumsum() - counts]
