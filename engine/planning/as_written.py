"""The gradients of a workload by plain autograd on the module that its user wrote.

The engine computes with a module as a function of its tensors (`workloads.stateless.Stateless`), for one client or
under vmap for a block of clients, whose shorter batches are padded. Everything that the engine computes must be what
`loss.backward()` gives for the module itself on the rows of one client. It is not where a module reads its parameters
from another place, where an operation has another gradient under vmap, or where what a row gives depends on the other
rows of its batch: on a mean over them, their order or their number. Then the padding counts.

`gradient_difference` compares one client alone, and `block_difference` a block of two clients, with batches of equal
size and, if the run can have them, with a padded one. Both take a model near the initial one, where no unit is dead and
no factor 0. Both forms are computed in float64, where rounding and a difference are some six orders of magnitude apart.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ...algorithms.tree import Layout, Tree
from ...workloads import counted
from ...workloads.client_index import ClientIndex
from ...workloads.stateless import NETWORK, Stateless
from ...workloads.workload import Batch, Params, Split, Workload
from ..clients.local_training import Gradient, LocalTrainer, shares_of
from ..clients.modules import evaluating, kept_generators
from ..errors import RAISED_BY_USERS, type_and_first_line
from ..kernels.agreement import ROUNDINGS, Excess, Rounding, agrees, equal, exceeding, largest_entry
from ..kernels.vectorised import vectorised
from ..run_spec import RunSpec

FEWEST, MOST, COMPARED_NUMBERS = 4, 64, 1 << 21
"""The number of examples in the larger batch of a block, if the batches of the run have so many: as many as that times
the number of parameters is at most COMPARED_NUMBERS, between FEWEST and MOST."""
MODELS = 3
"""Two forms differ if they do at each of so many models. At a kink of ReLU or at a tie of max pooling, which constant
inputs have, a rounding error may change a gradient; an error of a form is there at all models."""
AGREE = 2.0**-30
"""Two results in float64 are the same if they differ by at most this share of the largest entry of their tensor. It
allows a rounding error to grow by 2^22. Then a float32 result would have no right digit, and nobody could train the
model. It is two orders of magnitude below 2^-23, which is what float32 shows of any difference."""
PERTURBATIONS, PERTURBATION_SIZE = 8, 2.0**-22
"""The number of models beside one at which it is found out what a rounding error of its weights changes, and their
relative distance: float32 rounds their weights to the same numbers or to their neighbours."""

Gradients = tuple[Tensor, Tensor]
"""(gradient (P,), loss ()) of one client's batch."""


_tried: ContextVar[bool] = ContextVar("tried", default=False)


@contextmanager
def trying() -> Iterator[None]:
    """A context in which this thread tries something before the rounds."""
    token = _tried.set(True)
    try:
        yield
    finally:
        _tried.reset(token)


def under_way() -> bool:
    """Whether this thread tries something, for code that must tell these calls from those of a round."""
    return _tried.get()


class NoNumbers(Exception):
    """A gradient or a loss is infinite or NaN, so that there is nothing to compare with."""


# --- the module as it was written -------------------------------------------------------------------------------------
class OwnParameters(Stateless):
    """A module that computes with its own parameters, which get the values of the tensors that a call is given, and
    gradients by `backward`. `own`: its parameters by name. `given`: the tensors of the calls so far."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        made: dict[str, nn.Parameter] = {}
        for name, tensors, leaf in self.slots:
            if isinstance(tensors[leaf], nn.Parameter) and tensors[leaf].is_meta:  # of a network that was never filled
                tensors[leaf] = made.setdefault(name, nn.Parameter(torch.empty(0, dtype=tensors[leaf].dtype)))
        own = {name: tensors[leaf] for name, tensors, leaf in self.slots}
        self.own = {name: tensor for name, tensor in own.items() if isinstance(tensor, nn.Parameter)}
        self.slots = [slot for slot in self.slots if slot[0] not in self.own]
        self.given: dict[str, Tensor] = {}

    def __call__(self, p: Params, x: Tensor, key: Tensor | None = None, share: Tensor | None = None) -> Tensor:
        for name, parameter in self.own.items():
            if name not in self.given:
                self.given[name] = p[name]
                trained = p[name].requires_grad  # else it is a frozen tensor, which may be large and is not copied
                parameter.data, parameter.grad = p[name].detach().clone() if trained else p[name].detach(), None
                parameter.requires_grad_(trained)  # also where it is a weight that the method's server changes
            elif self.given[name] is not p[name]:
                raise ValueError(f"the loss calls a module with different tensors {name}")
        return super().__call__(p, x, key, share)


class AsWritten:
    """The workload of a run with its networks as they were written. It is a copy, of which the run uses nothing.
    frozen: the frozen tensors of the model."""

    def __init__(self, workload: Workload, frozen: Params) -> None:
        self.workload, self.frozen = copy.deepcopy(workload), frozen
        self.networks: list[OwnParameters] = []

    def _network(self, module: nn.Module) -> Stateless:
        self.networks.append(OwnParameters(module))
        return self.networks[-1]

    def gradient(self, point: Tensor, layout: Layout, batch: Batch) -> Gradients:
        """(gradient (P,), loss ()) at a model (P,), by `backward` of the mean loss of a batch without padding."""
        for network in self.networks:
            network.given.clear()
        views = zip(layout.names, Tree(point.detach(), layout).views(), strict=True)
        leaves = {name: view.clone().requires_grad_() for name, view in views}
        token = NETWORK.set(self._network)
        try:
            with torch.enable_grad():
                losses = self.workload.losses({**leaves, **self.frozen}, batch)
                shares = shares_of(self.workload, batch, losses.dtype)
                loss = losses.mean() if shares is None else (losses * shares).sum()
                if loss.requires_grad:
                    loss.backward(retain_graph=True)
        finally:
            NETWORK.reset(token)
        found = {name: dense(leaf.grad, leaf) for name, leaf in leaves.items()}
        for network in self.networks:
            self._add(found, leaves, network)
        return torch.cat([gradient.reshape(-1) for gradient in found.values()]), loss.detach()

    def report(self, point: Tensor, layout: Layout, batch: Batch) -> Batch:
        """The report of a model (P,), whose modules go to `eval()` when they have its numbers. For one call."""
        token = NETWORK.set(self._network)
        try:
            with evaluating():
                return self.workload.report({**dict(Tree(point.clone(), layout).items()), **self.frozen}, batch)
        finally:
            NETWORK.reset(token)

    def _add(self, found: dict[str, Tensor], leaves: dict[str, Tensor], network: OwnParameters) -> None:
        """Add the gradients of a network's own parameters to those of the tensors that it was given, or to those from
        which the loss had computed these."""
        names = {id(leaf): name for name, leaf in leaves.items()}
        for name, given in network.given.items():
            gradient = network.own[name].grad
            if gradient is None:
                continue
            if id(given) in names:
                found[names[id(given)]] += dense(gradient, given)
            elif given.requires_grad:
                more = torch.autograd.grad(
                    given, list(leaves.values()), dense(gradient, given), retain_graph=True, allow_unused=True
                )
                for leaf, part in zip(leaves, more, strict=True):
                    found[leaf] += dense(part, leaves[leaf])


def dense(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient as a dense tensor, zeros for None."""
    if gradient is None:
        return torch.zeros_like(like, requires_grad=False)
    return (gradient.to_dense() if gradient.layout != torch.strided else gradient).detach().clone()


# --- the forms of a gradient ------------------------------------------------------------------------------------------
class Forms:
    """The forms of a gradient of a run's workload in one dtype; models are (P,)."""

    def __init__(self, run_spec: RunSpec, dtype: torch.dtype | None = None) -> None:
        """dtype: None for that of the run."""
        x = run_spec.initial_model()
        self.x = x if dtype is None else x.to(dtype)
        self.dtype, self.layout = self.x.flat.dtype, self.x.layout
        self.trainer = LocalTrainer(run_spec.method(), run_spec.workload, self.x, frozen=run_spec.frozen)
        self.as_written: AsWritten | None = None
        with suppress(Exception):  # what a user's workload holds may not be copied
            self.as_written = AsWritten(run_spec.workload, self.trainer.frozen)

    def plain(self, point: Tensor, batch: Batch) -> Gradients:
        """By the module as it was written, on a batch without padding; by the engine's form where a loss calls the
        module in a way that a module with parameters of its own does not have."""
        if self.as_written is not None:
            try:
                return self.as_written.gradient(point.to(self.dtype), self.layout, batch)
            except RAISED_BY_USERS:
                self.as_written = None  # if the loss itself raises this, it does so below, too
        return self.alone(point, batch)

    def alone(self, point: Tensor, batch: Batch) -> Gradients:
        """By the engine for a client alone, on a batch without padding."""
        return Gradient.forward(point.to(self.dtype), self.trainer, self.layout, tuple(batch), *batch.values())

    def block(self, point: Tensor, columns: Batch) -> Gradients:
        """(gradients (c, P), losses (c,)) by the engine for a block. columns: (c, B, …)."""
        columns = {name: each.to(self.dtype) if name == "weight" else each for name, each in columns.items()}
        points = point.to(self.dtype).expand(len(columns["key"]), -1)

        def gradient(flat: Tensor, batch: Batch) -> Gradients:
            return Gradient.apply(flat, self.trainer, self.layout, tuple(batch), *batch.values())  # pyright: ignore

        return vectorised(gradient)(points, columns)


def near(run_spec: RunSpec) -> Iterator[Tensor]:
    """Models (P,) near the initial one, with its running statistics: a variance must not be negative."""
    draw = counted.generator(run_spec.experiment.seed, "as written")
    x = run_spec.initial_model()
    for _ in range(MODELS):
        parts = []
        for name, value in x.items():
            fan = max(value.numel() // max(len(value), 1) if value.ndim else 1, 1)
            least = 0.1 if value.ndim < 2 else (2 / fan) ** 0.5
            size = 0.1 * max(float(value.square().mean() ** 0.5) if value.numel() else 0.0, least)
            xi = torch.randn(value.shape, generator=draw, dtype=value.dtype)
            parts.append((value if name in run_spec.buffers else value + size * xi).flatten())
        yield torch.cat(parts)


@dataclass
class Compared:
    """A form of a gradient and the plain one, for some clients' batches. form: (forms in one dtype, model (P,)) to the
    gradients of the clients."""

    run_spec: RunSpec
    batches: Sequence[Batch]  # without padding
    form: Callable[[Forms, Tensor], list[Gradients]]

    def difference(self) -> str:
        """The largest difference, if there is one at all models near the initial one, else "". Where the loss raises an
        exception or is no number at those, as a logarithm of a parameter may, the initial model takes their place;
        there an exception is raised."""
        try:
            return self._at_all(near(self.run_spec))
        except RAISED_BY_USERS:
            with suppress(NoNumbers):
                return self._at_all([self.forms.x.flat])
            return ""

    def _at_all(self, points: Iterable[Tensor]) -> str:
        found = ""
        for point in points:
            found = self._at(point)
            if not found:
                return ""
        return found

    @functools.cached_property
    def forms(self) -> Forms:
        return Forms(self.run_spec)

    @functools.cached_property
    def wide(self) -> Forms:
        return Forms(self.run_spec, torch.float64)

    def _at(self, point: Tensor) -> str:
        try:
            expected = self._plain(self.wide, point)
            found = self.form(self.wide, point)
        except RAISED_BY_USERS:  # code that cannot compute in float64
            expected = self._plain(self.forms, point)
            found = self.form(self.forms, point)
            return self._beyond(expected, found, expected, self._changes(self.forms, expected, point))
        if not self._beyond(expected, found, expected, share=AGREE):
            return ""
        # Code may compute in float32 although it is given float64. Then both forms have the rounding errors of float32.
        torchs = [self.forms.plain(point, batch) for batch in self.batches]
        return self._beyond(expected, found, torchs, self._changes(self.wide, expected, point))

    def _plain(self, forms: Forms, point: Tensor) -> list[Gradients]:
        """The plain gradients of the clients. Raises NoNumbers unless all of them are finite."""
        found = [forms.plain(point, batch) for batch in self.batches]
        check_numbers(found)
        return found

    def _changes(self, forms: Forms, expected: list[Gradients], point: Tensor) -> Callable[[], list[Tensor]]:
        """What finds by how much nearby weights change each entry of the clients' gradients and losses."""

        def flat(gradients: Iterable[Gradients]) -> list[Tensor]:
            return [each for of_client in gradients for each in of_client]

        return changes_beside(point, flat(expected), lambda p: flat(forms.plain(p, batch) for batch in self.batches))

    def _beyond(
        self,
        expected: Sequence[Gradients],
        found: Sequence[Gradients],
        other: Sequence[Gradients],
        changes: Callable[[], list[Tensor]] | None = None,
        share: float = ROUNDINGS,
    ) -> str:
        """The largest difference that rounding does not explain, a clause; "" if there is none. other, share: see
        `Rounding`. changes: by how much rounding the weights changes the gradients and losses of all clients, one after
        another."""

        def kinks(place: int) -> Callable[[], Tensor] | None:
            found = changes
            return None if found is None else lambda: found()[place]

        differences = [
            (each.off / max(each.size, 1e-30), f"the gradient of {name}" if name else "the loss")
            for client, plain in enumerate(expected)
            for which, value in enumerate(plain)
            for name, each in exceeding_parts(
                self.forms.layout,
                *(value, found[client][which], other[client][which]),
                kinks(2 * client + which),
                share,
            )
        ]
        largest, what = max(differences, default=(0.0, ""))
        return what and f"{what} differs by {largest:.1e} of its largest entry"


def exceeding_parts(
    layout: Layout,
    expected: Tensor,
    found: Tensor,
    other: Tensor,
    kinks: Callable[[], Tensor] | None = None,
    share: float = ROUNDINGS,
) -> Iterator[tuple[str, Excess]]:
    """(name, how) for each tensor of a gradient (P,) that differs by more than rounding allows from the plain one; for
    a loss () the name is "". other, kinks, share: see `Rounding`."""

    def parts(value: Tensor) -> list[Tensor]:
        return Tree(value, layout).views() if value.ndim else [value]

    # The error of a sum that cancels is as large as that of its terms, whose size the other tensors show.
    least = 0.01 * largest_entry(expected) if expected.ndim else 1.0
    tolerance = Rounding(parts(other), least, None if kinks is None else lambda: parts(kinks()), share)
    for each in exceeding(parts(expected), parts(found), tolerance):
        yield layout.names[each.place] if expected.ndim else "", each


def changes_beside(
    point: Tensor, expected: Sequence[Tensor], at: Callable[[Tensor], Sequence[Tensor]]
) -> Callable[[], list[Tensor]]:
    """What finds, once, by how much each entry of some results changes where rounding errors change the weights. point:
    the model (P,). expected: the results there. at: the results at a model (P,) in float64."""

    @functools.cache
    def changes() -> list[Tensor]:
        draw, most = counted.generator(0, "perturbed"), [torch.zeros_like(each) for each in expected]
        for _ in range(PERTURBATIONS):
            xi = torch.rand(point.shape, generator=draw, dtype=torch.float64)
            found = at(point.double() * (1 + PERTURBATION_SIZE * (2 * xi - 1)))
            most = [torch.maximum(a, (b - c).abs()) for a, b, c in zip(most, found, expected, strict=True)]
        return most

    return changes


def check_numbers(gradients: Sequence[Gradients]) -> None:
    """Raise NoNumbers unless all gradients and losses are finite."""
    if not all(bool(each.isfinite().all()) for of_client in gradients for each in of_client):
        raise NoNumbers


# --- what is compared -------------------------------------------------------------------------------------------------
def gradient_difference(run_spec: RunSpec, batch: Batch) -> str:
    """How what the engine computes for a client alone differs from plain autograd on the module, a clause; "" if it
    does not. batch: without padding. Raises whatever the loss raises."""
    compared = Compared(run_spec, [batch], lambda forms, point: [forms.alone(point, batch)])
    with suppress(Exception):  # it is raised again where the initial model raises it, too
        point = next(near(run_spec))
        plain, own = compared.forms.plain(point, batch), compared.forms.alone(point, batch)
        check_numbers([plain])
        if agrees(plain, own):
            return ""
    return compared.difference()


def reports_repeat(run_spec: RunSpec, batch: Batch) -> bool:
    """Whether the module as it was written gives the same report when it is built again. batch: of test rows."""
    forms = Forms(run_spec)
    if forms.as_written is None:
        return True
    first, again = (
        AsWritten(run_spec.workload, forms.trainer.frozen).report(forms.x.flat, forms.layout, batch) for _ in range(2)
    )
    return equal(first, again)


def report_difference(run_spec: RunSpec, batch: Batch) -> str:
    """How the reports of two models, one after the other, differ from those of the module as it was written, a clause;
    "" if they do not. batch: of test rows."""
    forms = Forms(run_spec)
    if forms.as_written is None:
        return ""
    workload, frozen, count = run_spec.workload, forms.trainer.frozen, len(next(iter(batch.values())))
    for point in (next(near(run_spec)), forms.x.flat):
        given = point.to(forms.dtype, copy=True)
        with evaluating():
            found = workload.report({**dict(Tree(given, forms.layout).items()), **frozen}, batch)
        expected = AsWritten(workload, frozen).report(point.to(forms.dtype), forms.layout, batch)
        if not torch.equal(given, point.to(forms.dtype)):
            return "the model after an evaluation differs"
        for name, column in expected.items():
            if not same_rows(column, found[name], count):
                return f"the metric {name} differs"
    return ""


def block_batches(run_spec: RunSpec, split: Split, ragged: bool) -> tuple[list[Batch], Batch]:
    """(batches of the two clients with the most rows, without padding; the same as columns (2, B, …), as `train_block`
    has them). They have a few examples. ragged: whether the batch of the second client is shorter and padded, as far as
    possible half as long as the first one."""
    index, batch = split.client_index, run_spec.experiment.federation.local.examples
    clients = np.resize(np.argsort(-index.sizes, kind="stable")[:2], 2)
    sizes = index.sizes_of(clients)
    examples = COMPARED_NUMBERS // max(run_spec.initial_model().flat.numel(), 1)
    most = min(batch, max(FEWEST, min(examples, MOST)), int(sizes[0]))
    counts = (most, min(most - 1, max(2, most // 2), int(sizes[1]))) if ragged else (min(most, int(sizes[1])),) * 2
    keys = counted.key(run_spec.experiment.seed, "as written", torch.arange(2))
    alone = []
    for client, count, key in zip(clients, counts, keys, strict=True):
        own = index.rows[index.offsets[client] : index.offsets[client + 1]]
        rows = own[np.linspace(0, len(own) - 1, count).astype(np.int64)]  # neighbours may be equal
        columns = {name: torch.from_numpy(np.ascontiguousarray(column[rows])) for name, column in split.train.items()}
        alone.append({**columns, "key": key})
    padded = [padded_to(max(counts), batch) for batch in alone] if ragged else alone
    return alone, {name: torch.stack([batch[name] for batch in padded]) for name in padded[0]}


def padded_to(width: int, batch: Batch) -> Batch:
    """A batch with its first row again until it has `width` rows, and with its weights, as in `batches.Stream`."""
    count = next(len(column) for name, column in batch.items() if name != "key")
    places = torch.where(torch.arange(width) < count, torch.arange(width), 0)
    columns = {name: column if name == "key" else column[places] for name, column in batch.items()}
    return {**columns, "weight": (torch.arange(width) < count) / torch.tensor(count, dtype=torch.float64)}


def may_be_ragged(index: ClientIndex, batch: int) -> bool:
    """Whether two batches of the run may have different sizes. batch: the largest one."""
    rest = index.sizes % batch
    return len({*np.minimum(index.sizes, batch).tolist(), *rest[rest > 0].tolist()}) > 1


def block_difference(run_spec: RunSpec, split: Split) -> str:
    """Why clients must not be trained in blocks, a clause for the log; "" if they may.

    What raises an exception by itself is left to the run.
    """
    ragged = may_be_ragged(split.client_index, run_spec.experiment.federation.local.examples)
    threads = torch.get_num_threads()
    torch.set_num_threads(run_spec.experiment.engine.threads)
    try:
        with torch.no_grad(), kept_generators():
            for padded in (False, True) if ragged else (False,):
                if reason := _block_difference(run_spec, *block_batches(run_spec, split, padded), padded):
                    return reason
    finally:
        torch.set_num_threads(threads)
    return ""


def _block_difference(run_spec: RunSpec, alone: list[Batch], columns: Batch, padded: bool) -> str:
    compared = Compared(run_spec, alone, lambda forms, point: list(zip(*forms.block(point, columns), strict=True)))
    try:
        difference = compared.difference()
    except RAISED_BY_USERS as error:
        return _raises_alone_only(compared.forms, columns, error)
    if not difference:
        return ""
    where = ""
    for point in (next(near(run_spec)), compared.forms.x.flat) if padded else ():
        where = where or coupled_at(
            compared.forms, point, alone[1], {name: column[1] for name, column in columns.items()}
        )
    if where:
        return f"{where} makes the result for a row depend on the other rows of its batch, and blocks pad short batches"
    return f"{difference} between a block and the module itself, as plain autograd computes it"


def _raises_alone_only(forms: Forms, columns: Batch, error: BaseException) -> str:
    """Why clients must not be trained in blocks if an exception was raised; "" if that is raised in blocks, too."""
    try:
        forms.block(forms.x.flat, columns)
    except RAISED_BY_USERS:
        return ""
    return f"a client alone raises {type_and_first_line(error)}, and a block does not"


# --- where rows are coupled -------------------------------------------------------------------------------------------
@contextmanager
def noted_calls() -> Iterator[list[tuple[nn.Module, Tensor | None, Any]]]:
    """A context that notes the calls of modules: (module, first tensor of the inputs, output), in the order in which
    they end. Inner modules end before those around them."""
    found: list[tuple[nn.Module, Tensor | None, Any]] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append((module, next((each for each in inputs if isinstance(each, Tensor)), None), output))

    hook = register_module_forward_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def coupled_at(forms: Forms, point: Tensor, batch: Batch, padded: Batch) -> str:
    """Which module, or that the loss, gives other results for the same rows if the batch is padded; "" for none."""
    workload, count = forms.trainer.workload, next(len(column) for name, column in batch.items() if name != "key")
    padded = {**padded, "weight": padded["weight"].to(forms.dtype)}
    calls, losses = [], []
    for each in (batch, padded):
        with noted_calls() as noted, suppress(Exception):
            losses.append(workload.losses({**dict(Tree(point, forms.layout).items()), **forms.trainer.frozen}, each))
        calls.append(noted)
    if len(losses) < 2 or len(calls[0]) != len(calls[1]):
        return ""
    for (module, given, output), (_, given_padded, output_padded) in zip(*calls, strict=True):
        if same_rows(given, given_padded, count) and not same_rows(output, output_padded, count):
            root = calls[0][-1][0]
            name = next((name for name, part in root.named_modules() if part is module), "")
            return f"module {name} ({type(module).__name__})" if name else f"module {type(module).__name__}"
    return "" if same_rows(losses[0], losses[1], count) else "the loss"


def same_rows(a: Any, b: Any, count: int) -> bool:
    """Whether two results have the same first rows within a rounding error, or whether there are no rows to compare."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.ndim or not b.ndim or len(a) != count:
        return True
    if not a.is_floating_point():
        return agrees([a], [b[:count]])
    if not bool(a.isfinite().all() and b.isfinite().all()):
        return True
    return agrees([a], [b[:count]], Rounding([a], share=math.sqrt(torch.finfo(a.dtype).eps)))
