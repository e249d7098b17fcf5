"""The configuration of an experiment: typed, validated, plain data that YAML can hold.

The text below each key says what it is; the site, the JSON schema and editors show it. Counts have the upper limit
2^31 - 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from ...workloads.processors import processors
from ..errors import ConfigError, nearest
from ..storage.expanded import expanded_address, is_unicode
from ..storage.secrets import redacted, without_secrets
from .conflicts import Conflict, first_conflict
from .earlier import one_key_for_the_sampler
from .schedules import counts_steps

LARGEST_COUNT = 2**31 - 1
"""The largest value of any count."""


class Section(BaseModel):
    """A frozen mapping of known keys. Unknown keys, infinite numbers and NaN are refused.

    The constructor raises ConfigError with one sentence per mistake. Its representation has the keys whose values are
    not the defaults.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    """What does not go together in this section."""

    if not TYPE_CHECKING:  # a type checker takes the arguments from the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(_sentences(error, values, type(self))) from None

        __init__.__pydantic_base_init__ = True  # sections inside a section are validated without this constructor

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.get_default(call_default_factory=True):
                yield name, value

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: Any) -> Any:
        """Refuse true and false for a number: to Python they are 1 and 0."""
        wanted = cls.model_fields[info.field_name].annotation
        allowed = (wanted, *get_args(wanted))
        if isinstance(value, bool) and bool not in allowed and all(each is not value for each in allowed):
            raise ValueError(f"must not be {str(value).lower()}")
        return value

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        if message := first_conflict(self.conflicts, self, self):
            raise PydanticCustomError("conflict", "{message}", {"message": message})
        return self

    def check(self, path: str = "") -> None:
        """Raise ConfigError for settings that do not go together, in this section and in those inside: a copy by
        `model_copy` was not validated. path: what stands before the keys of this section, as in "federation."."""
        for name in type(self).model_fields:
            if isinstance(inner := getattr(self, name), Section):
                inner.check(f"{path}{name}.")
        if message := first_conflict(self.conflicts, self, self):
            raise ConfigError(path + message)


class Local(Section):
    """The work of one client in a round. Either `steps` or `epochs` may be given; without both, `steps` is 5."""

    steps: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """The number of local steps K, each on one batch, at least 1."""
    epochs: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """The number of passes over the client's own training rows, at least 1."""
    batch: int = Field(default=32, ge=1, le=LARGEST_COUNT)
    """The number of examples in a batch, at least 1. The last batch of an epoch may have fewer."""
    accumulate: int = Field(default=1, ge=1, le=LARGEST_COUNT)
    """The number of batches whose examples make one local step, at least 1. A step has the rows and the gradient that
    it would have with a batch so many times as large, in the memory of one batch. What is drawn at random within the
    model, such as dropout and noise, is drawn for each batch, and BatchNorm normalises each batch."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "steps", "epochs", "give either steps or epochs, not both", "drop one", lambda s: s.steps and s.epochs
        ),
        Conflict(
            *("accumulate", "batch", f"a local step has at most {LARGEST_COUNT} examples", "lower it"),
            lambda s: s.examples > LARGEST_COUNT,
        ),
    )

    @property
    def examples(self) -> int:
        """The number of examples of a local step."""
        return self.batch * self.accumulate

    @property
    def at_once(self) -> int | None:
        """The most examples of which a gradient is computed at once; None for all of a local step."""
        return self.batch if self.accumulate > 1 else None

    def taking(self, steps: int | None = None, epochs: int | None = None) -> Self:
        """The work of another number of local steps, or of epochs, on the same batches."""
        return self.model_copy(update={"steps": steps, "epochs": epochs})

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("steps") is None and values.get("epochs") is None:
            return {**values, "steps": 5}
        return values


class Pace(Section):
    """How a round ends in virtual time. Other values than the defaults need a section `systems`."""

    versions: ClassVar[int] = 1
    """From how many versions of the model clients train at the same time."""

    name: Literal["rounds", "buffered", "fedasync"] = "rounds"
    """`rounds` (default), synchronous rounds; the other names are those of an asynchronous run."""
    select: float = Field(default=1.0, ge=1, le=LARGEST_COUNT)
    """How many clients are selected for each one that is wanted, at least 1; the round takes those that arrive first.
    """
    deadline: float | None = Field(default=None, gt=0)
    """The virtual seconds after which a round ends, more than 0 (default: none)."""
    stragglers: Literal["wait", "drop", "partial"] = "wait"
    """What becomes of clients that would miss the deadline. `wait` (default): there is no deadline; `drop`: they are
    left out; `partial`: they take as many local steps as fit into it."""
    least: int = Field(default=1, ge=1, le=LARGEST_COUNT)
    """The fewest clients that a round needs, at least 1: it begins when so many are online, and is empty if fewer
    arrive."""
    notice: Literal["once", "never"] = "once"
    """When a client that is lost is noticed, `once` it is lost (default) or `never`, which needs a deadline."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            *("deadline", "stragglers", "goes with stragglers drop or partial", "choose one"),
            lambda p: p.deadline is not None and p.stragglers == "wait",
        ),
        Conflict(
            *("stragglers", "deadline", "drop and partial need a deadline", "give seconds"),
            lambda p: p.deadline is None and p.stragglers != "wait",
        ),
        Conflict(
            *("notice", "deadline", "never needs a deadline, or a round without an answer never ends", "give seconds"),
            lambda p: p.deadline is None and p.notice == "never",
        ),
    )


class Asynchronous(Section):
    """Rounds without a common end: the server makes an update whenever enough results have arrived, see
    docs/howto/asynchronous.md. It needs a section `systems`. `federation.cohort` is then the number C of clients that
    train at the same time, and `federation.rounds` the number of updates.
    """

    versions: ClassVar[int] = 8
    """From how many versions of the model clients train at the same time, at most."""

    name: Literal["buffered", "fedasync"]
    """`buffered`, as FedBuff, or `fedasync`. Further defaults follow from it."""
    buffer: int = Field(default=10, ge=1, le=LARGEST_COUNT)
    """The number M of results in an update, at least 1 (default 10; fedasync: 1)."""
    base: Literal["download", "current"] = "download"
    """What a result is a change of. `download`: of the model that the client downloaded; `current`: of the newest
    model, so that whole models are mixed (default download; fedasync: current)."""
    weight: Literal["constant", "polynomial", "hinge", "threshold"] = "polynomial"
    """The weight of a result that t updates came before: `constant`, 1; `polynomial`, (1 + t)^-a; `hinge`, 1 up to t =
    b and 1 / (slope (t - b) + 1) beyond; `threshold`, 1 up to t = b and c beyond (default polynomial; fedasync:
    constant)."""
    a: float = Field(default=0.5, ge=0, le=1)
    """The exponent of `weight: polynomial`."""
    slope: float = Field(default=10.0, gt=0)
    """The slope of `weight: hinge`."""
    b: float = Field(default=4.0, ge=0)
    """Up to how many updates `weight: hinge` and `weight: threshold` are 1."""
    c: float = Field(default=0.0, ge=0)
    """The weight beyond b of `weight: threshold`."""
    relative_to: float = Field(default=0.0, ge=0)
    """The number of updates at which the weight shall be 1, 0 or more."""
    divide: Literal["buffer", "weights", "none"] = "buffer"
    """What the sum of the results is divided by. `buffer`: the sum of the client weights, so that stale results shorten
    the step; `weights`: the sum of the same times the weights of their staleness; `none` (default buffer; fedasync:
    none)."""
    mix: float = Field(default=1.0, gt=0)
    """What each result is multiplied by, more than 0, a step size that no divisor has: the alpha of FedAsync (default
    1; fedasync: 0.6)."""
    staleness: int | None = Field(default=None, ge=0, le=LARGEST_COUNT)
    """Results that more updates than this came before are discarded, 0 or more (default: none)."""
    open: int = Field(default=1, ge=1, le=LARGEST_COUNT)
    """How many of the C slots must be free before any is filled, 1 to C."""
    once: bool = True
    """Whether a client is dispatched at most once from the same version of the model."""
    deadline: float | None = Field(default=None, gt=0)
    """The virtual seconds after which a client that has not answered is lost, more than 0 (default: none)."""
    ties: Literal["number", "counted"] = "number"
    """In which order results that arrive at one time count: by client `number` (default), or `counted`, at random."""
    starts: Literal["slots", "rate"] = "slots"
    """When clients are dispatched. `slots` (default): whenever slots are free; `rate`: one client every `gap` seconds,
    however many there are in flight."""
    gap: float = Field(default=1.0, gt=0)
    """The virtual seconds between two clients with `starts: rate`."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") == "fedasync":
            return {"buffer": 1, "base": "current", "weight": "constant", "divide": "none", "mix": 0.6, **values}
        return values

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            *("relative_to", "b", "relative_to <= b must hold with weight: threshold and c: 0", "lower it"),
            lambda p: p.weight == "threshold" and p.c == 0 and p.relative_to > p.b,
        ),
        Conflict(
            *("weight", "divide", "has no effect with buffer: 1, where the only weight is divided by itself"),
            "choose divide: buffer, or weight: constant",
            lambda p: p.divide == "weights" and p.buffer == 1 and p.weight != "constant",
        ),
    )


def kind_of_pace(value: Any) -> str:
    """The name of the section that `federation.pace` is."""
    name = value.get("name", "rounds") if isinstance(value, dict) else getattr(value, "name", "rounds")
    return "Asynchronous" if name in ("buffered", "fedasync") else "Pace"


PaceKinds = Annotated[
    Annotated[Pace, Tag("Pace")] | Annotated[Asynchronous, Tag("Asynchronous")],
    Discriminator(kind_of_pace),
]


COUNTED = ("uniform", "binomial", "turns")
"""The samplers whose cohorts follow from the seed and the number of the round alone."""


class Federation(Section):
    """Who is trained, how often, and how the results are averaged."""

    clients: int = Field(default=100, ge=1, le=LARGEST_COUNT)
    """The number N of clients, at least 1."""
    cohort: int = Field(default=20, ge=1, le=LARGEST_COUNT)
    """The number S of clients that are sampled in each round, 1 to `clients`."""
    sampler: Any = "uniform"
    """How clients are drawn, by a name in the table SAMPLERS, or a name with arguments as in {name: power_of_choice, d:
    40}. `uniform` (default): S of them without replacement. `binomial`: every client with probability S / N,
    independently of the others, so that S is the mean number and some rounds may have none. `turns`, as in {name:
    turns, separation: 11}: the clients are cut into `separation` groups at random, which take turns; a round samples
    its group so that S is the mean number, or takes all of the group if it has S clients. Privacy, attacks and rules of
    aggregation go with these three."""
    mean: Literal["auto", "normalised", "unbiased"] = "auto"
    """What the weighted sum of a cohort is divided by. `auto` (default): by what the sampler needs for a mean that is
    right on average, if it has unequal probabilities, else by the sum of the weights; `normalised`: by the sum of the
    weights; `unbiased`: by the expected sum, so that the mean over all draws is that over all clients."""
    pace: PaceKinds = Field(default_factory=Pace)
    """How a round ends in virtual time, see `Pace`; or an asynchronous run, see `Asynchronous`."""
    rounds: int = Field(default=50, ge=1, le=LARGEST_COUNT)
    """The number R of rounds, at least 1."""
    local: Local = Field(default_factory=lambda: Local.model_validate({}))
    """The work of one client in a round, see `Local`."""
    weights: Literal["uniform", "examples", "tokens"] = "uniform"
    """The weights of the clients in the mean of their models. `uniform` (default) gives all clients of a cohort the
    same weight; `examples` weights each client by the number of its training rows, and `tokens` by the number of
    targets in them, for workloads of language models."""
    without: tuple[int, ...] = ()
    """The numbers of clients that are drawn but not used: a cohort is trained, and its mean is taken, without them, and
    everybody else's draws stay as they are (default: none). See docs/howto/forks.md."""
    unseen: float | tuple[int, ...] | None = None
    """Further clients that are never trained with, to see what a newcomer gets: a number of 1 or more, a fraction of
    all clients below 1, or a list of the numbers that they have in the partition (default: none). The partition deals
    the rows to all of them; those that are trained with then have the numbers from 0 to `clients` - 1, and the unseen
    ones those from `clients` on. What they get is in eval/unseen/…, see docs/howto/personal.md."""

    @field_validator("unseen")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if isinstance(value, tuple):
            if not value or min(value) < 0 or len(set(value)) < len(value):
                raise ValueError("a list must have the number of a client at least, and none twice")
        elif value is not None and not 0 < value < 1 and (value < 1 or value % 1):
            raise ValueError("must be a whole number of 1 or more, a fraction below 1, or a list of numbers of clients")
        return value

    @property
    def all_clients(self) -> int:
        """The number of all clients, also of those that are never trained with."""
        if isinstance(self.unseen, tuple):
            return self.clients + len(self.unseen)
        if self.unseen is None or self.unseen >= 1:
            return self.clients + int(self.unseen or 0)
        return self.clients + max(1, round(self.clients * self.unseen / (1 - self.unseen)))

    @model_validator(mode="before")
    @classmethod
    def _one_key_for_the_sampler(cls, values: Any) -> Any:
        if isinstance(values, dict) and (message := one_key_for_the_sampler(values)):
            raise PydanticCustomError("conflict", "{message}", {"message": message})
        return values

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict("cohort", "clients", "cohort <= clients must hold", "lower it", lambda f: f.cohort > f.clients),
        Conflict(
            *("without", "clients", "clients have the numbers from 0 to clients - 1", "drop the others"),
            lambda f: any(not 0 <= client < f.clients for client in f.without),
        ),
        Conflict(
            *("without", "clients", "must not repeat a client", "drop one"),
            lambda f: len(set(f.without)) < len(f.without),
        ),
        Conflict(*("without", "clients", "a client must be left", "drop one"), lambda f: len(f.without) == f.clients),
        Conflict(
            *(
                "unseen",
                "clients",
                "the partition has the clients from 0 to clients + their number - 1",
                "drop the others",
            ),
            lambda f: isinstance(f.unseen, tuple) and max(f.unseen) >= f.all_clients,
        ),
        Conflict(
            *("sampler.separation", "clients", "cohort * separation <= clients must hold"),
            "lower it, or federation.cohort",
            lambda f: f.cohort * (f.separation or 1) > f.clients,
        ),
        Conflict(
            *("mean", "sampler", "binomial and turns divide by the sum of the weights", "drop one"),
            lambda f: f.sampled in ("binomial", "turns") and f.mean != "auto",
        ),
        Conflict(
            *("pace.select", "clients", "so many clients cannot be selected", "lower it, or federation.cohort"),
            lambda f: isinstance(f.pace, Pace) and f.selected > f.clients,
        ),
        Conflict(
            *("pace.open", "cohort", "no more slots can be free than there are", "lower it"),
            lambda f: isinstance(f.pace, Asynchronous) and f.pace.starts == "slots" and f.pace.open > f.cohort,
        ),
        Conflict(
            *("pace.buffer", "clients", "an update has one result of each client at most with once: true", "lower it"),
            lambda f: isinstance(f.pace, Asynchronous) and f.pace.once and f.pace.buffer > f.clients,
        ),
        *(
            Conflict(
                *(key, "pace.name", f"has no meaning in an asynchronous run: {why}", "leave one of them out"),
                lambda f, key=key: isinstance(f.pace, Asynchronous) and is_set(f, key),
            )
            for key, why in (
                ("sampler", "clients that are idle are drawn uniformly"),
                ("mean", "what is divided by is pace.divide"),
            )
        ),
    )

    @field_validator("sampler")
    @classmethod
    def _named(cls, value: Any) -> Any:
        rounds = value.get("separation") if isinstance(value, dict) else None
        if part_name(name_or_mapping(value)) == "turns" and (type(rounds) is not int or rounds < 1):
            raise ValueError(
                "turns needs the rounds from one turn of a client to its next, a whole number from 1; write {name: "
                "turns, separation: 10}"
            )
        return value

    @property
    def sampled(self) -> str:
        """The name of the sampler."""
        return part_name(self.sampler)

    @property
    def is_counted(self) -> bool:
        """Whether cohorts follow from the seed and the number of the round alone."""
        return self.sampled in COUNTED

    @property
    def separation(self) -> int | None:
        """The fewest rounds from one turn of a client to its next; None if it may take part in any round."""
        return self.sampler["separation"] if self.sampled == "turns" else None

    @property
    def selected(self) -> int:
        """The number of clients that are selected in a synchronous round: the cohort and its spares."""
        select = self.pace.select if isinstance(self.pace, Pace) else 1.0
        return math.ceil(round(select * self.cohort, 9))

    @property
    def largest_cohort(self) -> int:
        """The largest number of clients that a round may have, or of an asynchronous run the number of results that may
        wait for their updates."""
        if isinstance(self.pace, Asynchronous):
            flight = self.cohort if self.pace.starts == "slots" else self.clients
            return flight + 2 * self.pace.buffer + 1
        if self.sampled in ("binomial", "poisson", "turns"):
            return -(-self.clients // (self.separation or 1))
        return self.cohort


class WorkerGroup(Section):
    """A group of equal workers, an entry of the list `engine.workers`."""

    count: int = Field(ge=1, le=LARGEST_COUNT)
    """The number of workers in the group, at least 1."""
    cpus: float | None = Field(default=None, gt=0)
    """The CPUs that each worker reserves, more than 0; may be a fraction (default: engine.cpus)."""
    gpus: float = Field(default=0.0, ge=0)
    """The GPUs that each worker reserves, 0 or more; may be a fraction. With 0 (default) and device=cuda, all workers
    of this machine share the GPUs that it has."""
    labels: dict[str, str] = {}
    """The labels that a node must have to run these workers, as {name: value} in Ray's syntax (default: none)."""
    resources: dict[str, float] = {}
    """The custom resources of Ray that each worker reserves on its node, as {name: amount} (default: none)."""

    def needs(self) -> dict[str, float]:
        """The resources that one worker reserves on a node, by Ray's names."""
        return {"CPU": self.cpus or 1.0, **({"GPU": self.gpus} if self.gpus else {}), **self.resources}


def kind_of_number(value: Any) -> str:
    """The name of the section, or of the type, that `engine.workers` is."""
    return "WorkerGroup" if isinstance(value, list | tuple) else "auto" if value == "auto" else "number"


Workers = Annotated[
    Annotated[int, Tag("number")]
    | Annotated[Literal["auto"], Tag("auto")]
    | Annotated[tuple[WorkerGroup, ...], Tag("WorkerGroup")],
    Discriminator(kind_of_number),
]


class Engine(Section):
    """How and where the run is computed.

    `backend`, `workers`, `cpus`, `gpus`, `address`, `placement`, `wait`, `pending` and `state_memory` never change a
    bit of the result. `block`, `kernels`, `vectorise`, `threads`, `dtype` and `device` may change it within rounding
    errors, and `precision` and `base` within the rounding errors of the types that they name.
    """

    backend: Literal["auto", "ray", "local"] = "auto"
    """`ray` trains in worker processes on Ray, `local` in the calling process. `auto` (default) is `ray` where
    `workers`, an `address` or `gpus` are given. Otherwise it is `local` on a GPU or with one processor, and for a run
    whose local steps take at most 4 billion multiplications, since that is about what the start of Ray costs: the
    number of rounds x cohort x steps x batch x multiplications of the network for one example, with at least 200,000
    for each step. Where these cannot be counted before the data are read, it is `ray`.
    """
    workers: Workers = "auto"
    """The number of worker processes, at least 1; or `auto` (default), as many as the processors allow that the process
    may use (its affinity, and the quota of its container), or those of the Ray or the cluster it is connected to; or a
    list of groups of equal workers, see `WorkerGroup`."""
    cpus: float = Field(default=1.0, gt=0)
    """The CPUs that each worker reserves, more than 0; may be a fraction."""
    gpus: float = Field(default=0.0, ge=0)
    """The GPUs that each worker reserves, 0 or more; may be a fraction. With 0 (default) and device=cuda, all workers
    of this machine share the GPUs that it has."""
    block: int | Literal["auto"] = "auto"
    """The number of clients that a worker trains at once, at least 1; or `auto` (default), which is measured once if
    the run is long or on a CUDA device, and else follows from a rule; 1 with `kernels=channels_last`."""
    kernels: str = "auto"
    """The kernels that compute losses and gradients. `torch`: only those of torch; `channels_last`: those of torch,
    with the channels of images last in memory while a client trains alone; `native`: also compiled convolutions, and
    no computation for the padding of texts while a client trains alone; `attention`: `native`, and the attention of the
    model gpt in one compiled call; `chain`: compiled code that computes the loss
    of a whole network and its gradient in one call. These four are for float32 on a CPU. They are used only after a
    proof on the data of the run that they compute what torch computes. Three are for CUDA devices, and replay the local
    steps of a block from a CUDA graph, to the same bits: `graph` has torch's kernels, `products` computes convolutions
    of a block as batched products, after a proof, and `streams` has each client of a block on one of four streams, with
    the kernels that it has alone. `auto` (default): the fastest in a measurement if the run is long or on a CUDA
    device, else `torch`. A plug-in may add others to the table `KERNELS`."""
    vectorise: bool = True
    """Whether the clients of a block run at once under torch.func.vmap."""
    device: str = "auto"
    """The device that trains: `cpu`, `cuda`, `cuda:0`, `xpu`, `mps`; or `auto` (default), which is cuda if workers
    reserve GPUs or the process that starts the run sees one, and else cpu. Runs of searches and studies take one only
    where it is asked for."""
    threads: int = Field(default=1, ge=1, le=4096)
    """The number of torch threads in each worker, 1 to 4096."""
    dtype: Literal["float32", "float64"] = "float32"
    """The type of weights, gradients and states, `float32` (default) or `float64`."""
    precision: Literal["same", "bfloat16", "tf32"] = "same"
    """The type of the forward and backward passes of training, `same` as dtype (default) or `bfloat16`, which is
    possible for classification without running statistics. Weights, gradients and states stay in dtype. On a GPU,
    Newton-Schulz iterations of methods are then in bfloat16 too. `tf32` is for GPUs: products of float32 keep 10 bits
    of each factor."""
    base: Literal["same", "float32", "bfloat16", "float16", "as_stored"] = "same"
    """The type in which the frozen tensors of the model are kept with `precision=same`: `same` as dtype (default); one
    of the others, of which each layer is cast up to dtype where it is used; or `as_stored`, the type that they have in
    their files, where that is no wider than dtype. `float16` is for runs that train adapters alone. With
    `precision=bfloat16`, frozen tensors are in bfloat16."""
    state_dtype: Literal["same", "bfloat16"] = "same"
    """The type of clients' states between rounds, `same` as dtype (default) or `bfloat16`. Single numbers of a state,
    such as counts, stay as they are."""
    state_memory: Literal["auto"] | Annotated[float, Field(ge=0, le=1024)] = "auto"
    """The GiB of the device's memory, 0 to 1024, in which a run in the calling process keeps clients' states between
    rounds; those that do not fit are in files. `auto` (default): half of what is free on a CUDA device beside a block
    of clients; nothing on the processor, and on Ray, whose workers share files."""
    store: str | None = None
    """The folder for clients' states (default: in the folder of the run, or a temporary folder without one)."""
    keep_state: bool = False
    """Whether that folder is kept when the run ends."""
    address: str | None = None
    """The address of a running Ray cluster, `auto`, HOST:PORT or ray://HOST:PORT (default: Ray is started on this
    machine)."""
    on_failure: Literal["fail", "drop"] = "fail"
    """What happens if a client fails again when it runs alone: `fail` (default) ends the run, `drop` leaves the client
    out of the round. A run always ends if a client fails because memory runs out."""
    patience: float = Field(default=600.0, gt=0)
    """With workers on Ray, the seconds without a sign of life (each local step is one) after which a worker that has a
    task counts as hung and is replaced, more than 0."""
    pending: int | None = Field(default=None, ge=1, lt=2**63)
    """The most bytes of memory that finished results of an asynchronous run may take while they wait for their updates,
    at least 1 (default: half of the memory that is free when the run starts)."""
    placement: Literal["pack", "spread"] = "pack"
    """On a cluster, `pack` (default) puts workers on as few nodes as possible, `spread` on all nodes."""
    wait: float = Field(default=60.0, gt=0)
    """The seconds to wait for resources of the cluster that other jobs hold, more than 0."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            *("precision", "dtype", "bfloat16 and tf32 are for float32", "choose same"),
            lambda e: e.precision != "same" and e.dtype != "float32",
        ),
        Conflict(
            *("precision", "device", "tf32 is for CUDA devices", "choose same"),
            lambda e: e.precision == "tf32" and not e.trains_on.startswith("cuda"),
        ),
        Conflict(
            *("base", "precision", "is for same; with bfloat16, frozen tensors are in bfloat16", "leave base out"),
            lambda e: e.base != "same" and e.precision == "bfloat16",
        ),
    )

    @field_validator("store")
    @classmethod
    def _with_home(cls, value: str | None) -> str | None:
        return value and expanded_address(value)

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|(cuda|xpu)(:\d+)?|mps", value):
            raise ValueError("must be auto, cpu, cuda, cuda:0, xpu or mps")
        return value

    @field_validator("workers", "block")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be a positive integer or auto")
        if isinstance(value, int) and value > LARGEST_COUNT:
            raise ValueError(f"must be at most {LARGEST_COUNT}, or auto")
        if isinstance(value, tuple) and not value:
            raise ValueError("must name a group at least, as in [{count: 2}]")
        return value

    def groups(self) -> tuple[WorkerGroup, ...]:
        """The groups of workers to start: as given, or one group with as many as the processors allow that this process
        may use."""
        if isinstance(self.workers, tuple):
            return tuple(group.model_copy(update={"cpus": group.cpus or self.cpus}) for group in self.workers)
        count = workers_on(processors(), self.cpus) if self.workers == "auto" else self.workers
        return (WorkerGroup(count=count, cpus=self.cpus, gpus=self.gpus),)

    def count_workers(self) -> int:
        """The number of workers in all groups."""
        return sum(group.count for group in self.groups())

    def asks_for_ray(self) -> bool:
        """Whether a setting has a meaning on Ray alone."""
        return self.workers != "auto" or self.address is not None or self.on_gpus()

    def on_gpus(self) -> bool:
        """Whether any worker has a GPU."""
        return any(group.gpus > 0 for group in self.workers) if isinstance(self.workers, tuple) else self.gpus > 0

    @property
    def trains_on(self) -> str:
        """The device that trains, by torch's name: as given, or cuda if any worker has a GPU."""
        if self.device != "auto":
            return self.device
        return "cuda" if self.on_gpus() else "cpu"


def workers_on(processors: float, cpus: float) -> int:
    """The number of workers that reserve `cpus` of these processors, at least 1."""
    return max(1, int(processors / cpus + 1e-9))


Direction = Literal["auto", "max", "min"]


class EarlyStop(Section):
    """When a run ends before its last round, by the values that a metric has had so far. `patience`, `target` or both
    are required."""

    metric: str = "eval/accuracy"
    """A column of rounds.parquet (default eval/accuracy). The rounds that have it count as evaluations."""
    best: Direction = "auto"
    """Whether larger (`max`) or smaller (`min`) values are better. `auto` (default) is `min` for the metrics that the
    workload names in `lower` and for those whose name ends in loss, else `max`."""
    patience: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """The run ends after so many evaluations in a row that are not better than the best one before them, at least 1
    (default: none)."""
    margin: float = Field(default=0.0, ge=0)
    """A value must be better by more than this to count as better for `patience`, 0 or more."""
    target: float | None = None
    """The run ends after the first evaluation that reaches this value (default: none)."""
    after: int = Field(default=0, ge=0, le=LARGEST_COUNT)
    """The run does not end before this round, whatever the values are, 0 or more."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            *("patience", "target", "is missing, and so is target", "give one of them, as in {patience: 5}"),
            lambda s: s.patience is None and s.target is None,
        ),
        Conflict(
            *("margin", "patience", "has a meaning for patience alone", "give patience, or leave margin out"),
            lambda s: s.margin > 0 and s.patience is None,
        ),
    )


class BestModel(Section):
    """By which metric the best model of a run is kept."""

    metric: str
    """A column of rounds.parquet, such as eval/accuracy."""
    best: Direction = "auto"
    """Whether larger (`max`) or smaller (`min`) values are better; `auto` (default) as in `evaluate.stop`."""


FORMS = ("head", "body", "norm", "norm_parameters", "statistics", "all")
"""Texts that name tensors of a model, see `Personal`."""


def group_of_tensors(value: Any) -> Any:
    """The value of a setting that names tensors. Raises ValueError for what is none of its forms."""
    if isinstance(value, str) and value in FORMS:
        return value
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("first", "last"):
        count = next(iter(value.values()))
        if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
            return value
    if isinstance(value, list | tuple) and all(isinstance(pattern, str) for pattern in value):
        return list(value)
    raise ValueError(f"must be {', '.join(FORMS[:-1])}, {{first: n}}, {{last: n}} or a list of patterns")


class Adapt(Section):
    """How a client tunes its model on its own training rows before it is evaluated. Either `steps` or `epochs` may be
    given; without both, `epochs` is 1."""

    steps: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """The number of local steps, at least 1."""
    epochs: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """The number of passes over the client's training rows, at least 1."""
    batch: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | Literal["same", "all"] = "same"
    """The number of examples in a batch, at least 1, `same` as in training (default), or `all` of the client."""
    rule: Any = "same"
    """The local optimiser, by its name in the table RULES or a name with arguments; `same` (default) is the method's.
    Of a schedule over rounds it has the number of the round; of one over steps `start`, or the largest of `values`."""
    tensors: str | dict[str, int] | list[str] = "all"
    """The group of tensors that is tuned, in the forms of `personal.tensors`; `all` (default) are those that are
    trained, and those that `personal.frozen` names. Running statistics outside the group stay, too."""
    prox: float = Field(default=0.0, ge=0)
    """The weight of a pull towards the model that the client begins with, 0 or more."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict("steps", "epochs", "give steps or epochs", "leave one out", lambda a: a.steps and a.epochs),
    )

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("steps") is None and values.get("epochs") is None:
            return {**values, "epochs": 1}
        return values

    @field_validator("tensors", mode="before")
    @classmethod
    def _form(cls, value: Any) -> Any:
        return group_of_tensors(value)

    @field_validator("rule")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return name_or_mapping(value)


def kind_of_adapt(value: Any) -> str | None:
    """Which of its forms `evaluate.clients.adapt` has, None if none."""
    if isinstance(value, list | tuple):
        return "adaptations"
    if isinstance(value, dict | Adapt):
        return "Adapt"
    return "word" if value in ("auto", "none") else None


ADAPT_FORMS = "must be auto, none, {steps: n}, {epochs: n} or a list of such"
AdaptKinds = Annotated[
    Annotated[Literal["auto", "none"], Tag("word")]
    | Annotated[Adapt, Tag("Adapt")]
    | Annotated[tuple[Adapt, ...], Tag("adaptations")],
    Discriminator(
        kind_of_adapt,
        custom_error_type="adaptation",
        custom_error_message=ADAPT_FORMS,
    ),
]


class ClientModels(Section):
    """How clients' own models are evaluated, each on the rows of its client."""

    own: bool | Literal["auto"] = "auto"
    """Whether they are. `auto` (default): where the method gives clients models of their own, or adapts them, or where
    clients are unseen; `true`: also where every client has the server's model, for comparison."""
    adapt: AdaptKinds = "auto"
    """What clients do before they are evaluated once more, as in {epochs: 5}, see `Adapt`; `auto` (default) is what the
    method says, `none` is nothing. Of a list, each is evaluated, and, with rows for validation, for each client the one
    that is best on these."""
    sample: float = Field(default=0.0, ge=0, le=LARGEST_COUNT)
    """How many clients are evaluated before the last round, the same in all rounds: a number of 1 or more, a fraction
    below 1, or 0 for all (default)."""
    statistics: Literal["model", "training"] = "model"
    """The running statistics of clients' models: those of the `model` (default), or those of the client's own
    `training` rows, found by a pass over them, which a client that was never trained with lacks otherwise."""
    table: Literal["none", "last", "every"] = "last"
    """Whether the folder of the run has a table with a row for each client, clients.parquet: of the `last` evaluation
    (default); of `every` one, under names such as clients-000005.parquet for round 5; or of `none`."""
    export: Literal["none", "personal", "whole"] = "none"
    """Whether a complete run writes the models that its clients are served with to files in its folder, as `fedfleet
    export RUN --clients all` does: `whole` ones, the `personal` tensors alone, or `none` (default)."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            *("adapt", "own", "needs clients' models to be evaluated", "leave one of them out"),
            lambda c: c.adaptations and c.own is False,
        ),
    )

    @field_validator("adapt", mode="before")
    @classmethod
    def _no_switch(cls, value: Any) -> Any:
        if isinstance(value, bool):  # which is for `own`; an adaptation has a length
            raise PydanticCustomError("adaptation", ADAPT_FORMS)  # pyright: ignore[reportArgumentType]
        return value

    @field_validator("adapt")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if value == ():
            raise ValueError("a list must have an adaptation at least")
        return value

    @property
    def adaptations(self) -> tuple[Adapt, ...]:
        """Those that are given."""
        return (self.adapt,) if isinstance(self.adapt, Adapt) else self.adapt if isinstance(self.adapt, tuple) else ()


class Evaluate(Section):
    """When and on which rows the model is evaluated."""

    every: int = Field(default=5, ge=0, le=LARGEST_COUNT)
    """The number of rounds between evaluations; 0 evaluates only after the last round, which is always evaluated."""
    seconds: float | None = Field(default=None, gt=0)
    """Instead of `every`, the virtual seconds between evaluations, more than 0: the first round that ends at or after a
    multiple of them is evaluated (default: none)."""
    batch: int = Field(default=500, ge=1, le=LARGEST_COUNT)
    """The number of examples in a batch of an evaluation, at least 1."""
    fairness: bool = False
    """Whether the model is also evaluated on each client's own training rows. The mean over the clients and the mean
    over the worst tenth of them are recorded."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """The fraction of each client's rows that it does not train on, 0 or more and less than 1. The same two means over
    these rows are recorded."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """The fraction of each client's rows, 0 or more and less than 1, by which settings are chosen: they are neither
    trained on nor test rows, and the model's report on all of them is recorded as `eval/validation_…`. With rows that
    clients hold out, the two means over clients are recorded, too."""
    server: bool | Literal["auto"] = "auto"
    """Whether the server's model is evaluated on the test set. `auto` (default): where all of it is trained; `false`:
    only on the clients' rows, which takes less time where the test set is large."""
    clients: ClientModels | None = None
    """How clients' own models are evaluated, as in {own: true, adapt: {epochs: 5}}, see `ClientModels` (default: with
    its defaults)."""
    stop: EarlyStop | None = None
    """When the run ends before its last round, as in {metric: eval/accuracy, patience: 5}, see `EarlyStop` (default:
    never). A run that has ended so is complete, and has a result."""


class Checkpoint(Section):
    """When the run can be resumed, and from where."""

    every: int = Field(default=0, ge=0, le=LARGEST_COUNT)
    """The number of rounds between checkpoints; 0 (default) for none by the number of rounds. A run that is interrupted
    writes one in any case."""
    seconds: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    """A checkpoint is also written after the first round that ends this long after the last checkpoint; null for none.
    `auto` (default) is 600, or null if `every` is not 0; it gives checkpoints up when the disk gets short of space for
    the client states that they keep."""
    keep: int = Field(default=2, ge=1, le=LARGEST_COUNT)
    """The number of checkpoints that are kept, at least 1."""
    last: bool | Literal["auto"] = "auto"
    """Whether a run that is complete keeps the state after its last round in its folder, so that it can be made longer
    (`fedfleet resume RUN federation.rounds=500`) or forked there: true, false, or `auto` (default), which is true where
    this takes at most 64 MiB and `engine.store` is not set. Studies and searches take `auto` for false."""
    folder: str | None = Field(default=None, min_length=1)
    """Where complete copies of the checkpoints are stored, in a folder named after the id of the run, so that other
    machines can resume the run: a path or a URL such as file:///… or s3://bucket/… (default: no copies)."""

    best: BestModel | None = None
    """A metric, as in `best: eval/accuracy` or {metric: eval/loss, best: min}: the model of the round with its best
    value, the earlier one of equal ones, is kept as best.safetensors in the run's folder, and as `best` of the result
    (default: none)."""

    @field_validator("folder")
    @classmethod
    def _no_secret(cls, value: str | None) -> str | None:
        return value and expanded_address(without_secrets(value))

    @field_validator("best", mode="before")
    @classmethod
    def _metric_alone(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value


class Trackers(Section):
    """The choice of trackers."""

    name: str | tuple[str, ...] = "mlflow"
    """The tracker that writes, or a list of several: `mlflow` (default), `tensorboard`, `wandb`, `csv`, or one of a
    plug-in; `none` for none. `tracking: [mlflow, tensorboard]` is short for this key."""
    uri: str = "auto"
    """The MLflow store: `auto` (default), the SQLite file mlflow.db in the current folder; sqlite:///…; or the address
    of a server, http(s)://…. With `none` no tracker writes."""

    @model_validator(mode="before")
    @classmethod
    def _names_alone(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str | list | tuple) else values

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the trackers that write."""
        found = (self.name,) if isinstance(self.name, str) else tuple(dict.fromkeys(self.name))
        return () if self.uri == "none" else tuple(name for name in found if name != "none")


class Tracking(Trackers):
    """Where the records of the run are written in addition to its folder."""

    experiment: str = "fedfleet"
    """The name of the experiment in MLflow, and of the project in W&B."""
    clients: bool = False
    """Whether the loss, movement and steps of every client in every round are also written, as Parquet files in the
    folder of the run, and with `systems` its visit in virtual time."""
    model: Literal[True, False, "graph"] = True
    """What MLflow gets of the final model: its tensors as model.safetensors (`true`, default), nothing (`false`), or
    `graph`, which `mlflow.pytorch.load_model` loads without FedFleet; a graph takes some seconds at the end of a run.
    """
    system: bool = False
    """Whether the load of the processors, memory, disk, network and GPUs is recorded while the run goes on."""
    metrics: bool = True
    """Whether a run on Ray sets gauges that the nodes of Ray export to Prometheus."""

    @field_validator("uri")
    @classmethod
    def _with_home(cls, value: str) -> str:
        return expanded_address(value)


class AsIf(Section):
    """The federation whose privacy is accounted for, see `Privacy`."""

    clients: int = Field(ge=1, le=LARGEST_COUNT)
    """Its number of clients."""
    cohort: int = Field(ge=1, le=LARGEST_COUNT)
    """The mean size of its Poisson cohorts, at least federation.cohort."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict("cohort", "clients", "cohort <= clients must hold", "lower it", lambda a: a.cohort > a.clients),
    )


class Privacy(Section):
    """Client-level differential privacy: bounded messages and noise on their sum.

    It is simulated, see docs/privacy.md.
    """

    clip: Any
    """The bound C on the norm of all that one client sends in a round: a number, a schedule, or a quantile of the norms
    as {name: quantile, start: 0.1, below: 0.5, lr: 0.2, count_noise: auto}. Required."""
    noise: Any = "auto"
    """The noise multiplier z: a number from 0 (only clipping), a schedule, or `auto` (default), the least z that
    reaches `epsilon` after all rounds."""
    epsilon: float | None = Field(default=None, gt=0)
    """With noise: auto the target; with a number the budget, at which the run ends (default: none)."""
    delta: float | None = Field(default=None, gt=0, lt=1)
    """More than 0 and at most 1 / clients; required unless noise is 0."""
    mechanism: Any = "gaussian"
    """The noise over the rounds, by its name in the table MECHANISMS, or a name with arguments as in {name: banded,
    bands: 8}."""
    accountant: Literal["auto", "rdp", "pld"] = "auto"
    """`rdp`, `pld`, or `auto` (default), which is pld where it has a bound."""
    scales: dict[str, float] = {}
    """What the groups that a client sends (`delta`, and fields such as `estimator`) are multiplied by in the norm
    (default: 1 each)."""
    shares: dict[str, float] = {}
    """Positive numbers for all groups, each of which then has a bound of its own (default: none)."""
    as_if: AsIf | None = None
    """{clients, cohort}: the noise and the epsilon of a larger federation, which this one stands for (default: none).
    The run itself is not private at that epsilon."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            *("epsilon", "noise", "noise=0 has no epsilon", "drop it, or give noise"),
            lambda p: p.epsilon is not None and p.noise == 0,
        ),
        Conflict(
            *("noise", "epsilon", "auto needs epsilon", "give epsilon, or noise as a number"),
            lambda p: p.epsilon is None and p.noise == "auto",
        ),
        Conflict(
            *("delta", "noise", "noise needs a delta", "give a number up to 1 / clients"),
            lambda p: p.delta is None and p.noise != 0,
        ),
        Conflict(
            "scales", "shares", "scales and shares exclude each other", "drop one", lambda p: p.scales and p.shares
        ),
        Conflict(
            *("clip", "shares", "quantile goes with joint clipping", "give clip as a number, or drop shares"),
            lambda p: isinstance(p.clip, dict) and p.clip.get("name") == "quantile" and p.shares,
        ),
    )


class Personal(Section):
    """Tensors of the model that stay with each client, or are not trained at all, for any method.

    A group of tensors is `head`, the parameters of the module that owns the last one; `body`, all others; {first: n} or
    {last: n}, n layers; `norm`, the normalisation layers; `norm_parameters`, their scales and shifts; `statistics`, all
    running statistics; or a list of shell patterns, as in [fc2.*].
    """

    tensors: str | dict[str, int] | list[str] = []
    """The group that each client has for itself: never sent and never averaged (default: none)."""
    frozen: str | dict[str, int] | list[str] = []
    """The group that stays as it is before round 1 for all clients, neither trained nor sent (default: none)."""
    split: Literal["together"] | tuple[int, int] = "together"
    """`together` (default): every local step trains both sides; [a, b]: a parts of a visit's steps train the personal
    tensors, and b parts the shared ones."""
    order: Literal["personal", "shared"] = "personal"
    """With `split`, the side that is trained first (default: personal)."""
    rule: Any = "same"
    """The local optimiser of the personal tensors, by its name in the table RULES or a name with arguments; `same`
    (default) is the method's."""
    carry: Literal["reset", "keep"] = "reset"
    """What becomes of that optimiser's state after a visit: `reset` (default), or the client keeps it (`keep`)."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            *("tensors", "frozen", "some tensor must be personal or frozen", "leave the section out"),
            lambda p: not p.tensors and not p.frozen,
        ),
        *(
            Conflict(
                *(key, "tensors", "needs personal tensors", "leave it out"),
                lambda p, key=key: not p.tensors and is_set(p, key),
            )
            for key in ("split", "rule", "carry")
        ),
        Conflict(
            *("order", "split", "says which part of a split is first", "give split as [1, 1], or leave it out"),
            lambda p: p.order == "shared" and p.split == "together",
        ),
    )

    @field_validator("tensors", "frozen", mode="before")
    @classmethod
    def _form(cls, value: Any) -> Any:
        return group_of_tensors(value)

    @field_validator("split", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        parts = isinstance(value, list | tuple) and len(value) == 2
        if value == "together" or (parts and all(type(part) is int and part >= 1 for part in value)):
            return value
        raise ValueError("must be together, or two whole numbers of 1 or more")

    @field_validator("rule")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return name_or_mapping(value)


class Systems(Section):
    """The devices of the clients in virtual time, see docs/howto/fleets.md.

    No bit of the model depends on real time.
    """

    devices: Any = "lognormal"
    """How fast clients compute and transfer, by a name in the table DEVICES, or a name with arguments as in {name:
    lognormal, compute: 80, sigma: 0.8}."""
    availability: Any = "always"
    """When clients are online, by a name in the table AVAILABILITIES."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The probability that a client is lost during a visit, 0 or more and less than 1."""
    interrupt: Literal["session", "end", "never"] = "session"
    """What becomes of a client that goes offline. `session` (default): it is lost when its session ends; `end`: it is
    lost if it is not online when it would finish; `never`: it finishes."""
    work: Any = "full"
    """How much of its local work a client does, by a name in the table LOCAL_WORK."""
    examples: Literal["real", "nominal"] = "real"
    """What the time of computing depends on: the `real` numbers of examples in the batches (default), or `nominal`,
    batches that are all full."""
    scale: float = Field(default=1.0, gt=0)
    """What the time of computing is multiplied by, more than 0, for another model than the one that was timed."""
    server: float = Field(default=0.0, ge=0)
    """The virtual seconds of aggregation and evaluation in a round, 0 or more."""
    needs: float = Field(default=4.0, ge=0)
    """The bytes of memory that a client needs, in multiples of the bytes of the model, 0 or more."""

    @field_validator("devices", "availability", "work")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return name_or_mapping(value)


PARTS = ("workload", "method", "aggregate", "attack")
"""The keys of an experiment whose values are parts: names, names with arguments, or objects."""


class Experiment(Section):
    """One run, completely described."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """The seed that all random draws follow from, 0 to 2^63 - 1."""
    name: str = ""
    """A name for trackers and reports (default: none; the command line takes the name of the file)."""
    plugins: tuple[str, ...] = ()
    """Paths of .py files or names of modules with the user's own parts; one string or a list (default: none)."""
    workload: Any
    """Data, model and loss: a name, a name with arguments as in {name: digits, model: mlp}, or in Python an object that
    is already built."""
    method: Any
    """The federated algorithm, in the same forms."""
    aggregate: Any = "mean"
    """The rule that makes one message of those of a cohort, by its name in the table AGGREGATORS, or a name with
    arguments as in {name: multi_krum, f: 4, before: [nnm]}."""
    attack: Any = None
    """What Byzantine clients do and who they are, as in {name: ipm, share: 0.2}, by its name in the table ATTACKS
    (default: none)."""
    federation: Federation = Field(default_factory=lambda: Federation.model_validate({}))
    """Who is trained, how often, and how the results are averaged."""
    engine: Engine = Field(default_factory=Engine)
    """How and where the run is computed."""
    privacy: Privacy | None = None
    """Client-level differential privacy, see `Privacy` (default: none)."""
    systems: Systems | None = None
    """The clients' devices in virtual time, see `Systems` (default: none, and no virtual clock)."""
    personal: Personal | None = None
    """Tensors of the model that stay with each client, see `Personal` (default: none)."""
    evaluate: Evaluate = Field(default_factory=Evaluate)
    """When and on which rows the model is evaluated."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """When the run can be resumed, and from where."""
    tracking: Tracking = Field(default_factory=Tracking)
    """Where the records of the run are written in addition to its folder."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            *("federation.unseen", "evaluate.clients.own", "unseen clients are there to be evaluated"),
            "leave one of them out",
            lambda e: e.federation.unseen is not None and e.evaluate.clients and e.evaluate.clients.own is False,
        ),
        Conflict(
            *("federation.pace.name", "systems", "an asynchronous run needs a virtual clock", "add systems: {}"),
            lambda e: e.is_asynchronous and e.systems is None,
        ),
        Conflict(
            *("systems.server", "federation.pace.name", "the server of an asynchronous run keeps no client waiting"),
            "leave it out",
            lambda e: e.is_asynchronous and e.systems.server,
        ),
        *(
            Conflict(
                *(key, "federation.pace.name", f"has no meaning in an asynchronous run: {why}"),
                "leave it or federation.pace out",
                lambda e, key=key: e.is_asynchronous and is_set(e, key),
            )
            for key, why in (
                ("privacy", "its noise is accounted for cohorts that are drawn at random"),
                ("attack", "attacks see the messages of one round together"),
                ("aggregate", "rules compare messages about one model"),
            )
        ),
        *(
            Conflict(
                *(key, "systems", "needs a virtual clock", "add systems: {}"),
                lambda e, key=key: e.systems is None and is_set(e, key),
            )
            for key in (
                "federation.pace.select",
                "federation.pace.deadline",
                "federation.pace.least",
                "evaluate.seconds",
            )
        ),
        *(
            Conflict(
                *(key, other, f"does not go with {what}, which changes who is in a mean", "leave one of them out"),
                lambda e, key=key, other=other: is_set(e, key) and is_set(e, other) and not e.is_asynchronous,
            )
            for other, what in (
                ("systems", "a virtual clock"),
                ("federation.mean", "another mean than auto"),
            )
            for key in ("privacy", "attack", "aggregate")
        ),
        *(
            Conflict(
                *(key, "federation.sampler", "goes with samplers that do not change the weights of a mean"),
                f"choose {', '.join(COUNTED[:-1])} or {COUNTED[-1]}",
                lambda e, key=key: is_set(e, key) and not e.federation.is_counted and not e.is_asynchronous,
            )
            for key in ("privacy", "attack", "aggregate")
        ),
        Conflict(
            *("federation.sampler", "systems", "goes with no virtual clock, which changes who is in a mean"),
            "choose another sampler, or leave systems out",
            lambda e: e.federation.sampled in ("binomial", "turns") and e.systems and not e.is_asynchronous,
        ),
        Conflict(
            *("federation.local.epochs", "run", "a schedule over steps needs the same number of steps of all clients"),
            "give federation.local.steps",
            lambda e: counts_steps(e.method) and e.federation.local.steps is None,
        ),
        *(
            Conflict(
                *(key, "run", "a schedule over steps counts the steps of all clients together, which then differ"),
                "leave it out, or give over: rounds",
                lambda e, holds=holds: counts_steps(e.method) and holds(e),
            )
            for key, holds in (
                ("federation.pace.name", lambda e: e.is_asynchronous),
                ("federation.pace.stragglers", lambda e: getattr(e.federation.pace, "stragglers", "") == "partial"),
                ("systems.work", lambda e: e.systems is not None and part_name(e.systems.work) != "full"),
            )
        ),
        Conflict(
            *("federation.weights", "privacy", "examples and tokens give a client's influence no public bound"),
            "choose weights: uniform",
            lambda e: e.privacy and e.federation.weights != "uniform",
        ),
        Conflict(
            *("privacy.delta", "federation.clients", "delta <= 1 / clients must hold", "lower it"),
            lambda e: e.is_noisy and not e.privacy.as_if and e.privacy.delta > 1 / e.federation.clients,
        ),
        Conflict(
            *("privacy.delta", "privacy.as_if.clients", "delta <= 1 / clients must hold", "lower it"),
            lambda e: e.is_noisy and e.privacy.as_if and e.privacy.delta > 1 / e.privacy.as_if.clients,
        ),
        Conflict(
            *("privacy.as_if.cohort", "federation.cohort", "as_if.cohort >= federation.cohort must hold", "raise it"),
            lambda e: e.privacy and e.privacy.as_if and e.privacy.as_if.cohort < e.federation.cohort,
        ),
        Conflict(
            *("privacy.as_if", "federation.sampler", "goes with sampler uniform or binomial", "drop it"),
            lambda e: e.privacy and e.privacy.as_if and e.federation.sampled == "turns",
        ),
        Conflict(
            *("personal.rule", "run", "a schedule over steps is for the rule of the method", "give over: rounds"),
            lambda e: e.personal is not None and counts_steps(e.personal.rule),
        ),
        Conflict(
            *("privacy", "engine.device", "norms are computed in float64, which mps lacks", "choose cpu"),
            lambda e: e.privacy and e.engine.device == "mps",
        ),
    )

    if TYPE_CHECKING:  # the sections may be given as mappings, which the fields' types do not say

        def __init__(
            self,
            *,
            workload: Any,
            method: Any,
            seed: int = 0,
            name: str = "",
            plugins: str | Sequence[str] = (),
            aggregate: Any = "mean",
            attack: Any = None,
            federation: Federation | Mapping[str, Any] = Federation(),
            privacy: Privacy | Mapping[str, Any] | None = None,
            systems: Systems | Mapping[str, Any] | None = None,
            personal: Personal | Mapping[str, Any] | None = None,
            engine: Engine | Mapping[str, Any] = Engine(),
            evaluate: Evaluate | Mapping[str, Any] = Evaluate(),
            checkpoint: Checkpoint | Mapping[str, Any] = Checkpoint(),
            tracking: Tracking | Mapping[str, Any] | str | Sequence[str] = Tracking(),
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _texts_are_unicode(cls, values: Any) -> Any:
        """Refuse texts that no file and no tracker can hold, before they are met in the middle of a run."""
        for key, text in _texts(values):
            if not is_unicode(text):
                raise ValueError(f"{ascii(key)[1:-1]} must be valid UTF-8, got {text!a}; write other characters")
        return values

    @field_validator("plugins", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator(*PARTS)
    @classmethod
    def _named(cls, value: Any, info: Any) -> Any:
        if value is None and not cls.model_fields[info.field_name].is_required():
            return cls.model_fields[info.field_name].default
        if isinstance(value, dict) and not isinstance(value.get("name"), str):
            raise ValueError("needs a name, as in {name: digits}")
        if value is None or isinstance(value, int | float | list | tuple):
            raise ValueError("must be a name or {name: …, arguments}")
        return value

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server makes updates from the results that have arrived, and not rounds."""
        return isinstance(self.federation.pace, Asynchronous)

    @property
    def is_noisy(self) -> bool:
        """Whether noise is added to the sums of the clients' messages."""
        return self.privacy is not None and self.privacy.noise != 0

    @property
    def title(self) -> str:
        """The names of the method and of the workload, as in "METHOD on WORKLOAD"."""
        return f"{part_name(self.method)} on {part_name(self.workload)}"

    @property
    def has_objects(self) -> bool:
        """Whether a part is an object, so that no file can say what the experiment is."""
        return any(not isinstance(getattr(self, key), str | dict | None) for key in PARTS)

    def plain(self) -> dict[str, Any]:
        """The experiment as data that YAML can hold. Objects that are already built become their representation."""
        data = self.model_dump(mode="python", exclude={*PARTS})
        data["plugins"] = list(self.plugins)
        data["tracking"]["uri"] = redacted(self.tracking.uri)
        if isinstance(self.tracking.name, tuple):
            data["tracking"]["name"] = list(self.tracking.name)
        for key in ("privacy", "systems", "personal"):
            if data[key] is None:
                del data[key]
        for section, key in (("evaluate", "stop"), ("checkpoint", "best")):
            if data[section][key] is None:  # so that configurations without them have the digests that they had
                del data[section][key]
        without_later(data["evaluate"])
        for key in PARTS:
            value = getattr(self, key)
            data[key] = value if value is None or isinstance(value, str | dict) else repr(value)
        return data


def without_later(evaluate: dict[str, Any]) -> None:
    """Take later keys of the section `evaluate` that have their defaults out of its data, so that configurations
    without them have the digests that they had."""
    clients = evaluate["clients"] or {}
    adapt = clients.get("adapt", ())
    adaptations = [each for each in (adapt if isinstance(adapt, list | tuple) else [adapt]) if isinstance(each, dict)]
    for data, defaults in (
        (evaluate, {"server": "auto"}),
        (clients, {"table": "last", "statistics": "model", "export": "none"}),
        *((each, {"tensors": "all"}) for each in adaptations),
    ):
        for key, default in defaults.items():
            if key in data and data[key] == default:
                del data[key]


def _texts(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of all texts in nested mappings and lists; keys are texts, too."""
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            inner = f"{path}.{key}" if path else str(key)
            yield inner, str(key)
            yield from _texts(value, inner)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _texts(value, path)


def name_or_mapping(value: Any) -> Any:
    """The value. Raises ValueError unless it is the name of a part, or a mapping with a name."""
    if isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("name"), str)):
        return value
    raise ValueError("must be a name or {name: …, arguments}")


def part_name(part: Any) -> str:
    """The name of a part that is given as a name or as a mapping with a name; for an object, the name of its class."""
    return part if isinstance(part, str) else str(part.get("name")) if isinstance(part, dict) else type(part).__name__


def is_set(section: Section, key: str) -> bool:
    """Whether the setting with this dotted key is another than by default. Of parts the names are compared."""
    *path, name = key.split(".")
    for each in path:
        section = getattr(section, each)
    if name not in type(section).model_fields:
        return False
    value, default = getattr(section, name), type(section).model_fields[name].get_default(call_default_factory=True)
    return (part_name(value) if isinstance(value, dict) else value) != default


RANGES = ("uniform", "loguniform", "int", "choice", "grid")
"""The kinds of ranges that `fedfleet search` and `fedfleet study` replace by values."""


def range_in(data: Any, path: tuple[str, ...] = ()) -> tuple[str, Any] | None:
    """(dotted key, range) of the first range {search: uniform, …} that stands for a value, or None."""
    if not isinstance(data, dict):
        return None
    if path and "name" not in data and (data.get("search") in RANGES or {"search", "low"} <= data.keys()):
        return ".".join(path), data
    return next((found for key, inner in data.items() if (found := range_in(inner, (*path, str(key))))), None)


def experiment(data: dict[str, Any]) -> Experiment:
    """The validated experiment. Raises ConfigError with one sentence per mistake."""
    if found := range_in(data):
        raise ConfigError(
            f"{found[0]} is a range, got {found[1]!r}; give a value, or have `fedfleet search` choose one"
        )
    return validated(Experiment, data)


S = TypeVar("S", bound=Section)


def validated(section: type[S], data: Any, where: str = "") -> S:
    """The validated section. Raises ConfigError with one sentence per mistake. where: what stands before its keys, such
    as "search."."""
    try:
        return section.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_sentences(error, data, section, where)) from None


KEYS_OF_PARTS = (
    *("method.rule", "method.rule.lr", "method.compression"),
    *("workload.model", "workload.partition", "workload.partition.beta"),
)
"""Keys that many parts have, and that the schema does not know."""


def dotted_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a section and of all sections in it, such as federation.rounds."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in (field.annotation, *get_args(field.annotation)):
            if hasattr(inner, "model_fields"):
                yield from dotted_keys(inner, f"{prefix}{name}.")


def keys_in(data: Any, prefix: str = "") -> Iterator[str]:
    """The keys of plain data and of all mappings in it, such as workload.model.hidden."""
    for name, value in data.items() if isinstance(data, Mapping) else ():
        yield f"{prefix}{name}"
        yield from keys_in(value, f"{prefix}{name}.")


RENAMED = {"engine.hosts": "engine.workers", "search.hosts": "search.workers"}
"""Old keys and their present names: an old key is refused with a message that gives the present one."""


def _sentences(error: ValidationError, data: Any, section: type[BaseModel], where: str = "") -> str:
    """The message for all errors that pydantic found in the data of a section. where: see `validated`."""
    every = error.errors()
    wrong = {each["loc"][:-1] for each in every if each["type"] != "too_short"}  # an entry that is wrong is not counted
    shown = [each for each in every if each["type"] != "too_short" or each["loc"] not in wrong]
    return "; ".join(dict.fromkeys(_sentence(each, data, section, where) for each in shown))


def _sentence(error: Any, data: Any, section: type[BaseModel], where: str) -> str:
    """The message for one validation error of pydantic."""
    path = _path(error, data)
    key = where + ".".join(path)
    if key in RENAMED:
        return f"{key} is called {RENAMED[key]} now, got {error['input']!r}; write {RENAMED[key]}"
    if error["type"] == "extra_forbidden":
        kind = " of an asynchronous pace" if "Asynchronous" in error["loc"] else ""
        of_parts = KEYS_OF_PARTS if section is Experiment else ()
        known = dict.fromkeys((*dotted_keys(section), *of_parts, *keys_in(data)))
        elsewhere = [each for each in known if where + each != key]
        return f"{key} is not a key{kind}; {nearest(path[-1], _keys(error['loc'][:-1], section), elsewhere)}"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should be", "must be", 1)
    if error["type"] == "missing":
        return f"{key} is missing; add {key}{': {name: …}' if key in PARTS else ''}"
    if error["type"] == "conflict":
        return where + ".".join([*path, message])
    if error["type"] == "value_error":
        got = "" if isinstance(error["input"], dict) else f", got {redacted(repr(error['input']))}"
        return f"{key}: {message}{got}" if key else message
    if error["type"] == "int_parsing_size":
        message = f"must be at most {LARGEST_COUNT}"
    if error["type"] == "too_short":
        least = error["ctx"]["min_length"]
        message = f"must have at least {least} entr{'y' if least == 1 else 'ies'}"
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping of keys", message)
    message = message.replace("a valid tuple", "a list")
    return f"{key} {message}, got {error['input']!r}"


def _path(error: Any, data: Any) -> list[str]:
    """The keys at the place of an error. pydantic also names there which form a setting has that may have several."""
    path: list[str] = []
    for part in error["loc"]:
        if isinstance(part, int) if isinstance(data, list | tuple) else isinstance(data, Mapping) and part in data:
            data = data[part]
            path.append(str(part))
    return [*path, str(error["loc"][-1])] if error["type"] == "missing" else path


def _keys(place: Sequence[Any], section: type[BaseModel]) -> list[str]:
    """The valid keys of the section at the place of an error in another section."""
    model: Any = section
    for part in place:
        if part in (forms := {each.__name__: each for each in (Pace, Asynchronous, WorkerGroup, Adapt)}):
            model = forms[part]
        elif part == "adaptations":  # a list of Adapt
            model = Adapt
        elif not isinstance(part, int):
            found = model.model_fields[part].annotation
            model = next((option for option in get_args(found) if option is not type(None)), found)
    return list(model.model_fields)
