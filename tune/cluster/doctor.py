"""`fedfleet doctor`: finds what would stop a run, before it starts."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import types
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...engine.backends.ray.connect import join, token_found
from ...engine.backends.ray.placement import cluster, placed, planned, wanted
from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError, FedFleetError, first_line, type_and_first_line
from ...engine.kernels.library import why_no_kernels
from ...engine.run_spec import RunSpec
from ...engine.storage.secrets import redacted
from ...workloads.files.vision import torchvision_models
from ..files import load
from ..streams import say
from ..tracking.stores import load_mlflow, store

PACKAGES = ("fedfleet", "ray", "torch", "numpy", "pyarrow")
NODE_SECONDS = 60.0
"""Seconds that a node may take to answer; it only imports the standard library."""
BUILD_SECONDS = 360.0
"""Seconds that a node may take to build the kernels."""
ROOM = 64 * 2**20
"""Free bytes of /dev/shm that shared memory and the object store need at least."""


STANDARD = {"__builtins__": __builtins__, "os": os, "platform": platform, "socket": socket, "metadata": metadata}
"""The globals of `look`, which nodes without this package execute too."""


class Finding(NamedTuple):
    """The outcome of a check. `what`: the thing that was checked; `well`: whether it is in order, None for a note;
    `text`: one sentence."""

    what: str
    well: bool | None
    text: str

    def __str__(self) -> str:
        return f"{'note' if self.well is None else 'ok' if self.well else 'PROBLEM':8}{self.what}: {self.text}"


def examine(source: str | None, overrides: Iterable[str], out: Path) -> None:
    """Print all findings; raises FedFleetError if there is a problem. source: an experiment, or None."""
    experiment = load(source or "digits", overrides)
    problems = 0
    for finding in findings(experiment, out, asked=source is not None):
        say(str(finding))
        problems += finding.well is False
    if problems:
        raise FedFleetError(f"{problems} problem{'s' if problems > 1 else ''} found")


def findings(experiment: Experiment, out: Path, asked: bool) -> Iterator[Finding]:
    """All findings. asked: whether the user named the experiment, so that the placement of its workers is checked."""
    ours = look("", PACKAGES)["versions"]
    yield Finding("here", True, versions_text(ours))
    yield of_torchvision()
    address = experiment.engine.address
    if address:
        try:
            join(address)
        except ConfigError as error:
            yield Finding("cluster", False, str(error))
            address = None
        else:
            yield from of_cluster(experiment, out, ours, asked)
    else:
        yield Finding("cluster", None, "no --address; a run starts Ray on this machine")
        yield of_kernels("here", why_no_kernels(), experiment if asked else None)
    if "mlflow" in experiment.tracking.names:
        yield store_opens(experiment.tracking.uri)
    else:
        yield Finding("MLflow", None, "the experiment is not tracked there")


def of_torchvision() -> Finding:
    """A finding on the package that data sets and models need, whose wheels are for one version of torch each."""
    try:
        torchvision_models()
    except Exception as error:  # an extension for another torch may raise anything
        return Finding("torchvision", False, f"cannot be imported here: {type_and_first_line(error)}")
    return Finding("torchvision", True, f"version {metadata.version('torchvision')} can be imported here")


def versions_text(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


# --- the cluster ------------------------------------------------------------------------------------------------------
def of_cluster(experiment: Experiment, out: Path, ours: dict[str, str], asked: bool) -> Iterator[Finding]:
    """Findings on the cluster that this process has joined. ours: package -> version on this machine."""
    address = experiment.engine.address
    try:
        yield Finding("cluster", True, f"{address} answers")
        yield authentication()
        seen: list[bool] = []
        there: list[Any] = []  # the nodes that have this package
        with_mark = mark(out)
        try:
            for node, report in reports(with_mark):
                yield from of_node(node, report, ours, seen)
                if report is not None and report["versions"]["fedfleet"] != "none":
                    there.append(node)
        finally:
            with_mark.unlink(missing_ok=True)
        if len(seen) > 1:
            yield shared(out, seen)
        for node, why in kernels_of(there):
            yield of_kernels(f"node {node.name}", why, experiment if asked else None)
        if asked:
            yield from of_workers(experiment)
    finally:
        ray.shutdown()


def authentication() -> Finding:
    if token_found():
        return Finding("authentication", True, "by token")
    return Finding(
        "authentication",
        None,
        "off: everybody who can reach the cluster's ports can run code on it; make a token "
        "(`ray get-auth-token --generate`) and start the cluster again",
    )


def mark(out: Path) -> Path:
    """Create a file whose existence the nodes are asked for."""
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    file = folder / f".fedfleet-doctor-{secrets.token_hex(8)}"
    file.write_text("")
    return file


def reports(mark: Path) -> Iterator[tuple[Any, dict[str, Any] | None]]:
    """(node, what `look` returns there, or None if it does not answer). The function is sent by value, since the
    package may be missing there."""
    anywhere = types.FunctionType(look.__code__, {**STANDARD, "__name__": "__main__"}, "look")
    asked = []
    for node in cluster():
        there: Any = NodeAffinitySchedulingStrategy(node.id, soft=False)
        task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(anywhere)
        asked.append((node, task.remote(str(mark), PACKAGES)))
    for node, reference in asked:
        try:
            yield node, ray.get(reference, timeout=NODE_SECONDS)
        except RayError:
            yield node, None


def look(mark: str, packages: tuple[str, ...]) -> dict[str, Any]:
    """Name, versions and free shared memory of the node it runs on, and whether the file `mark` exists there.

    The function uses nothing of this package, and no other globals than those in STANDARD.
    """
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    room = None  # as on macOS, where Ray keeps objects in files
    if os.path.isdir("/dev/shm"):
        memory = os.statvfs("/dev/shm")
        room = memory.f_bavail * memory.f_frsize
    return {"host": socket.gethostname(), "versions": versions, "mark": os.path.exists(mark), "shm": room}


def of_node(node: Any, report: dict[str, Any] | None, ours: dict[str, str], seen: list[bool]) -> Iterator[Finding]:
    """Findings on a node. seen: receives whether the node can see the folder."""
    what = f"node {node.name}"
    if report is None:
        yield Finding(what, False, f"did not answer within {NODE_SECONDS:g} s")
        return
    seen.append(report["mark"])
    has = ", ".join(f"{node.room.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    theirs = report["versions"]
    other = [f"{name} {theirs[name]} (here {ours[name]})" for name in ours if theirs[name] != ours[name]]
    if theirs["fedfleet"] == "none":
        other.append("install fedfleet there, or use `fedfleet submit`")
    yield Finding(what, not other, f"{report['host']}, {has}; " + ("; ".join(other) or "same versions as here"))
    if report["shm"] is not None and report["shm"] < ROOM:
        yield Finding(what, False, f"/dev/shm has only {report['shm'] >> 20} MiB left; give the container more")


def kernels_of(nodes: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """(node, why it cannot use the project's own kernels, or ""). The kernels are built there if necessary."""
    asked = []
    for node in nodes:
        there: Any = NodeAffinitySchedulingStrategy(node.id, soft=False)
        task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(why_no_kernels)
        asked.append((node, task.remote()))
    for node, reference in asked:
        try:
            yield node, ray.get(reference, timeout=BUILD_SECONDS)
        except RayError as error:
            yield node, f"no answer: {type(error).__name__}"


def of_kernels(what: str, why: str, experiment: Experiment | None) -> Finding:
    """A finding on kernels. why: the reason that there are none, or ""; experiment: the one to run, or None."""
    if not why:
        return Finding(what, True, "has kernels for its processor")
    if experiment is not None and (wanted := RunSpec.of("doctor", experiment).kernels).compiled:
        return Finding(
            what, False, f"engine.kernels={wanted}: {why}; workers there would be given up; choose torch or auto"
        )
    return Finding(what, None, f"no native kernels ({why}): runs that measure plans use torch's kernels on all nodes")


def shared(out: Path, seen: list[bool]) -> Finding:
    """A finding on the folder of runs. seen: for each node, whether it can read the folder."""
    if all(seen):
        return Finding("storage", True, f"all nodes can read {out}")
    text = f"{sum(seen)} of {len(seen)} nodes can read {out}: checkpoints stay on the node that the run is started on"
    return Finding("storage", None, text)


def of_workers(experiment: Experiment) -> Iterator[Finding]:
    """Findings on the nodes of the workers, and on whether their resources are free now."""
    try:
        spots = planned(experiment.engine)
    except ConfigError as error:
        yield Finding("workers", False, str(error))
        return
    names = {node.id: node.name for node in cluster()}
    counts = {name: sum(spot.node == node for spot in spots) for node, name in names.items()}
    text = ", ".join(f"{count} on {name}" for name, count in counts.items() if count)
    busy = placed(wanted(experiment.engine, cluster()), cluster(free=True))[1]
    yield Finding("workers", True, f"{len(spots)} requested, granted: {text}")
    if busy:
        yield Finding("workers", None, f"{len(busy)} of them would wait, since others use the resources that they need")


# --- the tracker ------------------------------------------------------------------------------------------------------
def store_opens(uri: str) -> Finding:
    """A finding on the MLflow store. uri: the setting tracking.uri."""
    try:
        where = store(uri)
        file = Path(where.partition("///")[2])
        if where.startswith("sqlite") and not file.exists():
            well = os.access(file.parent, os.W_OK)
            return Finding(
                "MLflow",
                well,
                f"{where} {'will be created' if well else 'cannot be created: the folder is missing or read-only'}",
            )
        load_mlflow().MlflowClient(where).search_experiments(max_results=1)
    except Exception as error:  # a store may raise anything
        return Finding("MLflow", False, redacted(first_line(error)))
    return Finding("MLflow", True, f"{redacted(where)} answers")
