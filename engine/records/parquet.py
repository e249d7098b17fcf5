"""The record of a run: a row a round, a column a number, empty where it was not measured.

round                               1 … R
train/loss                          mean over the cohort of each client's mean loss over its local steps
eval/…                              the workload's report on the test set, where the round was evaluated
eval/clients/…, …_worst             evaluate.fairness: of each client's mean over its own training rows, the mean over
                                    clients and over the tenth that is worst off in it
client/count, dropped               clients that took part; those left out for failing (engine.on_failure: drop)
client/steps, gradients             their local steps and gradients in all; in round 1 the gradients of a warm start as
                                    well
client/norm2                        mean of |y_K - x|^2; under a compression, of the messages as they were decoded
server/lr                           the method's global learning rate as its paper defines it: eta_g of FedExP and
                                    FedDuA, server_lr, gamma (lr_dual: the dual group's, where it is another); where
                                    the server's rule has none, |server's move| / |mean of y_K - x|
comm/bytes_down, bytes_up           of this round
comm/bytes_buffers_down, …_up       running statistics, not counted above; where the model has any
time/seconds, train, workers          the round; its local work as the driver waited; the workers' time added up
time/state, data, reduce, compute   of the workers' time: reading, writing and checking clients' states; drawing and
                                    gathering batches; adding up messages; the rest, which is the local steps
time/wait                           seconds that workers had no task while the driver waited for local work, added up
time/server, evaluate               the server's step; the evaluation, where the round was evaluated
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from .history import History, Record

WHOLE = (
    "round",
    *("client/count", "client/dropped", "client/steps", "client/gradients"),
    *("comm/bytes_down", "comm/bytes_up", "comm/bytes_buffers_down", "comm/bytes_buffers_up"),
)


def to_table(rows: Iterable[Record]) -> pa.Table:
    history = rows if isinstance(rows, History) else History(rows)
    columns = {}
    for name in history.columns:
        values, there = history.column(name)
        columns[name] = pa.array(values.astype(np.int64) if name in WHOLE else values, mask=~there)
    return pa.table(columns)
