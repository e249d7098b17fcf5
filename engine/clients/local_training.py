"""A client's trip through a round, begin -> step … step -> finish: one at a time, or a block at once under vmap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm
from ...algorithms.tree import Layout, Tree
from ...workloads.base import Batch, Workload
from ..kernels.fused_chain import Chain, NotAChain, chain_from
from ..kernels.library import NoKernels
from ..kernels.operators import kernels, method_kernels
from ..methods.state_spec import StateSpec

Batches = Callable[[int], dict[str, Tensor]]
"""step -> the block's batch, each column (c, B, …), "key" (c,), "weight" (c, B) where there are short batches."""
AT_ONCE = 32
"""Steps whose batches are gathered together, at most: a sign of life in between, and no more memory."""


class ClientBatches(Protocol):
    """A client's, some steps at a time."""

    def __call__(self, steps: slice) -> dict[str, Tensor]:
        """Each column (K, B, …), "key" (K,), "weight" (K, B) where there are short batches, which are padded behind."""
        ...

    def beat(self) -> None:
        """A step begins: a sign of life."""
        ...


class LocalResult(NamedTuple):
    """What comes of a block: leaves with the clients' axis first."""

    message: Any
    client: Any
    loss: Tensor  # (c,) mean training loss over the steps
    gradients: int  # evaluations of the gradient per step


class BatchOracle:
    """The oracle of one step; `losses`: at each call."""

    def __init__(self, gradient_of: Callable[..., Any], trainer: LocalTrainer, batch: Batch, done: Tensor) -> None:
        self.gradient_of, self.trainer, self.batch, self.done = gradient_of, trainer, batch, done
        self.losses: list[Tensor] = []

    @property
    def key(self) -> Tensor:
        return self.batch["key"]

    @property
    def examples(self) -> Tensor:
        weight = self.batch.get("weight")
        if weight is not None:
            return (weight > 0).sum()
        return torch.tensor(next(len(column) for name, column in self.batch.items() if name != "key"))

    def __call__(self, y: Tree, /) -> Tree:
        gradient, loss = self.gradient_of(y.flat, self.trainer, y.layout, tuple(self.batch), *self.batch.values())
        self.losses.append(loss)
        return Tree(gradient, y.layout)


def unpadded(batches: Batch, i: int) -> Batch:
    """One of a client's batches (K, B, …): columns (b, …), "key" (), no "weight"."""
    batch = {name: column[i] for name, column in batches.items()}
    weight = batch.pop("weight", None)
    if weight is None:
        return batch
    real = int((weight > 0).sum())
    return {name: column if name == "key" else column[:real] for name, column in batch.items()}


class ClientSteps:
    """One client's steps of a round. `losses`: of those that were taken, one tensor or several."""

    def __init__(self, trainer: LocalTrainer, steps: int, batches: ClientBatches) -> None:
        self.trainer, self.steps, self.batches = trainer, steps, batches
        self.losses: list[Tensor] = []

    def __iter__(self) -> Iterator[BatchOracle]:
        for begin, batches in self._some():
            for i in range(len(batches["key"])):
                self.batches.beat()
                done = torch.tensor((begin + i) / self.steps, dtype=torch.float64)
                oracle = BatchOracle(Gradient.forward, self.trainer, unpadded(batches, i), done)
                yield oracle
                self.trainer.gradients = len(oracle.losses)
                self.losses.append(oracle.losses[0])

    def _some(self) -> Iterator[tuple[int, Batch]]:
        """(first step, batches), as many as are gathered together."""
        for begin in range(0, self.steps, AT_ONCE):
            yield begin, self.batches(slice(begin, min(begin + AT_ONCE, self.steps)))

    def descend(self, y: Tree, lr: float, shift: Any, total: Any) -> tuple[Tree, Any] | None:
        chain, flat = self.trainer.chain, y.flat
        if chain is None:
            return None
        added = total.flat.clone() if isinstance(total, Tree) else None
        constant = shift.flat if isinstance(shift, Tree) else None
        for _, batches in self._some():
            flat, losses = chain.descend(flat, batches, lr, constant, added)
            self.losses.append(losses)
        self.trainer.gradients = 1
        return Tree(flat, y.layout), total if added is None else Tree(added, y.layout)


class LocalTrainer:
    def __init__(
        self,
        algorithm: Algorithm,
        workload: Workload,
        x: Tree,
        kernels: str = "torch",
        precision: torch.dtype | None = None,
    ) -> None:
        """kernels: see `kernels`; precision: of losses and their gradients' computation, x's unless given."""
        self.algorithm, self.workload, self.kernels, self.precision = algorithm, workload, kernels, precision
        self.state_spec = StateSpec(algorithm, x)
        self.chain = _chain(workload, x.layout) if kernels == "chain" else None
        self.gradients = 0

    def loss(self, point: Tree, batch: Batch) -> Tensor:
        """The batch's mean loss, ()."""
        if self.precision is not None:
            point = point.to(self.precision)
        with kernels(self.kernels):
            losses = self.workload.losses(dict(point.items()), batch)
        weight = batch.get("weight")
        return losses.mean() if weight is None else (losses * weight).sum()

    def step(self, oracle: BatchOracle, public: Any, client: Any, local: Any) -> tuple[Any, Tensor]:
        """(next local state, loss at the first gradient)."""
        with method_kernels(self.kernels):
            local = self.algorithm.client_step(public, client, local, oracle)
        self.gradients = len(oracle.losses)
        return local, oracle.losses[0]

    def finish(self, public: Any, client: Any, local: Any) -> tuple[Any, Any]:
        """(message, as it may be added; next client's state)."""
        message, client = self.algorithm.client_finish(public, client, local)
        return self.algorithm.decode(public, message), client

    # --- one client ---------------------------------------------------------------------------------------------
    def alone(self, public: Any, client: Any, steps: int, batches: ClientBatches) -> LocalResult:
        """One client, no clients' axis in `client`; the outcome's leaves have none either, but for the loss ()."""
        visit = ClientSteps(self, steps, batches)
        local = self.algorithm.client_begin(public, client)
        with method_kernels(self.kernels):
            local = self.algorithm.client_steps(public, client, local, visit)
        message, client = self.finish(public, client, local)
        return LocalResult(message, client, torch.hstack(visit.losses).mean(dtype=torch.float64), self.gradients)

    # --- a block --------------------------------------------------------------------------------------------------
    def together(self, public: Any, client: Any, steps: Tensor, batches: Batches) -> LocalResult:
        """Clients along the first axis of every leaf of `client`; steps: (c,), they may differ."""
        # Stateless clients have no tensor to vectorise over; their steps always are one.
        begin = vmap(lambda key, client: self.algorithm.client_begin(public, client))
        step = vmap(
            lambda client, local, batch, done: self.step(
                BatchOracle(Gradient.apply, self, batch, done), public, client, local
            )
        )
        finish = vmap(lambda client, local: self.finish(public, client, local))
        local = begin(steps, client)
        total = torch.zeros(len(steps), dtype=torch.float64)
        shortest, longest = int(steps.min()), int(steps.max())
        for k in range(longest):
            after, loss = step(client, local, batches(k), k / steps.to(torch.float64))
            if k >= shortest:
                active = steps > k
                after, loss = select(active, after, local), torch.where(active, loss.to(total), 0)
            local, total = after, total + loss.to(total)
        message, client = finish(client, local)
        return LocalResult(message, client, total / steps, self.gradients)


def _chain(workload: Workload, layout: Layout) -> Chain:
    """NoKernels where the loss is no chain any more, though the plan has it that it is: no run goes on otherwise than
    its plan says."""
    try:
        return chain_from(workload, layout)
    except NotAChain as error:
        raise NoKernels(f"chain kernels cannot be used here: {error}") from error


class Gradient(torch.autograd.Function):
    """(gradient (P,), loss ()) of one client's batch, `forward`; of a whole block's, `apply` under vmap.

    There, clients being independent, the gradient of the sum of their losses has each one's own in its row: vmap runs
    the forward pass only and plain autograd the backward. (`torch.func.grad` inside vmap gives the same numbers, but
    loads torch's compiler at its first call: 80 MiB and 0.8 s in every worker.)
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(
        point: Tensor, trainer: LocalTrainer, layout: Layout, names: tuple[str, ...], *columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        if trainer.chain is not None:
            return trainer.chain.gradient(point, dict(zip(names, columns, strict=True)))
        with torch.enable_grad():
            leaf = point.detach().requires_grad_()
            loss = trainer.loss(Tree(leaf, layout), dict(zip(names, columns, strict=True)))
            (gradient,) = torch.autograd.grad(loss, leaf)
        return gradient, loss.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep: no gradient flows through a gradient."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        point: Tensor,
        trainer: LocalTrainer,
        layout: Layout,
        names: tuple[str, ...],
        *columns: Tensor,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        first, *others = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((point, *columns), (in_dims[0], *in_dims[4:]), strict=True)
        ]
        if trainer.chain is not None:
            return trainer.chain.gradient(first, dict(zip(names, others, strict=True))), (0, 0)
        with torch.enable_grad():
            leaf = first.detach().requires_grad_()
            losses = vmap(lambda flat, batch: trainer.loss(Tree(flat, layout), batch))(
                leaf, dict(zip(names, others, strict=True))
            )
            (gradients,) = torch.autograd.grad(losses.sum(), leaf)
        return (gradients, losses.detach()), (0, 0)


def select(active: Tensor, new: Any, old: Any) -> Any:
    """Leaf by leaf, `new` for active clients (c,), `old` for those that have finished."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(active.to(a.device).view(-1, *[1] * (a.ndim - 1)), a, b)

    return pytree.tree_map(pick, new, old)
