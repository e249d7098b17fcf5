"""Quadratic saddles with a known solution: what a min-max method does to client drift, without a network in the way.

    f_i(u, v) = (u - p_i)' H_i (u - p_i) / 2 + (u - p_i)' B (v - q_i) - (v - q_i)' G_i (v - q_i) / 2
    F = mean over all clients of f_i;  min over u, max over v

    H_i, G_i   a random rotation of s, from 1 down to 1 / condition in equal ratios; kappa is `condition`
    B          `coupling` times a random rotation, one for all clients
    p_i, q_i   centre + heterogeneity * standard normal: f_i has its saddle there

u and v are sums over `copies` rows of the tensors, divided by the root of their number: with copies = 1, f_i is
strongly convex in the primal and strongly concave in the dual; with more it is neither, but has the
Polyak-Lojasiewicz property in both, with the same constants, and its solutions are a subspace. Each client has one
example. At the saddle F's gradient is zero, so that one test example reports F and its distances exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import counted
from .base import Batch, ClientIndex, Params, Split
from .minimax import MinMax


class Saddles(NamedTuple):
    h: np.ndarray  # (N, d, d)
    g: np.ndarray  # (N, d, d)
    b: np.ndarray  # (d, d)
    p: np.ndarray  # (N, d)
    q: np.ndarray  # (N, d)

    @property
    def fields(self) -> np.ndarray:
        """(N, 2 d, 2 d): J_i with (gradient in u, minus gradient in v) of f_i = J_i ((u, v) - (p_i, q_i))."""
        clients, d = self.p.shape
        field = np.empty((clients, 2 * d, 2 * d))
        field[:, :d, :d], field[:, d:, d:] = self.h, self.g
        field[:, :d, d:], field[:, d:, :d] = self.b, -self.b.T
        return field

    @property
    def own(self) -> np.ndarray:
        """(N, 2 d): each client's saddle."""
        return np.concatenate([self.p, self.q], axis=1)

    @property
    def solution(self) -> np.ndarray:
        """(2 d,): where F has its saddle."""
        fields = self.fields
        return np.linalg.solve(fields.sum(0), np.einsum("nij,nj->i", fields, self.own))

    def objective(self, z: np.ndarray) -> float:
        """F at (u, v), (2 d,)."""
        d = self.p.shape[1]
        a, c = z[:d] - self.p, z[d:] - self.q
        terms = [("ni,nij,nj->n", (a, self.h, a)), ("ni,nij,nj->n", (c, self.g, c)), ("ni,ij,nj->n", (a, self.b, c))]
        convex, concave, cross = (np.einsum(form, *parts) for form, parts in terms)
        return float((convex / 2 + cross - concave / 2).mean())


@dataclass(frozen=True)
class Saddle(MinMax):
    """primal.x, dual.y: (copies, dim), float64, every entry `start` at first."""

    dim: int = 5
    heterogeneity: float = 1.0
    condition: float = 10.0
    coupling: float = 1.0
    copies: int = 1
    start: float = 0.0

    def __post_init__(self) -> None:
        least = {"dim": 1, "heterogeneity": 0, "condition": 1, "coupling": 0, "copies": 1, "start": -np.inf}
        for name, low in least.items():
            value = getattr(self, name)
            if not low <= value < np.inf:
                raise ValueError(f"{low} <= {name} < infinity must hold, got {name}={value}")

    def system(self, seed: int, clients: int) -> Saddles:
        """Client i's function depends on the seed and i alone."""
        d, ids = self.dim, torch.arange(clients)

        def turned(name: str, *which: Tensor) -> np.ndarray:
            drawn = counted.normal(counted.key(seed, name, *which), d * d).numpy()
            return np.linalg.qr(drawn.reshape(*drawn.shape[:-1], d, d))[0]

        def point(name: str) -> np.ndarray:
            centre = counted.normal(counted.key(seed, f"{name} centre"), d).numpy()
            return centre + self.heterogeneity * counted.normal(counted.key(seed, name, ids), d).numpy()

        spectrum = self.condition ** (-np.arange(d) / max(1, d - 1))
        h, g = ((q * spectrum) @ q.swapaxes(-1, -2) for q in (turned("saddle h", ids), turned("saddle g", ids)))
        return Saddles(h, g, self.coupling * turned("saddle b"), point("saddle p"), point("saddle q"))

    def split(self, seed: int, clients: int) -> Split:
        system = self.system(seed, clients)
        z, one = system.solution, np.ones((clients, 1, 1))
        train = {"h": system.h, "g": system.g, "b": one * system.b, "p": system.p, "q": system.q}
        test = {"h": system.h.mean(0)[None], "g": system.g.mean(0)[None], "b": system.b[None]}
        test |= {"p": z[None, : self.dim], "q": z[None, self.dim :], "floor": np.array([system.objective(z)])}
        own = ClientIndex(np.arange(clients + 1, dtype=np.int64), np.arange(clients, dtype=np.int64))
        return Split(train, test, own)

    def init(self, seed: int) -> dict[str, Tensor]:
        first = torch.full((self.copies, self.dim), self.start, dtype=torch.float64)
        return {"primal.x": first, "dual.y": first.clone()}

    def away(self, p: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """u - p_i and v - q_i, (B, d) each."""
        x, y = p["primal.x"], p["dual.y"]
        root = self.copies**0.5
        return x.sum(-2) / root - batch["p"].to(x.dtype), y.sum(-2) / root - batch["q"].to(y.dtype)

    def parts(self, p: Params, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """a = u - p_i, c = v - q_i, the gradient in u, minus the gradient in v; (B, d) each."""
        a, c = self.away(p, batch)
        h, g, b = (batch[name].to(a.dtype) for name in ("h", "g", "b"))
        down = torch.einsum("nij,nj->ni", h, a) + torch.einsum("nij,nj->ni", b, c)
        up = torch.einsum("nij,nj->ni", g, c) - torch.einsum("nji,nj->ni", b, a)
        return a, c, down, up

    def objectives(self, p: Params, batch: Batch) -> Tensor:
        a, c = self.away(p, batch)
        h, g, b = (batch[name].to(a.dtype) for name in ("h", "g", "b"))
        quadratic = torch.einsum("ni,nij,nj->n", a, h, a) - torch.einsum("ni,nij,nj->n", c, g, c)
        return quadratic / 2 + torch.einsum("ni,nij,nj->n", a, b, c)

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """(1,) each: F; the distance of (u, v) from the saddle; the squared norm of F's gradient in (u, v); the duality
        gap, max over v of F less min over u of F, each at the other's value."""
        a, c, down, up = self.parts(p, batch)
        h, g, b = (batch[name].to(a.dtype) for name in ("h", "g", "b"))
        primal = torch.einsum("ni,nij,nj->n", a, h + b @ torch.linalg.solve(g, b.mT), a)
        dual = torch.einsum("ni,nij,nj->n", c, g + b.mT @ torch.linalg.solve(h, b), c)
        return {
            "loss": batch["floor"].to(a.dtype) + self.objectives(p, batch),
            "distance": (a.square().sum(-1) + c.square().sum(-1)).sqrt(),
            "gradient_norm2": down.square().sum(-1) + up.square().sum(-1),
            "gap": (primal + dual) / 2,
        }
