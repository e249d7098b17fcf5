"""Proves that other kernels compute what torch's kernels compute, on the data of a run, before the run uses them.

What is compared:

- losses and gradients, on the first, second and last batches of two clients;
- the reports of evaluations, on test rows;
- two steps of descent, where the kernels do them in one call;
- of compiled kernels, the batches that are drawn and sums of messages, to the bit, and what methods orthogonalise.

At which models: the initial one, one near it, and a random one, since a model whose units are all dead has no gradient
to compare. With which batches: a client alone without padding, as it trains, and a block with padding, where the run
can have any. Batches of large models are cut; a chain, which chooses its way by the number of examples, is compared on
a whole one, too.

With what: plain autograd in float64 on the module that the user wrote, see `as_written`, within the rounding error of
torch's own float32 kernels, see `agreement`. A deep network meets a kink of ReLU by chance at many models, with torch's
kernels as well. So it suffices that kernels agree at a model or at one of some models beside it: an error of theirs
would be there at all of them. Where they agree at none, the changes that perturbed weights cause are allowed.

All of this happens before round 1, and takes a fraction of a second for a small network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ...algorithms.contract import Algorithm
from ...algorithms.parts.orthogonal import FASTER, How, Part, newton_schulz_plainly
from ...algorithms.tree import Layout, Tree
from ...workloads import counted
from ...workloads.client_index import ClientIndex
from ..clients.batches import Stream, stream
from ..clients.local_training import Gradient, LocalTrainer, unpadded
from ..clients.modules import evaluating
from ..clients.worker import Data
from ..cohorts import sampling
from ..errors import RAISED_BY_USERS, type_and_first_line
from ..kernels.agreement import Rounding, agrees, equal, excess, largest_entry
from ..kernels.contract import Kernels, RowInputs
from ..kernels.library import NoKernels, library
from ..kernels.operators import AT_ONCE, add_up, iterated, matrices_of
from ..kernels.torchs import Torch
from ..run_spec import RunSpec
from .as_written import Forms, may_be_ragged, padded_to

PERTURBATIONS, PERTURBATION_SIZE = 8, 2.0**-22
"""The number of perturbed models at which the reference is computed if kernels disagree, and their relative size."""
COMPARED_NUMBERS = 1 << 23
"""The number of examples that are compared, times the number of parameters, is at most this number."""
FEWEST_EXAMPLES, FEWEST_FOR_A_CHAIN = 4, 16
"""At least this many examples are compared, if the batch has them. A chain computes convolutions with the examples in
the places of a vector, of which there are up to 16. In deep networks more examples have more kinks."""
MOVED_MODELS, MOVE_SIZE = 6, 1e-3
"""The number of models beside one at which kernels differ, and their relative distance from it."""
BIAS = 2e-3
"""The relative error of the length of a random matrix after Newton-Schulz iterations that is allowed. With products in
bfloat16 it was at most 2e-4."""
SUMMED_ENTRIES = 5_003
"""The number of entries whose sums are compared. It is odd, so that the last vector of the processor is not full."""

Batch = dict[str, Tensor]
Gradients = tuple[Tensor, Tensor]
"""(gradient (P,), loss ()) of a batch."""


class Disagreement(Exception):
    """The kernels must not be used. The message says why.

    `torch_fails`: whether the reason is that torch's own kernels fail on the same data.
    """

    def __init__(self, reason: str, torch_fails: bool = False) -> None:
        super().__init__(reason)
        self.torch_fails = torch_fails


class Difference(Disagreement):
    """Numbers differ by more than rounding allows."""


class ProofData(NamedTuple):
    """The data of a run: columns (n, …) of all training rows and of all test rows, as numpy arrays or tensors. Without
    test rows, reports are not compared."""

    train: Any
    client_index: ClientIndex
    test: Any = None


def kernel_identity(kernels: Kernels) -> str:
    """The library of compiled kernels, torch version and instruction set that a proof of these kernels holds for."""
    file = Path(library()._name).name if kernels.compiled else "torch"
    return f"{file} {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


def prove_here(run_spec: RunSpec, data: Data) -> None:
    """Raise NoKernels if the run uses other kernels that do not compute what torch computes on this machine.

    The proof is repeated only if this machine has another library, torch version or instruction set than the driver.
    """
    kernels = run_spec.kernels
    if kernels.needs_proof and run_spec.proven_kernels != kernel_identity(kernels):
        try:
            blocks = run_spec.execution_plan is None or run_spec.execution_plan.block > 1
            prove(run_spec, ProofData(data.train, data.client_index, data.test), kernels, blocks)
        except Disagreement as error:
            raise NoKernels(f"{kernels} kernels do not compute here what torch's compute: {error}") from error


def prove(run_spec: RunSpec, given: ProofData, kernels: Kernels, blocks: bool = True) -> None:
    """Raise Disagreement unless the kernels compute what torch computes on this run's data. blocks:
    whether the run may train clients in blocks under vmap."""
    threads = torch.get_num_threads()
    torch.set_num_threads(run_spec.experiment.engine.threads)
    try:
        with torch.no_grad():
            Proof(run_spec, given, kernels, blocks).run()
    except NoKernels as error:
        raise Disagreement(str(error)) from error
    finally:
        torch.set_num_threads(threads)


class Proof:
    """All comparisons for one kind of kernels.

    `torchs`, `own`: trainers with torch's kernels and with the kernels. `wide`: torch in float64. `blocks`: whether
    blocks are compared.
    """

    def __init__(self, run_spec: RunSpec, given: ProofData, kernels: Kernels, blocks: bool = True) -> None:
        self.run_spec, self.given, self.kernels = run_spec, given, kernels
        self.blocks = blocks and run_spec.experiment.engine.vectorise
        self.x = run_spec.initial_model()
        method = run_spec.method()
        self.torchs = self.trainer(method, Torch())
        self.wide = Forms(run_spec, torch.float64)
        self.own = self.trainer(method, kernels)

    def trainer(self, method: Algorithm, kernels: Kernels) -> LocalTrainer:
        """A trainer of the run's clients."""
        spec = self.run_spec
        return LocalTrainer(method, spec.workload, self.x, kernels, spec.precision, frozen=spec.frozen)

    def run(self) -> None:
        if self.kernels.compiled:
            self.streams()
            check_sums(self.x.flat.numel())
        batches = self.batches()
        for name, point, pair in zip(("initial", "perturbed", "random"), self.points(), batches, strict=True):
            self.gradients(f"at the {name} model", point, pair)
        self.whole_batch()
        self.reports()
        for number, pair in enumerate(batches):
            if number == 0 or any(map(is_padded, pair)):
                self.descent(next(self.points()), pair)
        if self.kernels.compiled:
            self.orthogonalised(batches[0][0])

    # --- what is compared -----------------------------------------------------------------------------------------
    def streams(self) -> None:
        """Compare the batches of some clients, among them those with the fewest and the most rows, on first and later
        visits."""
        client_index, seed, local = (
            self.given.client_index,
            self.run_spec.experiment.seed,
            self.run_spec.experiment.federation.local,
        )
        sizes = client_index.sizes
        some = np.unique([*self.clients(), int(sizes.argmin()), int(sizes.argmax())])
        for visits in (np.zeros(len(some), np.int64), np.arange(1, len(some) + 1)):
            expected = stream(client_index, some, visits, local, seed)
            found = stream(client_index, some, visits, local, seed, native=True)
            for name, a, b in zip(expected._fields, expected, found, strict=True):
                if not equal(a, b):
                    raise Disagreement(f"the {name} of the batches of clients {some.tolist()} are not numpy's")

    def clients(self) -> np.ndarray:
        """(2,) two clients of the cohort of round 1; in a cohort of one client, that client twice."""
        plan = self.run_spec.experiment.federation
        sampled = sampling.sample(self.run_spec.experiment.seed, 1, plan.clients, plan.cohort)
        return sampled[[0, -1]]

    def batches(self) -> list[tuple[Batch, Batch]]:
        """Three pairs of batches of two clients: the first batches, the second ones, and the last ones.

        The last batch of a client is shorter if the batch size does not divide its rows. If none of these batches is
        padded, although others of the run are, the second one of the last pair is cut and padded.
        """
        pairs = []
        for step in (lambda last: 0, lambda last: min(1, last), lambda last: last):
            steps = [step(int(self.drawn.steps[client]) - 1) for client in range(2)]
            pairs.append((self.batch(0, steps[0], self.fewer), self.batch(1, steps[1], self.fewer)))
        ragged = self.blocks and may_be_ragged(self.given.client_index, self.run_spec.experiment.federation.local.batch)
        if ragged and not any(is_padded(batch) for pair in pairs for batch in pair):
            pairs[-1] = with_padding(pairs[-1])
        return pairs

    @property
    def fewer(self) -> int:
        """The number of examples to which batches are cut."""
        fewest = FEWEST_EXAMPLES if self.own.chain is None else FEWEST_FOR_A_CHAIN
        return max(fewest, COMPARED_NUMBERS // max(self.x.flat.numel(), 1))

    @functools.cached_property
    def drawn(self) -> Stream:
        """The batches of the two clients on their first visit."""
        experiment, visits = self.run_spec.experiment, np.zeros(2, np.int64)
        return stream(self.given.client_index, self.clients(), visits, experiment.federation.local, experiment.seed)

    def batch(self, client: int, step: int, most: int | None = None) -> Batch:
        """A batch of one of the two clients, with its padding. most: the number of its examples that are kept."""
        drawn = self.drawn
        rows = drawn.rows[client, step][:most].numpy()
        batch = {name: rows_of(column, rows) for name, column in self.given.train.items()}
        batch["key"] = drawn.keys[client, step]
        if drawn.weight is not None:
            weight = drawn.weight[client, step]
            if most is not None and most < len(weight):
                weight = weight[:most] / weight[:most].sum()
            batch["weight"] = weight.to(self.x.flat.dtype)
        return batch

    def points(self) -> Iterator[Tensor]:
        """Three models (P,): the initial one, one near it, and a random one with the usual variances before ReLU."""
        draw = counted.generator(self.run_spec.experiment.seed, "proof")
        near, drawn = [], []
        for name, value in self.x.items():
            xi = torch.randn(2, *value.shape, generator=draw, dtype=value.dtype)
            fan = max(value[0].numel() if value.ndim else 1, 1)
            spread = 0.1 if value.ndim < 2 else (2 / fan) ** 0.5
            is_buffer = name in self.run_spec.buffers  # not changed: a variance must not be negative
            near.append(value if is_buffer else value + 0.1 * max(float(value.square().mean() ** 0.5), spread) * xi[0])
            drawn.append(value if is_buffer else spread * xi[1])
        yield self.x.flat
        for values in (near, drawn):
            yield torch.cat([value.flatten() for value in values])

    # --- losses and gradients -------------------------------------------------------------------------------------
    def gradients(self, where: str, point: Tensor, pair: tuple[Batch, Batch]) -> None:
        """Compare the gradients and losses of each client alone, and of both clients as a block."""
        blocks = self.blocks and self.block(point, pair) is not None
        for client, batch in enumerate(pair):
            padded = "weight" in batch
            real = without_padding(batch)

            def in_block(model: Tensor, client: int = client) -> list[Gradients]:
                found = self.block(model, pair)
                return [] if found is None else [(found[0][client], found[1][client])]

            def by_client(model: Tensor, real: Batch = real, both: bool = blocks and not padded) -> list[Gradients]:
                return [*self.alone(model, real), *(in_block(model) if both else [])]

            if blocks and padded:
                self.compare(f"in a block {where}", point, real, in_block)
            self.compare(where, point, real, by_client)

    def whole_batch(self) -> None:
        """Compare a batch that is not cut."""
        if self.own.chain is not None and self.drawn.rows.shape[-1] > self.fewer:
            _, point, _ = self.points()
            batch = without_padding(self.batch(0, 0))
            self.compare("by a whole batch", point, batch, lambda model: self.alone(model, batch))

    def alone(self, point: Tensor, batch: Batch) -> list[Gradients]:
        """Of a client alone by the kernels, in each of the ways in which a step computes it."""
        found = [self.by_own(lambda: loss_gradient(self.own, point, self.x.layout, batch))]
        views = Tree(point, self.x.layout).views()
        leaves = [self.kernels.arranged(view) for view in views]
        if self.run_spec.precision is None and any(a is not b for a, b in zip(views, leaves, strict=True)):
            found.append(self.by_own(lambda: self.in_place(leaves, batch)))
        return found

    def in_place(self, leaves: list[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """(gradient (P,), loss ()) at the tensors of a model as they are arranged in steps in place."""
        gradients, loss = self.own.gradients_of(self.x.layout.names, leaves, batch)
        return torch.cat([gradient.reshape(-1) for gradient in gradients]), loss

    def block(self, point: Tensor, pair: tuple[Batch, Batch]) -> tuple[Tensor, Tensor] | None:
        """(gradients (2, P), losses (2,)) of a block, None if torch's kernels cannot run a block either."""
        columns = {name: torch.stack([batch[name] for batch in pair]) for name in pair[0]}
        points = point.expand(2, -1)

        def one(trainer: LocalTrainer) -> Callable[..., tuple[Tensor, Tensor]]:
            return vmap(lambda flat, batch: Gradient.apply(flat, trainer, self.x.layout, tuple(batch), *batch.values()))

        try:
            return one(self.own)(points, columns)
        except RAISED_BY_USERS as error:
            try:
                one(self.torchs)(points, columns)
            except RAISED_BY_USERS:
                return None
            raise Disagreement(f"a block raises {type_and_first_line(error)}, and not by torch's kernels") from error

    def compare(self, where: str, point: Tensor, batch: Batch, by_own: Callable[[Tensor], list[Gradients]]) -> None:
        """Compare what the kernels give for a batch, `by_own` of a model (P,), with what torch's give. batch: without
        padding, although the kernels may have got it with some."""
        if not any(self.agree_at(model, batch, by_own) for model in self.beside(point)):
            self.compare_at(where, point, batch, by_own, spread=True)

    def agree_at(self, point: Tensor, batch: Batch, by_own: Callable[[Tensor], list[Gradients]]) -> bool:
        """Whether the kernels agree at a model, without the changes that perturbed weights cause."""
        try:
            self.compare_at("", point, batch, by_own, spread=False)
        except Difference:
            return False
        return True

    def beside(self, point: Tensor) -> Iterator[Tensor]:
        """A model (P,), and models (P,) beside it, which have the same running statistics."""
        yield point
        draw = counted.generator(self.run_spec.experiment.seed, "beside")
        for _ in range(MOVED_MODELS):
            factors = Tree(1 + MOVE_SIZE * torch.randn(point.shape, generator=draw, dtype=point.dtype), self.x.layout)
            for name, factor in zip(self.x.layout.names, factors.views(), strict=True):
                if name in self.run_spec.buffers:
                    factor.fill_(1)
            yield point * factors.flat

    def compare_at(
        self, where: str, point: Tensor, batch: Batch, by_own: Callable[[Tensor], list[Gradients]], spread: bool
    ) -> None:
        """`compare` at one model. Torch's kernels come first, since an error that they raise, too, is none of the
        others. spread: whether the changes that perturbed weights cause are allowed."""
        torchs = self.by_torch(lambda: loss_gradient(self.torchs, point, self.x.layout, batch))
        found = by_own(point)
        if not bool(torchs[0].isfinite().all() and torchs[1].isfinite()):
            if any(bool(own[0].isfinite().all() and own[1].isfinite()) for own in found):
                raise Disagreement(f"{where} they give numbers where torch's give none")
            return
        expected = self.by_double(lambda: self.wide.plain(point.double(), batch))

        def perturbed(factors: Tensor) -> tuple[Tensor, Tensor]:
            return self.wide.plain(point.double() * factors, batch)

        moved = Perturbed(perturbed, point)
        for which, what in enumerate(("gradient", "loss")):
            for own in found:
                kinks = (lambda which=which: moved.of(which, expected[which])) if spread else None
                self.close(f"the {what} {where}", expected[which], torchs[which], own[which], kinks)

    def close(
        self, what: str, expected: Tensor, torchs: Tensor, own: Tensor, kinks: Callable[[], Tensor] | None = None
    ) -> None:
        """Raise Difference unless a gradient (P,) of the kernels, tensor by tensor, or a loss () is close to torch's.
        expected: in float64. kinks: see `Rounding`."""
        if not expected.ndim:
            check_close(what, [expected], [own], Rounding([torchs], 1.0, kinks and (lambda: [kinks()])))
            return

        def parts(flat: Tensor) -> list[Tensor]:
            return Tree(flat, self.x.layout).views()

        # The error of a sum that cancels is as large as that of its terms, whose size the other tensors show.
        least = 0.01 * largest_entry(expected)
        tolerance = Rounding(parts(torchs), least, kinks and (lambda: parts(kinks())))
        names = [f" of {name}" for name in self.x.layout.names]
        check_close(what, parts(expected), parts(own), tolerance, names)

    def descent(self, point: Tensor, pair: tuple[Batch, Batch]) -> None:
        """Compare two steps of plain descent, which a chain does in one call: the gradients' sum and the result."""
        chain = self.own.chain
        if chain is None or any(pair[0][name].shape != pair[1][name].shape for name in pair[0]):
            return
        first = self.by_torch(lambda: loss_gradient(self.torchs, point, self.x.layout, pair[0]))[0]
        if not bool(first.isfinite().all()):
            return
        lr = 0.01 * float(point.abs().max().clamp(min=0.01) / first.abs().max().clamp(min=1e-6))
        shift = 0.5 * first.flip(0)

        def steps(gradient_of: Callable[[Tensor, Batch], Gradients], y: Tensor) -> Tensor:
            begin, total = y, torch.zeros_like(y)
            for batch in map(without_padding, pair):
                gradient, _ = gradient_of(y, batch)
                y, total = y - lr * (gradient + shift.to(y.dtype)), total + gradient
            return total + (begin - y) / lr

        expected = self.by_double(lambda: steps(self.wide.plain, point.double()))
        torchs = self.by_torch(
            lambda: steps(lambda y, batch: loss_gradient(self.torchs, y, self.x.layout, batch), point)
        )
        if not bool(torchs.isfinite().all()):
            return
        columns = {name: torch.stack([batch[name] for batch in pair]) for name in pair[0]}
        where: list[RowInputs | None] = [None]
        column = torch.cat([batch["input"] for batch in reversed(pair)])
        if chain.takes(column, point.dtype):  # steps then read the inputs where they lie
            where.append(RowInputs(column, torch.arange(len(column)).view(2, -1).flip(0)))

        def perturbed(factors: Tensor) -> tuple[Tensor]:
            return (steps(self.wide.plain, point.double() * factors),)

        moved = Perturbed(perturbed, point)
        for inputs in where:
            total = torch.zeros_like(point)
            y, _ = self.by_own(
                lambda inputs=inputs, total=total: chain.descend(point, columns, lr, shift, total, inputs)
            )
            own = total + (point - y) / lr
            self.close("the outcome of two steps", expected, torchs, own, lambda: moved.of(0, expected))

    # --- evaluations ----------------------------------------------------------------------------------------------
    def reports(self) -> None:
        """Compare what the workload reports of test rows. Columns of whole numbers, such as hits, are left out: they
        jump at ties, and follow from what the other columns show."""
        if self.given.test is None:
            return
        rows = np.arange(min(self.fewer, len(next(iter(self.given.test.values())))))
        batch = {name: rows_of(column, rows) for name, column in self.given.test.items()}
        workload = self.run_spec.workload

        def report(point: Tensor, own: bool = False) -> dict[str, Tensor]:
            with self.kernels.around_losses() if own else nullcontext(), evaluating():
                frozen = (self.wide.trainer if point.dtype == torch.float64 else self.own).frozen
                return workload.report({**dict(Tree(point, self.x.layout).items()), **frozen}, batch)

        for point in self.points():
            try:
                torchs = report(point)
            except RAISED_BY_USERS:
                return  # the evaluation itself will say so
            expected = self.by_double(lambda point=point: report(point.double()))
            own = self.by_own(lambda point=point: report(point, own=True))
            for name, column in expected.items():
                counts = not column.is_floating_point() or torch.equal(column, column.round())
                if counts or not bool(torchs[name].isfinite().all()):
                    continue
                check_close(f"{name} in an evaluation", [column], [own[name]], Rounding([torchs[name]], 1.0))

    # --- Newton-Schulz --------------------------------------------------------------------------------------------
    def orthogonalised(self, batch: Batch) -> None:
        """Compare Newton-Schulz iterations of the matrices that the method orthogonalises, and of random ones."""
        rounds = {1, self.run_spec.experiment.federation.rounds} if self.run_spec.method_has_schedule else {1}
        asked_for = AskedFor()
        for round in rounds:
            self.by_torch(lambda round=round: self.trial(round, batch, asked_for))
        draw = counted.generator(self.run_spec.experiment.seed, "proof of matrices")
        for (shape, how), m in asked_for.matrices.items():
            drawn = torch.randn(shape, generator=draw).to(m.dtype)
            self.compare_parts(how, m, None, matrices_of(shape))
            self.compare_parts(how, drawn, None, matrices_of(shape))
            self.compare_length(how, drawn)
        for (parts, how), (y, v) in asked_for.steps.items():
            self.compare_parts(how, v, y, parts)

    def compare_parts(self, how: How, v: Tensor, y: Tensor | None, parts: tuple[Part, ...]) -> None:
        """Compare what the parts of y become, see `orthogonal.Part`; without y, of zeros. Where bfloat16 is asked for,
        they are compared in float32 as well: torch's errors in bfloat16 may be so large that they show nothing."""
        scheme, iterations, asked = how
        expected = self.by_double(lambda: by_parts(v.double(), y, parts, (scheme, iterations, None)))
        for precision in {None, asked}:
            own = self.by_own(lambda precision=precision: iterated(v, y, parts, (scheme, iterations, precision)))
            torchs = self.by_torch(lambda precision=precision: by_parts(v, y, parts, (scheme, iterations, precision)))
            if own is None or not torchs.isfinite().all():
                continue
            names = [f" of {[part.rows, part.cols]}" for part in parts]
            cut = [slice(part.start, part.start + max(part.rows, 1) * part.cols) for part in parts]
            plain, fast, other = ([found.flatten()[where] for where in cut] for found in (expected, own, torchs))
            check_close("Newton-Schulz", plain, fast, Rounding(other), names)

    def compare_length(self, how: How, m: Tensor) -> None:
        """Compare the length of a random matrix's result along torch's in float64. In bfloat16 entries have errors of
        some hundredths, which would hide that all are too large by one hundredth."""
        own = self.by_own(lambda: iterated(m, None, matrices_of(m.shape), how))
        if own is None:
            return
        expected = newton_schulz_plainly(m.double(), *how[:2])
        share = float(((own.double() - expected) * expected).sum() / expected.square().sum())
        if not abs(share) <= BIAS:
            raise Disagreement(f"Newton-Schulz of {list(m.shape)} is too long by {share:.1e} of its length")

    def trial(self, round: int, batch: Batch, asked_for: AskedFor) -> None:
        """One step of a client with torch's kernels. `asked_for`: what other kernels are asked for."""
        method = self.run_spec.method(round)
        trainer = self.trainer(method, Torch())
        public = method.unpack(method.broadcast(method.server_init(self.x)))
        token = FASTER.set(asked_for)
        try:
            trainer.train_client(public, method.client_init(public), 1, OneBatch(batch))
        finally:
            FASTER.reset(token)

    # --- who fails ------------------------------------------------------------------------------------------------
    def by_torch(self, f: Callable[[], Any]) -> Any:
        try:
            return f()
        except RAISED_BY_USERS as error:
            raise Disagreement(f"torch's own kernels raise {type_and_first_line(error)}", torch_fails=True) from error

    def by_double(self, f: Callable[[], Any]) -> Any:
        try:
            return f()
        except RAISED_BY_USERS as error:
            raise Disagreement(
                f"there is nothing to compare with: float64 raises {type_and_first_line(error)}"
            ) from error

    def by_own(self, f: Callable[[], Any]) -> Any:
        try:
            return f()
        except RAISED_BY_USERS as error:
            raise Disagreement(f"they raise {type_and_first_line(error)}, and torch's do not") from error


class AskedFor:
    """The matrices and the steps that kernels for Newton-Schulz iterations are asked for (`orthogonal.Faster`)."""

    def __init__(self) -> None:
        self.matrices: dict[tuple[torch.Size, How], Tensor] = {}
        self.steps: dict[tuple[tuple[Part, ...], How], tuple[Tensor, Tensor]] = {}

    def newton_schulz(self, m: Tensor, how: How) -> None:
        self.matrices.setdefault((m.shape, how), m.detach().clone())

    def step(self, y: Tensor, v: Tensor, parts: tuple[Part, ...], how: How) -> None:
        self.steps.setdefault((parts, how), (y.detach().clone(), v.detach().clone()))


def by_parts(v: Tensor, y: Tensor | None, parts: tuple[Part, ...], how: How) -> Tensor:
    """What the parts of y become, with torch's kernels, in the dtype of v."""
    found, flat = torch.zeros_like(v).flatten(), v.flatten()
    for start, rows, cols, keep, share in parts:
        where = slice(start, start + max(rows, 1) * cols)
        o = newton_schulz_plainly(flat[where].view(rows, cols), *how).flatten() if rows else flat[where]
        found[where] = share * o if y is None else keep * y[where].to(v.dtype) + share * o
    return found.view(v.shape)


class OneBatch:
    """A client's only batch, see `local_training.ClientBatches`."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __call__(self, steps: slice, without: str | None = None) -> Batch:
        return {name: column.unsqueeze(0) for name, column in self.batch.items() if name != without}

    def rows_of(self, name: str, steps: slice) -> tuple[Tensor, Tensor]:
        return self.batch[name], torch.arange(len(self.batch[name])).unsqueeze(0)

    def examples(self, step: int) -> int | None:
        """Not known: it follows from the weights."""

    def beat(self) -> None:
        """No worker watches this step."""


class Perturbed:
    """The reference at perturbed weights, computed once for loss and gradient."""

    def __init__(self, at: Callable[[Tensor], tuple[Tensor, ...]], point: Tensor) -> None:
        self.at, self.point = at, point
        self.found: list[tuple[Tensor, ...]] = []

    def of(self, which: int, expected: Tensor) -> Tensor:
        """The largest change of each entry of the gradient (`which` = 0) or of the loss (1)."""
        if not self.found:
            draw = counted.generator(0, "shakes")
            for _ in range(PERTURBATIONS):
                xi = torch.rand(self.point.shape, generator=draw, dtype=torch.float64)
                self.found.append(self.at(1 + PERTURBATION_SIZE * (2 * xi - 1)))
        return torch.stack([(values[which] - expected).abs() for values in self.found]).amax(0)


def rows_of(column: Any, rows: np.ndarray) -> Tensor:
    """Some rows of a column as a tensor."""
    if isinstance(column, Tensor):
        return column[torch.from_numpy(rows)]
    return torch.from_numpy(np.ascontiguousarray(column[rows]))


def without_padding(batch: Batch) -> Batch:
    """The batch as a client alone trains on it."""
    return dict(unpadded({name: column.unsqueeze(0) for name, column in batch.items()}, 0))


def is_padded(batch: Batch) -> bool:
    """Whether a batch has padded examples."""
    return "weight" in batch and not bool(batch["weight"].all())


def with_padding(pair: tuple[Batch, Batch]) -> tuple[Batch, Batch]:
    """The pair with a second batch of about half of its examples, and padding in the place of the others."""
    whole, other = map(without_padding, pair)
    width = max(len(next(iter(batch.values()))) for batch in (whole, other))
    kept = max(1, width // 2)
    shorter = {name: column if name == "key" else column[:kept] for name, column in other.items()}
    return tuple(  # pyright: ignore[reportReturnType]
        {**padded, "weight": padded["weight"].float()} for padded in (padded_to(width, b) for b in (whole, shorter))
    )


def loss_gradient(trainer: LocalTrainer, point: Tensor, layout: Layout, batch: Batch) -> tuple[Tensor, Tensor]:
    """(gradient (P,), loss ()) of one client's batch."""
    return Gradient.forward(point, trainer, layout, tuple(batch), *batch.values())


def check_close(
    what: str, plain: Sequence[Tensor], fast: Sequence[Tensor], tolerance: Rounding, names: Sequence[str] = ("",)
) -> None:
    """Raise Difference unless tensors of the kernels agree with plain ones. names: of the tensors, behind `what`."""
    if found := excess(plain, fast, tolerance):
        raise Difference(
            f"{what}{names[found.place]} is {found.off:.1e} off torch's, of entries up to "
            f"{largest_entry(plain[found.place]):.1e}, where rounding allows {found.allowed:.1e}"
        )


def check_sums(size: int) -> None:
    """Raise Disagreement unless sums of messages equal torch's to the bit. `size`: the length of a message."""
    draw = counted.generator(size, "proof of sums")
    parts = list(torch.randn(AT_ONCE, min(size, SUMMED_ENTRIES), generator=draw))
    for count in range(1, AT_ONCE + 1):
        for more in (False, True):
            totals = [torch.ones(len(parts[0]), dtype=torch.float64) / 3 for _ in range(2)]
            for total, compiled in zip(totals, (False, True), strict=True):
                add_up(total, parts[:count], more, compiled)
            if not agrees(totals[:1], totals[1:]):
                raise Disagreement(f"the sum of {count} messages is not torch's")
