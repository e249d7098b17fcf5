"""Synthetic regression and classification data whose difficulty is known.

    linear      Takakura et al. 2025 (FedDuA). Client i has rows x ~ N(0, diag(k^-spectrum)) and y = <theta_i, x>
                without noise; the entries of theta_i ~ N(u_i, 1) with u_i ~ N(0, spread). 20 clients of 30 rows make
                600 equations in 1,000 unknowns, so one vector solves all of them although the theta_i differ. The
                paper draws a theta for each row, ~ N(u_i, 1), which `solutions: row` does.
    logistic    Synthetic(alpha, beta) of LEAF and FedProx, Caldas et al. 2018. The label of x is arg max of W_i x +
                b_i; the entries of W_i and b_i ~ N(u_i, 1) with u_i ~ N(0, alpha). x ~ N(v_i, diag(k^-1.2)); the
                entries of v_i ~ N(B_i, 1) with B_i ~ N(0, beta). alpha and beta say how much the distributions of
                labels and of inputs differ between clients. With iid all clients have the W and b of the first one,
                and v = 0.

The second argument of N is a variance, as in the text of FedProx, except for `spread`, which is a standard deviation,
as in the code of FedExP, whose paper writes 0.1. The data of client i depend on the seed and i alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from .. import counted
from ..classification import Classification
from ..client_index import ClientIndex
from ..models.small import Logistic
from ..partitions.standard import Iid
from ..settings import check_finite_from
from ..workload import Batch, Columns, Model, Params, Partition, Split, Workload


def normals(seed: int, what: str, client: int, count: int) -> np.ndarray:
    """(count,) standard normal draws for one client; `what` names their purpose."""
    return counted.normal(counted.key(seed, what, client), count).numpy()


@dataclass(frozen=True)
class Linear(Workload):
    """Linear regression: loss (<theta, x> - y)^2 / 2, from theta = 0. The test set is the training set. `dim`:
    unknowns. `rows`: rows of each client. `solutions`: whether the rows of a client have one theta (client), or each
    row has its own (row). `spectrum`, `spread`: see the module."""

    dim: int = 1000
    rows: int = 30
    spectrum: float = 1.1
    spread: float = 0.1
    solutions: Literal["client", "row"] = "client"

    def __post_init__(self) -> None:
        check_finite_from(self, dim=1, rows=1, spectrum=0, spread=0)
        if self.solutions not in ("client", "row"):
            raise ValueError(f"solutions must be client or row, got {self.solutions!r}")

    def split(self, seed: int, clients: int) -> Split:
        scale = np.arange(1, self.dim + 1) ** (-self.spectrum / 2)
        inputs, targets = [], []
        for client in range(clients):
            x = normals(seed, "linear x", client, self.rows * self.dim).reshape(self.rows, self.dim) * scale
            centre, of = self.spread * normals(seed, "linear u", client, 1), self.rows if self.solutions == "row" else 1
            theta = centre + normals(seed, "linear", client, of * self.dim).reshape(of, self.dim)
            inputs.append(x)
            targets.append((x * theta).sum(-1) if self.solutions == "row" else x @ theta[0])
        columns = {"x": np.concatenate(inputs), "y": np.concatenate(targets)}
        return Split(columns, columns, ClientIndex.equal(np.arange(clients * self.rows), clients))

    def init(self, seed: int) -> dict[str, Tensor]:
        return {"theta": torch.zeros(self.dim, dtype=torch.float64)}

    def losses(self, p: Params, batch: Batch) -> Tensor:
        theta = p["theta"]
        return (batch["x"].to(theta.dtype) @ theta - batch["y"].to(theta.dtype)).square() / 2

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.losses(p, batch)}


@dataclass(frozen=True)
class Synthetic(Classification):
    """Multinomial logistic regression with inputs (dim,). Each client makes `rows` training rows and a quarter as many
    test rows; the test rows of all clients are one test set. `alpha`, `beta`, `iid`: see the module."""

    model: Model = Logistic()
    partition: Partition = Iid()
    alpha: float = 1.0
    beta: float = 1.0
    iid: bool = False
    rows: int = 100
    dim: int = 60

    classes: ClassVar[int] = 10

    def __post_init__(self) -> None:
        check_finite_from(self, alpha=0, beta=0, rows=1, dim=1)
        if self.partition != Iid():
            raise ValueError(
                "partition: logistic makes the data of each client itself, got a partition; leave workload.partition "
                "out and set alpha and beta"
            )

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.dim,)

    def load(self) -> tuple[Columns, Columns]:
        raise ValueError("logistic makes the data of each client itself; call split")

    def client(self, seed: int, client: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs (rows, dim) float32, labels (rows,)) of one client."""
        law = 0 if self.iid else client
        u, b = (normals(seed, f"logistic {name}", law, 1) for name in ("u", "B"))
        weights = np.sqrt(self.alpha) * u + normals(seed, "logistic W", law, (self.dim + 1) * self.classes)
        centre = np.sqrt(self.beta) * b + normals(seed, "logistic v", law, self.dim)
        drawn = normals(seed, "logistic x", client, rows * self.dim).reshape(rows, self.dim)
        x = centre * (not self.iid) + drawn * np.arange(1, self.dim + 1) ** -0.6
        scores = x @ weights[self.classes :].reshape(self.dim, self.classes) + weights[: self.classes]
        return x.astype(np.float32), scores.argmax(1)

    def split(self, seed: int, clients: int) -> Split:
        tests = -(-self.rows // 4)
        made = [self.client(seed, client, self.rows + tests) for client in range(clients)]
        train, test = (
            {
                "input": np.concatenate([inputs[part] for inputs, _ in made]),
                "label": np.concatenate([labels[part] for _, labels in made]),
            }
            for part in (slice(self.rows), slice(self.rows, None))
        )
        return Split(train, test, ClientIndex.equal(np.arange(clients * self.rows), clients))
