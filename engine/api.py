"""`run`, `rounds` and `resume`: from a validated experiment to a result, and to the files of a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .accelerators.choice import on_this_machine
from .config.differences import differences
from .config.schema import PARTS, Experiment, Federation
from .config.schema import experiment as validated
from .config.schema import validated as section
from .errors import ConfigError
from .rounds.resuming import check_longer, check_rounds
from .run_spec import RunSpec
from .runs.launch import execute
from .runs.observer import Watching, observers_of
from .runs.prepare import new_run_id, prepare
from .runs.result import Result
from .runs.rounds import Rounds
from .runs.run_directory import RunDirectory
from .runs.saved_files import initial_model, saved_config
from .state.checkpoint import checkpointed_rounds
from .storage.expanded import expanded


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    observers: Iterable[Watching] = (),
    run_id: str | None = None,
    stop: Callable[[], int] | None = None,
    *,
    initial_model: Mapping[str, Any] | None = None,
) -> Result:
    """Run an experiment to its last round, as `fedfleet.run` does, which has these arguments, but without progress."""
    run_spec, directory = new_run(here(experiment), out, run_id, initial_model)
    return execute(run_spec, directory, observers_of(observers), stop)


def resume(
    experiment: Experiment | str | Path,
    directory: str | Path | None = None,
    observers: Iterable[Watching] = (),
    stop: Callable[[], int] | None = None,
    *,
    rounds: int | None = None,
) -> Result:
    """Continue the run in a folder, as `fedfleet.resume` does, which has these arguments, but without progress."""
    if not isinstance(experiment, Experiment):
        if directory is not None:
            raise ConfigError(f"experiment must be an Experiment, got {experiment!r}; or give the run's folder alone")
        run_spec, run_directory = old_run(None, experiment, rounds)
    elif directory is None:
        raise ConfigError("directory is missing; give the run's folder")
    else:
        run_spec, run_directory = old_run(experiment, directory, rounds)
    return execute(run_spec, run_directory, observers_of(observers), stop)


def rounds(
    experiment: Experiment,
    out: str | Path | None = None,
    observers: Iterable[Watching] = (),
    run_id: str | None = None,
    *,
    initial_model: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Rounds:
    """Iterate over the rounds of an experiment while it runs.

        rounds = fedfleet.rounds(experiment, "runs/mine")
        for record in rounds:
            print(record["round"], record.get("eval/accuracy"))
        result = rounds.result

    resume: whether to continue the unfinished run in the folder `out`. The other arguments are those of `run`. Raises
    ConfigError at once if the experiment cannot run; see `Rounds` for the end of the run.
    """
    if not resume:
        run_spec, directory = new_run(here(experiment), out, run_id, initial_model)
    elif out is None or run_id is not None or initial_model is not None:
        raise ConfigError("resume=True continues the run in the folder out; give out, and no run_id or initial_model")
    else:
        run_spec, directory = old_run(experiment, out)
    return Rounds(run_spec, directory, observers_of(observers))


def check_experiment(value: Any) -> None:
    """Raise ConfigError for a name, a path or plain data in the place of an experiment."""
    if isinstance(value, Experiment):
        return
    got, write = type(value).__name__, "Experiment(workload=…, method=…)"
    if isinstance(value, str | Path):
        got, write = repr(str(value)), f"fedfleet.load({str(value)!r})"
    elif isinstance(value, Mapping):
        got, write = f"a {got}", "Experiment(**data)"
    raise ConfigError(f"experiment must be an Experiment, got {got}; write {write}")


def here(experiment: Experiment) -> Experiment:
    """The experiment of a run that begins on this machine: it has a device, see `on_this_machine`."""
    check_experiment(experiment)
    return experiment.model_copy(update={"engine": on_this_machine(experiment.engine)})


def new_run(
    experiment: Experiment,
    out: str | Path | None,
    run_id: str | None,
    initial_model: Mapping[str, Any] | None = None,
) -> tuple[RunSpec, RunDirectory | None]:
    """The specification of a new run, and its folder or None."""
    check_experiment(experiment)
    if out == "":
        raise ConfigError("out must name a folder, got an empty text; give one, or None for a run without files")
    directory = RunDirectory.new(expanded(out)) if out is not None else None
    path = directory.path if directory else None
    return prepare(experiment, run_id or new_run_id(), path, initial_model=initial_model), directory


def as_it_began(experiment: Experiment, device: str) -> Experiment:
    """The experiment that continues a run, with the device of the run's folder where it leaves this open."""
    if experiment.engine.device != "auto" or device == "auto":
        return experiment
    return here(experiment.model_copy(update={"engine": experiment.engine.model_copy(update={"device": device})}))


def refuse_representations(config: Mapping[str, Any], directory: str | Path) -> None:
    """Raise ConfigError for the configuration of a run that was made from objects: it has their representations, such
    as "Mlp(widths=(4,))", in the place of names."""
    for key in PARTS:
        if isinstance(config.get(key), str) and "(" in config[key]:
            raise ConfigError(
                f"{key} of the run in {directory} was an object of Python, {config[key]}, which a file cannot hold; "
                f"give the experiment: fedfleet.resume(experiment, {str(directory)!r})"
            )


def old_run(
    experiment: Experiment | None, directory: str | Path, rounds: int | None = None
) -> tuple[RunSpec, RunDirectory]:
    """The specification that continues the run in a folder, and this folder. experiment: None for the folder's. rounds:
    the number of rounds that the run is to have, None for that of the experiment."""
    if experiment is not None:
        check_experiment(experiment)
    run_directory = RunDirectory.old(expanded(directory))
    config = saved_config(run_directory.path)
    if experiment is None:
        refuse_representations(config, directory)
        experiment = validated(config)
    else:
        experiment = as_it_began(experiment, config.get("engine", {}).get("device", "auto"))
    if rounds is not None:
        federation = section(Federation, {**experiment.federation.model_dump(), "rounds": rounds}, "federation.")
        experiment = experiment.model_copy(update={"federation": federation})
    made, wanted = checkpointed_rounds(run_directory.path), experiment.plain()
    if keys := differences(config, wanted, made[-1] if made else 0):
        raise ConfigError(
            f"the run in {directory} is of another configuration: {'; '.join(keys)}; undo these changes, or give them "
            "to `fedfleet fork`"
        )
    run_id, path = run_directory.run_id, run_directory.path
    run_spec = prepare(experiment, run_id, path, resume=True, initial_model=initial_model(path))
    check_rounds(run_spec, config["federation"]["rounds"])
    if run_directory.complete:
        before, now = ((d["federation"]["rounds"], d.get("evaluate", {}).get("stop")) for d in (config, wanted))
        check_longer(run_spec, asked=rounds is not None or before != now)
    return run_spec, run_directory
