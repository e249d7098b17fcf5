"""How clients are run: the number of clients in a block, and the kernels.

The plan is given by the configuration, recorded by an earlier part of the run, set by a rule, or measured. The bits of
the result depend on it within rounding errors, so it is decided once. Checkpoints store it, covered by their digest,
and a resumed run reads it from there; plan.json in the folder of the run shows it to the user. Measurements are stored
in the cache folder by model, method, batch, processor and versions, never by workers, and later runs use them. A run
that is too short for a measurement follows a rule.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...workloads.workload import Split
from ..cohorts.tasks import steps_of
from ..errors import ConfigError
from ..kernels.agreement import Disagreement
from ..kernels.contract import Kernels
from ..kernels.library import NoKernels, instruction_set, processor, source_files
from ..records.event_log import PLAN
from ..run_spec import ExecutionPlan, RunSpec
from ..state.folders import sealed_plan
from ..storage.atomic_write import write
from ..storage.expanded import cache_folder
from ..storage.lock import Lock
from ..storage.plain_files import read_text
from ..storage.sha256 import sha256, sha256_of_json
from .as_written import block_difference, trying
from .kernel_proof import kernel_identity, prove

WORTH = 20_000
"""The number of local steps from which on a run is long enough for a measurement. Such a run takes about half a minute
with a small network, and the measurement takes some seconds."""
WORTH_OF_LARGE, LARGE = 2_000, 4e12
"""The same for a network so large that the forward passes of the run have this many multiplications: the run takes some
minutes, and measuring and proving take as long as some hundred local steps."""
PATIENCE = 60.0
"""The longest wait in seconds for another process that measures the same plan."""
BLOCKS = (48, 24, 12, 8, 4)
"""The numbers of blocks per round that are tried. With them, two, four or eight workers end at the same time."""
GPU_BLOCKS, GPU_CLIENTS = (1, 2, 4), (4, 2, 1)
"""The same on a GPU, which needs many clients at once to be busy, and which few workers share; and the numbers of
clients in small blocks, each of which may have a stream of its own."""
BUSY = 4e9
"""The multiplications of a forward pass for one batch from which on a client alone keeps a GPU busy."""
PROVEN = 4_000_000
"""The most parameters of a model for which kernels of a GPU are proven unasked: a proof computes in float64 on the
processor, which takes longer for larger ones than a short run."""
_ENGINE = Path(__file__).parents[1]
MEASURED_SOURCES = (
    *source_files(),
    *sorted((_ENGINE / "kernels").glob("*.py")),
    _ENGINE / "clients/local_training.py",
    _ENGINE / "planning/as_written.py",
    _ENGINE / "planning/kernel_proof.py",
)
"""The files that compute a client's result. When one of them changes, earlier measurements no longer hold."""

Measure = Callable[[RunSpec, Split, list[ExecutionPlan]], dict[ExecutionPlan, float]]
"""(run specification, data, candidates) -> seconds per client for each candidate that ran."""


def plan_execution(run_spec: RunSpec, split: Split, measure: Measure) -> tuple[RunSpec, str]:
    """The run specification with its execution plan, and a line for the log.

    `measure`: called if the plan is neither given, nor recorded, nor in the cache, and the run is long enough.
    """
    engine = run_spec.experiment.engine
    file = Path(run_spec.directory) / "plan.json" if run_spec.directory is not None else None
    if run_spec.resume:
        plan, how = recorded_plan(run_spec, file)
        if plan is None:  # no checkpoint can be used, which the driver reports: nothing is written here
            return run_spec.with_plan(plan_by_rule(run_spec)), how
    elif "auto" not in (engine.block, engine.kernels):
        plan, how = plan_by_rule(run_spec), "as given"
    elif not worth_measuring(run_spec, split):
        plan, how = plan_by_rule(run_spec), "too short a run to measure"
    else:
        if engine.kernels == "auto" and not run_spec.missing_kernels and (why := not_built_here(run_spec)):
            run_spec = run_spec.with_missing_kernels((why,))
        plan, how = measured_plan(run_spec, split, measure)
    plan, how = in_blocks_or_alone(run_spec, split, plan, how)
    plan, how = prove_or_fall_back(run_spec, split, plan, how)
    run_spec = run_spec.with_plan(plan)
    write_plan(run_spec, how)
    kernels = run_spec.kernels
    if run_spec.missing_kernels and not kernels.compiled:
        how += f"; no compiled kernels, which not every machine can have: {run_spec.missing_kernels[0]}"
    text = f"{PLAN}blocks of {plan.block} clients, {plan.kernels} kernels ({how})"
    return run_spec.with_plan(plan, kernel_identity(kernels, run_spec.device) if kernels.needs_proof else None), text


def write_plan(run_spec: RunSpec, how: str) -> None:
    """Write the run's execution plan to plan.json in its folder, if it has one. how: a clause for the reader."""
    if run_spec.directory is None:
        return
    file = Path(run_spec.directory) / "plan.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        compiled_for = {"compiled_for": instruction_set()} if run_spec.kernels.compiled else {}
        write(file, json.dumps({**run_spec.plan_for_checkpoint(), **compiled_for, "how": how}) + "\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror or error}); make room for it") from error


def in_blocks_or_alone(run_spec: RunSpec, split: Split, plan: ExecutionPlan, how: str) -> tuple[ExecutionPlan, str]:
    """The plan, with one client in a block if a block does not compute what the module does for each client alone.
    `how` is extended by the reason."""
    as_blocks = plan.block > 1 or run_spec.kernels_named(plan.kernels).blocks_of_one
    if not run_spec.experiment.engine.vectorise or not (as_blocks or may_vectorise(run_spec, split)):
        return plan, how
    reason = why_not_blocks(run_spec, split)
    if not reason:
        return plan, how
    blocks = f"blocks of {plan.block}" if plan.block > 1 else "blocks"
    how = f"{how}; clients train one after the other, not in {blocks}, which takes longer for a small model: {reason}"
    return ExecutionPlan(1, "torch" if run_spec.kernels_named(plan.kernels).blocks_of_one else plan.kernels), how


def why_not_blocks(run_spec: RunSpec, split: Split) -> str:
    """Why a block does not compute what the module does for each client alone, "" if it does. It is found out once."""
    proofs = run_spec.proofs
    if proofs.blocks is None:
        with trying():
            proofs.blocks = block_difference(run_spec, split)
    return proofs.blocks


def may_vectorise(run_spec: RunSpec, split: Split) -> bool:
    """Whether the run may train clients in blocks under vmap, if nothing speaks against it."""
    engine, cohort = run_spec.experiment.engine, run_spec.experiment.federation.cohort
    if not engine.vectorise or cohort < 2:
        return False
    if run_spec.execution_plan is not None or engine.block != "auto":
        return plan_by_rule(run_spec).block > 1
    return plan_by_rule(run_spec).block > 1 or worth_measuring(run_spec, split)


def trains_in_blocks(run_spec: RunSpec, split: Split) -> bool:
    """Whether the run may train clients in blocks under vmap."""
    return may_vectorise(run_spec, split) and not why_not_blocks(run_spec, split)


def prove_or_fall_back(run_spec: RunSpec, split: Split, plan: ExecutionPlan, how: str) -> tuple[ExecutionPlan, str]:
    """The plan, with torch's kernels if its own are not proven. `how` is extended by the kernels that were refused.

    Raises ConfigError if the configuration, or the run before it was resumed, requires the unproven kernels. If torch's
    kernels fail on the same data, the run takes them in any case, so that it fails as it would with torch alone.
    """
    engine = run_spec.experiment.engine
    error = disproof(run_spec, split, run_spec.kernels_named(plan.kernels))
    if error is not None:
        if not error.torch_fails and engine.kernels != "auto":
            raise ConfigError(
                f"engine.kernels={engine.kernels} must compute what torch's kernels compute, but {error}; choose torch"
            )
        if not error.torch_fails and run_spec.resume:
            raise ConfigError(
                f"{run_spec.directory}: the run began with {plan.kernels} kernels, which do not compute here what "
                f"torch's compute: {error}; resume it on a machine like the one where it began"
            )
        plan = plan._replace(kernels="torch")
    reasons = [f"{name} kernels refused: {why}" for name, why in run_spec.proofs.kernels.items() if why is not None]
    return plan, "; ".join([how, *reasons])


def disproof(run_spec: RunSpec, split: Split, kernels: Kernels) -> Disagreement | None:
    """Why kernels must not be used on this run's data, None if they are proven. Each kind is tried once."""
    if not kernels.needs_proof:
        return None
    name, found = str(kernels), run_spec.proofs.kernels
    if name not in found:
        found[name] = None
        try:
            prove(run_spec, split, kernels, blocks=trains_in_blocks(run_spec, split))
        except Disagreement as error:
            found[name] = error
    return found[name]


def recorded_plan(run_spec: RunSpec, file: Path | None) -> tuple[ExecutionPlan | None, str]:
    """The plan in the checkpoints of the run, whose digests cover it, and a clause for the log.

    `file`: plan.json, which the clause mentions if it does not agree with the checkpoints.
    """
    sealed = sealed_plan(run_spec.experiment.checkpoint, run_spec.run_id, run_spec.directory)
    if sealed is None:
        return None, "plan: no checkpoint says how the run began"
    plan = parse_plan(run_spec, sealed)
    if file is None:
        return plan, "as the run began"
    try:
        wrong = "" if read_plan(run_spec, file) == plan else "said otherwise"
    except ConfigError:
        wrong = "was damaged" if file.exists() else "was missing"
    return plan, f"as the run began{f'; plan.json {wrong} and is restored from the checkpoint' if wrong else ''}"


def asks_for_kernels(run_spec: RunSpec, split: Split) -> bool:
    """Whether a measurement may choose compiled kernels. Then all machines of the run must be able to have them."""
    return (
        run_spec.experiment.engine.kernels == "auto"
        and not run_spec.resume
        and worth_measuring(run_spec, split)
        and any(kernels.compiled and kernels.is_promising(run_spec) for kernels in all_kernels(run_spec))
    )


def not_built_here(run_spec: RunSpec) -> str:
    """Why the compiled library, which a measurement would try, cannot be built on this machine; "" if it can."""
    try:
        for kernels in all_kernels(run_spec):
            if kernels.compiled:
                kernels.why_not(run_spec)
    except NoKernels as error:
        return str(error)
    return ""


def plan_by_rule(run_spec: RunSpec) -> ExecutionPlan:
    """The plan in the configuration; a rule sets what the configuration leaves open."""
    if run_spec.device.type == "cuda":
        return plans_of_a_gpu(run_spec, kernels_asked_for(run_spec))[0]
    return ExecutionPlan(run_spec.block(run_spec.initial_model().flat.numel()), str(run_spec.kernels))


def worth_measuring(run_spec: RunSpec, split: Split) -> bool:
    """Whether a run is long enough for a measurement, or trains on a GPU, and this process has a device like those of
    its workers."""
    if run_spec.device.type != "cpu":
        return can_measure(run_spec.device)
    federation = run_spec.experiment.federation
    steps_per_client = float(steps_of(np.asarray(split.client_index.sizes), federation.local).mean())
    steps = steps_per_client * federation.cohort * federation.rounds
    if not WORTH_OF_LARGE <= steps < WORTH:
        return steps >= WORTH
    return LARGE <= steps * run_spec.multiplications_of_batch() < math.inf


def can_measure(device: torch.device) -> bool:
    """Whether this process can measure plans for workers on such a device."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def measured_plan(run_spec: RunSpec, split: Split, measure: Measure) -> tuple[ExecutionPlan, str]:
    """The plan from the cache folder, else from a measurement that is then stored there, and a clause for the log."""
    key = measurement_key(run_spec, split)
    file = cache_folder() / "paths" / f"{sha256_of_json(key)[:32]}.json"
    if file.is_file():
        return read_plan(run_spec, file), "measured before"
    with one_at_a_time(file):
        if file.is_file():
            return read_plan(run_spec, file), "measured before"
        return new_plan(run_spec, split, measure, key, file)


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """While it lasts, no other process measures for this file: two measurements would disturb each other, and one of
    them would be for nothing. Nobody is kept out for longer than PATIENCE, or where there are no locks."""
    lock = Lock(file.with_suffix(".lock"))
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.wait(PATIENCE)
    try:
        yield
    finally:
        lock.release()


def new_plan(
    run_spec: RunSpec, split: Split, measure: Measure, key: dict[str, Any], file: Path
) -> tuple[ExecutionPlan, str]:
    """The plan of a measurement, which is stored in this file of the cache folder with its key; and a clause."""
    seconds = measure(run_spec, split, candidates(run_spec, split))
    if not seconds:
        return plan_by_rule(run_spec), "nothing could be measured in time"
    plan = quickest(seconds)
    measured = ", ".join(f"{p.block} {p.kernels} {1e3 * s:.2f}" for p, s in seconds.items())
    try:
        publish_once(file, {**plan._asdict(), "measured": measured, "of": key})
        plan = read_plan(run_spec, file)  # another process may have been first
    except OSError as error:
        return plan, f"measured, but not stored: {error}"
    return plan, f"measured, ms per client: {measured}"


def candidates(run_spec: RunSpec, split: Split | None = None) -> list[ExecutionPlan]:
    """The plans to measure: small blocks first, and for each block torch's kernels first; on a GPU see
    `plans_of_a_gpu`.

    With a split, kernels that need a proof are candidates only if they are proven on it.
    """
    engine, cohort = run_spec.experiment.engine, run_spec.experiment.federation.cohort
    kinds = kernels_asked_for(run_spec, split)
    if run_spec.device.type == "cuda":
        return plans_of_a_gpu(run_spec, kinds, split)
    blocks = sorted({1, *(-(-cohort // number) for number in BLOCKS)}) if engine.block == "auto" else [engine.block]
    if not engine.vectorise:
        blocks = blocks[:1]
    elif len(blocks) > 1 and split is not None and why_not_blocks(run_spec, split):
        blocks = [1]
    return [ExecutionPlan(block, str(kernels)) for block in blocks for kernels in kinds if kernels.suits(block)]


def plans_of_a_gpu(run_spec: RunSpec, kinds: list[Kernels], split: Split | None = None) -> list[ExecutionPlan]:
    """The plans for a GPU, the most promising one first, which a run takes where nothing can be measured.

    A small network needs the whole cohort in a block. A client whose network keeps the card busy trains beside few
    others. Of the kernels, later ones in the table do more than earlier ones. split: None if nothing may be proven.
    """
    engine, federation = run_spec.experiment.engine, run_spec.experiment.federation
    if not engine.vectorise or (split is not None and why_not_blocks(run_spec, split)):
        return [ExecutionPlan(1, "torch" if engine.kernels == "auto" else engine.kernels)]
    small = sorted({min(count, federation.cohort) for count in GPU_CLIENTS}, reverse=True)
    large = sorted({-(-federation.cohort // number) for number in GPU_BLOCKS} - {*small}, reverse=True)
    few = not large or keeps_a_gpu_busy(run_spec)
    blocks = [*small, *reversed(large)] if few else [large[0], *small, *large[1:]]  # small ones take little time
    blocks = blocks if engine.block == "auto" else [min(engine.block, federation.cohort)]
    if engine.kernels == "auto" and not can_measure(run_spec.device):  # nothing can be proven here either
        kinds = [kernels for kernels in kinds if not kernels.needs_proof]
    plans = [ExecutionPlan(block, str(kernels)) for block in blocks for kernels in reversed(kinds)]
    suited = [plan for plan in plans if run_spec.kernels_named(plan.kernels).suits(plan.block)]
    return suited or plans


def keeps_a_gpu_busy(run_spec: RunSpec) -> bool:
    """Whether a client alone does, as far as its multiplications can be counted."""
    return BUSY <= run_spec.multiplications_of_batch() < math.inf


def may_prove(run_spec: RunSpec) -> bool:
    """Whether kernels that nobody asked for are proven. On a GPU only those of small models are."""
    on_gpu = run_spec.device.type == "cuda"
    return not on_gpu or (sum(run_spec.layout.sizes) <= PROVEN and not keeps_a_gpu_busy(run_spec))


def kernels_asked_for(run_spec: RunSpec, split: Split | None = None) -> list[Kernels]:
    """The kernels in the configuration, or those that a measurement may choose, see `kernels_to_try`."""
    return kernels_to_try(run_spec, split) if run_spec.experiment.engine.kernels == "auto" else [run_spec.kernels]


def all_kernels(run_spec: RunSpec) -> list[Kernels]:
    """All kernels, in the order of their table."""
    return [run_spec.kernels_named(name) for name in run_spec.registry.tables["KERNELS"]]


def kernels_to_try(run_spec: RunSpec, split: Split | None = None) -> list[Kernels]:
    """The kernels that a measurement may choose. With a split, only those that need no proof or are proven on it; why
    promising ones cannot be had is then among the proofs of the run."""
    found: list[Kernels] = []
    for kernels in all_kernels(run_spec):
        if not kernels.is_promising(run_spec) or (kernels.compiled and run_spec.missing_kernels):
            continue
        if kernels.needs_proof and not may_prove(run_spec):
            continue
        if not (why := why_not(run_spec, kernels)):
            found.append(kernels)
        elif split is not None:
            run_spec.proofs.kernels[str(kernels)] = Disagreement(f"they are {why}")
    replaced = {name for kernels in found for name in kernels.instead_of}
    kept = [kernels for kernels in found if kernels.name not in replaced]
    return [kernels for kernels in kept if split is None or disproof(run_spec, split, kernels) is None]


def why_not(run_spec: RunSpec, kernels: Kernels) -> str:
    """Why a run cannot have kernels, "" if it can, see `Kernels.why_not`; nothing is proven here."""
    if not kernels.single_losses and run_spec.sampler.needs_rms:
        return "without losses of single examples, which federation.sampler needs"
    return kernels.why_not(run_spec)


def quickest(seconds: dict[ExecutionPlan, float]) -> ExecutionPlan:
    """The first plan that is at most 3 % slower than the quickest one: smaller differences are noise.

    On a processor, plans with smaller blocks and torch's kernels come first.
    """
    best = min(seconds.values())
    return next(plan for plan, value in seconds.items() if value <= 1.03 * best)


def measurement_key(run_spec: RunSpec, split: Split) -> dict[str, Any]:
    """What a measurement depends on. Numbers among the arguments of a method, such as step sizes, are left out."""
    experiment = run_spec.experiment
    engine, federation = experiment.engine, experiment.federation
    alone = may_vectorise(run_spec, split) and why_not_blocks(run_spec, split) != ""
    layout, vectorise = run_spec.layout, engine.vectorise and not alone
    frozen = {name: list(tensor.shape) for name, tensor in run_spec.frozen.items()}
    names = list(map(str, kernels_to_try(run_spec, split)))
    return {
        "model": [list(layout.names), [list(shape) for shape in layout.shapes], *([frozen] if frozen else [])],
        "columns": {name: [str(c.dtype), list(c.shape[1:])] for name, c in split.train.items()},
        "workload": type(run_spec.workload).__name__,
        "method": without_numbers(experiment.method),
        "local": federation.local.model_dump(),
        "cohort": federation.cohort,
        "engine": [engine.block, engine.kernels, vectorise, engine.threads, engine.dtype, engine.precision]
        + ([engine.base] if engine.base != "same" else []),
        "device": [run_spec.device.type, processor(), torch.__version__, names, *gpu(run_spec)],
        "source": sha256(source.read_bytes() for source in MEASURED_SOURCES),
    }


def gpu(run_spec: RunSpec) -> list[Any]:
    """The GPU that a measurement holds for, and the share of it that a worker has; empty for other devices."""
    if run_spec.device.type != "cuda":
        return []
    properties = torch.cuda.get_device_properties(run_spec.device)
    return [properties.name, properties.total_memory, max(group.gpus for group in run_spec.experiment.engine.groups())]


def without_numbers(value: Any) -> Any:
    """A specification without its numbers; other values than text become the name of their type."""
    if isinstance(value, dict):
        return {key: without_numbers(inner) for key, inner in value.items() if not isinstance(inner, int | float)}
    if isinstance(value, list | tuple):
        return [without_numbers(inner) for inner in value]
    return value if isinstance(value, str) else type(value).__name__


def read_plan(run_spec: RunSpec, file: Path) -> ExecutionPlan:
    """The plan in a file of the cache, or in plan.json. Raises ConfigError if the file is damaged."""
    try:
        return parse_plan(run_spec, json.loads(read_text(file)))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({error}); remove it, and it is measured anew") from error


def parse_plan(run_spec: RunSpec, found: dict[str, Any]) -> ExecutionPlan:
    """The plan in parsed JSON. Raises ValueError, KeyError or TypeError if it is not a plan for this run."""
    plan = ExecutionPlan(found["block"], found["kernels"])
    if type(plan.block) is not int or plan.block < 1:
        raise ValueError(f"it says {plan.block!r} clients")
    run_spec.kernels_named(plan.kernels)
    return plan


def publish_once(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file in one step, unless another process has written it first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(content, out, indent=1)
        with suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        os.unlink(temporary)
