"""Local training: what a client computes in a round.

A client's local training is `client_begin`, then `client_step` for each local step, then `client_finish`. The trainer
runs it for one client, or for a block of clients at once under `torch.func.vmap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Known
from ...algorithms.tree import Layout, Tree
from ...workloads import counted
from ...workloads.models.narrow import HALF
from ...workloads.workload import Batch, Params, Workload
from ..accelerators.transfer import number, to_device
from ..kernels.contract import Kernels
from ..kernels.operators import in_bfloat16, orthogonalised_by
from ..kernels.recorded_visit import Recording, VisitRecorder, copy_into, fixed
from ..kernels.torchs import Torch
from ..kernels.vectorised import vectorised
from ..method_form.numbers import Path, form, identity, numbers
from ..method_form.state_spec import StateSpec
from ..storage.sha256 import sha256_of_tensors
from .batches import BlockBatches, ClientBatches

BatchesOfStep = Callable[[int], dict[str, Tensor]]
"""Local step -> the batches of a block of clients: columns (c, B, …), "key" (c,), and "weight" (c, B) if some batches
are short. Where steps are recorded, it is a `BlockBatches`."""
GATHERED_STEPS = 32
"""The largest number of local steps whose batches are gathered at once. It limits the memory that they take, and the
time without a sign of life."""

RECORDED_BYTES = 64 << 20
"""The gradient of one client is recorded if all its tensors together take at most so much memory. In larger ones the
operations take so long that it does not matter how they are found."""


class LocalResult(NamedTuple):
    """The result of the local training of one client, or of a block: then every leaf has the clients' axis first."""

    message: Any  # decoded, so that it can be added to others
    client: Any  # the new client state
    loss: Tensor  # () or (c,), the mean training loss over the local steps
    gradients: int  # gradient evaluations per local step
    rms: Tensor | None = None  # () or (c,), see `LocalTrainer`


class OwnViews(NamedTuple):
    """The public states of the clients of a block where each has a view of its own (`Algorithm.view`): every leaf has
    the clients' axis first. What all clients have already (`Known`) and no view has changed is in memory once."""

    state: Any

    @staticmethod
    def of(views: Sequence[Any]) -> OwnViews:
        """The views of the clients of a block."""

        def together(*parts: Any) -> Any:
            if isinstance(parts[0], Known):
                return pytree.tree_map(shared_or_stacked, *parts)
            return torch.stack(parts)

        return OwnViews(pytree.tree_map(together, *views, is_leaf=lambda part: isinstance(part, Known)))


def shared_or_stacked(*leaves: Tensor) -> Tensor:
    """Tensors of equal shape along a new first axis, which takes no memory where they are one tensor."""
    first = leaves[0]
    same = all(leaf is first for leaf in leaves)
    return first.expand(len(leaves), *first.shape) if same else torch.stack(leaves)


class BatchOracle:
    """The gradient oracle of one local step. `losses` has what is kept of the loss of each call, see
    `LocalTrainer.kept`."""

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
        count = next(len(column) for name, column in self.batch.items() if name != "key")
        return number(count, self.trainer.device, torch.int64)

    def __call__(self, y: Tree, /) -> Tree:
        gradient, loss = self._accumulated(y) if self.trainer.at_once else self._on(y, self.batch)
        self.losses.append(loss)
        return Tree(gradient, y.layout)

    def _on(self, y: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        """(gradient (P,), what is kept of the loss) at y on a batch."""
        return self.gradient_of(y.flat, self.trainer, y.layout, tuple(batch), *batch.values())

    def _accumulated(self, y: Tree) -> tuple[Tensor, Tensor]:
        """The same on the batch of the step, which is taken in parts."""
        assert self.trainer.at_once is not None
        gradient, losses = torch.zeros_like(y.flat), list[Tensor]()
        rows = counted_rows(self.trainer.workload, self.batch, y.flat.dtype)
        for share, part in parts_of(self.batch, self.trainer.at_once, rows):
            found, loss = self._on(y, part)
            gradient = gradient + found * share
            losses.append(self.trainer.shared(loss, share))
        return gradient, torch.stack(losses).sum(0)


def unpadded(batches: Batch, i: int, real: int | None = None) -> Batch:
    """Batch i of a client's batches (K, B, …), without its padding: columns (b, …), "key" (), no "weight".

    real: the number b of its examples, if it is known; otherwise it follows from the examples' weights.
    """
    batch = {name: column[i] for name, column in batches.items()}
    weight = batch.pop("weight", None)
    if weight is None:
        return batch
    if real is None:
        real = int((weight > 0).sum())
    return {name: column if name == "key" else column[:real] for name, column in batch.items()}


def counted_rows(workload: Workload, batch: Batch, dtype: torch.dtype) -> Tensor | None:
    """(B,): the workload's weights of the rows of a batch, 0 for padding, in `dtype` or in float32; None for none."""
    rows = workload.row_weights(batch)
    if rows is None:
        return None
    rows = rows.to(torch.promote_types(dtype, torch.float32))
    return torch.where(batch["weight"] > 0, rows, 0.0) if "weight" in batch else rows


def shares_of(workload: Workload, batch: Batch, dtype: torch.dtype) -> Tensor | None:
    """(B,): what the loss of each example is multiplied by in the mean of a batch; None for the plain mean. dtype: of
    the losses."""
    rows = counted_rows(workload, batch, dtype)
    return batch.get("weight") if rows is None else rows / rows.sum().clamp(min=1)


def parts_of(batch: Batch, most: int, rows: Tensor | None = None) -> Iterator[tuple[Any, Batch]]:
    """(share, part) of a batch in parts of at most so many examples. The mean loss of the batch is the sum over parts
    of `share` times the mean loss of the part: a number, or () where examples have weights. rows: `counted_rows` of
    the batch. Each part has a key of its own. Where all examples of a part are padding, it has the share 0, and equal
    weights, with which it can be normalised as any other one."""
    columns = {name: column for name, column in batch.items() if name not in ("key", "weight")}
    weight, count = batch.get("weight"), len(next(iter(columns.values())))
    for begin in range(0, count, most):
        part = {name: column[begin : begin + most] for name, column in columns.items()}
        part["key"] = counted.key(batch["key"], "part", begin // most) if begin else batch["key"]
        share: Any = min(most, count - begin) / count
        if weight is not None:
            own = weight[begin : begin + most]
            share = own.sum()
            part["weight"] = torch.where(share > 0, own / torch.where(share > 0, share, 1.0), 1.0 / len(own))
        if rows is not None:  # the mean of a part is divided by the sum of its weights, or by 1 where that is larger
            total = rows[begin : begin + most].sum()
            share = torch.where(total > 0, total.clamp(min=1), 0.0) / rows.sum().clamp(min=1)
        yield share, part


class ClientSteps:
    """The local steps of one client in a round, as a method sees them (`LocalSteps`).

    `losses` has the losses of the steps that were taken: what is kept of the loss of each step, or a tensor (k,)
    for k of them.
    """

    def __init__(self, trainer: LocalTrainer, steps: int, batches: ClientBatches) -> None:
        self.trainer, self.steps, self.batches = trainer, steps, batches
        self.losses: list[Tensor] = []
        self.descents = 0  # of models that took all steps in one call
        self.only: Batch | None = None  # the batches of all steps, where they are gathered at once

    def __iter__(self) -> Iterator[BatchOracle]:
        for begin, batches in self._gathered():
            for i in range(len(batches["key"])):
                self.batches.beat()
                done = number((begin + i) / self.steps, self.trainer.device)
                batch = unpadded(batches, i, self.batches.examples(begin + i))
                oracle = BatchOracle(Gradient.forward, self.trainer, batch, done)
                yield oracle
                self.trainer.gradients = len(oracle.losses)
                self.losses.append(oracle.losses[0])

    def _gathered(self) -> Iterator[tuple[int, Batch]]:
        """(number of the first step, batches of some consecutive steps), for all steps in order."""
        if self.steps <= GATHERED_STEPS:
            self.only = self.batches(slice(0, self.steps)) if self.only is None else self.only
            yield 0, self.only
            return
        for begin in range(0, self.steps, GATHERED_STEPS):
            yield begin, self.batches(slice(begin, min(begin + GATHERED_STEPS, self.steps)))

    def descend(self, y: Tree, lr: float, shift: Any = (), total: Any = (), pull: Any = ()) -> tuple[Tree, Any] | None:
        chain, flat = self.trainer.chain, y.flat
        if chain is None or self.trainer.at_once is not None:
            return None
        flat_total = total.flat.clone() if isinstance(total, Tree) else None
        flat_shift = shift.flat if isinstance(shift, Tree) else None
        flat_pull = (pull[0], pull[1].flat) if pull else None
        taken = list[Tensor]()
        for _, batches in self._gathered():
            flat, losses = chain.descend(flat, batches, lr, flat_shift, flat_total, flat_pull)
            taken.append(losses)
        self.descents += 1
        self.trainer.gradients = self.descents
        self.losses = self.losses or taken
        return Tree(flat, y.layout), total if flat_total is None else Tree(flat_total, y.layout)


class LocalTrainer:
    """Runs the local training of clients with one method and one workload.

    `chain`: the fused kernels of the workload's loss, if the kernels have them. `gradients`: the number of gradient
    evaluations in the last local step. `with_rms`: whether a client's root mean square of the losses of its examples is
    found too, over the first gradients of all its local steps; the chain has no losses of single examples.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        workload: Workload,
        x: Tree,
        kernels: Kernels = Torch(),
        precision: torch.dtype | None = None,
        recorder: VisitRecorder | None = None,
        with_rms: bool = False,
        frozen: Params | None = None,
        at_once: int | None = None,
        columns: Mapping[str, Tensor] | None = None,
        fixed_steps: bool = False,
    ) -> None:
        """x: the initial model, for its shapes and its device.

        precision: the dtype in which losses and their gradients are computed; None for the dtype of x. recorder: of a
        block's local steps; None to run each of them. with_rms: not with a chain. frozen: the frozen tensors of
        the model. at_once: the most examples of which a gradient is computed at once; None for all of a local step.
        columns: from which the batches of blocks are gathered, where they stay on the device; else None. fixed_steps:
        whether the method's clients take a number of local steps that does not depend on their data.
        """
        self.recorder, self.with_rms, self.columns, self.fixed_steps = recorder, with_rms, columns, fixed_steps
        self.algorithm, self.workload, self.kernels, self.precision = algorithm, workload, kernels, precision
        self.state_spec, self.device = StateSpec(algorithm, x), x.flat.device
        self.chain = kernels.chain(workload, x.layout)
        self.x, self.gradients, self.at_once = x, 0, at_once
        dtype = x.flat.dtype if precision is None else precision
        self.frozen = {  # a narrower one is cast up by the module that uses it
            name: tensor.to(self.device, dtype if tensor.is_floating_point() and tensor.dtype not in HALF else None)
            for name, tensor in (frozen or {}).items()
        }
        self.held: dict[str, Tensor] = {}
        self.held_of: Any = None
        self.tapes = kernels.tapes(self.device, RECORDED_BYTES)

    def hold(self, public: Any) -> None:
        """Take what the method holds of the model in a round. public: what clients make of the broadcast. Recorded
        steps read the tensors where they are, so that these keep their memory from round to round."""
        if public is self.held_of:
            return
        self.held_of = public
        for name, tensor in self.algorithm.held(public).items():
            if name not in self.held:
                self.held[name] = torch.empty_like(tensor, dtype=self.precision)
            self.held[name].copy_(tensor)

    @functools.cached_property
    def form(self) -> Hashable:
        """What trainers have in common that differ in nothing but the numbers of their methods."""
        workload = identity(self.workload, without=("partition",))
        model = (self.x.layout, self.x.flat.dtype, str(self.device), sha256_of_tensors(self.frozen))
        workload = (workload, self.workload.constants_seed)
        return (form(self.algorithm), workload, self.kernels, self.precision, self.with_rms, self.at_once, *model)

    @functools.cached_property
    def numbers(self) -> dict[Path, float]:
        """The numbers of the method."""
        return numbers(self.algorithm)

    def _around_steps(self) -> AbstractContextManager[Any]:
        """The context of a method's local steps. Where gradients are in bfloat16 on a device, so is what methods
        orthogonalise."""
        if self.precision == torch.bfloat16 and self.device.type != "cpu":
            return orthogonalised_by(in_bfloat16)
        return self.kernels.around_steps()

    def loss(self, leaves: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """(the mean loss (), over the examples of a batch; what is kept of it, see `kept`). leaves: the tensors of the
        model that are not frozen, in the dtype in which losses are computed."""
        with self.kernels.around_losses():
            losses = self.workload.losses({**leaves, **self.frozen, **self.held}, batch)
        shares = shares_of(self.workload, batch, losses.dtype)
        mean = losses.mean() if shares is None else (losses * shares).sum()
        return mean, self.kept(losses, mean, shares) if self.with_rms else mean

    @staticmethod
    def kept(losses: Tensor, mean: Tensor, shares: Tensor | None) -> Tensor:
        """(3,): the mean loss, the sum of the squared losses of the examples, and the number of examples, from which
        `of_visit` finds their root mean square. Without `with_rms`, the mean loss () alone is kept."""
        squares = losses.detach().to(torch.promote_types(losses.dtype, torch.float32)).square()
        real = torch.ones_like(squares) if shares is None else (shares > 0).to(squares.dtype)
        return torch.stack([mean.to(squares.dtype), (squares * real).sum(), real.sum()])

    def shared(self, kept: Tensor, share: Any) -> Tensor:
        """What is kept of the loss on a part of a step's batch, as a summand of what is kept of the whole. share: of
        the part, see `parts_of`."""
        return torch.cat([kept[:1] * share, kept[1:] * (share > 0)]) if self.with_rms else kept * share

    def loss_at(self, point: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        """`loss` at a point in the run's dtype."""
        return self.loss(dict((point if self.precision is None else point.to(self.precision)).items()), batch)

    def gradients_of(
        self, names: tuple[str, ...], leaves: Sequence[Tensor], batch: Batch
    ) -> tuple[list[Tensor], Tensor]:
        """`leaf_gradients`, by a recording of it where this is possible. names, leaves: the tensors of the model."""

        def gradients(*tensors: Tensor) -> tuple[list[Tensor], None]:
            point = {
                name: leaf.detach().requires_grad_() for name, leaf in zip(names, tensors[: len(names)], strict=True)
            }
            found, loss = leaf_gradients(self, point, dict(zip(batch, tensors[len(names) :], strict=True)))
            return [*found, loss], None

        tensors = [*leaves, *batch.values()]
        if self.tapes is None:
            *found, loss = gradients(*tensors)[0]
        else:
            *found, loss = self.tapes.call_flat((names, tuple(batch)), gradients, tensors)[0]
        return found, loss

    def of_visit(self, losses: Tensor, steps: Tensor | int) -> tuple[Tensor, ...]:
        """(mean loss,), or (mean loss, root mean square of the examples' losses), of a visit. losses: the sum of what
        was kept in its local steps, with the clients' axis first if there is one."""
        if not self.with_rms:
            return (losses / steps,)
        mean, squares, examples = losses.unbind(-1)
        return mean / steps, (squares / examples.clamp(min=1)).sqrt()

    def step(self, oracle: BatchOracle, public: Any, client: Any, local: Any) -> tuple[Any, Tensor]:
        """(the next local state, what was kept of the loss at the point of the first gradient)."""
        with self._around_steps():
            local = self.algorithm.client_step(public, client, local, oracle)
        self.gradients = len(oracle.losses)
        return local, oracle.losses[0]

    def finish(self, public: Any, client: Any, local: Any) -> tuple[Any, Any]:
        """(the decoded message, the new client state)."""
        message, client = self.algorithm.client_finish(public, client, local)
        return self.algorithm.decode(public, message), client

    # --- one client ---------------------------------------------------------------------------------------------
    def train_client(self, public: Any, client: Any, steps: int, batches: ClientBatches) -> LocalResult:
        """The local training of one client. Neither `client` nor the result has a clients' axis.

        public: the public state that was broadcast. client: the client state. steps: the number of local steps.
        """
        local_steps = ClientSteps(self, steps, batches)
        local = self.algorithm.client_begin(public, client)
        with self._around_steps():
            local = self.algorithm.client_steps(public, client, local, local_steps)
        message, client = self.finish(public, client, local)
        if not self.with_rms:
            of_visit: tuple[Tensor, ...] = (torch.hstack(local_steps.losses).mean(dtype=torch.float64),)
        else:
            of_visit = self.of_visit(torch.stack(local_steps.losses).sum(0, dtype=torch.float64), steps)
        return LocalResult(message, client, of_visit[0], self.gradients, *of_visit[1:])

    # --- a block --------------------------------------------------------------------------------------------------
    def train_block(self, public: Any, client: Any, steps: Tensor, batches: BatchesOfStep) -> LocalResult:
        """The local training of c clients at once, along the first axis of every leaf of `client`.

        public: the public state of all of them, or their OwnViews.
        steps: (c,) numbers of local steps, which may differ, in the processor's memory.
        """
        shortest, longest, steps = int(steps.min()), int(steps.max()), to_device(steps, self.device)
        if self.device.type != "cpu":
            client = contiguous(client)
        if self.recorder is not None:
            assert isinstance(batches, BlockBatches)
            visit = BlockVisit(self, self.columns is not None, self.fixed_steps and shortest == longest)
            message, client, of_visit = self._recorded_block(visit, (public, client, steps), longest, batches)
            return LocalResult(message, client, of_visit[0], self.gradients, *of_visit[1:])
        local, loss_sum = self.begin_block(public, client, steps), self.no_losses(steps)
        step = self.block_step(public)
        for k in range(longest):
            after, loss = step(client, local, batches(k), k / steps.to(torch.float64))
            if k >= shortest:
                active = steps > k
                after, loss = select(active, (after, loss.to(loss_sum)), (local, loss_sum.new_zeros(())))
            local, loss_sum = after, loss_sum + loss.to(loss_sum)
        message, client = self.finish_block(public, client, local)
        loss, *rms = self.of_visit(loss_sum, steps)
        return LocalResult(message, client, loss, self.gradients, *rms)

    def no_losses(self, steps: Tensor) -> Tensor:
        """The sum of what is kept of a block's losses before the first step. steps: (c,)."""
        shape = (len(steps), 3) if self.with_rms else (len(steps),)
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def begin_block(self, public: Any, client: Any, steps: Tensor) -> Any:
        """The local states of a block before the first step."""
        begin = self.algorithm.client_begin
        if isinstance(public, OwnViews):
            local = vectorised(begin)(public.state, client)
        else:  # `steps` is passed to vmap because clients without state have no other tensor to vectorise over
            local = vectorised(lambda _, client: begin(public, client))(steps, client)
        return local if self.device.type == "cpu" else contiguous(local)

    def block_step(self, public: Any) -> Callable[..., tuple[Any, Tensor]]:
        """A local step of a block: (client states, local states, batches, done (c,)) -> (the next local states, what
        was kept of each client's loss)."""

        def step(public: Any, client: Any, local: Any, batch: Batch, done: Tensor) -> tuple[Any, Tensor]:
            return self.step(BatchOracle(Gradient.apply, self, batch, done), public, client, local)

        if isinstance(public, OwnViews):
            return functools.partial(self.kernels.together(step), public.state)
        return self.kernels.together(functools.partial(step, public))

    def finish_block(self, public: Any, client: Any, local: Any) -> tuple[Any, Any]:
        """(the decoded messages, the new client states) of a block."""
        if isinstance(public, OwnViews):
            return vectorised(self.finish)(public.state, client, local)
        return vectorised(lambda client, local: self.finish(public, client, local))(client, local)

    def _recorded_block(
        self, visit: BlockVisit, given: tuple[Any, ...], longest: int, batches: BlockBatches
    ) -> tuple[Any, Any, tuple[Tensor, ...]]:
        """What `visit.finish` gives for a block, by replays if the visit can be recorded and is proven. given: (public
        state, client states, numbers of steps). All batches of a block have the same shapes.

        Where the columns stay on the device, a recording gathers the batches itself, so that the processor starts
        nothing but replays from the first step to the last one. Else every batch is copied to the recording.
        """
        assert self.recorder is not None
        inputs = (*given, batches.places() if visit.gathers else batches(0))
        recording = self.recorder.recording(visit, inputs)
        proves = recording is not None and self.recorder.is_to_be_proven(recording)
        if recording is None or proves or not self.recorder.can_use(recording):
            return self._both_ways(visit, inputs, longest, batches, recording if proves else None)
        copy_into(recording.inputs, inputs)
        recording.begin()
        for k in range(longest):
            batches.beat()
            if k and not visit.gathers:
                copy_into(recording.inputs[3], batches(k))
            recording.step()
        recording.finish()
        return fixed(recording.result)

    def _both_ways(
        self, visit: BlockVisit, inputs: Any, longest: int, batches: BlockBatches, recording: Recording | None
    ) -> tuple[Any, Any, tuple[Tensor, ...]]:
        """The same without replays, where each part is compared with the recording if there is one."""
        *given, source = inputs
        step = replace(visit, gathers=False).step
        local = visit.begin(inputs)
        if recording is not None and not recording.begins(inputs, local):
            recording = self._refuse(recording)
        for k in range(longest):
            batch = batches(k)
            after = step((*given, batch), local)
            compared = (*given, source if visit.gathers else batch)
            if recording is not None and not recording.steps(compared, local, after):
                recording = self._refuse(recording)
            local = after
        result = visit.finish(inputs, local)
        if recording is not None and not recording.finishes(inputs, local, result):
            recording = self._refuse(recording)
        if recording is not None and self.recorder is not None:
            self.recorder.proved(recording)
        return result

    def _refuse(self, recording: Recording) -> None:
        """Use no recording from here on, since a replay of this one differed."""
        assert self.recorder is not None
        before = ", and so perhaps did some before" if self.recorder.can_use(recording) else ""
        self.recorder.refuse(f"a replay gave other bits than the step{before}")


@dataclass(frozen=True)
class BlockVisit:
    """The visit of a block of clients in a round, as `VisitRecorder` takes it.

    Inputs: (public state, client states, numbers of steps (c,), source of the batches).
    Local states: (those of the method, sums of what was kept of the losses, number of the next step ()).

    `gathers`: the source is the `Places` of the batches of all steps, and a step gathers its own; else it is the batch
    of the step. `equal`: whether all clients take the same number of steps, so that none of them waits for others;
    where these numbers follow from data, blocks in which they are equal by chance are recorded as all others.
    """

    trainer: LocalTrainer
    gathers: bool
    equal: bool

    @property
    def form(self) -> tuple[bool, bool]:
        return self.gathers, self.equal

    def begin(self, inputs: Any) -> Any:
        """What is before the first local step."""
        (public, client, steps, _), trainer = inputs, self.trainer
        k = torch.zeros((), dtype=torch.int64, device=trainer.device)
        return contiguous(trainer.begin_block(public, client, steps)), trainer.no_losses(steps), k

    def step(self, inputs: Any, local: Any) -> Any:
        """A local step. Clients that have finished keep what they have."""
        (public, client, steps, source), (before, loss_sum, k) = inputs, local
        batch = source
        if self.gathers:
            assert self.trainer.columns is not None
            batch = source.of_step(k).batches(self.trainer.columns)
        done = steps.to(torch.float64).reciprocal() * k  # as torch divides a number by a tensor, and not as k / steps
        after, loss = self.trainer.block_step(public)(client, before, batch, done)
        if not self.equal:
            after, loss = select(steps > k, (after, loss.to(loss_sum)), (before, loss_sum.new_zeros(())))
        return after, loss_sum + loss.to(loss_sum), k + 1

    def finish(self, inputs: Any, local: Any) -> tuple[Any, Any, tuple[Tensor, ...]]:
        """(the decoded messages, the new client states, what `LocalTrainer.of_visit` gives)."""
        (public, client, steps, _), (after, loss_sum, _) = inputs, local
        return *self.trainer.finish_block(public, client, after), self.trainer.of_visit(loss_sum, steps)


def leaf_gradients(trainer: LocalTrainer, leaves: dict[str, Tensor], batch: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
    """(gradient of each leaf, what is kept of the loss) for one client. A tensor that the loss does not use has the
    gradient 0."""
    with torch.enable_grad():
        mean, kept = trainer.loss(leaves, batch)
        gradients = torch.autograd.grad(mean, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return gradients, kept.detach()


class Gradient(torch.autograd.Function):
    """(gradient (P,), what is kept of the loss) at a point (P,) on a batch: by `forward` for one client, by `apply`
    under vmap for a block.

    The clients of a block are independent, so the gradient of the sum of their losses has the gradient of each client
    in its row. Therefore vmap runs only the forward pass, and plain autograd the backward pass. (`torch.func.grad`
    inside vmap gives the same numbers, but its first call loads torch's compiler: with torch 2.13, 76 MiB and 1.3 s
    of a processor in every worker.)
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(
        point: Tensor, trainer: LocalTrainer, layout: Layout, names: tuple[str, ...], *columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        if trainer.chain is not None:
            return trainer.chain.gradient(point, dict(zip(names, columns, strict=True)))
        batch = dict(zip(names, columns, strict=True))
        if trainer.precision is None:
            gradients, loss = trainer.gradients_of(layout.names, Tree(point.detach(), layout).views(), batch)
            return torch.cat([gradient.reshape(-1) for gradient in gradients]), loss
        with torch.enable_grad():
            leaf = point.detach().requires_grad_()
            mean, kept = trainer.loss_at(Tree(leaf, layout), batch)
            (gradient,) = torch.autograd.grad(mean, leaf)
        return gradient, kept.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved, because no gradient flows through a gradient."""

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
            means, kept = vmap(lambda flat, batch: trainer.loss_at(Tree(flat, layout), batch))(
                leaf, dict(zip(names, others, strict=True))
            )
            (gradients,) = torch.autograd.grad(means.sum(), leaf)
        return (gradients, kept.detach()), (0, 0)


def contiguous(state: Any) -> Any:
    """The state with every client's numbers in memory of their own. What is the same for all clients of a block, as the
    public state where they begin, comes as one client's numbers that are read by all. A device adds numbers up in an
    order that depends on this, so that the first step would have other bits than later ones with the same numbers."""
    return pytree.tree_map(lambda leaf: leaf.contiguous(), state)


def select(active: Tensor, new: Any, old: Any) -> Any:
    """For every leaf (c, …): the entries of `new` for active clients (c,), those of `old` for the others."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(active.to(a.device).view(-1, *[1] * (a.ndim - 1)), a, b)

    return pytree.tree_map(pick, new, old)
