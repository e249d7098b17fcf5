"""Made-up data whose difficulty is known.

    linear      Takakura et al. 2025 (FedDuA): client i has rows x ~ N(0, diag(k^-spectrum)) and y = <theta_i, x>, no
                noise; entries of theta_i ~ N(u_i, 1), u_i ~ N(0, spread). 20 clients of 30 rows make 600 equations in
                1,000 unknowns: one vector solves them all though the theta_i differ.
    logistic    LEAF's and FedProx's Synthetic(alpha, beta), Caldas et al. 2018: labels arg max of W_i x + b_i, entries
                of W_i, b_i ~ N(u_i, 1), u_i ~ N(0, alpha); x ~ N(v_i, diag(k^-1.2)), entries of v_i ~ N(B_i, 1), B_i ~
                N(0, beta). alpha, beta: how unlike labels' and inputs' laws are; iid: all clients have the first's.

The second numbers are variances in logistic, as FedProx's text has them, and a standard deviation in `spread`, as
FedExP's code has it where the paper writes 0.1. Client i's data depend on the seed and i alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from . import counted
from .base import Batch, Classification, ClientIndex, Columns, Model, Params, Partition, Split, Workload
from .models import Logistic
from .partitions import Iid


def normals(seed: int, what: str, client: int, count: int) -> np.ndarray:
    """(count,) standard normal"""
    return counted.normal(counted.key(seed, what, client), count).numpy()


def in_turn(clients: int, each: int) -> ClientIndex:
    """Client i has rows i x each … (i + 1) x each - 1."""
    return ClientIndex(np.arange(clients + 1, dtype=np.int64) * each, np.arange(clients * each, dtype=np.int64))


@dataclass(frozen=True)
class Linear(Workload):
    """Loss (<theta, x> - y)^2 / 2 from theta = 0; the test set is the training set."""

    dim: int = 1000
    rows: int = 30
    spectrum: float = 1.1
    spread: float = 0.1

    def __post_init__(self) -> None:
        for name, least in (("dim", 1), ("rows", 1), ("spectrum", 0), ("spread", 0)):
            if not least <= getattr(self, name) < np.inf:
                raise ValueError(f"{least} <= {name} < infinity must hold, got {name}={getattr(self, name)}")

    def split(self, seed: int, clients: int) -> Split:
        scale = np.arange(1, self.dim + 1) ** (-self.spectrum / 2)
        inputs, targets = [], []
        for client in range(clients):
            x = normals(seed, "linear x", client, self.rows * self.dim).reshape(self.rows, self.dim) * scale
            theta = self.spread * normals(seed, "linear u", client, 1) + normals(seed, "linear", client, self.dim)
            inputs.append(x)
            targets.append(x @ theta)
        columns = {"x": np.concatenate(inputs), "y": np.concatenate(targets)}
        return Split(columns, columns, in_turn(clients, self.rows))

    def init(self, seed: int) -> dict[str, Tensor]:
        return {"theta": torch.zeros(self.dim, dtype=torch.float64)}

    def losses(self, p: Params, batch: Batch) -> Tensor:
        theta = p["theta"]
        return (batch["x"].to(theta.dtype) @ theta - batch["y"].to(theta.dtype)).square() / 2

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.losses(p, batch)}


@dataclass(frozen=True)
class Synthetic(Classification):
    """Multinomial regression on `dim` inputs; each client has `rows` to train and a quarter as many to test."""

    model: Model = Logistic()
    partition: Partition = Iid()
    alpha: float = 1.0
    beta: float = 1.0
    iid: bool = False
    rows: int = 100
    dim: int = 60

    classes: ClassVar[int] = 10

    def __post_init__(self) -> None:
        for name, least in (("alpha", 0), ("beta", 0), ("rows", 1), ("dim", 1)):
            if not least <= getattr(self, name) < np.inf:
                raise ValueError(f"{least} <= {name} < infinity must hold, got {name}={getattr(self, name)}")
        if self.partition != Iid():
            raise ValueError(
                "logistic has clients of its own, got a partition; leave workload.partition out and set alpha, beta"
            )

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.dim,)

    def load(self) -> tuple[Columns, Columns]:
        raise ValueError("logistic has clients of its own; call split")

    def client(self, seed: int, client: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, dim) float32 and (rows,)"""
        law = 0 if self.iid else client
        u, b = (normals(seed, f"logistic {name}", law, 1) for name in ("u", "B"))
        weights = np.sqrt(self.alpha) * u + normals(seed, "logistic W", law, (self.dim + 1) * self.classes)
        centre = np.sqrt(self.beta) * b + normals(seed, "logistic v", law, self.dim)
        drawn = normals(seed, "logistic x", client, rows * self.dim).reshape(rows, self.dim)
        x = centre * (not self.iid) + drawn * np.arange(1, self.dim + 1) ** -0.6
        scores = x @ weights[self.classes :].reshape(self.dim, self.classes) + weights[: self.classes]
        return x.astype(np.float32), scores.argmax(1)

    def split(self, seed: int, clients: int) -> Split:
        more = -(-self.rows // 4)
        made = [self.client(seed, client, self.rows + more) for client in range(clients)]
        train = {
            "input": np.concatenate([x[: self.rows] for x, _ in made]),
            "label": np.concatenate([label[: self.rows] for _, label in made]),
        }
        test = {
            "input": np.concatenate([x[self.rows :] for x, _ in made]),
            "label": np.concatenate([label[self.rows :] for _, label in made]),
        }
        return Split(train, test, in_turn(clients, self.rows))
