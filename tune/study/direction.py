"""Whether larger or smaller values of a study's metric are better, where the study does not say so."""

from __future__ import annotations

from ...engine.config.schema import experiment
from ...engine.errors import FedFleetError
from ...engine.run_spec import RunSpec
from .cells import first_values, levels, planned
from .spec import Study, better


def with_direction(study: Study) -> Study:
    """The study with the `report.best` and `tune.best` that follow from its metrics and its workload, unless they are
    given."""
    if study.report.best != "auto":
        return study
    metrics = (study.report.metric, study.deciding)
    # Only metrics of the evaluation are the workload's; what a loss is, its name says.
    unknown = any(name.startswith("eval/") and better(name) == "max" for name in metrics)
    lower = lower_of(study) if unknown else ()
    reported, deciding = (better(name, lower) for name in metrics)
    deciding = deciding if study.tune.best == "auto" else study.tune.best
    report = study.report.model_copy(update={"best": reported})
    tune = study.tune.model_copy(update={"best": deciding if deciding != reported else study.tune.best})
    return study.model_copy(update={"report": report, "tune": tune})


def lower_of(study: Study) -> tuple[str, ...]:
    """`lower` of the workload at the first level; () for a study that cannot be built, which its check refuses."""
    try:
        data = first_values(planned(study, next(iter(study.methods)), levels(study)[0][1], study.seeds[0]))
        return tuple(RunSpec.of("direction", experiment(data)).workload.lower)
    except FedFleetError:
        return ()
