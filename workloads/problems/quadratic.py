"""Quadratics with a known optimum. They show how a method treats client drift, without the effects of a network.

    f_i(x) = |A_i x - b_i|^2 / 2        F(x) = mean over all clients of f_i(x)
    gradient of an example at x         A_i^T (A_i x - b_i) + noise * xi,  xi standard normal

    random           A_i = diag(s) Q_i, where Q_i is a random rotation and s^2 goes from 1 down to 1 / condition in
                     equal ratios; b_i = A_i (z + heterogeneity z_i) with z and z_i standard normal. The minimum of f_i
                     is at z + heterogeneity z_i.
    counterexample   two clients in one dimension, f_1 = x^2 / 2 and f_2 = (x + a)^2 / 2 with a = 4, from x = -a / 4. By
                     theorem 1 of Takezawa et al. 2025, normalised local steps without a correction never leave x.

Each client has one example. Let H be the mean of A_i^T A_i and x* the optimum. Then F(x) = F(x*) + <x - x*, H (x - x*)>
/ 2, so that one test example, (H, x*, F(x*)), is enough to report F and its gradient exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import counted
from ..client_index import ClientIndex
from ..settings import check_finite_from
from ..workload import Batch, Params, Split, Workload

GAP = 4.0
"""a of the counterexample: the distance between the two clients' optima."""


class System(NamedTuple):
    """A_i and b_i of all clients."""

    a: np.ndarray  # (N, d, d)
    b: np.ndarray  # (N, d)

    @property
    def hessian(self) -> np.ndarray:
        """(d, d): the Hessian of F."""
        return np.einsum("nki,nkj->ij", self.a, self.a) / len(self.a)

    @property
    def optimum(self) -> np.ndarray:
        """(d,): the minimum of F."""
        return np.linalg.solve(self.hessian, np.einsum("nki,nk->i", self.a, self.b) / len(self.a))

    def objective(self, x: np.ndarray) -> float:
        """F at x, (d,)."""
        return float(((self.a @ x - self.b) ** 2).sum(-1).mean() / 2)


@dataclass(frozen=True)
class Quadratic(Workload):
    """One quadratic per client. `preset`: see the module. `dim`, `heterogeneity`, `condition`: only for
    preset="random". `noise`: standard deviation of each entry of an example's gradient. `start`: every entry of the
    initial x; by default 0 (random) or -a / 4 (counterexample)."""

    dim: int = 10
    heterogeneity: float = 1.0
    condition: float = 10.0
    noise: float = 0.0
    preset: Literal["random", "counterexample"] = "random"
    start: float | None = None

    def __post_init__(self) -> None:
        if self.preset not in ("random", "counterexample"):
            raise ValueError(f"preset must be random or counterexample, got preset={self.preset!r}")
        check_finite_from(self, dim=1, heterogeneity=0, condition=1, noise=0)

    def system(self, seed: int, clients: int) -> System:
        """The functions of all clients. That of client i depends on the seed and i alone, not on `clients`."""
        if self.preset == "random":
            return self._random(seed, clients)
        if clients != 2:
            raise ValueError(f"preset=counterexample has two clients, got clients={clients}; set federation.clients=2")
        return System(np.ones((2, 1, 1)), np.array([[0.0], [-GAP]]))

    def _random(self, seed: int, clients: int) -> System:
        d = self.dim
        ids = torch.arange(clients)
        turned = counted.normal(counted.key(seed, "rotation", ids), d * d).view(clients, d, d).numpy()
        centre = counted.normal(counted.key(seed, "centre"), d).numpy()
        apart = counted.normal(counted.key(seed, "optimum", ids), d).numpy()
        scale = self.condition ** (-np.arange(d) / (2 * max(1, d - 1)))
        a = scale[:, None] * np.linalg.qr(turned)[0]
        return System(a, np.einsum("nij,nj->ni", a, centre + self.heterogeneity * apart))

    def optimum(self, seed: int, clients: int) -> np.ndarray:
        """(d,): the minimum of F, the mean over `clients` clients."""
        return self.system(seed, clients).optimum

    def split(self, seed: int, clients: int) -> Split:
        system = self.system(seed, clients)
        x = system.optimum
        test = {"hessian": system.hessian[None], "optimum": x[None], "floor": np.array([system.objective(x)])}
        return Split({"a": system.a, "b": system.b}, test, ClientIndex.equal(np.arange(clients), clients))

    def init(self, seed: int) -> dict[str, Tensor]:
        """{"x": (d,)}, float64."""
        dim, start = (self.dim, 0.0) if self.preset == "random" else (1, -GAP / 4)
        return {"x": torch.full((dim,), start if self.start is None else self.start, dtype=torch.float64)}

    def losses(self, p: Params, batch: Batch) -> Tensor:
        """(B,): f_i(x), plus noise, of each example; the batch has the columns a, (B, d, d), and b, (B, d)."""
        x = p["x"]
        residual = batch["a"].to(x.dtype) @ x - batch["b"].to(x.dtype)
        loss = residual.square().sum(-1) / 2
        return loss + self.noise * (self._xi(batch, x) @ x) if self.noise else loss

    def _xi(self, batch: Batch, x: Tensor) -> Tensor:
        """(B, d) standard normal. The draw for an example depends on its place in the batch, not on the batch's
        length."""
        places = torch.arange(batch["b"].shape[0], device=x.device)
        return counted.normal(counted.key(batch["key"], "gradient noise", places), x.shape[0]).to(x.dtype)

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """For the one test example, each (1,): F(x), F(x) - F(x*), |x - x*|, and the squared norm of F's gradient."""
        x = p["x"]
        away = x - batch["optimum"].to(x.dtype)
        gradient = torch.einsum("bij,bj->bi", batch["hessian"].to(x.dtype), away)
        excess = (away * gradient).sum(-1) / 2
        return {
            "loss": batch["floor"].to(x.dtype) + excess,
            "excess": excess,
            "distance": away.norm(dim=-1),
            "gradient_norm2": gradient.square().sum(-1),
        }
