"""The record of a run as a table: one row per round, one column per number, empty if it was not measured.

round                               1 … R
train/loss                          the mean over the cohort of each client's mean loss over its local steps; empty in
                                    rounds without clients
eval/…                              the workload's report on the test set, in rounds with an evaluation
eval/validation_…                   with evaluate.validation: the same on the rows of all clients by which settings are
                                    chosen
eval/clients/…, …_worst             with evaluate.fairness: each client's mean over its own training rows, averaged over
                                    all clients and over the tenth of the clients with the worst means
eval/own/…                          where clients have models of their own, or with evaluate.clients: the metrics of
                                    each client's own model on its own rows (test_…, validation_…, training_…),
                                    averaged over the clients
eval/own/…_weighted, …_std          the mean weighted by the clients' rows; the standard deviation over the clients
eval/own/…_worst, …_decile          the mean over the worst tenth; the best of the worst tenth
eval/own/…_q05, …_q10               quantiles over the clients, also …_q25, …_q50, …_q75, …_q90, …_q95
eval/own/…_better                   the share of the clients whose own model is better than the server's, also …_equal,
                                    …_worse; where the server's model is trained as a whole
eval/own/…_missing                  the clients that are left out, since they lack a metric of all of their rows, such
                                    as an AUC where all are of one class
eval/own/never                      the clients among them that have never taken part
eval/own/…_gap                      with federation.unseen: the participation gap, the weighted mean over the clients
                                    that are trained with minus that over the unseen ones
eval/adapted/…                      the same of their models after the adaptation of evaluate.clients.adapt; of a list
                                    also eval/adapted@2/…, and so on
eval/chosen/…                       with a list and rows for validation: the same of the model that is best on these
                                    rows of its client
eval/unseen/…                       with federation.unseen: the same over the unseen clients, own/…, adapted/…, and
                                    server/… of the server's model where it is trained as a whole
eval/gradients                      the gradients of this adaptation, which client/gradients does not count
eval/gradients_statistics           with evaluate.clients.statistics=training: those of the batches by which running
                                    statistics of the clients' own rows were found
personal/parameters, stored         where clients keep models: how many numbers of its own model each keeps; the bytes
                                    of those of all clients that have taken part
client/personal_norm2               with personal tensors: the mean of the squared norm of their change in a visit
client/count, dropped               clients that took part; clients left out (failures, federation.without, Byzantine
                                    clients that send nothing)
client/steps, gradients             the sums of their local steps and gradients; in round 1 with the gradients of a warm
                                    start
client/looks                        the rows, times models, of which clients found the losses before their first
                                    steps, for methods that need them; in an asynchronous run of the visits that have
                                    ended since the update before
client/norm2                        the mean of |y_K - x|^2; with a compression, of the decoded messages
client/kappa, schatten_order        with a method's kappa: true: the means over the cohort of kappa, the least over the
                                    matrices and local steps of a client, and of the order p that follows from it;
                                    where one client takes part, the least kappa and the largest p over the rounds are
                                    those of theorem 3 of Takezawa et al. 2025; p for classic Newton-Schulz iterations
                                    and exact steps alone
client/clipped, nonfinite, snr      in a private run: the share of messages that the bound shortened; the number that
                                    were not finite and became zeros; the norm of the mean without noise over that of
                                    its noise; no epsilon covers these
privacy/epsilon, epsilon_as_if      what the rounds so far cost; the latter if privacy.as_if is given
privacy/clip, noise, below          the bound; the standard deviation of the noise on a coordinate of the mean; with a
                                    quantile, the noisy share of messages within the bound
server/lr                           the method's global learning rate as its paper defines it: eta_g of FedExP and
                                    FedDuA, server_lr, gamma (lr_dual: that of the dual group, if it differs); if the
                                    server's rule has none, |server's move| / |mean of y_K - x|
comm/bytes_down, bytes_up           bytes of this round
comm/bytes_probe                    bytes of the losses that a sampler asked for, and of the models sent for them
comm/bytes_wasted                   with systems: the downloads of clients that were selected and not used, and the
                                    uploads that an asynchronous run discarded
client/selected, late, lost         with systems: clients that received the model; those of them that were cut off, and
                                    those that vanished; of an asynchronous run, since the update before
client/eligible                     with systems: clients that were online and had enough memory when the round began,
                                    or at the update of an asynchronous run
system/clock, seconds, waited       with systems: the virtual clock at the end of the round; the virtual seconds of the
                                    round; those of them spent waiting for enough clients, or without any client in
                                    flight in an asynchronous run
system/wasted                       with systems: the virtual seconds that clients spent in vain
async/staleness, staleness_max      in an asynchronous run: the mean and the maximum, over the results of the update, of
                                    the number of updates between a client's download and its arrival
async/weight                        the sum of the weights with which the results were added, over that of the client
                                    weights
async/flight, versions              clients in flight after the update; the versions of the model that they received
async/discarded                     results that arrived since the update before and were too stale
time/probe                          seconds until the losses that a sampler asked for were there
sampler/lambda_max, lambda_0, …      with the sampler agnostic: the largest share of a group in the mean of this round,
                                    and that of each group, if there are 20 or fewer
comm/bytes_buffers_down, …_up       bytes of running statistics, not counted above; only if the model has any
robust/byzantine                    with an attack: the Byzantine clients among those that were sampled
robust/broken                       with a rule of aggregation: the messages that are not finite, which were left out
robust/error                        the distance of the rule's answer from the mean of the honest messages, in units of
                                    the root mean squared distance of the honest messages from their mean; of delta
robust/kept_honest, kept_byzantine  the sums of the weights that the rule gave to honest and to Byzantine messages
robust/residual                     the residual at which the geometric median stopped
attack/…                            numbers that an attack chose, such as z, gamma, factor
time/aggregate                      seconds of attack and rule, in rounds whose messages are collected
time/seconds, train, workers        seconds of the round; of the driver's wait for local work; of all workers' work
time/state, data, reduce, compute   the workers' seconds in parts: reading, writing and checking clients' states;
                                    drawing and gathering batches; adding up messages; the rest: local steps
time/wait                           the seconds of all workers without a task while the driver waited for local work
time/sum                            the seconds in which the driver added up the sums of tasks, a part of time/train
time/server, evaluate               seconds of the server's step; of the evaluation, in rounds with an evaluation
time/clients                        seconds of the evaluation of clients' own models, a part of time/evaluate
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from .history import History, Record

INTEGER_COLUMNS = (
    "round",
    *("client/count", "client/dropped", "client/steps", "client/gradients", "client/looks"),
    *("comm/bytes_down", "comm/bytes_up", "comm/bytes_buffers_down", "comm/bytes_buffers_up"),
)


def to_table(rows: Iterable[Record]) -> pa.Table:
    """The table of these records."""
    history = rows if isinstance(rows, History) else History(rows)
    columns = {}
    for name in history.columns:
        values, measured = history.column(name)
        columns[name] = nullable(values.astype(np.int64) if name in INTEGER_COLUMNS else values, measured)
    return pa.table(columns)


def nullable(values: np.ndarray, there: np.ndarray) -> pa.Array:
    """An Arrow array of these values (n,), with nulls where `there` (n,) is False. It is made from buffers, since
    pyarrow's own conversion of NumPy's arrays loads pandas, which takes longer than a short run."""
    bits = pa.py_buffer(np.packbits(there, bitorder="little"))
    missing = int((~there).sum())
    buffers = [bits if missing else None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers, missing)
