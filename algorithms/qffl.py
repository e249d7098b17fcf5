"""q-FFL by q-FedAvg: clients with large losses count more, so that accuracies differ less from client to client.

Li, Sanjabi, Beirami, Smith, ICLR 2020, arXiv:1905.10497, Algorithm 2.

Choose it when the clients that are served worst matter, and a lower mean accuracy is acceptable. With `q` = 0 it is
FedAvg, and the larger `q` is, the more a client with a large loss counts.

    y <- x;  K times: y <- y - step(g(y));   delta = L (x - y_K)
    F = the mean loss of x over the client's rows
    h = q F^(q-1) |delta|^2 + L F^q
    x <- x - mean of F^q delta / mean of h

The client evaluates x before its first local step, in one forward pass over its rows, and sends one number more.

Departures:
- The authors' code draws clients by their numbers of examples, with replacement, and sums plainly; here the means have
  the federation's weights.
- F has `floor` added, 1e-10 as in the code, so that a loss of 0 has a power.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .contract import Around, Client, Local, LocalSteps, Message, Oracle, Public, Round, Server, Viewer
from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.checks import nonnegative, positive, refuse
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Tree


class View(NamedTuple):
    """What a client makes of the broadcast."""

    method: Any  # the public state of FedAvg
    loss: Tensor  # (), F


@dataclass(frozen=True)
class QFedAvg(Around):
    """`method`: FedAvg; `q`; `scale`: L; `floor`: what is added to F."""

    method: LocalMethod
    q: float
    scale: float
    floor: float = 1e-10
    own_view = True  # pyright: ignore[reportAssignmentType]
    divides_means = True  # pyright: ignore[reportAssignmentType]
    stale = "losses of several versions of the model do not compare"  # pyright: ignore[reportAssignmentType]
    not_private = "it weighs clients by their losses, for which there is no bound"  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        nonnegative(q=self.q, floor=self.floor)
        positive(L=self.scale)

    def looks(self, public: Public, client: Client) -> tuple[Tree, ...]:
        return (self.origin(public),) if self.q else ()  # with q = 0 no loss counts

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Public:
        return View(public, losses.sum() + self.floor)

    def client_begin(self, public: Public, client: Client) -> Local:
        return self.method.client_begin(public.method, client)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        return self.method.client_step(public.method, client, local, oracle)

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        return self.method.client_steps(public.method, client, local, steps)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, client = self.method.client_finish(public.method, client, local)
        moved, q, scale = message.delta, self.q, self.scale  # moved = -delta / L
        weight = public.loss**q if q else public.loss.new_ones(())
        h = scale * weight
        if q:
            h = h + q * public.loss ** (q - 1) * scale**2 * moved.norm2()
        return message._replace(delta=scale * weight * moved, norm2=h), client

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return self.method.server_update(server, mean._replace(delta=mean.delta / mean.norm2), round)


def qffl(q: float = 1.0, rule: Rule = Sgd(0.1), L: float | None = None, floor: float | None = None) -> QFedAvg:
    """q: how much more large losses count, 0 is FedAvg; rule: the local optimiser; L: the Lipschitz constant of the
    gradient, 1 / lr of the rule unless given; floor: what is added to the losses, 1e-10 unless given."""
    if not q:
        refuse({"floor": floor}, "q=0 takes no loss into account", "leave it out, or give q")
    if L is None:
        lr = getattr(rule, "lr", None)
        if not isinstance(lr, float | int):
            raise ValueError(f"L must be given with a rule that has no one lr, got rule={rule!r}; give L: 10, say")
        L = 1 / lr
    return QFedAvg(LocalMethod(rule, Plain(), Mean()), q, L, 1e-10 if floor is None else floor)
