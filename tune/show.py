"""Description of an experiment before it runs: configuration, parameters by kind, bytes per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from torch import Tensor

from ..algorithms.contract import Algorithm
from ..algorithms.parts.groups import is_dual
from ..algorithms.parts.muon import kinds
from ..algorithms.parts.reparameterisation import Compressing
from ..algorithms.tree import Tree
from ..engine.config.differences import flatten
from ..engine.config.schema import Experiment, part_name
from ..engine.errors import ConfigError
from ..engine.method_form.batch_norm import Buffered
from ..engine.method_form.personal import Personal
from ..engine.method_form.ranked import Ranked
from ..engine.method_form.scheduled import Scheduled
from ..engine.method_form.state_spec import StateSpec
from ..engine.records.lineage import lineage_of
from ..engine.run_spec import RunSpec
from ..engine.user_code import plugin_errors
from .listing import arguments, columns
from .partition import PartitionSummary, table_of


def describe(experiment: Experiment, everything: bool = True) -> str:
    """The description as text. Missing data are mentioned in it and are no error, since nothing runs.

    everything: whether the configuration includes the keys that nobody has set, with their defaults, and whether the
    arguments of the method and of the workload follow with their types, defaults and meanings.
    """
    run_spec = RunSpec.of("show", experiment)
    method, buffers = run_spec.method(), run_spec.buffers
    x = run_spec.checked_initial_model()
    with plugin_errors("method", settings=experiment.method):
        state_spec = StateSpec(method, x)
    tables = [
        parameters(x, buffers, run_spec.frozen),
        "",
        *compression(method, state_spec),
        traffic(run_spec, x),
        data(run_spec),
    ]
    if everything:
        tables += arguments_of_parts(run_spec)
    if run_spec.personal_text:
        tables += ["", f"personal, trained and never sent: {run_spec.personal_text}"]
    if run_spec.privacy is not None:
        tables += ["", run_spec.privacy.description(run_spec.last_round)]
    return "\n".join([configuration(experiment, everything), *tables])


def arguments_of_parts(run_spec: RunSpec) -> list[str]:
    """The arguments of the method and of the workload, where the configuration names them."""
    found, tables = [], run_spec.registry.tables
    for key, table in (("method", "METHODS"), ("workload", "WORKLOADS")):
        part = getattr(run_spec.experiment, key)
        if isinstance(part, str | dict):
            name = part_name(part)
            found += ["", f"{key} {name}", arguments(table, name, tables)]
    return found


def configuration(experiment: Experiment, everything: bool) -> str:
    """The configuration as YAML. everything: see `describe`."""
    whole = experiment.plain()
    if everything:
        return yaml.safe_dump(whole, sort_keys=False)
    given = chosen(whole, experiment)
    left = len(flatten(whole)) - len(flatten(given))
    return f"{yaml.safe_dump(given, sort_keys=False)}# {left} further keys have their defaults; --all prints them\n"


def chosen(whole: dict[str, Any], section: BaseModel) -> dict[str, Any]:
    """The part of a section's plain data that was set, also in the sections inside of it."""
    found = {}
    for key in whole:
        inner = getattr(section, key)
        if key in section.model_fields_set and whole[key] != []:
            found[key] = chosen(whole[key], inner) if isinstance(inner, BaseModel) else whole[key]
    return found


def described_lineage(folder: Path) -> list[str]:
    """Comments in YAML on where the run in a folder comes from; [] for a run that is no fork, or no run."""
    lineage = lineage_of(folder)
    return [] if lineage is None else [f"# {sentence}" for sentence in lineage.sentences]


def data(run_spec: RunSpec) -> str:
    """The table of the partition, or why there are no data."""
    try:
        return table_of(PartitionSummary.of(run_spec))
    except (ConfigError, ValueError) as error:
        return f"no data: {' '.join(str(error).split()).removeprefix('workload: ')}"


def parameters(x: Tree, buffers: Sequence[str] = (), frozen: Mapping[str, Tensor] | None = None) -> str:
    """A table of tensors with their shapes, and whether Muon's rules treat them as matrices or as vectors.

    buffers: names of running statistics, which share one row. frozen: the frozen tensors, which share one row.
    """
    rows = [("tensor", "shape", "numbers", "kind")]
    x, apart = x.pick(set(x) - set(buffers)), sum(x[name].numel() for name in buffers)
    for (name, kind), leaf in zip(kinds(x.layout).items(), x.views(), strict=True):
        what = f"matrix {kind[0]} x {kind[1]}" if kind else "vector"
        rows.append((name, " x ".join(map(str, leaf.shape)) or "()", f"{leaf.numel():,}", what))
    dual = sum(leaf.numel() for name, leaf in x.items() if is_dual(name))
    if dual:
        rows += [("primal", "", f"{x.flat.numel() - dual:,}", "group"), ("dual", "", f"{dual:,}", "group")]
    rows.append(("total", "", f"{x.flat.numel():,}", ""))
    if apart:
        rows.append(("and running statistics", "", f"{apart:,}", "averaged"))
    if frozen:
        constant = sum(leaf.numel() for leaf in frozen.values())
        rows.append(("and frozen tensors", ", ".join(frozen), f"{constant:,}", "neither trained nor sent"))
    return columns(rows)


def compression(method: Algorithm, state_spec: StateSpec) -> list[str]:
    """A table of what clients send instead of each compressed weight, and shares of the model; [] without compression.

    The last line divides all bytes that are sent, including indices, keys and scales, by the bytes of the parameters.
    This is the definition by which all compressions can be compared.
    """
    while isinstance(method, Buffered | Personal | Ranked | Scheduled):
        method = method.method
    if not isinstance(method, Compressing):
        return []
    report = method.report
    rows = [("compressed", "as a matrix", "sent", "numbers", "ratio")]
    for (weight, _, sent), text in zip(report.sized, report.texts, strict=True):
        sides = f"{weight.rows} x {weight.cols}"
        rows.append((weight.name, sides, text, f"{sent:,}", f"{sent / weight.numbers:.4f}"))
    rows.append(("the model, with all else", "", "", "", f"{report.ratio:.4f}"))
    model = state_spec.model
    shares = f"of the model's {model:,} B: up {state_spec.up / model:.4f}, down {state_spec.down / model:.4f}"
    return [columns(rows), shares, ""]


AVERAGED = 1000
"""The most rounds, and clients, whose bytes are averaged, where they differ."""


def traffic(run_spec: RunSpec, x: Tree) -> str:
    """A table of the bytes that a client keeps and sends, and of those of a round; the block and the kernels."""
    state_spec, federation = StateSpec(method := run_spec.method(), x), run_spec.experiment.federation
    clients = range(min(federation.clients, AVERAGED) if method.own_traffic else 1)
    numbers = range(1, min(federation.rounds, max(2, AVERAGED // len(clients))) + 1)
    each = [state_spec.traffic(method, number, client) for number in numbers for client in clients]
    down, up = (round(sum(way) / len(each)) for way in zip(*each, strict=True))
    mean = ", on average" if len(set(each)) > 1 else ""
    rows = [
        (f"per client{mean}", f"keeps {state_spec.kept:,} B", f"down {down:,} B", f"up {up:,} B"),
        (
            f"per round{mean}",
            f"{federation.cohort} clients",
            f"down {federation.cohort * down:,} B",
            f"up {federation.cohort * up:,} B",
        ),
    ]
    if state_spec.buffers:
        total = federation.cohort * state_spec.buffers
        rows.append(("per round", "running statistics", f"down {total:,} B", f"up {total:,} B"))
    measured = "" if is_given(run_spec) else ", if the run is too short to measure which plan is fastest"
    return columns(rows) + f"\nblocks of {run_spec.block(x.flat.numel())} clients, {run_spec.kernels} kernels{measured}"


def is_given(run_spec: RunSpec) -> bool:
    """Whether the settings say which block and which kernels to use."""
    return "auto" not in (run_spec.experiment.engine.block, run_spec.experiment.engine.kernels)
