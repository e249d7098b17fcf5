"""What does not go together where a part must be built to know it, such as a method or a rule of aggregation.

What the configuration alone says is in the classes of its sections (`config/schema.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch.utils import _pytree as pytree

from ...algorithms.aggregation.contract import Aggregator, Mean
from ...algorithms.attacks.contract import Attack
from ...algorithms.contract import Algorithm, Known
from ...workloads.classification import Classification
from ..aggregation.stage_plan import sends
from ..cohorts.samplers import Replacement
from ..config.conflicts import Conflict, refuse
from ..config.schema import Asynchronous, Experiment, Pace, is_set
from ..kernels.library import NoKernels
from ..method_form.personal import Personal
from ..method_form.state_spec import StateSpec
from ..run_spec import RunSpec
from ..workload.layers import momenta_of


@dataclass(frozen=True)
class Built:
    """A run, and what is built for it when a row asks for it."""

    run_spec: RunSpec

    @property
    def experiment(self) -> Experiment:
        return self.run_spec.experiment

    @property
    def rule(self) -> Aggregator:
        return self.run_spec.stage.rule

    @property
    def attack(self) -> Attack | None:
        return self.run_spec.stage.attack

    @cached_property
    def method(self) -> Algorithm:
        return self.run_spec.method()

    @cached_property
    def state_spec(self) -> StateSpec:
        return StateSpec(self.method, self.run_spec.initial_model())

    @property
    def pace(self) -> Pace | Asynchronous:
        return self.experiment.federation.pace


def rows(*given: tuple[str, str, str, str, Callable[[Built], object]]) -> tuple[Conflict, ...]:
    """Rows whose last column looks at what is built."""
    return tuple(Conflict(*each) for each in given)


# --- rules of aggregation and attacks ---------------------------------------------------------------------------------
def has_no_weights(built: Built) -> str:
    """Which of the rule and of the parts before it has no weights, "" if all have."""
    rule = built.rule
    return next((each.called for each in (rule, *rule.before) if not each.takes_weights), "")


def lacks_f(built: Built) -> str:
    """Which of the parts before a rule needs the rule's f, where the rule has none; "" if there is none."""
    rule = built.rule
    lacking = (part.called for part in rule.before if getattr(part, "f", 0) is None and not hasattr(rule, "f"))
    return next(lacking, "")


def has_a_rule(built: Built) -> bool:
    """Whether something else than the mean takes the place of the messages."""
    return not isinstance(built.rule, Mean) or bool(built.rule.before)


def forges(built: Built) -> bool:
    """Whether an attack changes messages, rather than only the data that clients train on."""
    return built.attack is not None and (built.attack.collects or sends(built.attack))


AGGREGATION = rows(
    (
        *("aggregate.f", "attack", "known and expected count the clients of an attack", "give f as a number"),
        lambda b: isinstance(b.rule.faults, str) and b.attack is None,
    ),
    (
        *("privacy", "attack", "clipping and noise go with no attack", "drop one of them"),
        lambda b: b.run_spec.privacy is not None and b.attack is not None,
    ),
    (
        *("privacy", "aggregate", "clipping and noise go with the mean", "choose aggregate: mean"),
        lambda b: b.run_spec.privacy is not None and not isinstance(b.run_spec.stage_plan.rule, Mean),
    ),
    (
        *("aggregate", "federation.weights", "a part of it has no weights", "set federation.weights: uniform"),
        lambda b: b.experiment.federation.weights != "uniform" and has_no_weights(b),
    ),
    (
        *("attack", "aggregate.vectors", "searches against each vector by itself", "choose vectors: each"),
        lambda b: getattr(b.attack, "searches", False) and b.rule.vectors != "each",
    ),
    (
        *("aggregate.vectors", "aggregate.name", "joint is for rules that find weights", "leave it out"),
        lambda b: b.rule.vectors == "joint" and b.rule.by == "columns",
    ),
    (
        *("aggregate.before", "aggregate.name", "a part needs f, which the rule does not have"),
        "give it there, as in {name: …, f: 2}",
        lacks_f,
    ),
    (
        *("aggregate.before", "aggregate.name", "the rule tolerates no Byzantine message that mixing spreads"),
        "choose another rule, such as trimmed_mean",
        lambda b: b.rule.mixed_is_unsafe and any(each.mixes for each in b.rule.before),
    ),
)

# --- samplers and weights ---------------------------------------------------------------------------------------------
SAMPLING = rows(
    (
        *("engine.kernels", "federation.sampler", "they give no losses of single examples, which the sampler needs"),
        "choose auto, native or torch, or utility: mean",
        lambda b: not b.run_spec.kernels.single_losses and b.run_spec.sampler.needs_rms,
    ),
    (
        *("privacy", "federation.sampler", "epsilon is for cohorts that are drawn, and first=all draws none"),
        "leave first out",
        lambda b: b.run_spec.privacy is not None and getattr(b.run_spec.sampler, "first", "") == "all",
    ),
    (
        *("federation.pace.least", "federation.cohort", "no round uses so many clients", "lower it"),
        lambda b: (
            isinstance(b.pace, Pace) and b.run_spec.sampler.fixed and b.pace.least > b.experiment.federation.cohort
        ),
    ),
    (
        *("federation.pace.least", "federation.clients", "no round uses so many clients", "lower it"),
        lambda b: isinstance(b.pace, Pace) and b.pace.least > b.experiment.federation.clients,
    ),
    (
        *("federation.cohort", "method", "all clients must take part in every round"),
        "give cohort = clients, or choose another method",
        lambda b: b.experiment.federation.cohort < b.experiment.federation.clients and b.method.needs_all,
    ),
    *(
        (
            *(key, "method", "no client may be missing in a round"),
            "leave it out, or choose another method",
            lambda b, key=key: is_set(b.experiment, key) and b.method.needs_all,
        )
        for key in ("systems", "federation.without", "engine.on_failure")
    ),
    (
        *("federation.sampler", "method", "draws with replacement, and no client may be missing in a round"),
        "choose uniform, or another method",
        lambda b: isinstance(b.run_spec.sampler, Replacement) and b.method.needs_all,
    ),
    (
        *("federation.mean", "federation.sampler", "unbiased needs a sampler whose probabilities are known"),
        "choose auto",
        lambda b: b.experiment.federation.mean == "unbiased" and not b.run_spec.sampler.has_probabilities,
    ),
    (
        *("federation.sampler", "method", "the sampler sets the weights of the mean, and the method's means are plain"),
        "choose another sampler or method",
        lambda b: b.run_spec.sampler.sets_weights and not b.method.weighted,
    ),
    (
        *("federation.pace.select", "federation.sampler", "must be 1, since the sampler gives no spare clients"),
        "lower it",
        lambda b: isinstance(b.pace, Pace) and b.pace.select > 1 and not b.run_spec.sampler.gives_spares,
    ),
    (
        *("federation.mean", "method", "unbiased is of one mean, and the method divides one by another"),
        "choose normalised",
        lambda b: b.experiment.federation.mean == "unbiased" and b.method.divides_means,
    ),
    (
        *("aggregate", "method", "the method compares the messages and adds them up by itself"),
        "choose mean, or another method",
        lambda b: b.method.compares and has_a_rule(b),
    ),
    (
        *("workload", "method", "running statistics would be means over clients with other models"),
        "set norm: group",
        lambda b: b.method.compares and b.run_spec.shared_statistics,
    ),
    *(
        (
            *(key, "method", "the server needs the mean of what clients have sent"),
            "leave it out, or choose another method",
            lambda b, changes=changes: changes(b) and b.method.needs_mean,
        )
        for key, changes in (("aggregate", has_a_rule), ("attack", forges))
    ),
    (
        *("attack", "method", "no client may be missing in a round, and the attack has clients send nothing"),
        "choose another attack or method",
        lambda b: b.method.needs_all and b.attack is not None and b.attack.silent,
    ),
    (
        *("aggregate", "method", "the method divides by a mean that the rule does not guard"),
        "choose mean, or another method",
        lambda b: b.method.divides_means and not isinstance(b.run_spec.stage_plan.rule, Mean),
    ),
    *(
        (
            *(key, "method", "does not go with a method that weighs clients by their steps"),
            "choose another method",
            lambda b, key=key: is_set(b.experiment, key) and b.method.local_norms(1) is not None,
        )
        for key in ("privacy", "attack", "aggregate")
    ),
    (
        *("workload", "method", "running statistics do not go with a method that weighs clients by their steps"),
        "choose another method",
        lambda b: b.run_spec.shared_statistics and b.method.local_norms(1) is not None,
    ),
)


# --- asynchronous runs ------------------------------------------------------------------------------------------------
def follows_broadcasts(built: Built) -> bool:
    """Whether clients must follow every broadcast, which a client in flight cannot."""
    leaves = pytree.tree_leaves(built.state_spec.public, is_leaf=lambda part: isinstance(part, Known))
    return any(isinstance(leaf, Known) for leaf in leaves)


def sends_no_changes(built: Built) -> bool:
    """Whether the messages of the method are no changes of a model."""
    try:
        built.method.origin(built.method.unpack(built.state_spec.public))
    except NotImplementedError:
        return True
    return False


def may_have_no_weight(built: Built) -> str:
    """What is divided by the sum of weights that may all be 0, since all results of an update may be stale; "" if
    nothing is."""
    pace, spec = built.pace, built.state_spec
    if not isinstance(pace, Asynchronous) or pace.weight != "threshold" or pace.c > 0:
        return ""
    if pace.staleness is not None and pace.staleness <= pace.b:
        return ""
    if pace.divide == "weights":
        return "divide: weights"
    if "averaged" in spec.parts:
        return "a method that averages states"
    return "a model with running statistics" if spec.statistics > 0 else ""


def asynchronous(holds: Callable[[Built, Asynchronous], object]) -> Callable[[Built], object]:
    """The condition, for asynchronous runs only."""
    return lambda b: isinstance(b.pace, Asynchronous) and holds(b, b.pace)


ASYNCHRONOUS = rows(
    (
        *("federation.pace.name", "method", "the method has no asynchronous form", "leave federation.pace out"),
        asynchronous(lambda b, pace: b.method.stale),
    ),
    (
        *("federation.pace.name", "method", "the clients of the method must follow every broadcast"),
        "leave federation.pace out",
        asynchronous(lambda b, pace: follows_broadcasts(b)),
    ),
    (
        *("federation.pace.buffer", "method", "must be 2 or more where states are averaged, as with carry=average"),
        "raise it, or choose another carry or method",
        asynchronous(lambda b, pace: pace.buffer == 1 and b.method.averages_states),
    ),
    (
        *("federation.pace.once", "method", "false is for methods whose clients keep nothing from visit to visit"),
        "leave it out",
        asynchronous(lambda b, pace: not pace.once and pytree.tree_leaves(b.state_spec.client)),
    ),
    (
        *("federation.pace.base", "method", "current mixes models, and the method sends no changes of a model"),
        "choose download",
        asynchronous(lambda b, pace: pace.base == "current" and sends_no_changes(b)),
    ),
    (
        *("federation.pace.c", "federation.pace.b", "must be more than 0 where a mean is divided by the weights"),
        "raise it, or discard results older than b by staleness",
        may_have_no_weight,
    ),
)


def why_no_kernels(built: Built) -> str:
    """Why the run cannot have the kernels that it names, "" if it can."""
    try:
        why = built.run_spec.kernels.why_not(built.run_spec)
    except NoKernels as error:
        return f"they cannot be compiled here ({error})"
    return f"they are {why}" if why else ""


def changed_weights_of_float16(built: Built) -> str:
    """With a base in float16, the parameters of the model itself that the run changes, "" without any."""
    spec = built.run_spec
    if built.experiment.engine.base != "float16":
        return ""
    factors = {name for pair in spec.workload.pairs for name in (pair.a, pair.b)}
    return ", ".join(name for name in spec.layout.names if name not in factors)


# --- kernels and numbers ----------------------------------------------------------------------------------------------
ENGINE = rows(
    (
        *("engine.precision", "workload", "bfloat16 is for classification without running statistics", "choose same"),
        lambda b: (
            b.run_spec.precision is not None
            and (b.run_spec.buffers or not isinstance(b.run_spec.workload, Classification))
        ),
    ),
    (
        *("engine.base", "workload", "is for frozen tensors that a network casts up, and this workload has none"),
        "leave it out, or train an adapter (workload.adapter)",
        lambda b: b.experiment.engine.base != "same" and not b.run_spec.workload.casts_up,
    ),
    (
        *("engine.base", "personal.frozen", "is for tensors that an adapter or the model freezes"),
        "leave one of them out",
        lambda b: b.experiment.engine.base != "same" and b.run_spec.kept_apart.frozen,
    ),
    (
        *("engine.base", "workload", "float16 has too few digits for weights that change, and these do"),
        "choose bfloat16 or float32, or train the factors of an adapter alone",
        changed_weights_of_float16,
    ),
    (
        *("engine.kernels", "run", "must fit the run", "choose torch or auto"),
        why_no_kernels,
    ),
    (
        *("engine.state_memory", "engine.backend", "is for runs in the calling process; workers on Ray share files"),
        "choose auto, or backend: local",
        lambda b: b.experiment.engine.state_memory not in ("auto", 0) and b.run_spec.backend.name == "ray",
    ),
)

# --- files ------------------------------------------------------------------------------------------------------------
FILES = rows(
    *(
        (
            *(key, "out", "needs a folder for the run's files", "give out"),
            lambda b, key=key: b.run_spec.directory is None and is_set(b.experiment, key),
        )
        for key in ("checkpoint.every", "checkpoint.seconds", "checkpoint.folder", "tracking.clients")
    )
)


# --- clients' own models ----------------------------------------------------------------------------------------------
def wrapped_method(built: Built) -> Algorithm:
    """The method that `personal` wraps."""
    method = built.method
    while not isinstance(method, Personal):
        method = method.method  # pyright: ignore[reportAttributeAccessIssue] a wrapper around it
    return method.method


def has_personal(built: Built) -> bool:
    """Whether the section `personal` gives tensors to clients."""
    return bool(built.run_spec.kept_apart.personal)


def untrained(built: Built) -> str:
    """Why the server's model is not trained as a whole, "" if it is."""
    if built.run_spec.trains_the_servers_model:
        return ""
    division = built.run_spec.division
    return "the clients send nothing" if division is None else f"{division.names[0]} is personal"


def apart_factor(built: Built) -> str:
    """A factor of an adapter that stays with clients, "" where none does."""
    factors = {name for pair in built.run_spec.workload.pairs for name in (pair.a, pair.b)}
    return next((name for name in built.run_spec.kept_apart.personal if name in factors), "")


PERSONAL = rows(
    (
        *("evaluate.clients.own", "personal.tensors", "the server has no model without the factors of clients"),
        "leave it out, so that clients' own models are evaluated",
        lambda b: b.run_spec.client_models.own is False and apart_factor(b),
    ),
    (
        *("evaluate.clients.export", "method", "clients have no models of their own, all have the server's"),
        "leave it out",
        lambda b: b.run_spec.client_models.export != "none" and not b.method.own_models,
    ),
    (
        *("evaluate.clients.export", "out", "needs a folder for the run's files", "give out"),
        lambda b: b.run_spec.client_models.export != "none" and b.run_spec.directory is None,
    ),
    (
        *("evaluate.server", "personal.tensors", "not all tensors of the server's model are trained"),
        "leave it out",
        lambda b: b.experiment.evaluate.server is True and untrained(b),
    ),
    (
        *("evaluate.clients.statistics", "run", "training needs layers with running statistics and a momentum"),
        "leave it out",
        lambda b: b.run_spec.client_models.statistics == "training" and not momenta_of(b.run_spec.workload.outline),
    ),
    (
        *("engine.state_dtype", "method", "bfloat16 would round clients' models between visits", "set same"),
        lambda b: b.experiment.engine.state_dtype == "bfloat16" and b.method.own_models,
    ),
    (
        *("personal", "method", "does not go with a method that gives clients whole models of their own"),
        "choose another method, or leave personal out",
        lambda b: has_personal(b) and wrapped_method(b).own_models,
    ),
    (
        *("personal.tensors", "method", "does not go with a method that changes the weights beside adapters"),
        "leave it out, or choose another method",
        lambda b: has_personal(b) and b.method.moves_weights,
    ),
    (
        *("aggregate", "method", "products of factors are added to the weights, where only a mean has a meaning"),
        "choose mean, or another method",
        lambda b: b.method.moves_weights and not isinstance(b.run_spec.stage_plan.rule, Mean),
    ),
    (
        *("evaluate.clients.adapt", "method", "would train the weights that the method's server changes"),
        "leave it out",
        lambda b: b.method.moves_weights and bool(b.run_spec.adaptations(b.method)),
    ),
    (
        *("workload.adapter.ranks", "systems", "the virtual clock has one size of messages for all clients"),
        "leave one of them out",
        lambda b: b.method.own_traffic and is_set(b.experiment, "systems"),
    ),
    (
        *("workload.adapter.ranks", "evaluate.clients.adapt", "would train with one rank for all"),
        "leave one of them out",
        lambda b: b.method.own_traffic and bool(b.run_spec.adaptations(b.method)),
    ),
    *(
        (
            *(key, "method", "needs messages, and the clients of the method send none"),
            "leave it out",
            lambda b, key=key: is_set(b.experiment, key) and not b.method.shares_model,
        )
        for key in ("aggregate", "attack")
    ),
    (
        *("aggregate", "personal.tensors", "the rule trains a model at the server, which has no personal tensors"),
        "choose another rule",
        lambda b: b.run_spec.division is not None and b.rule.extra == "trusted",
    ),
)

BUILT_CONFLICTS = (*AGGREGATION, *SAMPLING, *ASYNCHRONOUS, *ENGINE, *FILES, *PERSONAL)


def check_conflicts(built: Built) -> None:
    """Raise ConfigError for the first settings of a run that do not go together."""
    refuse(BUILT_CONFLICTS, built, built.experiment)
