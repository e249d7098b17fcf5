"""Displacements that clients and the server add up over the rounds: the machinery of FedDyn and FedDC.

Acar et al., ICLR 2021, arXiv:2111.04263; Gao et al., CVPR 2022, arXiv:2203.11751.

    y   <- y - lr (u + c - c_i),  u = g(y) + alpha (y - x + d_i)          K times
    d_i <- d_i + y_K - x
    c_i <- mean of the K directions u
    d   <- d + |S|/N mean(y_K - x)
    x   <- x + mean(y_K - x) + d
    c   <- c + |S|/N mean(change of c_i)

c and c_i are FedDC's; FedDyn has none of the two. d is the mean of all d_i and stays on the server. Means are uniform,
whatever the federation's client weights are: d would not be the mean of all d_i otherwise.

With alpha_by = "examples", alpha of client i is alpha n / (N n_i), where n_i of all n rows are its own.

The lines of the clients and of c are those of the estimator `Drift`, and the lines of d and x those of `Drifted`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..contract import Around, Client, Local, Message, Oracle, Public, Round, Server, Viewer
from ..local import Estimator, LocalMethod, ServerRule
from ..tree import Tree
from .checks import one_of


class Own(NamedTuple):
    """What a client keeps."""

    drift: Tree  # d_i
    control: Any  # c_i where there are control variates, else ()


class Trace(NamedTuple):
    x: Tree  # the server's model
    total: Any  # the sum of u where there are control variates, else ()
    alpha: Any = ()  # (), the client's alpha where it has one of its own, else ()


@dataclass(frozen=True)
class Drift(Estimator):
    """The direction is u, or u + c - c_i if `controlled`. Shared: c. Own: d_i and c_i. Sent: the change of c_i."""

    alpha: float
    controlled: bool = False
    weighted = False
    stale = "the displacements that are added up must be from one version of the model"

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"alpha must be more than 0, got {self.alpha}; choose fedavg")

    def _control(self, x: Tree) -> Any:
        return x.zeros() if self.controlled else ()

    def shared_init(self, x: Tree) -> Any:
        return self._control(x)

    def own_init(self, x: Tree) -> Own:
        return Own(x.zeros(), self._control(x))

    def begin(self, x: Tree, c: Any, c_i: Own) -> Trace:
        return Trace(x, self._control(x))

    def estimate(self, oracle: Oracle, y: Tree, c: Any, c_i: Own, trace: Trace) -> tuple[Tree, Trace]:
        alpha: Any = trace.alpha if isinstance(trace.alpha, Tensor) else self.alpha
        u = oracle(y).add(y - trace.x + c_i.drift, alpha)
        return (u + c - c_i.control, trace._replace(total=trace.total + u)) if self.controlled else (u, trace)

    def finish(self, c: Any, c_i: Own, trace: Trace, steps: Tensor, delta: Tree) -> tuple[Own, Any]:
        control = trace.total / steps if self.controlled else ()
        change = control - c_i.control if self.controlled else ()
        return Own(c_i.drift + delta, control), change

    def update(self, c: Any, sent: Any, delta: Tree, round: Round) -> Any:
        return c.add(sent, round.share) if self.controlled else ()


@dataclass(frozen=True)
class Drifted(ServerRule):
    """The mean of the cohort's models, moved on by d, the mean drift of all clients, which is the state. `evaluate`:
    the model that is evaluated is x, or the mean of the cohort's models, x - d."""

    evaluate: Literal["server", "mean"] = "server"

    def __post_init__(self) -> None:
        one_of("server", "mean", evaluate=self.evaluate)

    def init(self, x: Tree) -> Tree:
        return x.zeros()

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Tree, round: Round) -> tuple[Tree, Tree]:
        d = state.add(delta, round.share)
        return x + delta + d, d

    def model(self, x: Tree, state: Tree) -> Tree:
        return x - state if self.evaluate == "mean" else x


AlphaBy = Literal["none", "examples"]
"""What alpha depends on."""


class View(NamedTuple):
    """What a client makes of the broadcast."""

    method: Any  # the public state of the method
    alpha: Tensor  # ()


@dataclass(frozen=True)
class ByExamples(Around):
    """`method`: with `Drift`, whose alpha is divided by the client's share of the rows."""

    method: LocalMethod
    own_view = True  # pyright: ignore[reportAssignmentType]

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> View:
        assert isinstance(self.method.estimator, Drift)
        return View(public, (self.method.estimator.alpha / viewer.share).to(public.x.flat.dtype))

    def client_begin(self, public: View, client: Client) -> Local:
        local = self.method.client_begin(public.method, client)
        return local._replace(trace=local.trace._replace(alpha=public.alpha))

    def client_step(self, public: View, client: Client, local: Local, oracle: Oracle) -> Local:
        return self.method.client_step(public.method, client, local, oracle)

    def client_finish(self, public: View, client: Client, local: Local) -> tuple[Message, Client]:
        return self.method.client_finish(public.method, client, local)

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(server, mean, round)


def drifting(method: LocalMethod, alpha_by: AlphaBy) -> LocalMethod | ByExamples:
    """The method, with an alpha for each client if it depends on the clients' rows."""
    one_of("none", "examples", alpha_by=alpha_by)
    return ByExamples(method) if alpha_by == "examples" else method
