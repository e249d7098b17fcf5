"""What an experiment comes to before it runs: configuration, parameters by kind, bytes."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from ..algorithms.contract import Algorithm
from ..algorithms.parts.groups import is_dual
from ..algorithms.parts.muon import kinds
from ..algorithms.parts.reparameterisation import Compressing
from ..algorithms.tree import Tree
from ..engine.config.run_spec import RunSpec
from ..engine.config.schema import Experiment
from ..engine.errors import ConfigError
from ..engine.methods.batch_norm import Buffered
from ..engine.methods.state_spec import StateSpec
from ..engine.user_code import plugin_errors
from .listing import columns
from .partition import Dealt, told


def describe(experiment: Experiment) -> str:
    """Data that are not here are told, and are no error: nothing runs."""
    run_spec = RunSpec.of("show", experiment)
    method, buffers = run_spec.method(), run_spec.buffers
    x = run_spec.checked_initial_model()
    with plugin_errors("method", settings=experiment.method):
        forms = StateSpec(method, x)
    tables = [parameters(x, buffers), "", *compression(method, forms), traffic(run_spec, x), data(run_spec)]
    return "\n".join([yaml.safe_dump(experiment.plain(), sort_keys=False), *tables])


def data(run_spec: RunSpec) -> str:
    try:
        return told(Dealt.of(run_spec))
    except (ConfigError, ValueError) as error:
        return f"no data: {' '.join(str(error).split()).removeprefix('workload: ')}"


def parameters(x: Tree, buffers: Sequence[str] = ()) -> str:
    """Each tensor with its shape, and whether Muon's rules take it as a matrix or as a vector; buffers in one row."""
    rows = [("tensor", "shape", "numbers", "kind")]
    x, apart = x.pick(set(x) - set(buffers)), sum(x[name].numel() for name in buffers)
    for (name, kind), leaf in zip(kinds(x.layout).items(), x.views(), strict=True):
        what = f"matrix {kind[0]} x {kind[1]}" if kind else "vector"
        rows.append((name, " x ".join(map(str, leaf.shape)) or "()", f"{leaf.numel():,}", what))
    dual = sum(leaf.numel() for name, leaf in x.items() if is_dual(name))
    if dual:
        rows += [("primal", "", f"{x.flat.numel() - dual:,}", "group"), ("dual", "", f"{dual:,}", "group")]
    rows.append(("total", "", f"{x.flat.numel():,}", ""))
    return columns([*rows, ("and running statistics", "", f"{apart:,}", "averaged")] if apart else rows)


def compression(method: Algorithm, forms: StateSpec) -> list[str]:
    """What goes up in place of each compressed weight, and shares of the model; nothing where nothing is compressed.
    The last line counts all that is sent, places, keys and scales as well, over the bytes of the parameters: the one
    definition by which all compressions can be compared."""
    method = method.method if isinstance(method, Buffered) else method
    if not isinstance(method, Compressing):
        return []
    report = method.report
    rows = [("compressed", "as a matrix", "sent", "numbers", "ratio")]
    for (weight, _, sent), text in zip(report.sized, report.texts, strict=True):
        sides = f"{weight.rows} x {weight.cols}"
        rows.append((weight.name, sides, text, f"{sent:,}", f"{sent / weight.numbers:.4f}"))
    rows.append(("the model, with all else", "", "", "", f"{report.ratio:.4f}"))
    shares = f"of the model's {forms.model:,} B: up {forms.up / forms.model:.4f}, down {forms.down / forms.model:.4f}"
    return [columns(rows), shares, ""]


def traffic(run_spec: RunSpec, x: Tree) -> str:
    forms, plan = StateSpec(run_spec.method(), x), run_spec.experiment.federation
    rows = [
        ("per client", f"keeps {forms.kept:,} B", f"down {forms.down:,} B", f"up {forms.up:,} B"),
        (
            "per round",
            f"{plan.cohort} clients",
            f"down {plan.cohort * forms.down:,} B",
            f"up {plan.cohort * forms.up:,} B",
        ),
    ]
    if forms.buffers:
        total = plan.cohort * forms.buffers
        rows.append(("per round", "running statistics", f"down {total:,} B", f"up {total:,} B"))
    measured = "" if given(run_spec) else ", if the run is too short to measure what is quickest"
    return columns(rows) + f"\nblocks of {run_spec.block(x.flat.numel())} clients, {run_spec.kernels} kernels{measured}"


def given(run_spec: RunSpec) -> bool:
    return "auto" not in (run_spec.experiment.engine.block, run_spec.experiment.engine.kernels)
