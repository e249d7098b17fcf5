"""CFL: all clients begin with one model, and clusters of clients whose updates point apart get models of their own.

Sattler, Müller, Samek, IEEE TNNLS 2021, arXiv:1910.01991.

Choose it when clients fall into groups with different problems and neither the groups nor their number are known; if
the number is known, IFCA needs no stage of a common model. All clients take part in every round, and the server
compares all updates in pairs.

    y_i <- x_c, the model of client i's cluster;  K times: y <- y - step(g(y));   delta_i = y_K - x_c
    a cluster c is cut in two if  |mean of delta_i| < eps1,  max |delta_i| > eps2,  |c| > least  and  round > after:
        into the parts between which the largest cosine of delta_i and delta_j is smallest
    x_c <- x_c + mean of delta_i over the cluster                each part of a cut cluster begins with its own mean

Download and upload are those of FedAvg. The mean is near 0 where the cluster's model is at rest, and a large delta_i
says that it is not at rest for client i. Parts stand where their cluster stood, the one with the smallest client first.
A client is evaluated with the model of its cluster, and clients that are never trained with get that of the first one,
which is the server's model, too.

linkage = "single" joins the two parts with the most similar pair of members until two are left. This gives the paper's
cut, the one with the smallest largest similarity across it. "complete" joins by the least similar pair, which is what
all codes run.

Departures:
- The authors' code has eps1 = 0.4, eps2 = 1.6, least = 2 and after = 20; the paper's own criteria, by a bound gamma and
  by the similarity across the cut, are left out.
- There are at most `most` clusters.
- The code keeps a momentum between rounds and lowers the step size by 0.99 in each; give a rule and a schedule.
- The paper sends new clients down the tree of cuts by their first update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .aggregation.messages import Messages, product
from .contract import Deferred, Message, Public, Round, RunContext, Server, Viewer
from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.checks import nonnegative, one_of
from .parts.one_of_several import OneOfSeveral, view_of
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Tree

ROWS = 256
"""So many rows of similarities are computed at once."""


class Clusters(NamedTuple):
    """The public state. A client is sent the model of its cluster, and its number."""

    models: tuple[Tree, ...]  # those without clients stay 0
    of: Tensor  # (N,) int64, the cluster of each client


@dataclass(frozen=True)
class Cfl(OneOfSeveral):
    """`method`: FedAvg, for the model of a client's cluster; `clients`: N; the others: see `cfl`."""

    clients: int
    linkage: Literal["single", "complete"] = "single"
    eps1: float = 0.4
    eps2: float = 1.6
    least: int = 2
    after: int = 20
    most: int = 8
    compares = True
    needs_all = "it compares the updates of all clients"
    stale = "updates from several versions of the models do not compare"
    not_private = "it compares updates one by one"

    # --- clients ------------------------------------------------------------------------------------------------------
    def view(self, public: Clusters, viewer: Viewer, losses: Tensor) -> Public:
        number = viewer.number
        new = number >= self.clients  # a client that is never trained with
        return view_of(public.models, torch.where(new, 0, public.of[torch.where(new, 0, number)]))

    def traffic(self, round: int, public: Clusters, message: Message, client: int = 0) -> tuple[int | None, int | None]:
        x = public.models[0].flat
        return x.numel() * x.element_size() + 8, None

    # --- the server ---------------------------------------------------------------------------------------------------
    def server_init(self, x: Tree) -> Server:
        models = (x, *(x.zeros() for _ in range(1, self.most)))
        return Server(Clusters(models, torch.zeros(self.clients, dtype=torch.int64)))

    def parts(self, server: Server, messages: Messages, round: Round) -> tuple[np.ndarray, Tensor]:
        """((most, N) the weights of the clients in the means of the new clusters, (N,) int64 the new clusters)."""
        before = server.public.of.numpy()
        clusters = [np.flatnonzero(before == c) for c in range(before.max() + 1)]
        room, after = self.most - len(clusters), list[np.ndarray]()
        gram = messages.gram()
        for c in clusters:
            own = gram[np.ix_(c, c)]
            if room and round.number > self.after and self._is_cut(own, messages.weights[c]):
                after += [c[part] for part in halves(cosines(own), self.linkage)]
                room -= 1
            else:
                after.append(c)
        weights, found = np.zeros((self.most, len(before))), np.empty_like(before)
        for number, c in enumerate(after):
            weights[number, c] = messages.weights[c] / messages.weights[c].sum()
            found[c] = number
        return weights, torch.from_numpy(found)

    def _is_cut(self, gram: np.ndarray, weights: np.ndarray) -> bool:
        """Whether a cluster is cut. gram: (n, n), of its clients' deltas; weights: (n,), of the clients."""
        w = weights / weights.sum()
        mean2, longest2 = float(product(w, product(gram, w))), np.diagonal(gram).max()
        return len(w) > self.least and mean2 < self.eps1**2 and longest2 > self.eps2**2

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        before, found = server.public, mean.sent
        models = list[Tree]()
        for number, moved in enumerate(mean.delta):
            members = (found == number).nonzero()
            models.append(before.models[before.of[members[0, 0]]] + moved if len(members) else moved)
        return Server(Clusters(tuple(models), found))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """clusters, cuts: how many there are now, and were cut in this round; size_1, …: the clients of each."""
        sizes = torch.bincount(mean.sent, minlength=self.most)
        count = mean.sent.max() + 1
        cuts = count - 1 - server.public.of.max()
        return {"clusters": count, "cuts": cuts, **{f"size_{j}": size for j, size in enumerate(sizes.unbind(), 1)}}

    def model(self, server: Server) -> Tree:
        return server.public.models[0]


def cosines(gram: np.ndarray) -> np.ndarray:
    """(n, n): the cosines of n vectors with these inner products, 0 with a vector that is 0."""
    norms, found = np.sqrt(np.diagonal(gram)), np.zeros_like(gram)
    for begin in range(0, len(gram), ROWS):  # so that the lengths take little memory
        rows = slice(begin, begin + ROWS)
        lengths = np.outer(norms[rows], norms)
        np.divide(gram[rows], lengths, out=found[rows], where=lengths > 0)
    return found


def halves(similarity: np.ndarray, linkage: Literal["single", "complete"]) -> tuple[np.ndarray, np.ndarray]:
    """The two parts of n >= 2 vectors that are left when the most similar parts have been joined again and again. Parts
    are as similar as their most similar members (single) or their least similar ones (complete); of equals, those with
    the smallest members are joined. similarity: (n, n), symmetric; it is overwritten.

    A part has the number of its smallest member, and knows the part that is most similar to it, of equals the one with
    the smallest number. So a join takes time in proportion to n, unless many parts were most similar to one of the two.
    """
    np.fill_diagonal(similarity, -np.inf)
    part, gone = np.arange(len(similarity)), np.zeros(len(similarity), dtype=bool)
    nearest = similarity.argmax(1)
    highest = similarity[part, nearest]
    join = np.maximum if linkage == "single" else np.minimum
    for _ in range(len(part) - 2):
        one = int(highest.argmax())
        kept, other = sorted((one, int(nearest[one])))
        row = join(similarity[kept], similarity[other])
        row[gone] = row[[kept, other]] = -np.inf
        similarity[kept] = similarity[:, kept] = row
        gone[other], highest[other] = True, -np.inf
        part[part == other] = kept
        was = (nearest == kept) | (nearest == other)
        if linkage == "single":  # the joined part is as similar as the two were at most
            nearest[was | ((row == highest) & (kept < nearest))] = kept
            again = [kept]
        else:
            again = [kept, *np.flatnonzero(was & ~gone).tolist()]
        for each in again:
            nearest[each] = np.where(gone, -np.inf, similarity[each]).argmax()
            highest[each] = similarity[each, nearest[each]]
    return np.flatnonzero(part == 0), np.flatnonzero(part)


@dataclass(frozen=True)
class Planned(Deferred):
    """The settings, before the number of clients is known."""

    method: Cfl

    def build(self, context: RunContext) -> Cfl:
        return replace(self.method, clients=context.clients)


def cfl(
    rule: Rule = Sgd(0.1),
    linkage: Literal["single", "complete"] = "single",
    eps1: float = 0.4,
    eps2: float = 1.6,
    least: int = 2,
    after: int = 20,
    most: int = 8,
) -> Planned:
    """rule: the local optimiser; linkage: a cluster is cut so that the largest similarity across the cut is smallest
    (single), or as the codes do (complete); eps1: a cluster is cut if the mean of its updates is shorter; eps2: and one
    of its updates is longer; least: and it has more clients; after: no cluster is cut up to this round; most: the
    largest number of clusters."""
    nonnegative(eps1=eps1, eps2=eps2, least=least, after=after)
    one_of("single", "complete", linkage=linkage)
    if most < 1:
        raise ValueError(f"most >= 1 must hold, got most={most}")
    return Planned(Cfl(LocalMethod(rule, Plain(), Mean()), 0, linkage, eps1, eps2, least, after, most))
