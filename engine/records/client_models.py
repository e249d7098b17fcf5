"""What clients' own models reach, in the folder of a run: DIR/clients.parquet, one row per client that the last
evaluation has looked at, sorted by client. `pandas.read_parquet` reads it.

client                              the client's number
population                          with federation.unseen: `seen`, or `unseen` for clients that are never trained with
visits                              how often it has taken part
rows_training                       how many rows it trains on, also rows_test and rows_validation if the run has such
cluster                             of methods with several models, the number of the client's model, from 0
alpha                               of APFL, the share of the client's own model in its mixture
server_test_…                       the metric of the server's model on these rows of the client, empty without any;
                                    left out where the server's model is not trained as a whole
own_test_…                          the same of the client's own model
adapted_test_…                      the same after the adaptation of `evaluate.clients.adapt`, if there is one
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..storage.atomic_write import cleared, temporary_path

FILE = "clients.parquet"


def write_client_models(
    directory: str, clients: Mapping[str, np.ndarray], visits: np.ndarray, sizes: Mapping[str, np.ndarray]
) -> None:
    """Replace the file. clients: `id`, columns such as own/test_accuracy, (c,) each, NaN for clients without such rows,
    and what methods tell of clients, under names without /. visits: (N,), of the clients that are trained with. sizes:
    the rows of each kind, of these N clients and of the others, whose numbers are behind theirs."""
    from pyarrow import Table, parquet

    from .parquet import nullable

    ids, path, seen = clients["id"], Path(directory) / FILE, len(visits)
    everyone = len(sizes["training"])
    columns: dict[str, Any] = {"client": ids}
    if everyone > seen:
        columns["population"] = np.where(ids < seen, "seen", "unseen")
    columns["visits"] = np.concatenate([visits, np.zeros(everyone - seen, dtype=visits.dtype)])[ids]
    columns |= {f"rows_{kind}": rows[ids] for kind, rows in sizes.items()}
    columns |= {name: clients[name] for name in sorted(clients) if "/" not in name and name != "id"}
    for name in sorted(name for name in clients if "/" in name):
        kind = name.partition("/")[2].partition("_")[0]
        columns[name.replace("/", "_")] = nullable(clients[name], sizes[kind][ids] > 0)
    temporary = cleared(temporary_path(path))
    parquet.write_table(Table.from_pydict(columns), temporary)
    temporary.replace(path)
