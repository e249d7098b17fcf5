"""What each client did in a round, if tracking.clients is set: DIR/clients/round-000001.parquet, one row per client.

With systems there is a row for every client that was selected; loss, norm2 and steps are empty for clients whose
results were not used. An update of an asynchronous run has rows for its results, and for the clients that were lost or
too stale since the update before. `pandas.read_parquet(DIR / "clients")` reads all rounds.

round                               the number of the round, or of the update in an asynchronous run
id                                  the client's number
loss                                its mean training loss over its local steps
norm2                               |y_K - x|^2; with a compression, of the decoded message
steps                               its local steps
selected                            with systems: true if it was drawn for the cohort, false if as a spare
status                              with systems: 0 if its result was used, 1 if it was late and cut off, 2 if it was
                                    lost, 3 if its result was too stale, 4 if it failed and was left out
start, arrival                      with systems: the virtual time at which it was sent the model, and the one at which
                                    its result arrived or would have arrived, or at which it was lost or would have
                                    been lost
duration, compute                   with systems: the virtual seconds of its whole visit, and those of its local steps
version, staleness                  with systems: the number of updates before the model that it received, and of the
                                    updates between that and its arrival; 0 in rounds
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

USED, LATE, LOST, STALE, FAILED = range(5)
"""What became of a client that was selected: its result was used; it was cut off; it vanished; too many updates came
before its result; it failed and was left out, which is known only after the round."""
COLUMNS = ("id", "loss", "norm2", "steps")


def write_clients(
    directory: str, number: int, clients: Mapping[str, np.ndarray], visits: Mapping[str, np.ndarray]
) -> None:
    """Write the file of round `number`, sorted by id. A round that is run again replaces its file.

    `clients`: column -> (S,), in any order. `visits`: column -> (c,), of all clients that were selected; empty for a
    run without a virtual clock.
    """
    from pyarrow import Table, parquet

    folder = Path(directory) / "clients"
    folder.mkdir(exist_ok=True)
    order = np.argsort(clients["id"], kind="stable")
    columns: dict[str, Any] = {name: clients[name][order] for name in COLUMNS}
    if visits:
        columns = with_visits(columns, visits)
    table = Table.from_pydict({"round": np.full(len(columns["id"]), number), **columns})
    parquet.write_table(table, folder / f"round-{number:06d}.parquet")


def with_visits(clients: Mapping[str, np.ndarray], visits: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The Arrow columns of all visits, with the numbers of those that were used. clients: sorted by id."""
    import pyarrow as pa

    order = np.argsort(visits["id"], kind="stable")
    found = {name: column[order] for name, column in visits.items()}
    used = np.flatnonzero(found["status"] == USED)
    source = np.full(len(order), -1)  # the position in `clients` of each visit that has numbers
    at = 0
    for row in used.tolist():
        if at < len(clients["id"]) and clients["id"][at] == found["id"][row]:
            source[row], at = at, at + 1
    found["status"] = np.where((found["status"] == USED) & (source < 0), FAILED, found["status"])
    numbers = pa.array(source, mask=source < 0)
    measured = {name: pa.array(clients[name]).take(numbers) for name in COLUMNS[1:]}
    return {"id": found.pop("id"), **measured, **found}
