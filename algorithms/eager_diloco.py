"""Eager DiLoCo: the mean of a round arrives when the next round is over, and each worker puts its own change in.

Kale et al. 2025, arXiv:2502.12996.

Choose it when an exchange takes as long as a round, so that the clients of DiLoCo would have to wait for it. All
clients must take part, and each keeps five vectors of the model's size.

    D_i  <- x_i - y_i                                                  after H local steps from x_i
    D~_i <- D_i / M + D' - D'_i / M                                    D', D'_i: the mean and the own change before
    u_i  <- mu u_i + D~_i;  x_i <- x_i - outer_lr (D~_i + mu u_i)      Nesterov, sum form, on each worker

The newest change of each worker takes the place of its older one in the mean of all M, which is one round late. Every
worker has a model and an outer momentum of its own; the evaluated model is the mean of their models, which follows from
the means alone. With one worker it is DiLoCo. naive = true takes D' as it is, and all workers have one model.

Departures:
- The paper's text was not read: the equation is a reading of descriptions of it.
- With codes, what stands for the own change is what its code stands for, so that the mean over workers stays exact.
- Means are uniform, whatever the federation's client weights are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .contract import Algorithm, Client, Constant, Deferred, Local, Message, Oracle, Public, Round, RunContext, Server
from .fedavg import Plain
from .fedavgm import ServerMomentum
from .local import Averaged, LocalMethod, LocalState, Rule, Sent
from .parts.checks import fraction, positive
from .parts.coded import Coding, only_coded
from .parts.compression import Compression
from .parts.rules import Clip, adamw
from .tree import Tree


class Arrived(NamedTuple):
    """The public state."""

    moved: Tree  # -D', the mean displacement of the round before, 0 before round 1
    x: Any  # the model before round 1; Constant in the broadcast


class Means(NamedTuple):
    """What only the server has: means over the workers."""

    x: Tree
    momentum: Any  # the server rule's state


class Worker(NamedTuple):
    """What a client keeps."""

    x: Tree
    momentum: Any  # the server rule's state, on this worker
    moved: Tree  # -D'_i
    rule: Any  # the rule's state


@dataclass(frozen=True)
class Eager(LocalMethod):
    """The method. `server`: the outer step, which every worker takes; `workers`: M; `naive`: whether the own change
    stays out."""

    workers: int = 1
    naive: bool = False
    weighted = False  # pyright: ignore[reportAssignmentType]
    needs_all = "its clients keep models of their own, which follow from the means of all"
    stale = needs_all  # pyright: ignore[reportAssignmentType]
    not_private = needs_all
    needs_mean = "clients' models and the evaluated mean of them would come apart"
    follows_sent = True

    # --- clients ------------------------------------------------------------------------------------------------------
    def unpack(self, public: Public) -> Any:
        return public._replace(x=public.x.value)

    def client_init(self, public: Public) -> Client:
        x = public.x
        return Worker(x, self.server.init(x), x.zeros(), self.rule.init(x))

    def client_begin(self, public: Public, client: Client) -> Local:
        return LocalState(client.x, (), client.rule, client.x.flat.new_zeros(()))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        y, rule = self.rule.step(local.y, oracle(local.y), local.rule)
        return LocalState(y, (), rule, local.steps + 1)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.y - client.x
        message = Message(delta, Sent(()), {"norm2": delta.norm2()}, Averaged(()))
        return message, self.client_sent(public, client, client._replace(rule=local.rule), delta)

    def client_sent(self, public: Public, client: Client, kept: Client, delta: Tree) -> Client:
        return kept._replace(**self._stepped(client, self._late(public, delta, client.moved))._asdict(), moved=delta)

    def _late(self, public: Arrived, new: Tree, old: Tree) -> Tree:
        """The displacement of the outer step. new, old: what has changed in it since it was sent."""
        return public.moved if self.naive else new / self.workers + public.moved - old / self.workers

    def _stepped(self, at: Any, delta: Tree) -> Means:
        """The outer step from `at`, which has x and its momentum."""
        nothing = Round(1, 1, self.workers, self.workers)
        return Means(*self.server.step(at.x, delta, torch.full((), torch.nan), at.momentum, nothing))

    # --- the server ---------------------------------------------------------------------------------------------------
    def server_init(self, x: Tree) -> Server:
        return Server(Arrived(x.zeros(), Constant(x)), Means(x, self.server.init(x)))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        public: Arrived = server.public
        late = self._late(public, mean.delta, public.moved)
        return Server(public._replace(moved=mean.delta), self._stepped(server.private, late))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """lr: the outer step size."""
        return {"lr": self.server.lr}  # pyright: ignore[reportAttributeAccessIssue] it is ServerMomentum

    def model(self, server: Server) -> Tree:
        return server.private.x


@dataclass(frozen=True)
class EagerDiloco(Deferred):
    """The method before the number of workers is known."""

    method: Eager
    compression: Coding | None

    def build(self, context: RunContext) -> Algorithm:
        given = self.method
        method = Eager(given.rule, Plain(), given.server, "keep", context.cohort, given.naive)
        if self.compression is None:
            return method
        if context.layout is None:
            raise ValueError("a compression needs the model's shapes, got layout=None; give RunContext a layout")
        return self.compression.around(method, context.layout, context.seed)


def eager_diloco(
    rule: Rule = Clip(adamw(4e-4, (0.9, 0.95), 1e-8, 0.1), 1.0),
    outer_lr: float = 0.7,
    outer_mu: float = 0.9,
    naive: bool = False,
    compression: Compression | None = None,
) -> EagerDiloco:
    """rule: the inner optimiser, whose state clients keep; outer_lr, outer_mu: of the outer Nesterov step; naive: the
    late mean is taken as it is; compression: only `coded`."""
    positive(outer_lr=outer_lr)
    fraction(outer_mu=outer_mu)
    server = ServerMomentum(outer_lr, outer_mu, nesterov=True)
    coding = only_coded(compression, "every worker follows what it has sent, which other compressions do not tell")
    return EagerDiloco(Eager(rule, Plain(), server, "keep", naive=naive), coding)
