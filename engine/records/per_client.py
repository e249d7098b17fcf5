"""What each client did in a round, if tracking.clients is set: DIR/clients/round-000001.parquet, one row per client.

Columns: `round`; `id`, the client's number; `loss`, its mean training loss; `norm2`, |y_K - x|^2; `steps`, its local
steps. `pandas.read_parquet(DIR / "clients")` reads all rounds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

COLUMNS = ("id", "loss", "norm2", "steps")


def write_clients(directory: str, number: int, clients: dict[str, np.ndarray]) -> None:
    """Write the file of round `number`, sorted by id. A round that is run again replaces its file.

    `clients`: column -> (S,), in any order.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(directory) / "clients"
    folder.mkdir(exist_ok=True)
    order = np.argsort(clients["id"])
    columns = {"round": np.full(len(order), number), **{name: clients[name][order] for name in COLUMNS}}
    pq.write_table(pa.table(columns), folder / f"round-{number:06d}.parquet")
