"""The data of a run and the rows of every client.

Rows that clients keep for testing, and rows by which settings are chosen, are marked by columns of the data set, or
drawn from each client's rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...workloads import counted
from ...workloads.client_index import ClientIndex, check_index
from ...workloads.workload import HELD_OUT, VALIDATION, Split, Workload
from ..config.schema import Experiment, Federation
from ..errors import ConfigError
from ..user_code import plugin_errors

TORCH_HAS = {
    *("bool", "float16", "float32", "float64", "complex64", "complex128"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
"""The types of NumPy's arrays that torch has, too."""


def split_of(workload: Workload, experiment: Experiment, largest: float) -> Split:
    """The data and the rows of every client, without those that clients hold out. largest: the largest number of the
    type of the run. Raises ConfigError for data that the run cannot use."""
    clients = experiment.federation.all_clients
    with plugin_errors("workload"):
        split = workload.split(experiment.seed, clients)
    if not isinstance(split, Split):
        raise ConfigError(f"workload: split must return a workloads.workload.Split, got {type(split).__name__}")
    check_columns(split)
    with plugin_errors("workload"):
        check_index(split.client_index, len(next(iter(split.train.values()))))
        workload.check_split(split, largest)
    sizes = split.client_index.sizes
    if len(sizes) != clients or not sizes.all():
        got = f"rows for {int((sizes > 0).sum())} of {clients} clients"
        raise ConfigError(f"workload: every client must have a row, got {got}; lower federation.clients")
    evaluate = experiment.evaluate
    check_marks(split, evaluate.held_out)
    split = hold_out(split, evaluate.held_out, experiment.seed)
    split = set_aside(split, evaluate.validation, experiment.seed)
    with plugin_errors("workload", settings=experiment.workload):
        split = workload.prepared(split)
    split = split._replace(client_index=with_targets(divided(split.client_index, experiment), workload, split))
    by_client = "fairness" if evaluate.fairness else "held_out" if split.client_index.held is not None else ""
    by_client = by_client or ("validation" if split.client_index.validation is not None else "")
    if by_client and (absent := set(split.test) - set(split.train)):
        raise ConfigError(
            f"evaluate.{by_client}: the workload's report needs {', '.join(sorted(absent))}, which training "
            f"rows do not have; set it to {'false' if evaluate.fairness else 0}"
        )
    return split


def check_columns(split: Split) -> None:
    """Raise ConfigError for a column that is not an array of numbers that torch has."""
    for part, columns in split.named:
        for name, column in columns.items():
            got: Any = type(column).__name__
            if isinstance(column, np.ndarray):
                got = f"{column.dtype} in another order of bytes" if not column.dtype.isnative else column.dtype
                if column.dtype.isnative and column.dtype.name in TORCH_HAS:
                    continue
            raise ConfigError(
                f"workload: columns must be arrays of numbers that torch has, got {got} in column {name} of {part}; "
                "convert it, as by np.asarray(column, dtype=np.float32)"
            )


def with_targets(index: ClientIndex, workload: Workload, split: Split) -> ClientIndex:
    """The index with the targets of each client, where the workload says how many a row has."""
    with plugin_errors("workload"):
        targets = workload.targets(split.train)
    if targets is None:
        return index
    targets, rows = np.asarray(targets), len(next(iter(split.train.values())))
    if targets.shape != (rows,) or targets.dtype.kind not in "iu":
        raise ConfigError(
            f"workload: targets must be whole numbers of shape ({rows},), got {targets.dtype} of shape {targets.shape}"
        )
    return index.with_targets(targets)


def check_weights(index: ClientIndex, federation: Federation) -> None:
    """Raise ConfigError if clients are weighted by targets that they do not have."""
    if federation.weights != "tokens":
        return
    if index.targets is None or index.drift is not None:
        why = "the workload has none" if index.targets is None else "those that clients train on change with the round"
        raise ConfigError(
            f"federation.weights: tokens counts the targets of texts, and {why}; choose weights: examples"
        )
    without = np.flatnonzero(index.targets == 0)
    if len(without):
        raise ConfigError(
            "federation.weights: with tokens every client must have a target, got none for client "
            f"{without[0]}; leave it out, or choose weights: examples"
        )


def seen_and_unseen(federation: Federation, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(the N clients that are trained with, those that are not), ascending, by their numbers in the partition."""
    unseen = federation.unseen
    if unseen is None:
        apart = np.zeros(0, dtype=np.int64)
    elif isinstance(unseen, tuple):
        apart = np.sort(np.array(unseen, dtype=np.int64))
    else:
        order = counted.numpy_generator(seed, "unseen").permutation(federation.all_clients)
        apart = np.sort(order[: federation.all_clients - federation.clients]).astype(np.int64)
    return np.delete(np.arange(federation.all_clients), apart), apart


def divided(client_index: ClientIndex, experiment: Experiment) -> ClientIndex:
    """The index of the clients that are trained with, in the windows of round 1; `unseen` has the others."""
    federation = experiment.federation
    if federation.unseen is None:
        return client_index.in_windows()
    parts = seen_and_unseen(federation, experiment.seed)
    seen, unseen = (client_index.of_clients(clients).in_windows() for clients in parts)
    return seen._replace(unseen=unseen)


def natural_names(index: ClientIndex, workload: Workload) -> list[str]:
    """The name of each client's natural client, or its number where names are not known; [] unless each client has the
    rows of one. index: of all clients."""
    if "client" not in index.common:
        return []
    numbers, names = index.common["client"].tolist(), workload.client_names()
    return [names[number] for number in numbers] if names else list(map(str, numbers))


def with_groups(split: Split, column: str) -> Split:
    """The split whose index has a column in `common`. Raises ValueError unless each client has one value of it."""
    index = split.client_index
    if column in index.common:
        return split
    if column not in split.train:
        known = ", ".join([*index.common, *split.train])
        raise ValueError(f"groups must name a training column, got {column}; valid: {known}")
    values = np.asarray(split.train[column])
    if values.ndim != 1:
        raise ValueError(f"groups must name a column of single values, got {column}, whose values are several")
    index = index.with_common(column, values)
    if column not in index.common:
        raise ValueError(
            f"groups: all rows of a client must have one value of the column {column}, and some have several; choose a "
            "column by which the partition deals rows, or give the number of each client's group"
        )
    return split._replace(client_index=index)


def hold_out(split: Split, fraction: float, seed: int) -> Split:
    """The split without the rows that clients hold out; these are in `client_index.held`.

    They are the rows that the column `held_out` marks, or `fraction` of each client's rows, rounded to whole rows. With
    a fraction, a client with two rows or more holds out at least one and trains on at least one. A client with one row
    trains on it. The drawn rows depend only on the seed and the client's number. Raises ConfigError if both ways are
    given, or if no client has a row to hold out.
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
        draw_held_out(client_index.sizes, fraction, seed)
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
    clients = len(client_index.sizes)
    test_index = select_rows(client_index.rows, owner, held, clients)
    train_index = select_rows(client_index.rows, owner, ~held, clients)
    train_index = train_index._replace(held=test_index, drift=client_index.drift, common=client_index.common)
    return Split(train, split.test, train_index)


def check_marks(split: Split, held_out: float) -> None:
    """Raise ConfigError if columns mark a row twice, or validation rows where test rows are drawn, which may meet."""
    held, marks = split.train.get(HELD_OUT), split.train.get(VALIDATION)
    if marks is None:
        return
    if held is None and held_out:
        raise ConfigError(
            f"evaluate.held_out: the workload's column {VALIDATION} needs a column {HELD_OUT} beside it, got "
            f"held_out={held_out}; set it to 0, or mark both"
        )
    if held is not None and (both := int((np.asarray(held).astype(bool) & np.asarray(marks).astype(bool)).sum())):
        raise ConfigError(
            f"workload: a row must be held out or for validation, got {both} rows that the columns {HELD_OUT} and "
            f"{VALIDATION} both mark; change one of them"
        )


def set_aside(split: Split, fraction: float, seed: int) -> Split:
    """The split without the rows by which settings are chosen; these are in `client_index.validation`.

    They are the rows that the column `validation` marks, or `fraction` of all of a client's rows, rounded to whole
    rows, drawn from those that it does not hold out. With a fraction, a client that has two of them or more gives at
    least one and keeps at least one. The drawn rows depend only on the seed, the client's number and its rows. Raises
    ConfigError if both ways are given, if no client has a row to give, or if one has none left to train on.
    """
    train, client_index = dict(split.train), split.client_index
    marks = train.pop(VALIDATION, None)
    if marks is None and not fraction:
        return split
    if marks is not None and fraction:
        raise ConfigError(
            f"evaluate.validation: the workload's column {VALIDATION} already marks rows, got {fraction}; set it to 0"
        )
    left = client_index.sizes
    whole = left if client_index.held is None else left + client_index.held.sizes
    chosen = (
        draw_validation(left, whole, fraction, seed)
        if marks is None
        else np.asarray(marks)[client_index.rows].astype(bool)
    )
    owner = np.repeat(np.arange(len(left)), left)
    if not chosen.any():
        raise ConfigError(
            f"evaluate.validation: no client has a row for it, got clients of {left.max()} rows at most; lower "
            "federation.clients or set it to 0"
        )
    if len(lacking := np.setdiff1d(owner[chosen], owner[~chosen])):
        raise ConfigError(
            f"workload: every client must have a row to train on, got {len(lacking)} clients without one (client "
            f"{lacking[0]}); change the column {VALIDATION} or lower federation.clients"
        )
    validation, kept = (select_rows(client_index.rows, owner, some, len(left)) for some in (chosen, ~chosen))
    held, drift, common = client_index.held, client_index.drift, client_index.common
    kept = kept._replace(held=held, validation=validation, drift=drift, common=common)
    return Split(train, split.test, kept)


def draw_validation(left: np.ndarray, whole: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """(n,) bool in the order of the clients' rows that are left: true for rows for validation. whole: (N,) the rows of
    each client before it held some out."""
    chosen = np.zeros(int(left.sum()), dtype=bool)
    begins = np.cumsum(left) - left
    some = np.flatnonzero(left > 1)  # a client with one row trains on it
    randoms = counted.numpy_generators(counted.key(seed, "validation", some))
    for client, random in zip(some.tolist(), randoms, strict=True):
        begin, rows = int(begins[client]), int(left[client])
        count = min(max(1, round(fraction * int(whole[client]))), rows - 1)
        chosen[begin + random.permutation(rows)[:count]] = True
    return chosen


def draw_held_out(sizes: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """(n,) bool in the order of the clients' rows: true for rows that are held out, drawn at random for each client."""
    held = np.zeros(int(sizes.sum()), dtype=bool)
    begins = np.cumsum(sizes) - sizes
    some = np.flatnonzero(sizes > 1)  # a client with one row trains on it
    randoms = counted.numpy_generators(counted.key(seed, "held out", some))
    for begin, size, random in zip(begins[some].tolist(), sizes[some].tolist(), randoms, strict=True):
        count = min(max(1, round(fraction * size)), size - 1)
        held[begin + random.permutation(size)[:count]] = True
    return held


def select_rows(rows: np.ndarray, owner: np.ndarray, chosen: np.ndarray, clients: int) -> ClientIndex:
    """The index of the chosen rows only. `rows`, `owner` (client numbers), `chosen` (bool): (n,), sorted by client."""
    sizes = np.bincount(owner[chosen], minlength=clients)
    return ClientIndex(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), rows[chosen])


def unused_rows(split: Split) -> str:
    """A sentence on training rows that belong to no client, "" if all rows are used."""
    client_index, rows = split.client_index, len(next(iter(split.train.values())))
    parts = [part for part in (client_index, client_index.unseen) if part is not None]
    apart = [index for part in parts for index in (part.held, part.validation) if index is not None]
    used = sum(len(part.whole.rows) for part in parts) + sum(len(index.rows) for index in apart)
    if used >= rows:
        return ""
    clients = sum(len(part.sizes) for part in parts)
    return (
        f"{rows - used:,} of {rows:,} training rows belong to no client: the partition deals {used:,} to "
        f"{clients:,} clients; raise federation.clients, or set partition.rest=merge where it "
        "is natural"
    )
