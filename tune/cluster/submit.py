"""Runs an experiment as a job of a cluster, through the Jobs API of Ray."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import yaml
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from ...engine.backends.ray.connect import TOKEN, check_listening, first_bytes, token_found, use_token
from ...engine.config.registry import find_plugin
from ...engine.errors import ConfigError, FedFleetError, first_line
from ...engine.runs.prepare import new_run_id
from ..files import load, load_data
from ..keyboard import keyboard

FILE = "experiment.yaml"
"""The experiment in the folder that is sent."""
TICK = 0.5
"""Seconds between questions for the job's status."""
ASKED = b"GET /api/version HTTP/1.0\r\n\r\n"
"""A request to which any web server answers with its protocol's name; Ray's client would wait for ever for another
server."""


def client(address: str) -> Any:
    """A client of the cluster's dashboard. Raises ConfigError if the dashboard cannot be reached."""
    for noisy in ("ray", "ray.dashboard.modules.dashboard_sdk"):  # they would print which packages are sent
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if address == "auto":
        use_token()  # the cluster is on this machine, so that Ray has used the token for it
    else:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"--address must be the dashboard's http://HOST:PORT or auto, got {address!r}")
        host, colon, port = address.partition("//")[2].rstrip("/").rpartition(":")
        if colon and port.isdigit():
            check_listening(f"{host}:{port}")
            if address.startswith("http://") and not first_bytes(f"{host}:{port}", ASKED, 5).startswith(b"HTTP/"):
                raise ConfigError(
                    f"--address {address}: what answers there is not the dashboard of a cluster; give the dashboard's "
                    "address that `ray start --head` printed"
                )
    try:
        try:
            return JobSubmissionClient(address)
        except AuthenticationError:
            if token_found() or not use_token():
                raise
            return JobSubmissionClient(address)
    except AuthenticationError:
        raise ConfigError(f"--address {address}: the cluster requires a token, or another one; {TOKEN}") from None
    except (ConnectionError, RuntimeError) as error:
        if "401" in str(error) or "403" in str(error):
            raise ConfigError(f"--address {address}: the cluster requires a token, or another one; {TOKEN}") from None
        raise ConfigError(
            f"--address {address}: no dashboard of a cluster answers there ({first_line(error)}); give the dashboard's "
            "address that `ray start --head` printed"
        ) from None


def send(source: str, overrides: Iterable[str], address: str, out: str | None) -> str:
    """Submit the job; returns its id when the cluster has accepted it. out: folder there, or None."""
    run_id = new_run_id()
    folder = shlex.quote(out) if out else f'"$HOME/fedfleet/{run_id}"'
    with tempfile.TemporaryDirectory(prefix="ff-job-") as scratch:
        pack(Path(scratch), source, overrides)
        jobs = client(address)
        ours = {name: value for name, value in os.environ.items() if name.startswith("FEDFLEET_")}
        try:
            return jobs.submit_job(
                entrypoint=f"python -m fedfleet.tune.cli run {FILE} --address auto --out {folder}",  # see own_cluster
                runtime_env={"working_dir": scratch, "env_vars": {**ours, "PYTHONUNBUFFERED": "1"}},
                metadata={"fedfleet": run_id},
            )
        except RuntimeError as error:
            raise FedFleetError(f"the cluster at {address} did not accept the job: {first_line(error)}") from None


def follow(job: str, address: str, stop: bool = False) -> None:
    """Print the job's log until the job ends. Raises FedFleetError if it failed; Ctrl-C does not stop it."""
    jobs = client(address)
    try:
        with keyboard():
            if stop:
                jobs.stop_job(job)
            asyncio.run(print_log(jobs, job))
            while not (status := jobs.get_job_status(job)).is_terminal():
                time.sleep(TICK)
    except RuntimeError as error:
        raise ConfigError(
            f"--address {address}: {first_line(error)}; `ray job list --address {address}` has the jobs"
        ) from None
    except KeyboardInterrupt:
        raise FedFleetError(
            f"the job continues; to follow it again: fedfleet attach {job} --address {address}"
        ) from None
    if status != "SUCCEEDED":
        raise FedFleetError(f"job {job}: {status.lower()}; its log is above")


async def print_log(jobs: Any, job: str) -> None:
    async for lines in jobs.tail_job_logs(job):
        click.echo(lines, nl=False, file=sys.stdout)


# --- what is sent -----------------------------------------------------------------------------------------------------
def pack(folder: Path, source: str, overrides: Iterable[str]) -> None:
    """Fill the folder. Raises ConfigError for an experiment that could not run, before anything is sent."""
    overrides = tuple(overrides)
    load(source, overrides)
    data = load_data(source, overrides)
    (folder / "plugins").mkdir()
    data["plugins"] = [shipped(name, folder) for name in data["plugins"]]
    (folder / FILE).write_text(yaml.safe_dump(data, sort_keys=False))
    package = Path(str(importlib.import_module("fedfleet").__file__)).parent
    shutil.copytree(package, folder / "fedfleet", ignore=shutil.ignore_patterns("__pycache__"))
    describe(folder)


def describe(folder: Path) -> None:
    """Write the package's metadata beside it, as an installation has them: they say which version it is."""
    ours = metadata.distribution("fedfleet")
    beside = folder / f"fedfleet-{ours.version}.dist-info"
    beside.mkdir()
    (beside / "METADATA").write_text(ours.read_text("METADATA") or ours.read_text("PKG-INFO") or "")


def shipped(plugin: str, folder: Path) -> str:
    """The plug-in's name in the job. A file, or a package that lies in a folder, is copied; an installed package keeps
    its name and must be installed on the cluster too."""
    found = find_plugin(plugin)
    if found.source is not None:
        name = f"{found.module}.py"
        (folder / "plugins" / name).write_text(found.source)
        return f"plugins/{name}"
    top = found.module.partition(".")[0]
    package = Path(found.path) / top
    if not package.is_dir():
        return plugin
    if top == "fedfleet":
        raise ConfigError(f"plugins: {plugin} has the name of this package; rename it")
    if not (folder / top).exists():
        shutil.copytree(package, folder / top, ignore=shutil.ignore_patterns("__pycache__"))
    return plugin
