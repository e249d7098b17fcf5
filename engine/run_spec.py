"""The specification of a run, from which each process builds workload, method and model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.aggregation.contract import Aggregator, Stage
from ..algorithms.attacks.contract import Attack, PoisoningAttack
from ..algorithms.contract import Adaptation, Algorithm, Deferred, RunContext
from ..algorithms.local import Rule
from ..algorithms.parts.turns import Turns
from ..algorithms.tree import Layout, Tree
from ..workloads.models.narrow import is_narrower
from ..workloads.workload import Split, StoredTensors, Workload
from .accelerators.settings import applied
from .aggregation.stage_plan import StagePlan
from .cohorts.samplers import CountedSampler, Sampler
from .cohorts.tasks import steps_of
from .config import schedules
from .config.finite import check_finite
from .config.over_steps import rule_numbers, scheduled
from .config.registry import Plugin, Registry, find_plugin
from .config.schema import Adapt, ClientModels, Engine, Experiment, part_name
from .errors import ConfigError
from .kernels.agreement import Disagreement
from .kernels.contract import Kernels
from .method_form import ranked
from .method_form.batch_norm import Buffered
from .method_form.personal import Division, Personal
from .privacy.privacy_plan import PrivacyPlan
from .state.folders import state_folder
from .storage.known_digests import known
from .storage.sha256 import sha256_of_tensors
from .user_code import plugin_errors
from .workload.layers import chosen, matching, normalisation_of, shown
from .workload.model import building_model, check_network, check_size, like, tensors_of
from .workload.multiplications import multiplications
from .workload.split import check_weights, seen_and_unseen, split_of, with_groups

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Folders, actors and tags are named after the id of a run, so it must not be a path with several parts."""


AS_QUICK_HERE = 4e9
"""The most multiplications of a run that `engine.backend: auto` computes in the calling process. They take some four
seconds with a small network, as long as the start of Ray."""
LEAST_STEP = 2e5
"""The multiplications that a local step counts at least: a smaller one takes no less time."""


class ExecutionPlan(NamedTuple):
    """How clients are run: the number of clients in a block, and the name of the kernels, see `kernels/table.py`."""

    block: int
    kernels: str


class KeptApart(NamedTuple):
    """The names of the tensors that `personal` names, in the order of the model."""

    personal: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


class Backend(NamedTuple):
    """Where a run is computed. name: `ray` or `local`. why: a clause, "" where the configuration says it."""

    name: Literal["ray", "local"]
    why: str = ""


@dataclass
class ProofsOnData:
    """What this process found out on the data of a run before round 1.

    `kernels`: for each name of kernels that was tried, None if they are proven, else why they must not be used.
    `blocks`: why clients cannot be trained in blocks, "" if they can; None before it was tried.
    """

    kernels: dict[str, Disagreement | None] = field(default_factory=dict)
    blocks: str | None = None


T = TypeVar("T")


class built_once(Generic[T]):
    """A property of a run that is built where it is asked for first. Copies of the run with another plan share it."""

    def __init__(self, build: Callable[[Any], T]) -> None:
        self.build: Callable[[Any], T] = build
        self.__doc__ = build.__doc__

    def __get__(self, run_spec: RunSpec | None, owner: type | None = None) -> T:
        if run_spec is None:  # asked of the class, as documentation does
            return cast(T, self)
        experiment, found = run_spec.built.get(self.build, (None, None))
        if experiment is not run_spec.experiment:
            found = self.build(run_spec)
            run_spec.built[self.build] = run_spec.experiment, found
        return cast(T, found)


@dataclass(frozen=True)
class RunSpec:
    """The specification of one run: the experiment as data and the user's plug-ins as source.

    It can be sent to other processes. Workload, method and model are built from it where they are needed.

    `directory`: the folder of the run's files, or None. `resume`: whether to start from the last checkpoint there.
    `execution_plan`: set once the plan is decided. `proven_kernels`: the library for which the kernels of the plan were
    proven, see `kernel_proof.kernel_identity`. `missing_kernels`: one sentence for each machine of the run that cannot
    have compiled kernels. `given_model`: the model before round 1, name -> tensor, or None for the workload's own.
    `data_facts`: what the process that starts the run has read about its data, see `Workload.facts_of_data`.
    """

    run_id: str
    experiment: Experiment
    plugins: tuple[Plugin, ...] = ()
    directory: str | None = None
    resume: bool = False
    execution_plan: ExecutionPlan | None = None
    proven_kernels: str | None = None
    missing_kernels: tuple[str, ...] = ()
    given_model: dict[str, Tensor] | None = field(default=None, compare=False)
    data_facts: Any = field(default=None, compare=False)
    proofs: ProofsOnData = field(default_factory=ProofsOnData, compare=False, repr=False)
    dealt: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What is known of the partition in this process, as in partition.json, where the run has no folder."""
    built: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was built from the experiment in this process, see `built_once`."""

    @staticmethod
    def of(
        run_id: str,
        experiment: Experiment,
        directory: str | None = None,
        resume: bool = False,
        initial_model: Mapping[str, Any] | None = None,
    ) -> RunSpec:
        """initial_model: the model before round 1, name -> tensor or array, or None for the workload's own."""
        plugins = tuple(find_plugin(name) for name in experiment.plugins)
        given_model = None if initial_model is None else tensors_of(initial_model)
        return RunSpec(run_id, experiment, plugins, directory, resume, given_model=given_model)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Pickle the run without proofs, which hold for this process, and without what was built, which depends on
        plug-ins that are not yet loaded elsewhere."""
        return RunSpec, tuple(getattr(self, field.name) for field in fields(self) if field.compare or field.repr)

    def with_plan(self, plan: ExecutionPlan, proven_kernels: str | None = None) -> RunSpec:
        """The same run with its execution plan."""
        return replace(self, execution_plan=plan, proven_kernels=proven_kernels)

    def with_missing_kernels(self, missing_kernels: tuple[str, ...]) -> RunSpec:
        """The same run with the reasons why machines lack compiled kernels."""
        return replace(self, missing_kernels=missing_kernels)

    def with_proofs(self, proofs: ProofsOnData) -> RunSpec:
        """The same run with proofs that it shares with others."""
        return replace(self, proofs=proofs)

    @built_once
    def registry(self) -> Registry:
        return Registry(self.plugins)

    @built_once
    def workload(self) -> Workload:
        built = self.registry.build("WORKLOADS", self.experiment.workload, "workload")
        if not isinstance(self.experiment.workload, str | dict):
            check_finite(built, "workload")
        if not isinstance(built, Workload):
            raise ConfigError(f"workload: {self.experiment.workload!r} is not a workload; give a name or a Workload")
        built = built.seeded(self.experiment.seed)
        if self.data_facts is not None:
            built.take_facts(self.data_facts)
        attack = self.stage.attack
        if not isinstance(attack, PoisoningAttack):
            return built
        seen, _ = seen_and_unseen(self.experiment.federation, self.experiment.seed)
        clients = tuple(seen[self.byzantine].tolist())
        poison = {"name": attack.workload, "clients": clients, **attack.arguments()}
        return self.registry.build("WORKLOADS", poison, "attack", of=built)

    def method(self, round: int = 1) -> Algorithm:
        """The method of a round (1 … R), with its schedules resolved to numbers, or to those of each local step."""
        built = self._method(round)
        count, division = self.shared_statistics, self.division
        built = Buffered(built, count) if count else built
        if division is not None:
            built = self._personal(built, division, round)
        built = self._ranked(built)
        return built if self.stage.clip is None else self.stage.clip.wrap(built, round)

    def _personal(self, method: Algorithm, division: Division, round: int) -> Personal:
        """The method with personal tensors."""
        section = self.experiment.personal
        if section is None:
            return Personal(method, division, rule_of(method))
        turns = None if section.split == "together" else Turns(*section.split, section.order)
        keep = section.carry == "keep"
        if section.rule == "same":
            own = rule_of(method)
            return Personal(method, division, own, keep, turns, rule_numbers=rule_numbers(method, own))
        rule = schedules.resolve(section.rule, round, self.experiment.federation.rounds, "personal.rule")
        return Personal(method, division, self.registry.build("RULES", rule, "personal.rule"), keep, turns)

    def _ranked(self, method: Algorithm) -> Algorithm:
        """The method for clients whose adapters have different ranks; the method itself where they have not. Raises
        ConfigError for a method that does not go with them."""
        pairs = [pair for pair in self.workload.pairs if pair.ranks is not None]
        if not pairs:
            return method
        ranks = pairs[0].ranks
        assert ranks is not None
        if isinstance(self.experiment.method, dict) and self.experiment.method.get("compression") is not None:
            raise ConfigError(
                "workload.adapter.ranks: does not go with method.compression, whose codes have one size for all "
                "clients; leave one of them out"
            )
        layout = self.layout if self.division is None else self.division.shared
        if why := ranked.why_not(method, Tree(torch.zeros(sum(layout.sizes), dtype=self.dtype), layout)):
            raise ConfigError(
                f"workload.adapter.ranks: does not go with {part_name(self.experiment.method)}, because {why}; choose "
                "another method, or give one rank"
            )
        return ranked.Ranked(method, ranks, ranked.Places.of(pairs))

    def _method(self, round: int) -> Algorithm:
        """The method of a round, as if all tensors of the model were shared parameters."""
        spec, federation = self.experiment.method, self.experiment.federation
        if schedules.counts_steps(spec):
            assert federation.local.steps is not None, "refused by the conflicts of the experiment"
            return scheduled(spec, self._built, round, federation.rounds, federation.local.steps)
        return self._built(schedules.resolve(spec, round, federation.rounds, "method"))

    def method_for(self, layout: Layout) -> Algorithm:
        """The method of round 1, as if all tensors of a model with this layout were shared parameters: for shapes,
        before the model is built. Schedules over steps have their peaks."""
        rounds = self.experiment.federation.rounds
        return self._built(schedules.resolve(self.experiment.method, 1, rounds, "method", peaks=True), layout)

    def _built(self, spec: Any, layout: Layout | None = None) -> Algorithm:
        """The method of a specification without schedules. layout: of the model, None to build it."""
        built = self.registry.build("METHODS", spec, "method")
        if isinstance(built, Deferred):
            with plugin_errors("method"):
                built = built.build(self.context if layout is None else self.context_with(layout))
        if not isinstance(self.experiment.method, str | dict):
            check_finite(self.experiment.method, "method")
        if not isinstance(built, Algorithm):
            raise ConfigError(f"method: {spec!r} is not a method; give a name or an Algorithm")
        return built

    @built_once
    def sampler(self) -> Sampler:
        """How the clients of a round are drawn."""
        federation = self.experiment.federation
        sampler = self.registry.build("SAMPLERS", federation.sampler, "federation.sampler")
        wanted = CountedSampler if federation.is_counted else Sampler
        if not isinstance(sampler, wanted):
            raise ConfigError(
                f"federation.sampler: {federation.sampled} must be a {wanted.__name__}, got {sampler!r}; give a name"
            )
        with plugin_errors("federation.sampler"):
            sampler.check(federation.clients, federation.cohort, federation.weights)
        return sampler

    @built_once
    def stage(self) -> Stage:
        """What happens between the clients' messages and the server's update."""
        rule = self.registry.build("AGGREGATORS", self.experiment.aggregate, "aggregate")
        if not isinstance(rule, Aggregator):
            raise ConfigError(
                f"aggregate: {self.experiment.aggregate!r} is not an aggregator; give a name or an Aggregator"
            )
        attack = self.experiment.attack
        if attack is not None:
            attack = self.registry.build("ATTACKS", attack, "attack")
            if not isinstance(attack, Attack):
                raise ConfigError(f"attack: {self.experiment.attack!r} is not an attack; give a name or an Attack")
        privacy = self.privacy
        return Stage(rule, attack, privacy, None if privacy is None else privacy.noise)

    @built_once
    def privacy(self) -> PrivacyPlan | None:
        """The privacy of the run; None without a section `privacy`."""
        return PrivacyPlan.of(self.experiment, self.registry, self.dtype)

    # --- clients' own models ----------------------------------------------------------------------------------------
    @property
    def client_models(self) -> ClientModels:
        """How clients' own models are evaluated."""
        return self.experiment.evaluate.clients or ClientModels()

    @built_once
    def evaluates_own_models(self) -> bool:
        """Whether every client's own model is evaluated on the rows of its client."""
        own, method = self.client_models.own, self.method()
        if own != "auto":
            return own
        return self.experiment.federation.unseen is not None or method.own_models or bool(self.adaptations(method))

    @built_once
    def trains_the_servers_model(self) -> bool:
        """Whether all tensors of the server's model are trained: those that stay with the clients are not."""
        return self.division is None and self.method().shares_model

    def personal_numbers(self, client: Any) -> int:
        """How many numbers of its own model a client keeps; 0 where it keeps none. client: a sample of its state."""
        apart = 0 if self.division is None else sum(self.division.personal.sizes)
        whole = sum(self.layout.sizes)  # of the method's own, which knows of no running statistics
        kept = self._method(1).own_models and any(leaf.numel() == whole for leaf in pytree.tree_leaves(client))
        return apart + whole if kept else apart

    def adaptations(self, method: Algorithm) -> tuple[Adaptation, ...]:
        """What clients do to their models before they are evaluated once more, each instead of the others. method: of
        the round."""
        adapt, key = self.client_models.adapt, "evaluate.clients.adapt"
        if adapt == "auto":
            return () if method.adaptation is None else (method.adaptation,)
        given = self.client_models.adaptations
        keys = [f"{key}.{place}" for place in range(len(given))] if isinstance(adapt, tuple) else [key]
        return tuple(self._adaptation(method, *each) for each in zip(given, keys, strict=False))

    def _adaptation(self, method: Algorithm, adapt: Adapt, key: str) -> Adaptation:
        """What the settings under a key say."""
        same = self.experiment.federation.local.examples
        batch = None if adapt.batch == "all" else same if adapt.batch == "same" else adapt.batch
        rule = f"{key}.rule"
        built = rule_of(method, rule) if adapt.rule == "same" else self.registry.build("RULES", adapt.rule, rule)
        tensors = None if adapt.tensors == "all" else self.group(adapt.tensors, f"{key}.tensors")
        if tensors is not None and {*tensors} <= {*self.workload.buffers}:
            raise ConfigError(f"{key}.tensors: some parameter must be tuned, got {adapt.tensors}; name one")
        return Adaptation(built, adapt.steps, adapt.epochs, batch, adapt.prox, tensors)

    @property
    def last_round(self) -> int:
        """The round after which the run ends: R, or the last one that a privacy budget allows."""
        return self.experiment.federation.rounds if self.privacy is None else self.privacy.last_round

    @built_once
    def byzantine(self) -> np.ndarray:
        """(N,) bool: which clients are Byzantine."""
        clients = self.experiment.federation.clients
        if self.stage.attack is None:
            return np.zeros(clients, dtype=bool)
        with plugin_errors("attack"):
            return self.stage.attack.members(clients, self.experiment.seed)

    @built_once
    def stage_plan(self) -> StagePlan:
        """The stage, and what follows for it from the federation."""
        federation, method = self.experiment.federation, self.method()
        seed, statistics, warm_start = self.experiment.seed, self.shared_statistics, method.warm_start is not None
        parts = (self.stage, federation, seed, self.sampler, self.byzantine)
        return StagePlan(*parts, statistics, warm_start, method.compares)

    @built_once
    def buffers(self) -> tuple[str, ...]:
        """The names of the model's running statistics, without frozen ones."""
        with plugin_errors("workload", settings=self.experiment.workload):
            return tuple(name for name in self.workload.buffers if name not in self.kept_apart.frozen)

    @built_once
    def held(self) -> tuple[str, ...]:
        """The names of frozen tensors that the method's server changes. They are tensors of the run's model, of which
        clients train the others; () for most methods."""
        if not self.workload.pairs:
            return ()
        rounds = self.experiment.federation.rounds
        spec = schedules.resolve(self.experiment.method, 1, rounds, "method", peaks=True)
        built = self.registry.build("METHODS", spec, "method")
        moves = getattr(built, "moves_weights", False)
        return tuple({each.weight: None for each in self.workload.pairs}) if moves else ()

    @built_once
    def kept_apart(self) -> KeptApart:
        """The tensors that `personal` names. Raises ConfigError for settings that do not fit the model."""
        section = self.experiment.personal
        if section is None:
            return KeptApart()
        names, statistics = self._names
        found = KeptApart(*(self.group(getattr(section, key), f"personal.{key}") for key in ("tensors", "frozen")))
        if both := [name for name in found.personal if name in found.frozen]:
            raise ConfigError(
                f"personal.frozen: no tensor may be personal and frozen, got {both[0]}; take it out of one"
            )
        if not {*names} - {*statistics, *found.personal, *found.frozen}:
            what = f"all {len(names)} of {part_name(self.experiment.method)}'s"
            raise ConfigError(
                f"personal.tensors: some parameter must be shared, got {what}; choose a method that sends nothing for "
                "local training"
            )
        return found

    @built_once
    def _names(self) -> tuple[list[str], tuple[str, ...]]:
        """The names of the tensors of the model that are trained or named by `personal`, the running statistics last;
        those of the running statistics."""
        with building_model(self.experiment.workload), plugin_errors("workload", settings=self.experiment.workload):
            statistics, named = self.workload.buffers, self.workload.init(self.experiment.seed)
        return [*(name for name in named if name not in statistics), *statistics], statistics

    def group(self, form: Any, key: str) -> tuple[str, ...]:
        """The names of the tensors that a setting means, in the order of the model. Raises ConfigError for one that
        means nothing here."""
        norm = normalisation_of(self.workload.outline)
        return chosen(form, key, *self._names, norm, self._network_name)

    @property
    def _network_name(self) -> str:
        """What the model is called in messages."""
        spec = self.experiment.workload
        return part_name(spec.get("model", spec) if isinstance(spec, dict) else spec)

    @built_once
    def division(self) -> Division | None:
        """How the model is divided into shared and personal tensors; None where none is personal. The running
        statistics of a model of which nothing is sent are personal."""
        names = self.kept_apart.personal
        if not names and self.buffers and not self._method(1).shares_model:
            names = self.buffers
        if not names:
            return None
        return Division(self.initial_model().layout, names, sum(name in names for name in self.buffers))

    @property
    def shared_statistics(self) -> int:
        """The number of running statistics that are sent."""
        return len(self.buffers) - (0 if self.division is None else self.division.statistics)

    @property
    def context(self) -> RunContext:
        """What a deferred method may depend on: S, N, R, K, the seed and the shapes of the shared parameters."""
        return self.context_with(self.layout)

    def context_with(self, layout: Layout) -> RunContext:
        """The same for a layout that is known already, because another run has the same model."""
        federation = self.experiment.federation
        sizes = (federation.cohort, federation.clients, federation.rounds, federation.local.steps)
        if personal := self.kept_apart.personal:
            layout = layout.pick(set(layout.names) - set(personal))
        return RunContext(*sizes, self.experiment.seed, layout, self.workload.pairs, self.drawn_model)

    @built_once
    def drawn_models(self) -> dict[int, Tree]:
        """What `drawn_model` has made, by the seed: a method is built again for each round of a schedule."""
        return {}

    def drawn_model(self, seed: int) -> Tree:
        """The shared parameters of the model that the workload has with another seed."""
        if seed not in self.drawn_models:
            self.drawn_models[seed] = self._drawn_model(seed)
        return self.drawn_models[seed]

    def _drawn_model(self, seed: int) -> Tree:
        with building_model(self.experiment.workload), plugin_errors("workload", settings=self.experiment.workload):
            tensors, personal = self.workload.init(seed), self.kept_apart.personal
        names = [name for name in self.layout.names if name not in personal]
        return Tree.of({name: tensors[name].to(self.dtype) for name in names})

    @built_once
    def layout(self) -> Layout:
        """The layout of the model without buffers."""
        layout = self.checked_initial_model().layout
        return layout.pick(set(layout.names) - set(self.buffers))

    def checked_initial_model(self) -> Tree:
        """`initial_model`, but raises ConfigError for a model that cannot be built or does not fit into memory."""
        with plugin_errors("workload", settings=self.experiment.workload):
            if self.workload.outline is not None:
                check_size(self.workload.outline)
                check_network(self.workload.outline)
            return self.initial_model()

    @built_once
    def method_has_schedule(self) -> bool:
        """Whether the method differs from round to round."""
        private, personal = self.privacy is not None and self.privacy.has_schedule, self.experiment.personal
        own = personal is not None and schedules.has_schedule(personal.rule)
        return private or own or schedules.has_schedule(self.experiment.method)

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, gradients and states."""
        return getattr(torch, self.experiment.engine.dtype)

    @property
    def precision(self) -> torch.dtype | None:
        """The type of forward and backward passes, None if it is `dtype`."""
        return torch.bfloat16 if self.experiment.engine.precision == "bfloat16" else None

    def frozen_type(self, stored: torch.dtype) -> torch.dtype:
        """The type of frozen floats. stored: the one that they have in a file, or as the workload makes them."""
        base = self.experiment.engine.base
        if not self.workload.casts_up:
            return self.dtype
        if base == "as_stored":
            return stored if is_narrower(stored, self.dtype) else self.dtype
        return self.precision or (self.dtype if base == "same" else getattr(torch, base))

    @property
    def tf32(self) -> bool:
        """Whether a GPU may compute products of float32 in TF32."""
        return self.experiment.engine.precision == "tf32"

    @property
    def device(self) -> torch.device:
        """The device that trains."""
        return torch.device(self.experiment.engine.trains_on)

    def computing(self) -> AbstractContextManager[None]:
        """A context with torch's settings of the run, see `accelerators.settings.applied`."""
        return applied(self.device, self.tf32, self.experiment.engine.threads)

    @built_once
    def backend(self) -> Backend:
        """Where the run is computed: as the configuration says, or by the rule of `engine.backend: auto`, which depends
        on nothing but the configuration and whether this machine has more than one processor."""
        engine = self.experiment.engine
        if engine.backend != "auto":
            return Backend(engine.backend)
        if engine.asks_for_ray():
            return Backend("ray")
        if engine.trains_on != "cpu":
            return Backend("local", "one process trains on one GPU; engine.workers asks for more")
        if engine.count_workers() == 1:
            return Backend("local", "there is one processor")
        work = self.multiplications()
        if math.isinf(work):
            return Backend("ray", "its multiplications cannot be counted before it begins")
        why = f"{work / 1e9:.3g} billion multiplications; up to {AS_QUICK_HERE / 1e9:g} billion are as quick here"
        return Backend("local" if work <= AS_QUICK_HERE else "ray", why)

    def multiplications(self) -> float:
        """The multiplications of the forward passes of all local steps, with at least LEAST_STEP for each step, and
        clients of equal size where steps follow from it; infinity where they cannot be counted before the data are
        read."""
        federation = self.experiment.federation
        steps = federation.local.steps
        if steps is None:
            rows = self.workload.training_rows
            if rows is None:
                return math.inf
            (steps,) = steps_of(np.array([-(-rows // federation.clients)]), federation.local).tolist()
        one = federation.local.accumulate * max(LEAST_STEP, self.multiplications_of_batch())
        return federation.rounds * federation.cohort * steps * one

    def multiplications_of_batch(self) -> float:
        """The multiplications of a forward pass for one batch; infinity where they cannot be counted."""
        one = multiplications(self.workload) if self.workload.outline is not None else sum(self.layout.sizes)
        return self.experiment.federation.local.batch * one

    @property
    def workers(self) -> int:
        """The number of processes that train."""
        return self.experiment.engine.count_workers() if self.backend.name == "ray" else 1

    @property
    def state_folder(self) -> Path:
        """The folder of the client states; no other run uses it."""
        return state_folder(self.experiment.engine, self.run_id, self.directory)

    def on_cpu(self) -> RunSpec:
        """The same run for a worker without a GPU."""
        return self.with_engine(self.experiment.engine.model_copy(update={"device": "cpu"}))

    def with_engine(self, engine: Engine) -> RunSpec:
        """The same run with other settings of `engine`, which change no bit."""
        return self.with_experiment(self.experiment.model_copy(update={"engine": engine}))

    def without_frozen(self) -> RunSpec:
        """The same run as it is sent to processes that get its frozen tensors otherwise, see `with_frozen`."""
        given = self.given_model and {
            name: value for name, value in self.given_model.items() if name not in self.frozen
        }
        return replace(self, given_model=given)

    def with_frozen(self, frozen: dict[str, Tensor]) -> RunSpec:
        """The same run with its frozen tensors in other memory, which it does not fill: they are not built here."""
        given = self.given_model and {**self.given_model, **frozen}
        built = {**self.built, vars(RunSpec)["frozen"].build: (self.experiment, frozen)}
        return replace(self, given_model=given, built=built)

    def forget_frozen(self) -> None:
        """Free the frozen tensors in this process. They are built again if they are asked for."""
        self.built.pop(vars(RunSpec)["frozen"].build, None)

    def with_experiment(self, experiment: Experiment) -> RunSpec:
        """The same run with other settings. Nothing is built of them, and nothing is proven."""
        return replace(self, experiment=experiment, proofs=ProofsOnData(), built={})

    def for_worker(self, gpus: float) -> RunSpec:
        """The same run for a worker that reserves this many GPUs, or a fraction of one, while others may have some."""
        engine = self.experiment.engine
        if not gpus and engine.on_gpus():
            return self.on_cpu()
        if engine.gpus == gpus:
            return self
        return self.with_engine(engine.model_copy(update={"gpus": gpus}))

    def block(self, parameters: int) -> int:
        """The number of clients in a block, for a model with `parameters` numbers."""
        engine, cohort = self.experiment.engine, self.experiment.federation.cohort
        if self.execution_plan is not None:
            return self.execution_plan.block
        if engine.block == "auto":
            block = auto_block(parameters, cohort, self.device.type)
            return block if self.kernels.suits(block) else 1
        return min(engine.block, cohort)

    def plan_for_checkpoint(self) -> dict[str, Any]:
        """The execution plan as checkpoints store it: the number of clients in a block, and the kernels."""
        plan = self.execution_plan or ExecutionPlan(self.block(self.initial_model().flat.numel()), str(self.kernels))
        return plan._asdict()

    @property
    def kernels(self) -> Kernels:
        """The kernels that clients run by: those of the execution plan, once it is decided."""
        if self.execution_plan is not None:
            return self.kernels_named(self.execution_plan.kernels)
        wanted = self.experiment.engine.kernels
        return self.kernels_named("torch" if wanted == "auto" else wanted)

    def kernels_named(self, name: str) -> Kernels:
        """The kernels with this name in a plan. Raises ConfigError if there are none."""
        built = self.registry.build("KERNELS", name, "engine.kernels")
        if not isinstance(built, Kernels):
            raise ConfigError(f"engine.kernels: {name} gives {built!r}; give a class of Kernels in the table")
        return built

    def memory_remedy(self) -> str:
        """A clause for messages about memory: how large a block and the model are, and the settings to lower."""
        parameters = sum(self.layout.sizes)
        lower = "engine.block, engine.workers" if self.backend.name == "ray" else "engine.block"
        return (
            f"a block has {self.block(parameters)} clients, and the model of workload "
            f"{part_name(self.experiment.workload)} has {parameters:,} parameters, "
            f"{self.dtype.itemsize * parameters / 2**20:,.1f} MiB for each client; "
            f"lower {lower} or federation.local.batch, or choose a smaller model"
        )

    def initial_model(self) -> Tree:
        """The model before round 1, without its frozen tensors. Its buffers, if it has any, are the last tensors."""
        held = self.held
        with building_model(self.experiment.workload):
            tensors = self.workload.init(self.experiment.seed)
            if held:
                frozen = self.workload.frozen(self.experiment.seed)
                tensors = {**{name: frozen[name] for name in held}, **tensors}
            tensors = {name: value for name, value in tensors.items() if name not in self.kept_apart.frozen}
            tensors = {**tensors, **{name: tensors.pop(name) for name in self.buffers}}  # moves buffers to the end
            if self.given_model is not None:
                given = like({**tensors, **self.frozen}, self.given_model)
                tensors = {name: given[name] for name in tensors}
            return Tree.of({name: value.to(self.dtype) for name, value in tensors.items()})

    @built_once
    def frozen(self) -> dict[str, Tensor]:
        """The frozen tensors of the model, on the processor; their floats are in `frozen_type`. They are
        constants of the run, of which no round, row, message or checkpoint has a copy."""
        found = self._found_frozen()
        with building_model(self.experiment.workload):
            return dict(found)

    @property
    def frozen_one_by_one(self) -> Mapping[str, Tensor]:
        """The same. Those that are in files are read when they are asked for, unless all are in memory already."""
        build = vars(RunSpec)["frozen"].build
        if self.built.get(build, (None, None))[0] is self.experiment:
            return self.frozen
        found = self._found_frozen()
        if not isinstance(found, StoredTensors):
            self.built[build] = self.experiment, dict(found)
        return found

    def _found_frozen(self) -> Mapping[str, Tensor]:
        """The frozen tensors, still in files where all of them are there as the run has them."""
        with building_model(self.experiment.workload), plugin_errors("workload", settings=self.experiment.workload):
            tensors, names = self.workload.frozen(self.experiment.seed), self.kept_apart.frozen
            if isinstance(tensors, StoredTensors) and self.given_model is None and not names:
                found = tensors.some(tuple(name for name in tensors if name not in self.held))
                as_stored = self.workload.casts_up and self.experiment.engine.base == "as_stored"
                return found.as_in_files(self.dtype) if as_stored else found.to(self.frozen_type(self.dtype))
            if names:
                trained = self.workload.init(self.experiment.seed)
                tensors = {**tensors, **{name: trained[name] for name in names}}
            given = self.given_model or {}
            return {
                name: floats_to(self.dtype if name in names else self.frozen_type(value.dtype), given.get(name, value))
                for name, value in tensors.items()
                if name not in self.held
            }

    @built_once
    def frozen_facts(self) -> dict[str, Any]:
        """What the record of a run says of its frozen tensors: their names, how many numbers and bytes they are, and
        the digest of their names, types, shapes and numbers. {} without frozen tensors."""
        if (stored := self._frozen_in_files()) is not None:
            return known(stored.files, stored.outline, lambda: facts_of(stored))
        return facts_of(self.frozen_one_by_one)

    def _frozen_in_files(self) -> StoredTensors | None:
        """The frozen tensors where all are in files as the run has them. Their numbers are not read."""
        found = None if self.workload.stored() is None or self.given_model is not None else self._found_frozen()
        return found if isinstance(found, StoredTensors) else None

    @property
    def frozen_text(self) -> str:
        """The frozen tensors in words, for logs; "" without any."""
        if not self.frozen:
            return ""
        numbers = sum(value.numel() for value in self.frozen.values())
        return f"{shown(list(self.frozen))}, {numbers:,} numbers"

    @property
    def personal_text(self) -> str:
        """The personal tensors in words, for logs; "" without any."""
        if self.division is None:
            return ""
        return f"{shown(self.division.names)}, {sum(self.division.personal.sizes):,} numbers"

    def split(self) -> Split:
        """The data and the rows of every client. Raises ConfigError for data that the run cannot use."""
        split, column = split_of(self.workload, self.experiment, torch.finfo(self.dtype).max), self.sampler.grouped_by
        if column is not None:
            with plugin_errors("federation.sampler"):
                split = with_groups(split, column)
        self.check_clients(split)
        return split

    def check_clients(self, split: Split) -> None:
        """Raise ConfigError if the weights or the sampler do not fit the clients of data, which runs may share."""
        index, column = split.client_index, self.sampler.grouped_by
        check_weights(index, self.experiment.federation)
        if column is not None:
            with plugin_errors("federation.sampler"):
                self.sampler.check_groups(len(np.unique(index.common[column])))


def rule_of(method: Algorithm, key: str = "personal.rule") -> Rule:
    """The local rule of a method, or of the one that it wraps. key: of the setting that needs it. Raises ConfigError if
    it has none."""
    inner = method
    while not isinstance(rule := getattr(inner, "rule", None), Rule):
        inner = getattr(inner, "method", None)
        if inner is None:
            name = type(method).__name__.lower()
            raise ConfigError(f"{key}: same needs a method with the one option rule, got {name}; give a rule")
    return rule


def check_patterns(method: Algorithm, names: Sequence[str], spec: Any) -> None:
    """Raise ConfigError if a pattern of a local rule matches no tensor. names: of the trained tensors. spec: of the
    method, which may have the rule's options as its own."""
    inner, rule = getattr(method, "method", None), getattr(method, "rule", None)
    if isinstance(inner, Algorithm):
        check_patterns(inner, names, spec)
    if isinstance(rule, Rule):
        for key, patterns in rule.patterns.items():
            if isinstance(method, Personal):
                place = "personal.rule"
            else:
                place = "method" if isinstance(spec, Mapping) and key in spec else "method.rule"
            matching(patterns, f"{place}.{key}", names)


def facts_of(frozen: Mapping[str, Tensor]) -> dict[str, Any]:
    """`RunSpec.frozen_facts` of these tensors."""
    if not frozen:
        return {}
    count = size = 0
    types: set[str] = set()
    for value in frozen.values():
        count, size = count + value.numel(), size + value.nbytes
        types.add(str(value.dtype).removeprefix("torch."))
    return {
        "tensors": list(frozen),
        "numbers": count,
        "bytes": size,
        "dtype": ", ".join(sorted(types)),
        "sha256": sha256_of_tensors(frozen),
    }


def floats_to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The tensor in this type if it has floats; whole numbers and bits stay as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def auto_block(parameters: int, cohort: int, device: str) -> int:
    """The number of clients in a block if the experiment leaves it open and nothing was measured.

    On a CPU, vectorising pays as long as the cost of a step is the dispatch of its operations. `benchmarks/blocks.py`
    finds that this is so below 50,000 parameters. Convolutions and large layers run faster one client at a time. A GPU
    needs many clients at once to be busy.
    """
    block = cohort if device == "cuda" else 16 if parameters < 50_000 else 1
    return min(cohort, block)
