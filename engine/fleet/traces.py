"""Parquet files of devices and of availability.

Devices: a row for each device, with the columns `compute` (milliseconds for each unit of work), `down` and `up`
(kbit/s), and optionally `client` (the client's number) and `memory` (bytes). The file's metadata may have `unit`,
`reference` (the model that was timed) and `source`.

Availability: a row for each session, with the columns `client` (the trace's own number), `from` and `to` (seconds,
half-open), sorted by client and time. The file's metadata may have `period`, after which the trace begins again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .contract import DeviceNumbers, Unit, keys, require, uniform

LARGEST_NUMBER = 2.0**53
"""Client numbers are read as float64, which is exact below this number."""
Assign = Literal["number", "modulo", "random"]
"""How the entries of a file are assigned to clients."""


class Sessions(NamedTuple):
    """The sessions of a file. Entry k, of the k-th client number of the file, has the sessions offsets[k] …
    offsets[k + 1] - 1, in the order of time."""

    begin: np.ndarray  # (sessions,) seconds
    end: np.ndarray
    offsets: np.ndarray  # (entries + 1,)
    clients: np.ndarray  # (entries,) ascending numbers
    period: float | None


def rows_of(numbers: np.ndarray | None, count: int, assign: str | None, seed: int, clients: np.ndarray) -> np.ndarray:
    """(c,) which of the `count` entries of a file belongs to each client. numbers: (count,) ascending client numbers of
    the entries, or None. Raises ValueError where a client has no entry.

    With `random` the same draw chooses a client's row in the table of devices and its entry in the trace, so that files
    with as many entries stay aligned: entry i of both is one device. With `modulo` for one of them, they are
    independent.
    """
    if assign == "modulo":
        return clients % count
    if assign == "random":
        return np.floor(uniform(keys(seed, "device", clients)) * count).astype(np.int64)
    require(numbers is not None, "assign=number needs a file with the column client; choose modulo or random")
    assert numbers is not None
    places = np.minimum(np.searchsorted(numbers, clients), count - 1)
    missing = clients[numbers[places] != clients]
    if len(missing):
        raise ValueError(f"the file must have every client, got none with number {missing[0]}; choose assign: random")
    return places


def _read(file: str) -> tuple[pa.Table, dict[str, str]]:
    path = Path(file).expanduser()
    require(path.is_file(), f"there is no file {file}; give the path of a Parquet file")
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file} is no Parquet file ({str(error).splitlines()[0]}); give another one") from None
    require(table.num_rows > 0, f"{file} must have a row, got none; give another file")
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    return table, metadata


def _column(table: pa.Table, file: str, name: str) -> np.ndarray:
    """(rows,) float64, a column without missing numbers."""
    require(name in table.column_names, f"{file} has no column {name}; it needs it")
    column = table.column(name)
    require(column.null_count == 0, f"{file}: {name} must have no missing value, got {column.null_count}; fill them in")
    try:
        values = column.to_numpy().astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{file}: {name} must be numbers, got {column.type}; convert it") from None
    require(bool(np.isfinite(values).all()), f"{file}: {name} must be finite, got infinity or NaN; repair the file")
    return values


def _client_numbers(table: pa.Table, file: str) -> np.ndarray:
    """(rows,) int64, the column `client`."""
    values = _column(table, file, "client")
    whole = (values == np.floor(values)) & (np.abs(values) < LARGEST_NUMBER)
    if not whole.all():
        got = values[int(np.argmin(whole))]
        raise ValueError(f"{file}: client must be whole numbers below 2^53, got {got:g}; repair the file")
    return values.astype(np.int64)


def _rates(table: pa.Table, file: str, name: str) -> np.ndarray:
    """(rows,) a column of positive numbers."""
    values = _column(table, file, name)
    require(bool((values > 0).all()), f"{file}: {name} must be more than 0, got {values.min():g}; repair the file")
    return values


def read_devices(file: str) -> tuple[DeviceNumbers, np.ndarray | None, Unit | None]:
    """(the devices of a file, (rows,) ascending client numbers if the file has them, the unit of `compute` if the file
    names it). Raises ValueError for a file that cannot be used."""
    table, metadata = _read(file)
    compute, down, up = (_rates(table, file, name) for name in ("compute", "down", "up"))
    memory = _rates(table, file, "memory") if "memory" in table.column_names else np.full(table.num_rows, np.inf)
    unit: Any = metadata.get("unit")
    require(unit in (None, *get_args(Unit)), f"{file}: unit must be {', '.join(get_args(Unit))}, got {unit!r}")
    devices, clients = DeviceNumbers(compute, down, up, memory), None
    if "client" in table.column_names:
        clients = _client_numbers(table, file)
        order = np.argsort(clients, kind="stable")
        devices, clients = DeviceNumbers(*(column[order] for column in devices)), clients[order]
        require(bool((np.diff(clients) > 0).all()), f"{file}: every client must have one row, got two; drop one")
    return devices, clients, unit


def read_sessions(file: str) -> Sessions:
    """The sessions of a file; those that touch each other are one. Raises ValueError for a file that cannot be used."""
    table, metadata = _read(file)
    client, begin, end = _client_numbers(table, file), _column(table, file, "from"), _column(table, file, "to")
    require(bool((begin >= 0).all()), f"{file}: from must be 0 or more, got {begin.min():g}; repair the file")
    empty = begin >= end
    if empty.any():
        at = int(np.argmax(empty))
        raise ValueError(f"{file}: from < to must hold, got from={begin[at]:g}, to={end[at]:g}; drop the row")
    same = client[1:] == client[:-1]
    ordered = bool((np.diff(client) >= 0).all() and (begin[1:][same] >= end[:-1][same]).all())
    require(ordered, f"{file}: sessions must be sorted by client and time and must not overlap; sort or merge them")
    period = None
    if "period" in metadata:
        try:
            period = float(metadata["period"])
        except ValueError:
            raise ValueError(f"{file}: period must be a number, got {metadata['period']!r}; repair the file") from None
        require(np.isfinite(period), f"{file}: period must be finite, got {period}; leave it out, or give seconds")
        require(period >= end.max(), f"{file}: period >= to must hold, got {period:g} < {end.max():g}; raise it")
    touching = same & (begin[1:] == end[:-1])
    begin, end = begin[np.append(True, ~touching)], end[np.append(~touching, True)]
    client = client[np.append(True, ~touching)]
    numbers, first = np.unique(client, return_index=True)
    return Sessions(begin, end, np.append(first, len(client)), numbers, period)


def write_devices(path: Path, devices: DeviceNumbers, clients: np.ndarray, metadata: dict[str, str]) -> None:
    """Write a file that `read_devices` reads. clients: (rows,) their numbers."""
    columns = {"client": clients, "compute": devices.compute, "down": devices.down, "up": devices.up}
    if np.isfinite(devices.memory).all():
        columns["memory"] = devices.memory
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)


def write_sessions(path: Path, sessions: Sessions, metadata: dict[str, str]) -> None:
    """Write a file that `read_sessions` reads."""
    columns = {"client": np.repeat(sessions.clients, np.diff(sessions.offsets)), "from": sessions.begin}
    if sessions.period is not None:
        metadata = {"period": f"{sessions.period:g}", **metadata}
    pq.write_table(pa.table({**columns, "to": sessions.end}).replace_schema_metadata(metadata), path)
