"""Running statistics of clients' models, found on the clients' own training rows.

Of n batches that a client's rows are cut into, in their order, in training mode:

    s <- 0;  j = 0 … n - 1: s <- s + (statistics of batch j - s) / (j + 1)

so that s is the mean of the means, and of the unbiased variances, of the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...algorithms.tree import Tree
from ...workloads import counted
from ...workloads.workload import Params, Workload


class OwnStatistics:
    """Gives clients' models the statistics of the clients' own rows."""

    def __init__(
        self,
        workload: Workload,
        frozen: Params,
        momenta: Mapping[str, float],
        size: int,
        seed: int,
        beat: Callable[[], None],
    ) -> None:
        """frozen: the tensors that no model has. momenta: name of a running statistic -> how far one batch moves it, as
        a fraction. size: rows of a batch. seed: of the run. beat: called before each batch, as a sign of life."""
        self.workload, self.frozen, self.momenta = workload, frozen, momenta
        self.size, self.seed, self.beat = size, seed, beat

    def measured(self, z: Tree, client: int, columns: Mapping[str, Tensor]) -> Tree:
        """A model with the statistics of these rows (n, …) of a client."""
        tensors = dict(z.items())
        found = {name: torch.zeros_like(tensors[name]) for name in self.momenta if name in tensors}
        for j, begin in enumerate(range(0, len(next(iter(columns.values()))), self.size)):
            self.beat()
            batch = {name: column[begin : begin + self.size] for name, column in columns.items()}
            batch["key"] = counted.key(self.seed, "statistics", client, j).to(z.flat.device)
            for name, value in self._of_batch({**self.frozen, **tensors}, batch, list(found)).items():
                found[name] = found[name].lerp(value, 1 / (j + 1))
        return Tree.of({**tensors, **found})

    def _of_batch(self, p: Params, batch: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
        """The statistics of a batch: of zeros, a step moves them by `momenta` of these."""
        with torch.enable_grad():
            zeros = [torch.zeros_like(p[name]).requires_grad_() for name in names]
            loss = self.workload.losses({**p, **dict(zip(names, zeros, strict=True))}, batch).mean()
            moves = torch.autograd.grad(loss, zeros)  # the old values minus the new ones, see `Workload.buffers`
        return {name: -move / self.momenta[name] for name, move in zip(names, moves, strict=True)}
