"""Proves that other kernels compute what torch's kernels compute, on the data of a run, before the run uses them.

What is compared:

- losses and gradients, on the first, second and last batches of two clients;
- the reports of evaluations, on test rows;
- two steps of descent, where the kernels do them in one call;
- of compiled kernels, sums of messages, to the bit, and what methods orthogonalise.

At which models: the initial one, one near it, and a random one, since a model whose units are all dead has no gradient
to compare. With which batches: a client alone without padding, as it trains, and a block with padding, where the run
can have any. Batches of large models are cut; a chain, which chooses its way by the number of examples, is compared on
a whole one, too.

Where: on the run's device. With what: plain autograd in float64, on the processor, on the module that the user wrote,
see `as_written`, within the rounding error of torch's own float32 kernels on the device, see `agreement`. A deep
network meets a kink of ReLU by chance at many models, with torch's kernels as well. So it suffices that kernels agree
at a model or at one of some models beside it: an error of theirs would be there at all of them. Where they agree at
none, the changes that perturbed weights cause are allowed.

All of this happens before round 1, and takes a fraction of a second for a small network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm
from ...algorithms.parts.orthogonal import How, Part, matrices_of, newton_schulz_plainly
from ...algorithms.tree import Tree
from ...workloads import counted
from ...workloads.workload import Split
from ..clients.batches import Stream, only_batch, stream
from ..clients.local_training import Gradient, LocalTrainer, unpadded
from ..clients.modules import evaluating
from ..clients.own_models import report_of_outputs
from ..clients.worker import Data
from ..cohorts.samplers import sample
from ..errors import RAISED_BY_USERS, type_and_first_line
from ..kernels.agreement import Disagreement, Excess, Rounding, agrees, exceeding
from ..kernels.contract import Kernels, LossInOneCall
from ..kernels.library import NoKernels, library
from ..kernels.operators import AT_ONCE, add_up, iterated, orthogonalised_by
from ..kernels.torchs import Torch
from ..kernels.vectorised import vectorised
from ..method_form.state_spec import some_view
from ..run_spec import RunSpec
from .as_written import Forms, Gradients, changes_beside, exceeding_parts, may_be_ragged, padded_to

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


def kernel_identity(kernels: Kernels, device: torch.device) -> str:
    """The library of compiled kernels, torch version and instruction set that a proof of these kernels holds for, and
    the GPU if the run has one."""
    file = Path(library()._name).name if kernels.compiled else "torch"
    gpu = f" {torch.cuda.get_device_properties(device).name}" if device.type == "cuda" else ""
    return f"{file} {torch.__version__} {torch.backends.cpu.get_cpu_capability()}{gpu}"


def prove_here(run_spec: RunSpec, data: Data) -> None:
    """Raise NoKernels if the run uses other kernels that do not compute what torch computes on this machine.

    The proof is repeated only if this machine has another library, torch version, instruction set or GPU than the
    driver.
    """
    kernels = run_spec.kernels
    if kernels.needs_proof and run_spec.proven_kernels != kernel_identity(kernels, run_spec.device):
        try:
            blocks = run_spec.execution_plan is None or run_spec.execution_plan.block > 1
            prove(run_spec, data, kernels, blocks)
        except Disagreement as error:
            raise NoKernels(f"{kernels} kernels do not compute here what torch's compute: {error}") from error


def prove(run_spec: RunSpec, given: Split | Data, kernels: Kernels, blocks: bool = True) -> None:
    """Raise Disagreement unless the kernels compute what torch computes on this run's data, `given`. Without test rows,
    reports are not compared. blocks: whether the run may train clients in blocks under vmap."""
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
    """All comparisons for some kernels.

    `torchs`, `own`: trainers with torch's kernels and with the kernels, on the run's device. `wide`: torch in float64,
    on the processor. `blocks`: whether blocks are compared. Models, batches and what is compared are on the processor.
    """

    def __init__(self, run_spec: RunSpec, given: Split | Data, kernels: Kernels, blocks: bool = True) -> None:
        self.run_spec, self.given, self.kernels = run_spec, given, kernels
        self.blocks = blocks and run_spec.experiment.engine.vectorise
        self.x, self.device = run_spec.initial_model(), run_spec.device
        method = run_spec.method()
        self.torchs = self.trainer(method, Torch())
        self.wide = Forms(run_spec, torch.float64)
        self.own = self.trainer(method, kernels)

    def trainer(self, method: Algorithm, kernels: Kernels) -> LocalTrainer:
        """A trainer of the run's clients."""
        spec = self.run_spec
        x = self.x.to(self.device)
        return LocalTrainer(method, spec.workload, x, kernels, spec.precision, frozen=spec.frozen)

    def run(self) -> None:
        if self.kernels.compiled:
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
    def clients(self) -> np.ndarray:
        """(2,) two clients of the cohort of round 1; in a cohort of one client, that client twice."""
        plan = self.run_spec.experiment.federation
        sampled = sample(self.run_spec.experiment.seed, 1, plan.clients, plan.cohort)
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
        examples = self.run_spec.experiment.federation.local.examples
        ragged = self.blocks and may_be_ragged(self.given.client_index, examples)
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
            fan = max(value.numel() // max(len(value), 1) if value.ndim else 1, 1)
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
        """Of a client alone by the kernels."""
        return [self.by_own(lambda: self.gradient(self.own, point, batch))]

    def gradient(self, trainer: LocalTrainer, point: Tensor, batch: Batch) -> Gradients:
        """Of one client at a model (P,), on the device."""
        given = self.on_device(batch)
        found = Gradient.forward(self.on_device(point), trainer, self.x.layout, tuple(given), *given.values())
        return to_processor(found)

    def on_device(self, given: Any) -> Any:
        """A tensor, or a batch, on the run's device."""
        return pytree.tree_map(lambda leaf: leaf.to(self.device), given)

    def block(self, point: Tensor, pair: tuple[Batch, Batch]) -> tuple[Tensor, Tensor] | None:
        """(gradients (2, P), losses (2,)) of a block, None if torch's kernels cannot run a block either."""
        columns = self.on_device({name: torch.stack([batch[name] for batch in pair]) for name in pair[0]})
        points = self.on_device(point).expand(2, -1)

        def one(trainer: LocalTrainer) -> Callable[..., tuple[Tensor, Tensor]]:
            return vectorised(
                lambda flat, batch: Gradient.apply(flat, trainer, self.x.layout, tuple(batch), *batch.values())
            )

        try:
            return to_processor(one(self.own)(points, columns))
        except RAISED_BY_USERS as error:
            try:
                one(self.torchs)(points, columns)
            except RAISED_BY_USERS:
                return None
            raise Disagreement(f"a block raises {type_and_first_line(error)}, and not by torch's kernels") from error

    def compare(self, where: str, point: Tensor, batch: Batch, by_own: Callable[[Tensor], list[Gradients]]) -> None:
        """Compare what the kernels give for a batch, `by_own` of a model (P,), with what torch's give. batch: without
        padding, although the kernels may have got it with some."""
        if any(not self.difference(where, model, batch, by_own) for model in self.beside(point)):
            return
        if told := self.difference(where, point, batch, by_own, spread=True):
            raise Disagreement(told)

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

    def difference(
        self,
        where: str,
        point: Tensor,
        batch: Batch,
        by_own: Callable[[Tensor], list[Gradients]],
        spread: bool = False,
    ) -> str:
        """How the kernels differ at one model, "" if they do not. Torch's kernels come first, since an error that they
        raise, too, is none of the others. spread: whether the changes that perturbed weights cause are allowed."""
        torchs = self.by_torch(lambda: self.gradient(self.torchs, point, batch))
        found = by_own(point)
        if not bool(torchs[0].isfinite().all() and torchs[1].isfinite()):
            if any(bool(own[0].isfinite().all() and own[1].isfinite()) for own in found):
                raise Disagreement(f"{where} they give numbers where torch's give none")
            return ""
        expected = self.by_double(lambda: self.wide.plain(point.double(), batch))
        changes = changes_beside(point, expected, lambda p: self.wide.plain(p, batch))
        for which, what in enumerate(("gradient", "loss")):
            kinks = (lambda which=which: changes()[which]) if spread else None
            for own in found:
                if told := self.off(f"the {what} {where}", expected[which], torchs[which], own[which], kinks):
                    return told
        return ""

    def off(
        self, what: str, expected: Tensor, torchs: Tensor, own: Tensor, kinks: Callable[[], Tensor] | None = None
    ) -> str:
        """How a gradient (P,) of the kernels, or a loss (), differs by more than rounding allows, "" if it does not.
        expected: in float64. kinks: see `Rounding`."""
        found = next(exceeding_parts(self.x.layout, expected, own, torchs, kinks), None)
        return "" if found is None else sentence(f"{what}{' of ' if found[0] else ''}{found[0]}", found[1])

    def descent(self, point: Tensor, pair: tuple[Batch, Batch]) -> None:
        """Compare two steps of descent, plain and with a pull towards a model, which a chain does in one call: the
        gradients' sum and the result."""
        chain = self.own.chain
        if chain is None or any(pair[0][name].shape != pair[1][name].shape for name in pair[0]):
            return
        first = self.by_torch(lambda: self.gradient(self.torchs, point, pair[0]))[0]
        if not bool(first.isfinite().all()):
            return
        lr = 0.01 * float(point.abs().max().clamp(min=0.01) / first.abs().max().clamp(min=1e-6))
        shift = 0.5 * first.flip(0)
        for lam in (0.0, 0.1 / lr):
            self.steps_at_once(chain, point, pair, lr, shift, lam)

    def steps_at_once(
        self, chain: LossInOneCall, point: Tensor, pair: tuple[Batch, Batch], lr: float, shift: Tensor, lam: float
    ) -> None:
        """Compare y <- y - lr (g + shift + lam (y - centre)) on two batches, for a centre near the model."""
        centre = 0.9 * point

        def steps(gradient_of: Callable[[Tensor, Batch], Gradients], y: Tensor) -> Tensor:
            begin, total = y, torch.zeros_like(y)
            for batch in map(without_padding, pair):
                gradient, _ = gradient_of(y, batch)
                pull = lam * (y - centre.to(y.dtype)) if lam else 0.0
                y, total = y - lr * (gradient + shift.to(y.dtype) + pull), total + gradient
            return total + (begin - y) / lr

        expected = self.by_double(lambda: steps(self.wide.plain, point.double()))
        torchs = self.by_torch(lambda: steps(functools.partial(self.gradient, self.torchs), point))
        if not bool(torchs.isfinite().all()):
            return
        columns = self.on_device({name: torch.stack([batch[name] for batch in pair]) for name in pair[0]})
        changes = changes_beside(point, [expected], lambda p: [steps(self.wide.plain, p)])
        begin, constant = self.on_device(point), self.on_device(shift)
        total = torch.zeros_like(begin)
        pull = (lam, self.on_device(centre)) if lam else None
        y, _ = self.by_own(lambda: chain.descend(begin, columns, lr, constant, total, pull))
        own = to_processor([total + (begin - y) / lr])[0]
        if told := self.off("the outcome of two steps", expected, torchs, own, lambda: changes()[0]):
            raise Disagreement(told)

    # --- evaluations ----------------------------------------------------------------------------------------------
    def reports(self) -> None:
        """Compare what the workload reports of test rows. Columns of whole numbers, such as hits, are left out: they
        jump at ties, and follow from what the other columns show."""
        if not self.given.test:
            return
        rows = np.arange(min(self.fewer, len(next(iter(self.given.test.values())))))
        batch = {name: rows_of(column, rows) for name, column in self.given.test.items()}
        workload = self.run_spec.workload

        def report(trainer: LocalTrainer, point: Tensor, batch: Batch) -> dict[str, Tensor]:
            with trainer.kernels.around_losses(), evaluating():
                tensors = {**dict(Tree(point, self.x.layout).items()), **trainer.frozen}
                return dict(to_processor(workload.report(tensors, batch)))

        of_outputs, chain = report_of_outputs(workload, self.own.chain), self.own.chain

        def own_reports(point: Tensor, batch: Batch) -> list[dict[str, Tensor]]:
            """That of the server's model, and that of clients' own ones."""
            found = [report(self.own, point, batch)]
            return (
                found
                if of_outputs is None or chain is None
                else [*found, of_outputs(chain.outputs(point, batch), batch)]
            )

        for point in self.points():
            here, given = self.on_device(point), self.on_device(batch)
            try:
                torchs = report(self.torchs, here, given)
            except RAISED_BY_USERS:
                return  # the evaluation itself will say so
            expected = self.by_double(lambda point=point: report(self.wide.trainer, point.double(), batch))
            own = self.by_own(lambda here=here, given=given: own_reports(here, given))
            for (name, column), found in product(expected.items(), own):
                counts = not column.is_floating_point() or torch.equal(column, column.round())
                if counts or not bool(torchs[name].isfinite().all()):
                    continue
                for excess in exceeding([column], [found[name]], Rounding([torchs[name]], 1.0)):
                    raise Disagreement(sentence(f"{name} in an evaluation", excess))

    # --- Newton-Schulz --------------------------------------------------------------------------------------------
    def orthogonalised(self, batch: Batch) -> None:
        """Compare Newton-Schulz iterations of the matrices that the method orthogonalises, and of random ones."""
        rounds = {1, self.run_spec.experiment.federation.rounds} if self.run_spec.method_has_schedule else {1}
        asked: dict[Any, tuple[Tensor, Tensor | None, tuple[Part, ...], How]] = {}

        def note(v: Tensor, y: Tensor | None, parts: tuple[Part, ...], how: How) -> None:
            copy = None if y is None else y.detach().clone()
            asked.setdefault((v.shape, y is None, parts, how), (v.detach().clone(), copy, parts, how))

        for round in rounds:
            with orthogonalised_by(note):
                self.by_torch(lambda round=round: self.trial(round, batch))
        draw = counted.generator(self.run_spec.experiment.seed, "proof of matrices")
        for v, y, parts, how in asked.values():
            self.compare_parts(how, v, y, parts)
            if y is None:
                drawn = torch.randn(v.shape, generator=draw).to(v.dtype)
                self.compare_parts(how, drawn, None, parts)
                self.compare_length(how, drawn)

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
            plain, fast, other = ([each.flatten()[where] for where in cut] for each in (expected, own, torchs))
            for found in exceeding(plain, fast, Rounding(other)):
                raise Disagreement(sentence(f"Newton-Schulz{names[found.place]}", found))

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

    def trial(self, round: int, batch: Batch) -> None:
        """One step of a client with torch's kernels."""
        method = self.run_spec.method(round)
        public = method.unpack(method.broadcast(method.server_init(self.x)))
        client = method.client_init(public)
        seen = some_view(method, public, client)
        self.trainer(method, Torch()).train_client(seen, client, 1, only_batch(batch))

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


def by_parts(v: Tensor, y: Tensor | None, parts: tuple[Part, ...], how: How) -> Tensor:
    """What the parts of y become, with torch's kernels, in the dtype of v."""
    found, flat = torch.zeros_like(v).flatten(), v.flatten()
    for start, rows, cols, keep, share in parts:
        where = slice(start, start + max(rows, 1) * cols)
        o = newton_schulz_plainly(flat[where].view(rows, cols), *how).flatten() if rows else flat[where]
        found[where] = share * o if y is None else keep * y[where].to(v.dtype) + share * o
    return found.view(v.shape)


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


def to_processor(tensors: Any) -> Any:
    """The same tensors in the processor's memory."""
    return pytree.tree_map(lambda leaf: leaf.cpu(), tensors)


def sentence(what: str, found: Excess) -> str:
    """How a tensor of the kernels, `what`, differs from torch's."""
    return (
        f"{what} is {found.off:.1e} off torch's, of entries up to {found.size:.1e}, where rounding allows "
        f"{found.allowed:.1e}"
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
