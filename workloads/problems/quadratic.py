"""Quadratics with a known optimum. They show how a method treats client drift, without the effects of a network.

    f_i(x) = |A_i x - b_i|^2 / 2        F(x) = mean over all clients of f_i(x)
    gradient of an example at x         A_i^T (A_i x - b_i) + noise * xi,  xi standard normal

    random           A_i = diag(s) Q_i, where Q_i is a random rotation and s^2 goes from 1 down to 1 / condition in
                     equal ratios; b_i = A_i (z + heterogeneity z_i) with z and z_i standard normal. The minimum of f_i
                     is at z + heterogeneity z_i.
    counterexample   two clients in one dimension, f_1 = x^2 / 2 and f_2 = (x + a)^2 / 2 with a = 4, from x = -a / 4. By
                     theorem 1 of Takezawa et al. 2025, normalised local steps without a correction never leave x.

With `columns` above 1, x and b_i are matrices with so many columns, |.| is Frobenius' norm, and A_i multiplies every
column. Methods for matrices then have one, and the report has the trace norm of F's gradient as well, the dual of the
spectral norm, and with `schatten` Schatten's norm of this order, the p-norm of the gradient's singular values.

Each client has one example. Let H be the mean of A_i^T A_i and x* the optimum. Then F(x) = F(x*) + <x - x*, H (x - x*)>
/ 2, so that one test example, (H, x*, F(x*)), is enough to report F and its gradient exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

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
    b: np.ndarray  # (N, d) or (N, d, columns)

    @property
    def hessian(self) -> np.ndarray:
        """(d, d): the Hessian of F."""
        return np.einsum("nki,nkj->ij", self.a, self.a) / len(self.a)

    @property
    def optimum(self) -> np.ndarray:
        """(d,) or (d, columns): the minimum of F."""
        return np.linalg.solve(self.hessian, np.einsum("nki,nk...->i...", self.a, self.b) / len(self.a))

    def objective(self, x: np.ndarray) -> float:
        """F at x, (d,) or (d, columns)."""
        return float(((self.a @ x - self.b) ** 2).reshape(len(self.a), -1).sum(-1).mean() / 2)


@dataclass(frozen=True)
class Quadratic(Workload):
    """One quadratic per client. `preset`: see the module. `dim`, `heterogeneity`, `condition`, `columns`: only for
    preset="random". `noise`: standard deviation of each entry of an example's gradient. `start`: every entry of the
    initial x; by default 0 (random) or -a / 4 (counterexample). `schatten`: an order from 1 to infinity, for `columns`
    above 1."""

    dim: int = 10
    heterogeneity: float = 1.0
    condition: float = 10.0
    noise: float = 0.0
    preset: Literal["random", "counterexample"] = "random"
    start: float | None = None
    columns: int = 1
    schatten: Annotated[float, "may be infinite"] | None = None

    def __post_init__(self) -> None:
        if self.preset not in ("random", "counterexample"):
            raise ValueError(f"preset must be random or counterexample, got preset={self.preset!r}")
        check_finite_from(self, dim=1, heterogeneity=0, condition=1, noise=0, columns=1)
        if self.schatten is not None:
            if not self.schatten >= 1:
                raise ValueError(f"schatten >= 1 must hold, got schatten={self.schatten}")
            if self.columns == 1:
                raise ValueError(f"schatten needs columns > 1, got columns=1 and schatten={self.schatten}; set columns")

    def system(self, seed: int, clients: int) -> System:
        """The functions of all clients. That of client i depends on the seed and i alone, not on `clients`."""
        if self.preset == "random":
            return self._random(seed, clients)
        if clients != 2:
            raise ValueError(f"preset=counterexample has two clients, got clients={clients}; set federation.clients=2")
        return System(np.ones((2, 1, 1)), np.array([[0.0], [-GAP]]))

    def _random(self, seed: int, clients: int) -> System:
        d, shape = self.dim, self.shape
        ids = torch.arange(clients)
        turned = counted.normal(counted.key(seed, "rotation", ids), d * d).view(clients, d, d).numpy()
        centre = counted.normal(counted.key(seed, "centre"), math.prod(shape)).view(shape).numpy()
        apart = counted.normal(counted.key(seed, "optimum", ids), math.prod(shape)).view(clients, *shape).numpy()
        scale = self.condition ** (-np.arange(d) / (2 * max(1, d - 1)))
        a = scale[:, None] * np.linalg.qr(turned)[0]
        return System(a, np.einsum("nij,nj...->ni...", a, centre + self.heterogeneity * apart))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x: (d,) or (d, columns)."""
        if self.preset != "random":
            return (1,)
        return (self.dim,) if self.columns == 1 else (self.dim, self.columns)

    def optimum(self, seed: int, clients: int) -> np.ndarray:
        """(d,) or (d, columns): the minimum of F, the mean over `clients` clients."""
        return self.system(seed, clients).optimum

    def split(self, seed: int, clients: int) -> Split:
        system = self.system(seed, clients)
        x = system.optimum
        test = {"hessian": system.hessian[None], "optimum": x[None], "floor": np.array([system.objective(x)])}
        return Split({"a": system.a, "b": system.b}, test, ClientIndex.equal(np.arange(clients), clients))

    def init(self, seed: int) -> dict[str, Tensor]:
        """{"x": (d,) or (d, columns)}, float64."""
        start = 0.0 if self.preset == "random" else -GAP / 4
        return {"x": torch.full(self.shape, start if self.start is None else self.start, dtype=torch.float64)}

    def losses(self, p: Params, batch: Batch) -> Tensor:
        """(B,): f_i(x), plus noise, of each example; the batch has the columns a, (B, d, d), and b, (B, *shape)."""
        x = p["x"]
        residual = batch["a"].to(x.dtype) @ x - batch["b"].to(x.dtype)
        loss = residual.flatten(1).square().sum(-1) / 2
        return loss + self.noise * (self._xi(batch, x) @ x.flatten()) if self.noise else loss

    def _xi(self, batch: Batch, x: Tensor) -> Tensor:
        """(B, entries of x) standard normal. The draw for an example depends on its place in the batch, not on the
        batch's length."""
        places = torch.arange(batch["b"].shape[0], device=x.device)
        return counted.normal(counted.key(batch["key"], "gradient noise", places), x.numel()).to(x.dtype)

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """For the one test example, each (1,): F(x), F(x) - F(x*), |x - x*|, and the squared norm of F's gradient, and
        of a matrix also the gradient's trace norm, the sum of its singular values, and its norm of order `schatten`."""
        x = p["x"]
        away = x - batch["optimum"].to(x.dtype)
        gradient = torch.einsum("bij,bj...->bi...", batch["hessian"].to(x.dtype), away)
        excess = (away * gradient).flatten(1).sum(-1) / 2
        norms = {}
        if x.dim() == 2:
            singular = torch.linalg.svdvals(gradient)
            norms["gradient_trace_norm"] = singular.sum(-1)
            if self.schatten is not None:
                norms["gradient_schatten_norm"] = torch.linalg.vector_norm(singular, self.schatten, dim=-1)
        return {
            "loss": batch["floor"].to(x.dtype) + excess,
            "excess": excess,
            "distance": away.flatten(1).norm(dim=-1),
            "gradient_norm2": gradient.flatten(1).square().sum(-1),
            **norms,
        }
