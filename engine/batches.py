"""Each client's stream of batches: its own rows, shuffled anew every pass, continued from round to round.

A pass over n rows has ceil(n / B) batches, the last one short. Local steps number K per visit, so visit v takes batches
vK … vK + K - 1 of the stream, wherever passes begin and end. The shuffle of pass e is counted by (seed, client, e).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..workloads import counted
from ..workloads.base import Parts
from .cohort import steps_of
from .config import Local


class Stream(NamedTuple):
    """The batches of some clients for one visit; K is the longest client's number of steps."""

    rows: Tensor  # (c, K, B) int64, rows of the training set; short batches repeat their first row
    weight: Tensor | None  # (c, K, B) float64, 1 / examples in the batch, 0 on repeats; None if all batches are full
    steps: Tensor  # (c,) int64
    keys: Tensor  # (c, K) int64, this step's source of randomness


def stream(parts: Parts, clients: np.ndarray, visits: np.ndarray, local: Local, seed: int) -> Stream:
    """`visits`: (c,) how often each client took part before."""
    offsets = torch.from_numpy(parts.offsets[clients].astype(np.int64))
    sizes = torch.from_numpy(parts.offsets[clients + 1].astype(np.int64)) - offsets
    steps = torch.from_numpy(steps_of(sizes.numpy(), local).astype(np.int64))
    who, first = torch.from_numpy(clients.astype(np.int64)), torch.from_numpy(visits.astype(np.int64)) * steps
    batch = min(local.batch, int(sizes.max()))
    step = torch.arange(int(steps.max())) + torch.zeros_like(steps).unsqueeze(1)  # (c, K)
    passes = -(-sizes // local.batch).unsqueeze(1)
    number = first.unsqueeze(1) + torch.minimum(step, steps.unsqueeze(1) - 1)  # (c, K) batches of the whole stream
    shuffled, start = _shuffles(who, sizes, first, steps, passes[:, 0], seed)
    origin = start.unsqueeze(1) + (number // passes - number[:, :1] // passes) * sizes.unsqueeze(1)
    within = ((number % passes) * local.batch).unsqueeze(-1) + torch.arange(batch)  # (c, K, B)
    real = within < sizes.view(-1, 1, 1)
    within = torch.where(real, within, within[..., :1])
    chosen = shuffled[origin.unsqueeze(-1) + within] + offsets.view(-1, 1, 1)
    rows = torch.from_numpy(parts.rows)[chosen]
    weight = None if bool(real.all()) else real.to(torch.float64) / real.sum(-1, keepdim=True)
    return Stream(rows, weight, steps, counted.key(seed, "step", who.unsqueeze(1), first.unsqueeze(1) + step))


def _shuffles(
    who: Tensor, sizes: Tensor, first: Tensor, steps: Tensor, passes: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """(all permutations that the visits need, end to end; (c,) where each client's first one begins)."""
    begin = first // passes
    counts = (first + steps - 1) // passes - begin + 1  # passes that a visit touches
    client = torch.repeat_interleave(torch.arange(len(who)), counts)
    epoch = begin[client] + torch.arange(len(client)) - (counts.cumsum(0) - counts)[client]
    lengths = sizes[client]
    ends = lengths.cumsum(0)
    segment = torch.repeat_interleave(torch.arange(len(client)), lengths)
    place = torch.arange(len(segment)) - (ends - lengths)[segment]
    draws = counted.key(counted.key(seed, "order", who[client], epoch)[segment], place)
    # One sort for all: the segment in the high bits, 43 random ones below.
    order = torch.sort((segment << 43) | counted.high_bits(draws, 43), stable=True).indices
    return place[order], (ends - lengths)[counts.cumsum(0) - counts]
