"""How clients are run, blocks of how many by which kernels: as given, as recorded, by a rule, or as measured before.

Bits follow from it within rounding, so it is decided once: checkpoints keep it, under their digest, and resuming reads
it there; plan.json in the run's folder tells it to the user. What was measured is kept in the cache folder by model,
method, batch, processor and versions, never by workers, and later runs take it from there. Runs too short to be worth
measuring go by a rule.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...workloads.base import Split
from ..cohorts.tasks import steps_of
from ..config.run_spec import ExecutionPlan, RunSpec
from ..errors import ConfigError
from ..kernels.fused_chain import NotAChain, chain_from
from ..kernels.library import SOURCES, NoKernels, cache_folder, library, processor
from ..state.checkpoint import sealed_plan
from ..state.shared_checkpoint import sealed_plan as copied_plan
from ..storage.atomic_write import write
from .kernel_proof import Disagreement, TrainingData, kernel_identity, prove

WORTH = 20_000
"""Local steps of a run from which on it is measured: half a minute of a small network, some seconds of measuring."""
BLOCKS = (48, 24, 12, 8, 4)
"""Numbers of blocks a round that are tried: such that two, four or eight workers end together."""
MEASURED_SOURCES = (
    *SOURCES,
    *(
        Path(__file__).parents[1] / name
        for name in (
            "kernels/operators.py",
            "kernels/fused_chain.py",
            "clients/local_training.py",
            "planning/kernel_proof.py",
        )
    ),
)
"""The files that compute a client's result. When one of them changes, earlier measurements no longer hold."""

Measure = Callable[[RunSpec, Split, list[ExecutionPlan]], dict[ExecutionPlan, float]]
"""(run specification, data, candidates) -> seconds a client of those that ran."""


def plan_execution(run_spec: RunSpec, split: Split, measure: Measure) -> tuple[RunSpec, str]:
    """The run specification with its execution plan, and a sentence for the log.

    `measure` is asked where nothing else says what to do."""
    engine = run_spec.experiment.engine
    kept = Path(run_spec.directory) / "plan.json" if run_spec.directory is not None else None
    if run_spec.resume:
        path, how = recorded_plan(run_spec, kept)
        if path is None:  # there is no sound checkpoint, as the driver will say: nothing is touched
            return run_spec.with_plan(plan_by_rule(run_spec)), how
    elif "auto" not in (engine.block, engine.kernels):
        path, how = plan_by_rule(run_spec), "as given"
    elif not worth_measuring(run_spec, split):
        path, how = plan_by_rule(run_spec), "too short a run to measure"
    else:
        path, how = measured_plan(run_spec, split, measure)
    path, how = prove_or_fall_back(run_spec, split, path, how)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(kept, json.dumps({**path._asdict(), "how": how}) + "\n")
        except OSError as error:
            raise ConfigError(f"{kept} cannot be written ({error.strerror or error}); make room for it") from error
    if run_spec.missing_kernels and path.kernels == "torch":
        how += f"; no kernels of our own, which not every machine can have: {run_spec.missing_kernels[0]}"
    proved = kernel_identity() if path.kernels != "torch" else None
    return run_spec.with_plan(path, proved), f"plan: blocks of {path.block} clients, {path.kernels} kernels ({how})"


def prove_or_fall_back(run_spec: RunSpec, split: Split, path: ExecutionPlan, how: str) -> tuple[ExecutionPlan, str]:
    """The path with torch's kernels where those chosen are not proven, and how it came about with what was refused.

    Raises ConfigError where the user, or the run as it began, has it that they must be used; but where torch's kernels
    fail on the same data the run takes them, and fails as it does by them."""
    engine = run_spec.experiment.engine
    error = disproof(run_spec, split, path.kernels) if path.kernels != "torch" else None
    if error is not None:
        if not error.torch_fails and engine.kernels != "auto":
            raise ConfigError(
                f"engine.kernels={engine.kernels} must compute what torch's kernels compute, but {error}; choose torch"
            )
        if not error.torch_fails and run_spec.resume:
            raise ConfigError(
                f"{run_spec.directory}: the run began with {path.kernels} kernels, which do not do here what "
                f"torch's do: {error}; resume it on a machine like the one where it began"
            )
        path = path._replace(kernels="torch")
    reasons = [f"{name} kernels refused: {error}" for name, error in run_spec.proofs.items() if error is not None]
    return path, "; ".join([how, *reasons])


def disproof(run_spec: RunSpec, split: Split, kernels: str) -> Disagreement | None:
    """Why kernels of our own are not to be used on this run's data; None where they are proven."""
    if kernels not in run_spec.proofs:
        run_spec.proofs[kernels] = None
        try:
            prove(run_spec, TrainingData(split.train, split.client_index), kernels)
        except Disagreement as error:
            run_spec.proofs[kernels] = error
    return run_spec.proofs[kernels]


def recorded_plan(run_spec: RunSpec, kept: Path | None) -> tuple[ExecutionPlan | None, str]:
    """What the run's checkpoints say, which their digests cover; plan.json is written again where it says otherwise."""
    sealed = sealed_plan(run_spec.directory) if run_spec.directory is not None else None
    if sealed is None and (folder := run_spec.experiment.checkpoint.folder):
        sealed = copied_plan(folder, run_spec.run_id)
    if sealed is None:
        return None, "plan: no checkpoint says how the run began"
    path = parse_plan(sealed)
    if kept is None:
        return path, "as the run began"
    try:
        wrong = "" if read_plan(kept) == path else "said otherwise"
    except ConfigError:
        wrong = "was damaged" if kept.exists() else "was missing"
    return path, f"as the run began{f'; plan.json {wrong} and is restored from the checkpoint' if wrong else ''}"


def asks_for_kernels(run_spec: RunSpec, split: Split) -> bool:
    """Whether the plan may become one with kernels of our own that nobody asked for: then all machines of the run must
    be able to have them."""
    return (
        run_spec.experiment.engine.kernels == "auto"
        and not run_spec.resume
        and worth_measuring(run_spec, split)
        and has_native(run_spec)
    )


def plan_by_rule(run_spec: RunSpec) -> ExecutionPlan:
    """What is given, and what a rule says where nothing is."""
    return ExecutionPlan(run_spec.block(run_spec.initial_model().flat.numel()), run_spec.kernels)


def worth_measuring(run_spec: RunSpec, split: Split) -> bool:
    plan = run_spec.experiment.federation
    steps = float(steps_of(np.asarray(split.client_index.sizes), plan.local).mean()) * plan.cohort * plan.rounds
    return run_spec.device.type == "cpu" and steps >= WORTH


def measured_plan(run_spec: RunSpec, split: Split, measure: Measure) -> tuple[ExecutionPlan, str]:
    """What the cache folder says, else what is measured now, which it then says."""
    known = measurement_key(run_spec, split)
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
    file = cache_folder() / "paths" / f"{digest}.json"
    if file.is_file():
        return read_plan(file), "measured before"
    seconds = measure(run_spec, split, candidates(run_spec, split))
    path = quickest(seconds) or plan_by_rule(run_spec)
    told = ", ".join(f"{p.block} {p.kernels} {1e3 * s:.2f}" for p, s in seconds.items())
    try:
        publish_once(file, {**path._asdict(), "measured": told, "of": known})
        path = read_plan(file)  # another process may have been first
    except OSError as error:
        return path, f"measured, and not kept: {error}"
    return path, f"measured, ms a client: {told}"


def candidates(run_spec: RunSpec, split: Split | None = None) -> list[ExecutionPlan]:
    """Small blocks first, of each torch's kernels first; with a split, of ours only those that are proven on it."""
    engine, cohort = run_spec.experiment.engine, run_spec.experiment.federation.cohort
    blocks = sorted({1, *(-(-cohort // number) for number in BLOCKS)}) if engine.block == "auto" else [engine.block]
    if not engine.vectorise:
        blocks = blocks[:1]
    names = [engine.kernels] if engine.kernels != "auto" else ["torch", *own_kernels(run_spec, split)]
    return [ExecutionPlan(block, name) for block in blocks for name in names]


def own_kernels(run_spec: RunSpec, split: Split | None = None) -> list[str]:
    """Kernels beside torch's: where a chain is had, it leaves nothing to the others. With a split, only those that are
    proven on it."""
    names = []
    if has_native(run_spec):
        reason = why_no_chain(run_spec)
        names = ["native"] if reason else ["chain"]
        if reason and split is not None:
            run_spec.proofs["chain"] = Disagreement(reason)
    return [name for name in names if split is None or disproof(run_spec, split, name) is None]


def why_no_chain(run_spec: RunSpec) -> str:
    """Empty where the workload's loss is one that the chain computes, before anything is proven."""
    if run_spec.precision is not None:
        return f"engine.precision={run_spec.experiment.engine.precision}"
    try:
        chain_from(run_spec.workload, run_spec.initial_model().layout)
    except NotAChain as error:
        return str(error)
    return ""


def has_native(run_spec: RunSpec) -> bool:
    try:
        fits = run_spec.device.type == "cpu" and run_spec.dtype == torch.float32 and not run_spec.missing_kernels
        return fits and library() is not None
    except NoKernels:
        return False


def quickest(seconds: dict[ExecutionPlan, float]) -> ExecutionPlan | None:
    """The quickest; one that came before it, smaller or torch's, where that is within 3 %, which is noise."""
    best = min(seconds.values(), default=0.0)
    return next((path for path, value in seconds.items() if value <= 1.03 * best), None)


def measurement_key(run_spec: RunSpec, split: Split) -> dict[str, Any]:
    """What a measurement depends on. Numbers among a method's arguments (step sizes, say) are not in it."""
    experiment = run_spec.experiment
    engine, plan = experiment.engine, experiment.federation
    layout = run_spec.layout
    return {
        "model": [list(layout.names), [list(shape) for shape in layout.shapes]],
        "columns": {name: [str(c.dtype), list(c.shape[1:])] for name, c in split.train.items()},
        "workload": type(run_spec.workload).__name__,
        "method": without_numbers(experiment.method),
        "local": plan.local.model_dump(),
        "cohort": plan.cohort,
        "engine": [engine.block, engine.kernels, engine.vectorise, engine.threads, engine.dtype, engine.precision],
        "device": [run_spec.device.type, processor(), torch.__version__, own_kernels(run_spec, split)],
        "source": hashlib.sha256(b"".join(source.read_bytes() for source in MEASURED_SOURCES)).hexdigest(),
    }


def without_numbers(value: Any) -> Any:
    """Without numbers."""
    if isinstance(value, dict):
        return {key: without_numbers(inner) for key, inner in value.items() if not isinstance(inner, int | float)}
    if isinstance(value, list | tuple):
        return [without_numbers(inner) for inner in value]
    return value if isinstance(value, str) else type(value).__name__


def read_plan(file: Path) -> ExecutionPlan:
    """What a file that was written here says; ConfigError where it is damaged."""
    try:
        return parse_plan(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({error}); remove it, and it is measured anew") from error


def parse_plan(found: dict[str, Any]) -> ExecutionPlan:
    """ValueError, KeyError or TypeError for what is no path."""
    path = ExecutionPlan(found["block"], found["kernels"])
    if type(path.block) is not int or path.block < 1 or path.kernels not in ("torch", "native", "chain"):
        raise ValueError(f"it says {path.block!r} clients and {path.kernels!r} kernels")
    return path


def publish_once(file: Path, content: dict[str, Any]) -> None:
    """Whole, and only if no other process was first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=".", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(content, out, indent=1)
        with suppress(FileExistsError):
            os.link(beside, file)
    finally:
        os.unlink(beside)
