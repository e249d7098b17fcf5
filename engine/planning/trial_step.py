"""Tries one local step before round 1, on the run's own model and data, to see whether the code keeps the rules.

The engine runs a client anywhere, again, and together with others under `torch.func.vmap`. That is right only if the
functions of a method and the losses of a workload are pure: no global random generator, no attribute that changes,
nothing written into what they are given, states that keep their form. Code that breaks one of these rules would give
numbers that do not repeat, or would fail in every block of every round; it is refused here, with the user's line.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from enum import Enum
from pathlib import Path
from traceback import walk_tb
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]
from torch.utils import _pytree as pytree

from ...algorithms.aggregation.contract import Mean
from ...algorithms.aggregation.messages import Messages, Stored
from ...algorithms.contract import Algorithm, Message, Round
from ...workloads.stateless import Stateless
from ...workloads.workload import Split, Workload
from ..aggregation.message_rows import vector_leaves
from ..clients.batches import Stream, stream
from ..clients.local_training import BatchOracle, Gradient, LocalTrainer, OwnViews, unpadded
from ..clients.modules import TRIALS, evaluating, generators, kept_generators, moved
from ..cohorts.samplers import sample
from ..config.schema import part_name
from ..errors import RAISED_BY_USERS, ConfigError, FedFleetError, type_and_first_line
from ..kernels.agreement import equal
from ..method_form.state_spec import some_view
from ..run_spec import RunSpec
from ..user_code import Line, LineFinder, is_called_by, is_user_file, user_lines
from .as_written import gradient_difference, report_difference, reports_repeat, trying
from .execution_plan import may_vectorise

CLIENTS, EXAMPLES = 2, 8
"""The number of clients that are tried together, and the largest batch: more would find nothing else."""
FAR = (100.0, -100.0)
"""What the initial model is multiplied by for models that are far from it."""
ENTRIES = 10_000
"""The largest number of attributes that are compared."""
COUNTED = "draw from oracle.key or batch['key'] with fedfleet.workloads.counted"
RULES = "docs/howto/vectorised.md has the rules"
ASKS_FOR_LOSSES = LocalTrainer.loss.__code__
"""The code below which a mistake is one of the workload's losses."""
CHECKPOINTING = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")
"""The file of torch that computes parts of a network again in the backward pass."""


class CodeRaised(Exception):
    """A function raised an exception. That breaks no rule; it is left to the run, which names the client."""


def try_step(run_spec: RunSpec, split: Split) -> None:
    """Raise ConfigError if a function of the method, or the losses of the workload, break a rule.

    The step runs on the CPU, on the first two clients of round 1 with at most eight examples each: twice for one client
    and, if the run may vectorise, once for both together. No result is kept, and the generators are restored.
    """
    threads = torch.get_num_threads()
    try:
        with trying(), torch.no_grad(), kept_generators():
            torch.set_num_threads(run_spec.experiment.engine.threads)
            method = run_spec.method()
            for algorithm in (method.warm_start, method):
                if algorithm is not None:
                    Trial(run_spec, split, algorithm).run()
            last = Trial(run_spec, split, method)
            last.check_gradient()
            last.check_reports()
    except CodeRaised:
        return
    finally:
        torch.set_num_threads(threads)


# --- attributes -------------------------------------------------------------------------------------------------------
PLAIN = (
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    Enum,
    str,
    bytes,
    int,
    float,
    complex,
    torch.dtype,
    torch.device,
)


class Attributes:
    """A copy of the attributes of some objects, of the objects that they hold, and of their classes.

    networks: whether those of networks are copied, too, without parameters and mode, and the numbers and tensors of the
    user's modules of Python. A call may change them, but the same call again must not.
    """

    def __init__(self, *roots: Any, networks: bool = False) -> None:
        self.roots, self.networks = roots, networks
        self.before = self.now()

    def now(self) -> dict[str, Any]:
        """The attributes as they are, by names such as "Leash.count"."""
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for root in self.roots:
            self._walk(root, type(root).__name__, found, seen)
        return found

    def changed(self) -> str:
        """The name of an attribute that has changed since the copy; "" if none has."""
        now = self.now()
        for name, value in now.items():
            if name not in self.before or not equal(self.before[name], value):
                return name
        return next((name for name in self.before if name not in now), "")

    def _walk(self, value: Any, name: str, found: dict[str, Any], seen: set[int]) -> None:
        if len(found) >= ENTRIES:
            return
        if value is None or isinstance(value, PLAIN):
            found[name] = value
            return
        if id(value) in seen or (isinstance(value, nn.Module | Stateless) and not self.networks):
            return
        seen.add(id(value))
        if isinstance(value, Stateless):
            self._walk(value.module, name, found, seen)
        elif isinstance(value, nn.Module):
            self._globals(type(value), found)
            for key, inner in vars(value).items():
                if key not in ("_parameters", "training"):
                    self._walk(inner, name if key == "_modules" else f"{type(value).__name__}.{key}", found, seen)
        elif isinstance(value, Tensor):
            if not is_functorch_wrapped_tensor(value):  # it may be left from an earlier call of a block
                found[name] = value.detach().clone()
        elif isinstance(value, np.ndarray):
            found[name] = value.copy()
        elif isinstance(value, torch.Generator):
            found[name] = value.get_state()
        elif isinstance(value, np.random.Generator):
            found[name] = repr(value.bit_generator.state)
        elif isinstance(value, random.Random):
            found[name] = value.getstate()
        elif isinstance(value, Mapping):
            found[name] = len(value)
            for key, inner in value.items():
                self._walk(inner, f"{name}[{key!r}]", found, seen)
        elif isinstance(value, list | tuple | set | frozenset):
            found[name] = len(value)
            for number, inner in enumerate(value):
                self._walk(inner, f"{name}[{number}]", found, seen)
        else:
            self._object(value, name, found, seen)

    def _globals(self, kind: type, found: dict[str, Any]) -> None:
        """Copy the numbers and tensors of the modules of Python in which a class and its bases are defined."""
        for made in kind.__mro__ if self.networks else ():
            if made.__module__ in sys.modules and is_user_file(source_file(made)):
                for key, own in vars(sys.modules[made.__module__]).items():
                    if isinstance(own, int | float | Tensor | np.ndarray) and not key.startswith("__"):
                        self._walk(own, f"{made.__module__.rpartition('.')[2]}.{key}", found, set())

    def _object(self, value: Any, name: str, found: dict[str, Any], seen: set[int]) -> None:
        kind = type(value)
        self._globals(kind, found)
        cached = {
            key
            for made in kind.__mro__
            for key, own in vars(made).items()
            if isinstance(own, functools.cached_property)
        }
        slots = [slot for made in kind.__mro__ for slot in slots_of(made) if hasattr(value, slot)]
        for key in [*getattr(value, "__dict__", {}), *slots]:
            inner = getattr(value, key)
            if key not in cached or (self.networks and isinstance(inner, nn.Module | Stateless)):
                self._walk(inner, f"{kind.__name__}.{key}", found, seen)
        for made in kind.__mro__:
            if is_user_file(source_file(made)):
                for key, own in vars(made).items():
                    if not key.startswith("__") and isinstance(own, int | float | str | list | dict | set | Tensor):
                        self._walk(own, f"{made.__name__}.{key}", found, seen)


def slots_of(made: type) -> tuple[str, ...]:
    """The names in a class's `__slots__`."""
    slots = vars(made).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def source_file(made: type) -> str:
    """The file that defines a class."""
    return getattr(sys.modules.get(made.__module__), "__file__", None) or "<unknown>"


# --- states -----------------------------------------------------------------------------------------------------------
def leaf_forms(state: Any, place: str = "") -> dict[str, str]:
    """The type and shape of each leaf by its place in the state, such as {".trace": "float32 (10,)"}."""
    if isinstance(state, tuple | list):
        names = [f".{name}" for name in getattr(state, "_fields", ())] or [f"[{i}]" for i in range(len(state))]
        parts = zip(names, state, strict=True)
        return {key: what for name, part in parts for key, what in leaf_forms(part, place + name).items()}
    if isinstance(state, dict):
        return {
            key: what for name, part in state.items() for key, what in leaf_forms(part, f"{place}[{name!r}]").items()
        }
    leaves = leaves_of(state)
    if len(leaves) == 1:
        return {place or "it": describe_leaf(leaves[0])}
    return {f"{place}[{number}]": describe_leaf(leaf) for number, leaf in enumerate(leaves)}


def describe_leaf(leaf: Any) -> str:
    """The type and shape of a leaf, or that it is no tensor."""
    if not isinstance(leaf, Tensor):
        return f"{leaf!r}, which is no tensor"
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"


def form_difference(old: Any, new: Any) -> str:
    """How the structure, types or shapes of two states differ; "" if they do not."""
    before, after = leaf_forms(old), leaf_forms(new)
    for place, what in after.items():
        if what.endswith("no tensor"):
            return f"{place} is {what}; a state has tensors only, () for nothing"
        if place not in before:
            return f"{place}, {what}, was not there before"
        if before[place] != what:
            return f"{place} was {before[place]}, becomes {what}"
    gone = next((f"{place}, {before[place]}, is no longer there" for place in before if place not in after), "")
    if not gone and pytree.tree_structure(old) != pytree.tree_structure(new):
        return "its structure is another one than before"
    return gone


def copy_state(state: Any) -> Any:
    """A state with copies of its tensors."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state)


def leaves_of(state: Any) -> list[Any]:
    """The leaves of a state, in order."""
    return pytree.tree_leaves(state)


class Zeros(Stored):
    """Messages that are 0."""

    def gram(self) -> np.ndarray:
        return np.zeros((len(self.norms2), len(self.norms2)))


# --- the trial --------------------------------------------------------------------------------------------------------
class Trial:
    """Calls each function of an algorithm once as a round does, and checks every call. `name`: of a function."""

    def __init__(self, run_spec: RunSpec, split: Split, algorithm: Algorithm) -> None:
        self.run_spec, self.split, self.algorithm = run_spec, split, algorithm
        self.x = run_spec.initial_model()
        self.attributes = Attributes(algorithm, run_spec.workload)

    def run(self) -> None:
        """Try all functions, and a block of two clients. Raises ConfigError for a rule that is broken."""
        algorithm = self.algorithm
        server = self.watch("server_init", algorithm.server_init, {"model": self.x})
        public = self.watch("broadcast", algorithm.broadcast, {"server's state": server})
        public = self.watch("unpack", algorithm.unpack, {"public state": public})
        given = {"public state": public}
        client = self.watch("client_init", algorithm.client_init, given)
        given["client's state"] = client
        if algorithm.own_view:
            self.check_looks(self.watch("looks", algorithm.looks, given))
            view = lambda public, client: some_view(algorithm, public, client)  # noqa: E731
            given["public state"] = public = self.watch("view", view, given)
        local = self.watch("client_begin", algorithm.client_begin, given)
        trainer = self.trainer()
        trainer.hold(public)
        columns = self.columns()
        batch = unpadded({name: column[:1] for name, column in columns.items()}, 0)

        def step(public: Any, client: Any, local: Any, batch: Any) -> Any:
            oracle = BatchOracle(Gradient.forward, trainer, batch, torch.zeros((), dtype=torch.float64))
            after = algorithm.client_step(public, client, local, oracle)
            if not oracle.losses:
                self.refuse(
                    "client_step asks for no gradient", [], "call oracle(y) in each step, the loss of which counts"
                )
            return after

        self.check_losses(trainer, batch)
        after = self.watch("client_step", step, {**given, "local state": local, "batch": batch})
        self.check_form("client_step", "local state", local, after, (step, (public, client, local, batch)))
        finish = functools.partial(self.watch, "client_finish", algorithm.client_finish)
        sent, kept = finish({**given, "local state": after})
        self.check_form(
            "client_finish", "client's state", client, kept, (algorithm.client_finish, (public, client, after))
        )
        message = self.watch("decode", algorithm.decode, {"public state": public, "message": sent})
        self.check_form(
            "client_finish",
            "message",
            trainer.state_spec.message,
            message,
            (algorithm.client_finish, (public, client, after)),
        )
        self.check_message(message, lambda: algorithm.client_finish(*copy_state((public, client, after))))
        mean = trainer.state_spec.mean([leaf.double() for leaf in leaves_of(message)], 1.0, 1.0)
        self.check_server(server, self.compared(server, mean) if algorithm.compares else mean)
        if may_vectorise(self.run_spec, self.split):
            self.check_block(trainer, public, client, columns)

    def check_message(self, message: Message, run: Callable[[], Any]) -> None:
        """Raise ConfigError for a message that cannot be added up. run: makes it again."""
        told, remedy = "", "add the squared norm of what the client has moved, as (y - x).norm2()"
        if "norm2" not in message.facts:
            told = f"the facts of a message must have norm2, got {', '.join(message.facts) or 'none'}"
        elif place := next((name for name, leaf in message.facts.items() if leaf.ndim), ""):
            told, remedy = (
                f"facts are numbers, got {place} of shape {tuple(message.facts[place].shape)}",
                "send its mean",
            )
        elif any(leaf.is_complex() for leaf in leaves_of(message)):
            told, remedy = "messages must be real, got complex numbers", "send torch.view_as_real of them"
        elif self.has_stage and (whole := [leaf for leaf in vector_leaves(message) if not leaf.is_floating_point()]):
            dtype = str(whole[0].dtype).removeprefix("torch.")
            told = f"with aggregate, attack or privacy a message must have floats, got {dtype}"
            remedy = "send them in the dtype of the model"
        if told:
            self.refuse(f"client_finish: {told}", self.returned(run), remedy)

    @property
    def has_stage(self) -> bool:
        """Whether something is between messages and server that computes with each of them."""
        stage, privacy = self.run_spec.stage, self.run_spec.privacy
        return not isinstance(stage.rule, Mean) or stage.attack is not None or privacy is not None

    def check_looks(self, models: tuple[Any, ...]) -> None:
        """Raise ConfigError unless clients can find the losses of these models."""
        if not models:
            return
        row = {name: torch.from_numpy(np.ascontiguousarray(column[:1])) for name, column in self.split.train.items()}
        point = {**dict(models[0].items()), **self.run_spec.frozen}
        try:
            with evaluating():
                got = ", ".join(report := self.run_spec.workload.report(point, row))
        except RAISED_BY_USERS as error:
            report, got = {}, type_and_first_line(error)
        if "loss" not in report:
            name = part_name(self.run_spec.experiment.method)
            raise ConfigError(
                f"method.name: {name} needs the loss of each row in the workload's report, got {got}; add loss"
            )

    def check_losses(self, trainer: LocalTrainer, batch: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if the losses of a client's batch are not one number per example: the padding of a block's
        shorter batches would count. batch: columns (b, …)."""
        point = dict((self.x if trainer.precision is None else self.x.to(trainer.precision)).items())
        if self.own_code:
            self.check_far(trainer, point, batch)
        with torch.enable_grad():
            leaves = {name: value.clone().requires_grad_() for name, value in point.items()}
            losses = self.call(
                "losses", self.run_spec.workload.losses, ({**leaves, **trainer.frozen}, copy_state(batch))
            )
        if not losses.is_floating_point() or not losses.requires_grad:
            got = "numbers without one" if losses.is_floating_point() else str(losses.dtype).removeprefix("torch.")
            remedy = "compute them from the tensors of the model, without detach() and no_grad()"
            self.refuse(f"losses must have a gradient in the model, got {got}", [], remedy, workload=True)
        weights = self.call("row_weights", self.run_spec.workload.row_weights, (copy_state(batch),))
        examples, shape = len(next(c for name, c in batch.items() if name != "key")), tuple(losses.shape)
        if weights is not None and tuple(weights.shape) != (examples,):
            self.refuse(
                f"row_weights must return one number per example, ({examples},) for this batch, got "
                f"{tuple(weights.shape)}",
                [],
                "leave out the sum over the batch",
                workload=True,
            )
        if shape != (examples,):
            self.refuse(
                f"losses must return one number per example, ({examples},) for this batch, got {shape}",
                [],
                "leave out the mean over the batch, as by reduction='none'",
                workload=True,
            )

    @functools.cached_property
    def own_network(self) -> bool:
        """Whether the network has code of the user."""
        outline = self.run_spec.workload.outline
        return outline is not None and any(is_user_file(source_file(type(part))) for part in outline.modules())

    @property
    def own_code(self) -> bool:
        """Whether losses may be computed by code of the user."""
        experiment = self.run_spec.experiment
        return bool(experiment.plugins) or isinstance(experiment.workload, Workload) or self.own_network

    def check_far(self, trainer: LocalTrainer, point: dict[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if losses write into a model that is far from the initial one, as code does that keeps
        weights in bounds. An exception is ignored, since the run may never come to such a model."""
        for factor in FAR:
            given = {"model": {name: value * factor for name, value in point.items()}, "batch": dict(batch)}
            inputs = copy_state(tuple(given.values()))
            try:
                trainer.loss(*inputs)
            except RAISED_BY_USERS:
                continue
            if not all(map(equal, leaves_of(given["model"]), leaves_of(inputs[0]))):
                self.refuse_write("losses", "model", trainer.loss, given)

    def check_reports(self) -> None:
        """Raise ConfigError if a network with code of the user evaluates another model than the one that it gets, as
        code does that keeps in eval() what follows from the weights."""
        own, test = self.own_network, self.split.test
        if own and not equal(self.x.flat, self.run_spec.initial_model().flat):
            self.refuse_build("has other weights")
        if not own or not test or not len(next(iter(test.values()))):
            return
        rows = {name: torch.from_numpy(np.ascontiguousarray(column[:EXAMPLES])) for name, column in test.items()}
        try:
            repeats, differs = reports_repeat(self.run_spec, rows), report_difference(self.run_spec, rows)
        except RAISED_BY_USERS as error:
            raise CodeRaised from error
        if not repeats:
            self.refuse_build("computes something else")
        if differs:
            self.refuse(
                f"{differs} between the engine and the module itself in eval()",
                [],
                "let forward compute from the weights that it has, with self.training, and keep nothing of them in "
                "train(), eval() or an attribute",
                workload=True,
            )

    def refuse_build(self, what: str) -> None:
        """Raise ConfigError for a network that does not follow from the seed. what: it does then."""
        self.refuse(
            f"a network that is built again with the same seed must be the same, and this one {what}",
            [],
            "draw by torch, NumPy or Python's random, without a generator of its own, or with one that has a seed",
            workload=True,
        )

    def check_gradient(self) -> None:
        """Raise ConfigError if the gradient of a client that trains alone is not that of plain autograd on the module
        that the user wrote."""
        batch = unpadded({name: column[:1] for name, column in self.columns().items()}, 0)
        try:
            difference = gradient_difference(self.run_spec, batch)
        except RAISED_BY_USERS as error:
            raise CodeRaised from error
        if difference:
            self.refuse(
                f"{difference} between the engine and the module itself, as loss.backward() computes it",
                [],
                "let forward read each parameter where it belongs to a module (self.weight), and register no hooks "
                "that change gradients",
                workload=True,
            )

    def compared(self, server: Any, message: Any) -> Any:
        """What a method that compares messages makes of a round of messages that are 0. message: one of them."""
        plan = self.run_spec.experiment.federation
        count, first = plan.cohort, Round(1, plan.rounds, plan.cohort, plan.clients)
        zeros = Zeros(norms2=np.zeros(count))
        messages = Messages(
            stored=zeros, length=message.delta.flat.numel(), round=1, key=torch.zeros(()), weights=np.ones(count)
        )
        parts = lambda server: self.algorithm.parts(server, messages, first)  # noqa: E731
        weights, found = self.watch("parts", parts, {"server's state": server})
        return message._replace(delta=tuple(message.delta for _ in weights), sent=found)

    def check_server(self, server: Any, mean: Any) -> None:
        """Try the functions of the server on its state before round 1. mean: the mean message."""
        algorithm, federation = self.algorithm, self.run_spec.experiment.federation
        first = Round(1, federation.rounds, federation.cohort, federation.clients)
        given = {"server's state": server, "mean message": mean}
        update = lambda server, mean: algorithm.server_update(server, mean, first)  # noqa: E731
        updated = self.watch("server_update", update, given)
        self.check_form("server_update", "server's state", server, updated, (update, (server, mean)))
        metrics = lambda server, mean: algorithm.server_metrics(server, mean, first)  # noqa: E731
        self.watch("server_metrics", metrics, given)
        self.watch("model", algorithm.model, {"server's state": updated})

    def trainer(self) -> LocalTrainer:
        """What runs the local steps of clients, with torch's kernels."""
        try:
            spec = self.run_spec
            return LocalTrainer(self.algorithm, spec.workload, self.x, precision=spec.precision, frozen=spec.frozen)
        except RAISED_BY_USERS as error:
            raise CodeRaised from error

    def columns(self) -> dict[str, Tensor]:
        """Batches of the first clients: columns (c, b, …), "key" (c,), and "weight" (c, b) if some are short."""
        federation, seed, train = self.run_spec.experiment.federation, self.run_spec.experiment.seed, self.split.train
        clients = sample(seed, 1, federation.clients, federation.cohort)[:CLIENTS]
        local = federation.local.taking(steps=1)
        drawn: Stream = stream(self.split.client_index, clients, np.zeros(len(clients)), local, seed)
        rows = drawn.rows[:, 0, :EXAMPLES].numpy()
        columns = {name: torch.from_numpy(np.ascontiguousarray(column[rows])) for name, column in train.items()}
        columns["key"] = drawn.keys[:, 0]
        if drawn.weight is not None:
            columns["weight"] = drawn.weight[:, 0, :EXAMPLES].to(self.x.flat.dtype)
        return columns

    # --- one client -------------------------------------------------------------------------------------------------
    def watch(self, name: str, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Call a function twice on copies, check the calls, and return the result. given: arguments by name."""
        inputs = copy_state(tuple(given.values()))
        drawn = generators()
        result = self.call(name, function, inputs)
        if generator := moved(drawn):
            self.refuse_draw(name, generator, lambda: function(*copy_state(tuple(given.values()))))
        if attribute := self.attributes.changed():
            self.refuse_attribute(name, attribute, lambda: function(*copy_state(tuple(given.values()))))
        for (what, value), own in zip(given.items(), inputs, strict=True):
            if not all(map(equal, leaves_of(value), leaves_of(own))):
                self.refuse_write(name, what, function, given)
        networks = Attributes(self.run_spec.workload, networks=True) if name == "client_step" else None
        again = self.call(name, function, copy_state(tuple(given.values())))
        if networks is not None and (attribute := networks.changed()):
            run = lambda: function(*copy_state(tuple(given.values())))  # noqa: E731
            self.refuse_attribute(name, attribute, run, networks=True)
        if not all(map(equal, leaves_of(result), leaves_of(again))):
            run = lambda: function(*copy_state(tuple(given.values())))  # noqa: E731
            self.refuse(
                f"{name} gives other numbers when it is called again on the same inputs, so a run would not repeat",
                self.returned(run),
                f"{COUNTED}, and let the result depend on the arguments alone",
            )
        return result

    def call(self, name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Call a function. ConfigError if it changes a frozen object, CodeRaised for any other exception."""
        try:
            return function(*inputs)
        except FedFleetError:
            raise
        except FrozenInstanceError as error:
            self.refuse(
                f"{name} changes an attribute ({error})",
                user_lines(error)[:1],
                "a method holds settings only: return what changes as a state",
                error,
            )
        except RAISED_BY_USERS as error:
            raise CodeRaised from error

    def refuse_draw(self, name: str, generator: str, run: Callable[[], Any]) -> None:
        """Raise ConfigError with the line that draws. What does not draw each time is not refused: another thread has
        drawn."""
        for _ in range(TRIALS):
            last = generators()
            finder = LineFinder(lambda before=last: bool(moved(before)), ASKS_FOR_LOSSES)
            finder.run(run)
            if finder.found is None and not moved(last):
                return
        self.refuse(
            f"{'losses draw' if finder.below else f'{name} draws'} from {generator}, so a run would not repeat",
            [finder.found] if finder.found else [],
            COUNTED,
            workload=finder.below,
        )

    def refuse_attribute(self, name: str, attribute: str, run: Callable[[], Any], networks: bool = False) -> None:
        """Raise ConfigError with the line that changes an attribute. networks: whether it is one of a network."""
        roots = Attributes(*self.attributes.roots, networks=networks)
        finder = LineFinder(lambda: bool(roots.changed()), ASKS_FOR_LOSSES)
        finder.run(run)
        in_losses = networks or finder.below
        remedy = "return what changes as a state, and use functools.cached_property for what follows from settings"
        if networks:
            remedy = (
                "running statistics belong into a subclass of fedfleet.workloads.stateless.Running; leave others out"
            )
        self.refuse(
            f"{'losses change' if in_losses else f'{name} changes'} the attribute {attribute}",
            [finder.found] if finder.found else [],
            f"an object holds settings only: {remedy}",
            workload=in_losses,
        )

    def refuse_write(self, name: str, what: str, function: Callable[..., Any], given: dict[str, Any]) -> None:
        """Raise ConfigError with the line that writes into an argument."""
        inputs, old = copy_state(tuple(given.values())), leaves_of(tuple(given.values()))
        now = leaves_of(inputs)
        finder = LineFinder(lambda: not all(map(equal, old, now)), ASKS_FOR_LOSSES)
        finder.run(lambda: function(*inputs))
        self.refuse(
            f"{'losses write' if finder.below else f'{name} writes'} in place into the {what}",
            [finder.found] if finder.found else [],
            "make a new tensor, a = a + b and not a += b",
            workload=finder.below,
        )

    def check_form(self, name: str, what: str, old: Any, new: Any, call: tuple[Callable[..., Any], Any]) -> None:
        """Raise ConfigError if a state has another form than before. call: the function and its arguments."""
        if differs := form_difference(old, new):
            function, inputs = call
            self.refuse(
                f"{name} changes the form of the {what}: {differs}",
                self.returned(lambda: function(*copy_state(inputs))),
                "structure, shapes and dtypes stay as they were",
            )

    def returned(self, run: Callable[[], Any]) -> list[Line]:
        """The last lines on which functions of the user returned, while `run` was called."""
        finder = LineFinder(lambda: False, ASKS_FOR_LOSSES)
        finder.run(run)
        return list(dict.fromkeys(finder.returned))[-2:]

    # --- a block ----------------------------------------------------------------------------------------------------
    def check_block(self, trainer: LocalTrainer, public: Any, client: Any, columns: dict[str, Tensor]) -> None:
        """Raise ConfigError if two clients cannot be trained together under vmap."""
        count = len(columns["key"])
        if count < CLIENTS:
            return
        clients = pytree.tree_map(lambda leaf: leaf.expand(count, *leaf.shape), client)
        if self.algorithm.own_view:
            public = OwnViews(pytree.tree_map(lambda leaf: leaf.expand(count, *leaf.shape), public))
        try:
            trainer.train_block(public, clients, torch.ones(count, dtype=torch.int64), lambda k: columns)
        except FedFleetError:
            raise
        except RAISED_BY_USERS as error:
            broken = vmap_rule_broken(error)
            asked = "vectorise" in self.run_spec.experiment.engine.model_fields_set
            if self.run_spec.workload.of_package and in_losses(error) and not asked:
                where = "".join(f" ({line})" for line in user_lines(error)[:1])
                reason = f"{broken}{where}"
                if (block := self.run_spec.experiment.engine.block) != "auto":
                    raise ConfigError(f"engine.block: {block} needs vmap, but {reason}; leave block out") from error
                self.run_spec.proofs.blocks = f"{reason}; engine.vectorise=false says the same"
                return
            self.refuse(
                f"clients cannot be run together under torch.func.vmap: {broken}",
                user_lines(error)[:1],
                "write it with tensor operations (torch.where), or set engine.vectorise=false",
                error,
                key="engine.vectorise",
                workload=in_losses(error),
            )

    def refuse(
        self,
        what: str,
        lines: list[Line],
        remedy: str,
        cause: BaseException | None = None,
        workload: bool = False,
        key: str = "",
    ) -> None:
        """Raise ConfigError: what is wrong, the user's lines, and the remedy. workload: its losses are wrong."""
        at = f" ({'; '.join(map(str, lines))})" if lines else ""
        key = key or ("workload" if workload else "method")
        raise ConfigError(f"{key}: {what}{at}; {remedy}; {RULES}") from cause


def in_losses(error: BaseException) -> bool:
    """Whether an exception was raised below the losses of the workload."""
    traceback, last = error.__traceback__, None
    while traceback is not None:
        last, traceback = traceback.tb_frame, traceback.tb_next
    return is_called_by(last, ASKS_FOR_LOSSES)


def vmap_rule_broken(error: BaseException) -> str:
    """The rule that is broken where torch says that something cannot be vectorised."""
    if any(frame.f_code.co_filename == CHECKPOINTING for frame, _ in walk_tb(error.__traceback__)):
        return "gradient checkpointing keeps state in place"  # whatever torch says, which names none of it
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    for words, rule in (
        (".item()", "a number is read from a tensor (.item(), float(), int(), tolist())"),
        ("data-dependent control flow", "a branch (if, while, and, or) depends on a tensor's value"),
        ("data pointer", "a tensor is given to NumPy or another library"),
        ("random operation", "a global random generator is drawn from"),
        ("dynamic shape", "a shape follows from a tensor's values"),
        ("inplace arithmetic", "a tensor that all clients share is written to in place"),
        ("broadcast shape", "a tensor that all clients share is written to in place"),
    ):
        if words in message:
            return rule
    return f"torch says {message[:200]!r}"
