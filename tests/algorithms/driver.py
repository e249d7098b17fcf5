"""The smallest engine: runs any method of the contract, one client after another, and keeps every state.

`gradient(i, x, r, k)`: gradient of client i at x, a dict of numpy arrays, in round r (0, 1, ...) at local step k; the
pass of a warm start has r = -1. The reference implementations get the same function.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fedfleet.algorithms.aggregation.messages import Messages, Stored
from fedfleet.algorithms.contract import Round, Viewer
from fedfleet.algorithms.tree import Tree
from fedfleet.workloads import counted

torch.set_num_threads(1)


class Run(NamedTuple):
    """The server's state and the states of all clients after each round."""

    problem: object
    method: object
    servers: list
    clients: list

    def models(self):
        return [self.method.model(server) for server in self.servers]

    def own_models(self):
        """What each client is evaluated with at the end."""
        server = self.servers[-1]
        public, x = self.method.unpack(self.method.broadcast(server)), self.method.model(server)
        views = [seen(self.method, public, each, i, self.problem) for i, each in enumerate(self.clients[-1])]
        return [self.method.client_model(x, *each) for each in zip(views, self.clients[-1], strict=True)]


def tree(x):
    return Tree.of({name: torch.as_tensor(value) for name, value in x.items()})


def arrays(x):
    return {name: value.numpy() for name, value in x.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class InMemory(Stored):
    inner_products: np.ndarray

    @staticmethod
    def of(deltas):
        gram = (deltas @ deltas.T).double().numpy()
        return InMemory(norms2=np.diagonal(gram), inner_products=gram)

    def gram(self):
        return self.inner_products


SOME = {"round": 1, "key": torch.tensor(0)}


class Step:
    """The oracle of client i in round r at step k."""

    def __init__(self, problem, where, done):
        self.problem, self.where = problem, where
        self.key, self.done = counted.key("step", *where), torch.tensor(done, dtype=torch.float64)
        self.examples = torch.tensor(1)

    def __call__(self, y):
        i, r, k = self.where
        return tree(self.problem.gradient(i, arrays(y), r, k))


def seen(method, public, client, i, problem):
    """What client i makes of the broadcast."""
    if not method.own_view:
        return public
    losses = [problem.loss(i, arrays(x)) for x in method.looks(public, client)]
    sizes = [len(rows) for rows in getattr(problem, "rows", [])]
    share = sizes[i] * len(sizes) / sum(sizes) if sizes else 1.0
    viewer = Viewer(torch.tensor(i), torch.tensor(share, dtype=torch.float64))
    return method.view(public, viewer, torch.tensor(losses, dtype=torch.float64))


def visit(method, public, client, oracles):
    """One client's local training: begin, one step for each oracle, finish."""
    local = method.client_begin(public, client)
    for oracle in oracles:
        local = method.client_step(public, client, local, oracle)
    message, client = method.client_finish(public, client, local)
    return method.decode(public, message), client


def play(method, server, clients, cohort, where, problem=None):
    """One round of a cohort, which updates `clients`. `where`: (the Round, function i -> oracles of client i);
    `problem`: for methods whose clients have views of their own."""
    round, oracles = where
    messages, counts = [], []
    public = method.unpack(method.broadcast(server))
    for i in cohort:
        steps = oracles(i)
        message, clients[i] = visit(method, seen(method, public, clients[i], i, problem), clients[i], steps)
        messages.append(message)
        counts.append(len(steps))
    mean = pytree.tree_map(lambda *leaves: sum(leaves) / len(leaves), *messages)
    if (norms := method.local_norms(max(counts))) is not None:
        effective = sum(norms.effective[K - 1] for K in counts) / len(counts)
        weighted = [m.delta * (effective / norms.norms[K - 1]) for m, K in zip(messages, counts, strict=True)]
        mean = mean._replace(delta=sum(weighted[1:], weighted[0]) / len(weighted))
    if method.compares:
        deltas = torch.stack([message.delta.flat for message in messages])
        given = Messages(stored=InMemory.of(deltas), **SOME, length=deltas.shape[1], weights=np.ones(len(deltas)))
        weights, found = method.parts(server, given, round)
        sums = torch.from_numpy(weights) @ deltas
        mean = mean._replace(delta=tuple(mean.delta._with(flat) for flat in sums), sent=found)
    return method.server_update(server, mean, round)


def run(method, problem, cohorts, steps):
    """Run a method. `problem`: has start, clients and gradient; `cohorts`: the clients of each round; `steps`: (round,
    client) -> K."""

    def oracles(r):
        def of(i):
            count = steps[r, i] if r >= 0 else 1
            return [Step(problem, (i, r, k), k / count) for k in range(count)]

        return of

    n = problem.clients
    server = method.server_init(tree(problem.start))
    clients = [method.client_init(method.unpack(method.broadcast(server))) for _ in range(n)]
    if method.warm_start is not None:
        whole = Round(0, len(cohorts), n, n)
        server = play(method.warm_start, server, clients, range(n), (whole, oracles(-1)))
    result, away = Run(problem, method, [], []), set() if method.warm_start is not None else set(range(n))
    for r, cohort in enumerate(cohorts):
        where = Round(r + 1, len(cohorts), len(cohort), n)
        server = play(method, server, clients, cohort, (where, oracles(r)), problem)
        away -= {*cohort}
        for i in away if method.own_models else ():  # they begin with what they receive at their first visit
            clients[i] = method.client_init(method.unpack(method.broadcast(server)))
        result.servers.append(server)
        result.clients.append(list(clients))
    return result
