"""The contract of kernels: how the clients of a run compute.

Kernels are a class with an entry in the table KERNELS (`table.py`). They say which runs can have them (`why_not`) and
when a measurement tries them (`is_promising`, `suits`), and they replace what they compute in another way than torch:
operators (`around_losses`, `around_steps`), a whole loss with its gradient (`chain`), or single calls by recordings
(`tapes`, `recorder`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ...algorithms.tree import Layout
from .recorded_visit import VisitRecorder
from .tape import Tapes
from .vectorised import vectorised


class Run(Protocol):
    """What kernels ask of a run, which is a RunSpec. workload: a Workload. layout: of the model, without running
    statistics. frozen: name -> tensor that is not trained."""

    @property
    def experiment(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def precision(self) -> torch.dtype | None: ...
    @property
    def workload(self) -> Any: ...
    @property
    def layout(self) -> Any: ...
    @property
    def frozen(self) -> Any: ...


class LossInOneCall(Protocol):
    """What computes the loss of a workload and its gradient in one call."""

    def gradient(self, points: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(gradients (c, P), losses (c,)) at the models `points` (c, P), for a batch of columns (c, B, …).

        For one client, all shapes are without c. Raises IndexError for a label that is not a class, RuntimeError for
        columns with a shape or type that the network does not take, and MemoryError.
        """
        ...

    def outputs(self, points: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The network's outputs (c, B, classes), or (B, classes), for the arguments of `gradient`."""
        ...

    def descend(
        self,
        y: Tensor,
        batches: Mapping[str, Any],
        lr: float,
        shift: Tensor | None = None,
        total: Tensor | None = None,
        pull: tuple[float, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(y (P,), losses (K,)) after K steps y <- y - lr (gradient + shift + lam (y - centre)) of one client.

        `batches`: columns (K, B, …), one batch per step. `total` (P,): the gradients are added to it in place. `pull`:
        (lam, centre (P,)), None for lam = 0. Raises the same errors as `gradient`.
        """
        ...


@dataclass(frozen=True)
class Kernels:
    """How clients compute. What a class does not define is as with torch's own kernels.

    `name`: in the table. `compiled`: whether they need the compiled library, which then adds up the messages, too, to
    the same bits. `needs_proof`: whether they are used only after a proof on the run's data that they compute what
    torch computes. `single_losses`: whether they give the losses of single examples. `instead_of`: names of kernels
    that a measurement does not try where it can have these. `blocks_of_one`: whether a client that is alone in its
    block is computed as a block is.
    """

    name: ClassVar[str]
    compiled: ClassVar[bool] = False
    needs_proof: ClassVar[bool] = True
    single_losses: ClassVar[bool] = True
    instead_of: ClassVar[tuple[str, ...]] = ()
    blocks_of_one: ClassVar[bool] = False

    def __str__(self) -> str:
        """The name in a plan."""
        return self.name

    def why_not(self, run: Run) -> str:
        """Why a run cannot have these kernels, "" if it can. It continues "they are", as in "for CUDA devices, not
        for device=cpu". Raises NoKernels if the compiled library cannot be built here."""
        return ""

    def is_promising(self, run: Run) -> bool:
        """Whether a measurement should try them, unless `why_not` says why they cannot be had."""
        return True

    def suits(self, block: int) -> bool:
        """Whether a measurement should try them with blocks of so many clients."""
        return True

    def around_losses(self) -> AbstractContextManager[Any]:
        """A context in which they compute the operators of losses and of evaluations."""
        return nullcontext()

    def together(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step of one client as one of a block, whose arguments and results have the clients' axis first. Both are
        trees of tensors."""
        return vectorised(step)

    def around_steps(self) -> AbstractContextManager[Any]:
        """A context in which they compute what methods orthogonalise."""
        return nullcontext()

    def chain(self, workload: Any, layout: Layout) -> LossInOneCall | None:
        """What computes the workload's loss and its gradient in one call, None for autograd. Raises NoKernels if the
        loss cannot be computed so: a run whose plan says so must not go on otherwise, as its bits would differ."""
        return None

    def tapes(self, device: torch.device, most_bytes: float = math.inf) -> Tapes | None:
        """What replays the gradients of a client alone, and the steps of several runs, from recordings of their
        operations; None to compute each of them. most_bytes: what works on more memory is not recorded."""
        return None

    def recorder(self) -> VisitRecorder | None:
        """What records and replays the local steps of blocks in a worker, None to run each of them."""
        return None
