"""Rows that clients keep for testing: by a column of the data set, or a fraction of each client's rows."""

from __future__ import annotations

import numpy as np

from ...workloads import counted
from ...workloads.base import HELD_OUT, ClientIndex, Split
from ..errors import ConfigError


def hold_out(split: Split, fraction: float, seed: int) -> Split:
    """The split whose parts hold out the rows that the column `held_out` marks, or `fraction` of each client's rows.

    The fraction is rounded to whole rows. A client of two rows or more holds out at least one and trains on at least
    one; a client of one row trains on it. The rows follow from the seed and the client's number. Raises ConfigError
    where both are given, or where no client has a row to hold out.
    """
    train, client_index = dict(split.train), split.client_index
    marks = train.pop(HELD_OUT, None)
    if marks is None and not fraction:
        return split
    if marks is not None and fraction:
        raise ConfigError(
            f"evaluate.held_out: the workload's column {HELD_OUT} already says which rows clients hold out, got "
            f"held_out={fraction}; set it to 0"
        )
    held = (
        drawn(client_index.sizes, fraction, seed)
        if marks is None
        else np.asarray(marks)[client_index.rows].astype(bool)
    )
    owner = np.repeat(np.arange(len(client_index.sizes)), client_index.sizes)
    if not held.any():
        raise ConfigError(
            f"evaluate.held_out: no client has a row to hold out, got clients of {client_index.sizes.max()} rows "
            "at most; lower federation.clients or set it to 0"
        )
    lacking = np.setdiff1d(owner[held], owner[~held])
    if len(lacking):
        raise ConfigError(
            f"workload: every client must have a row to train on, got {len(lacking)} clients whose rows are all held "
            f"out (client {lacking[0]}); change the column {HELD_OUT} or lower federation.clients"
        )
    tests = some(client_index.rows, owner, held, len(client_index.sizes))
    return Split(train, split.test, some(client_index.rows, owner, ~held, len(client_index.sizes))._replace(held=tests))


def drawn(sizes: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """(n,) bool in the order of the parts' rows, each client's rows drawn at random."""
    held = np.zeros(int(sizes.sum()), dtype=bool)
    begin = 0
    for client, size in enumerate(sizes.tolist()):
        count = min(max(1, round(fraction * size)), size - 1)
        if count > 0:
            held[begin + counted.numpy_generator(seed, "held out", client).permutation(size)[:count]] = True
        begin += size
    return held


def some(rows: np.ndarray, owner: np.ndarray, chosen: np.ndarray, clients: int) -> ClientIndex:
    """The parts of the chosen rows; rows, owner, chosen: (n,), in the order of the clients."""
    sizes = np.bincount(owner[chosen], minlength=clients)
    return ClientIndex(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), rows[chosen])


def left_out(split: Split) -> str:
    """A sentence on training rows that no client has, "" where all are dealt."""
    client_index, rows = split.client_index, len(next(iter(split.train.values())))
    used = len(client_index.rows) + (0 if client_index.held is None else len(client_index.held.rows))
    if used >= rows:
        return ""
    return (
        f"{rows - used:,} of {rows:,} training rows belong to no client: the partition deals {used:,} to "
        f"{len(client_index.sizes):,} clients; raise federation.clients, or set partition.rest=merge where it "
        "is natural"
    )
