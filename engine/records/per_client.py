"""What each client did in a round, where a run is asked for it: DIR/clients/round-000001.parquet, a row a client.

round, id; loss, its mean training loss; norm2, |y_K - x|^2; steps, local steps taken. `pandas.read_parquet(DIR /
"clients")` reads them all.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

COLUMNS = ("id", "loss", "norm2", "steps")


def write_clients(directory: str, number: int, clients: dict[str, np.ndarray]) -> None:
    """clients: column -> (S,), in any order; rows go by id. A round that is run again replaces its file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(directory) / "clients"
    folder.mkdir(exist_ok=True)
    order = np.argsort(clients["id"])
    columns = {"round": np.full(len(order), number), **{name: clients[name][order] for name in COLUMNS}}
    pq.write_table(pa.table(columns), folder / f"round-{number:06d}.parquet")
