"""Quadratics with a known optimum: what a method does to client drift, without a network in the way.

    f_i(x) = |A_i x - b_i|^2 / 2        F(x) = mean over all clients of f_i(x)
    gradient of an example at x         A_i^T (A_i x - b_i) + noise * xi,  xi standard normal

    random           A_i = diag(s) Q_i, Q_i a random rotation, s^2 from 1 down to 1 / condition in equal ratios;
                     b_i = A_i (z + heterogeneity z_i), z and z_i standard normal: f_i is least at z + heterogeneity z_i
    counterexample   two clients on the line, f_1 = x^2 / 2, f_2 = (x + a)^2 / 2, a = 4, from x = -a / 4. Theorem 1 of
                     Takezawa et al. 2025: normalised local steps without a correction never leave x.

Each client has one example. Let H be the mean of A_i^T A_i and x* the optimum; then F(x) = F(x*) + <x - x*, H (x - x*)>
/ 2, so that one test example, (H, x*, F(x*)), is enough to report F and its gradient exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import counted
from .base import Batch, ClientIndex, Params, Split, Workload

GAP = 4.0
"""a of the counterexample: the distance between the two clients' optima."""


class System(NamedTuple):
    a: np.ndarray  # (N, d, d)
    b: np.ndarray  # (N, d)

    @property
    def hessian(self) -> np.ndarray:
        """(d, d), of the mean objective."""
        return np.einsum("nki,nkj->ij", self.a, self.a) / len(self.a)

    @property
    def optimum(self) -> np.ndarray:
        """(d,), where the mean objective is least."""
        return np.linalg.solve(self.hessian, np.einsum("nki,nk->i", self.a, self.b) / len(self.a))

    def objective(self, x: np.ndarray) -> float:
        return float(((self.a @ x - self.b) ** 2).sum(-1).mean() / 2)


@dataclass(frozen=True)
class Quadratic(Workload):
    """`dim`, `heterogeneity`, `condition` shape the random preset only; `noise`: standard deviation of each entry of
    an example's gradient; `start`: every entry of the first x, 0 (random) or -a / 4 (counterexample) if not given."""

    dim: int = 10
    heterogeneity: float = 1.0
    condition: float = 10.0
    noise: float = 0.0
    preset: Literal["random", "counterexample"] = "random"
    start: float | None = None

    def __post_init__(self) -> None:
        if self.preset not in ("random", "counterexample"):
            raise ValueError(f"preset must be random or counterexample, got preset={self.preset!r}")
        for name, least in (("dim", 1), ("heterogeneity", 0), ("condition", 1), ("noise", 0)):
            value = getattr(self, name)
            if not least <= value < np.inf:
                raise ValueError(f"{least} <= {name} < infinity must hold, got {name}={value}")

    def system(self, seed: int, clients: int) -> System:
        """Client i's function depends on the seed and i alone, not on how many clients there are."""
        if self.preset == "random":
            return self._random(seed, clients)
        if clients != 2:
            raise ValueError(
                f"preset counterexample has two clients, got clients={clients}; set federation.clients to 2"
            )
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
        """(d,), where the mean over all clients is least."""
        return self.system(seed, clients).optimum

    def split(self, seed: int, clients: int) -> Split:
        system = self.system(seed, clients)
        x = system.optimum
        test = {"hessian": system.hessian[None], "optimum": x[None], "floor": np.array([system.objective(x)])}
        own = ClientIndex(np.arange(clients + 1, dtype=np.int64), np.arange(clients, dtype=np.int64))
        return Split({"a": system.a, "b": system.b}, test, own)

    def init(self, seed: int) -> dict[str, Tensor]:
        """{"x": (d,)}, float64."""
        shape, usual = (self.dim, 0.0) if self.preset == "random" else (1, -GAP / 4)
        return {"x": torch.full((shape,), usual if self.start is None else self.start, dtype=torch.float64)}

    def losses(self, p: Params, batch: Batch) -> Tensor:
        """(B,) from columns a (B, d, d) and b (B, d)."""
        x = p["x"]
        residual = batch["a"].to(x.dtype) @ x - batch["b"].to(x.dtype)
        loss = residual.square().sum(-1) / 2
        return loss + self.noise * (self._xi(batch, x) @ x) if self.noise else loss

    def _xi(self, batch: Batch, x: Tensor) -> Tensor:
        """(B, d); an example's depends on its place in the batch, not on the batch's length."""
        places = torch.arange(batch["b"].shape[0], device=x.device)
        return counted.normal(counted.key(batch["key"], "gradient noise", places), x.shape[0]).to(x.dtype)

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """(1,) each: F(x); F(x) - F(x*); |x - x*|; the squared norm of F's gradient."""
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
