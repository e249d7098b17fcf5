"""Quadratic saddle problems with a known solution. They show how a min-max method treats client drift, without the
effects of a network.

    f_i(u, v) = (u - p_i)' H_i (u - p_i) / 2 + (u - p_i)' B (v - q_i) - (v - q_i)' G_i (v - q_i) / 2
    F = mean over all clients of f_i;  min over u, max over v

    H_i, G_i   random rotations of a spectrum from 1 down to 1 / condition in equal ratios
    B          `coupling` times a random rotation, the same for all clients
    p_i, q_i   centre + heterogeneity * standard normal; (p_i, q_i) is the saddle of f_i

u and v are the sums over the `copies` rows of the tensors, divided by the square root of `copies`. With copies = 1, f_i
is strongly convex in the primal and strongly concave in the dual. With more copies it is neither, but has the
Polyak-Lojasiewicz property in both, with the same constants, and its solutions form a subspace. Each client has one
example. The gradient of F is zero at the saddle, so that one test example is enough to report F and the distances
exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import counted
from ..client_index import ClientIndex
from ..settings import check_finite_from
from ..workload import Batch, Params, Split
from .minimax import MinMax


class Saddles(NamedTuple):
    """H_i, G_i, B, p_i and q_i of all clients."""

    h: np.ndarray  # (N, d, d)
    g: np.ndarray  # (N, d, d)
    b: np.ndarray  # (d, d)
    p: np.ndarray  # (N, d)
    q: np.ndarray  # (N, d)

    @property
    def fields(self) -> np.ndarray:
        """(N, 2 d, 2 d): the matrices J_i. J_i ((u, v) - (p_i, q_i)) is the gradient of f_i in u and minus that in
        v."""
        clients, d = self.p.shape
        field = np.empty((clients, 2 * d, 2 * d))
        field[:, :d, :d], field[:, d:, d:] = self.h, self.g
        field[:, :d, d:], field[:, d:, :d] = self.b, -self.b.T
        return field

    @property
    def own(self) -> np.ndarray:
        """(N, 2 d): the saddle (p_i, q_i) of each client."""
        return np.concatenate([self.p, self.q], axis=1)

    @property
    def solution(self) -> np.ndarray:
        """(2 d,): the saddle of F."""
        fields = self.fields
        return np.linalg.solve(fields.sum(0), np.einsum("nij,nj->i", fields, self.own))

    def objective(self, z: np.ndarray) -> float:
        """F at z = (u, v), (2 d,)."""
        d = self.p.shape[1]
        a, c = z[:d] - self.p, z[d:] - self.q
        terms = [("ni,nij,nj->n", (a, self.h, a)), ("ni,nij,nj->n", (c, self.g, c)), ("ni,ij,nj->n", (a, self.b, c))]
        convex, concave, cross = (np.einsum(form, *parts) for form, parts in terms)
        return float((convex / 2 + cross - concave / 2).mean())


@dataclass(frozen=True)
class Saddle(MinMax):
    """One saddle problem per client. The model is primal.x and dual.y, each (copies, dim), float64. `start`: every
    entry of them at the beginning. For the other settings see the module."""

    dim: int = 5
    heterogeneity: float = 1.0
    condition: float = 10.0
    coupling: float = 1.0
    copies: int = 1
    start: float = 0.0

    def __post_init__(self) -> None:
        check_finite_from(self, dim=1, heterogeneity=0, condition=1, coupling=0, copies=1, start=-np.inf)

    def system(self, seed: int, clients: int) -> Saddles:
        """The functions of all clients. That of client i depends on the seed and i alone."""
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
        return Split(train, test, ClientIndex.equal(np.arange(clients), clients))

    def init(self, seed: int) -> dict[str, Tensor]:
        first = torch.full((self.copies, self.dim), self.start, dtype=torch.float64)
        return {"primal.x": first, "dual.y": first.clone()}

    def away(self, p: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """u - p_i and v - q_i, (B, d) each."""
        x, y = p["primal.x"], p["dual.y"]
        root = self.copies**0.5
        return x.sum(-2) / root - batch["p"].to(x.dtype), y.sum(-2) / root - batch["q"].to(y.dtype)

    def gradients(self, p: Params, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(u - p_i, v - q_i, the gradient in u, minus the gradient in v) of each example, each (B, d)."""
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
        """For the one test example, each (1,): F, the distance of (u, v) from the saddle, the squared norm of F's
        gradient in (u, v), that of the gradient of Phi(u) = maximum of F over v, by which theorems on such
        methods measure, and the duality gap, which is Phi(u) minus the minimum of F over u."""
        a, c, down, up = self.gradients(p, batch)
        h, g, b = (batch[name].to(a.dtype) for name in ("h", "g", "b"))
        envelope = h + b @ torch.linalg.solve(g, b.mT)  # the Hessian of Phi
        primal = torch.einsum("ni,nij,nj->n", a, envelope, a)
        dual = torch.einsum("ni,nij,nj->n", c, g + b.mT @ torch.linalg.solve(h, b), c)
        return {
            "loss": batch["floor"].to(a.dtype) + self.objectives(p, batch),
            "distance": (a.square().sum(-1) + c.square().sum(-1)).sqrt(),
            "gradient_norm2": down.square().sum(-1) + up.square().sum(-1),
            "phi_gradient_norm2": torch.einsum("nij,nj->ni", envelope, a).square().sum(-1),
            "gap": (primal + dual) / 2,
        }
