"""What clients' own models reach, in the folder of a run: DIR/clients.parquet, one row per client that the last
evaluation has looked at, sorted by client. `pandas.read_parquet` reads it. With evaluate.clients.table=every, the table
of the evaluation after round 5 stays in clients-000005.parquet; with none there is no table.

client                              the client's number
name                                where each client has rows of one natural client: its name in the column of clients
                                    of your own table, or else its number in the data set; empty elsewhere
population                          with federation.unseen: `seen`, or `unseen` for clients that are never trained with
visits, last_round                  how often it has taken part, and the last round in which it has, empty for none and
                                    where a checkpoint of an earlier version did not know it; in an asynchronous run the
                                    last update that has used a result of it
rows_training                       how many rows it trains on, also rows_test and rows_validation if the run has such
cluster                             of methods with several models, the number of the client's model, from 0
alpha                               of APFL, the share of the client's own model in its mixture
targets_training, …                 of language models, how many tokens of these rows are predicted
server_test_…                       the metric of the server's model on these rows of the client, empty without any;
                                    left out where the server's model is not trained as a whole
own_test_…                          the same of the client's own model
                                    of language models also perplexity, e to the client's loss
adapted_test_…                      the same after the adaptation of `evaluate.clients.adapt`, if there is one; of a
                                    list also adapted@2_test_…, and so on
chosen, chosen_test_…               with a list and rows for validation: the number of the adaptation that is best on
                                    these rows, 0 for none; the metric after it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..storage.atomic_write import cleared, temporary_path

FILE = "clients.parquet"


def name_of(round: int) -> str:
    """The file of the evaluation after a round, where each has one."""
    return f"clients-{round:06d}.parquet"


def write_client_models(
    path: Path,
    clients: np.ndarray,
    metrics: Mapping[str, tuple[np.ndarray, np.ndarray]],
    visits: np.ndarray,
    last: np.ndarray,
    sizes: Mapping[str, np.ndarray],
    targets: Mapping[str, np.ndarray],
    names: Sequence[str] = (),
) -> None:
    """Replace the file. clients: (c,) their numbers. metrics: name of a column, also of what methods tell of clients ->
    (its values, whether each is there), (c,) both. visits, last: (N,), of the clients that are trained with; a last
    round is 0 for none and -1 for one that is not known. sizes: the rows of each kind, of these N clients and of the
    others, whose numbers are behind theirs. targets: those in these rows, where they are known. names: of the natural
    clients of all of them; () where they have none."""
    import pyarrow as pa
    from pyarrow import Table, parquet

    from .parquet import nullable

    seen, everyone = len(visits), len(sizes["training"])
    named = [names[client] for client in clients.tolist()] if len(names) else [None] * len(clients)
    columns: dict[str, Any] = {"client": clients, "name": pa.array(named, pa.string())}
    if everyone > seen:
        columns["population"] = np.where(clients < seen, "seen", "unseen")
    none = np.zeros(everyone - seen, dtype=np.int64)
    columns["visits"] = np.concatenate([visits, none])[clients]
    rounds = np.concatenate([last, none])[clients]
    columns["last_round"] = nullable(rounds, rounds > 0)
    columns |= {f"rows_{kind}": rows[clients] for kind, rows in sizes.items()}
    columns |= {f"targets_{kind}": counts[clients] for kind, counts in targets.items()}
    columns |= {name: nullable(*metrics[name]) for name in sorted(metrics)}
    temporary = cleared(temporary_path(path))
    parquet.write_table(Table.from_pydict(columns), temporary)
    temporary.replace(path)
