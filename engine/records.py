"""The record of a run: a row a round, a column a number, empty where it was not measured.

round                               1 … R
train/loss                          mean over the cohort of each client's mean loss over its local steps
eval/…                              the workload's report on the test set, where the round was evaluated
client/count, dropped               clients that took part; those left out for failing (engine.on_failure: drop)
client/steps, gradients             their local steps and gradients in all
client/norm2                        mean of |y_K - x|^2
comm/bytes_down, bytes_up           of this round
time/seconds, train, hosts          the round; its local work as the driver waited; the hosts' time added up
time/state                          of the hosts' time, what reading, writing and checking clients' states took
"""

from __future__ import annotations

import pyarrow as pa

from .driver import Record

WHOLE = (
    "round",
    *("client/count", "client/dropped", "client/steps", "client/gradients"),
    *("comm/bytes_down", "comm/bytes_up"),
)


def to_table(rows: list[Record]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        kind = pa.int64() if name in WHOLE else pa.float64()
        values = [row.get(name) for row in rows]
        columns[name] = pa.array([None if v is None else int(v) if name in WHOLE else float(v) for v in values], kind)
    return pa.table(columns)
