"""Whether larger or smaller values of a study's metric are better, where the study does not say so."""

from __future__ import annotations

from ...engine.config.run_spec import RunSpec
from ...engine.config.schema import experiment
from ...engine.errors import ConfigError, FedFleetError
from .cells import levels, planned
from .grids import has_ranges
from .spec import Study, better


def with_direction(study: Study, refuse: bool) -> Study:
    """The study with the `report.best` and `tune.best` that follow from its metrics and its workload.

    Raises ConfigError, if asked to refuse, where ranges are searched by a metric that is better in another direction
    than the reported one: the searches have the direction of the report.
    """
    metrics = (study.report.metric, study.deciding)
    # Only metrics of the evaluation are the workload's; what a loss is, its name says.
    unknown = any(name.startswith("eval/") and better(name) == "max" for name in metrics)
    lower = lower_of(study) if unknown else ()
    reported, deciding = (better(name, lower) for name in metrics)
    deciding = deciding if study.tune.best == "auto" else study.tune.best
    if refuse and reported != deciding and any(map(has_ranges, study.methods.values())):
        raise ConfigError(
            f"report.best: auto is {reported} for {metrics[0]}, and the ranges are searched for the {deciding} of "
            f"{metrics[1]}; set report.best to {deciding}, or write grids"
        )
    report = study.report.model_copy(update={"best": reported})
    tune = study.tune.model_copy(update={"best": deciding if deciding != reported else study.tune.best})
    return study.model_copy(update={"report": report, "tune": tune})


def lower_of(study: Study) -> tuple[str, ...]:
    """`lower` of the workload at the first level; () for a study that cannot be built, which its check refuses."""
    from .check import first_values  # it imports the search and all that a run needs

    try:
        data = first_values(planned(study, next(iter(study.methods)), levels(study)[0][1], study.seeds[0]))
        return tuple(RunSpec.of("direction", experiment(data)).workload.lower)
    except FedFleetError:
        return ()
