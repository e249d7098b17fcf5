"""Runs an experiment as a job of a cluster, through the Jobs API of Ray."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from ...engine.backends.ray.connect import TOKEN, check_listening, first_bytes
from ...engine.errors import ConfigError, FedFleetError
from ...engine.runs.launch import new_run_id
from ..keyboard import keyboard
from .ship import FILE, pack

TICK = 0.5
"""Seconds between questions for the job's status."""
ASKED = b"GET /api/version HTTP/1.0\r\n\r\n"
"""A request to which any web server answers with its protocol's name; Ray's client would wait for ever for another
server."""


def client(address: str) -> Any:
    """A client of the cluster's dashboard. Raises ConfigError if the dashboard cannot be reached."""
    if address != "auto":
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
        return JobSubmissionClient(address)
    except AuthenticationError:
        raise ConfigError(f"--address {address}: the cluster requires a token, or another one; {TOKEN}") from None
    except (ConnectionError, RuntimeError) as error:
        if "401" in str(error) or "403" in str(error):
            raise ConfigError(f"--address {address}: the cluster requires a token, or another one; {TOKEN}") from None
        raise ConfigError(
            f"--address {address}: no dashboard of a cluster answers there ({first_line(error)})"
        ) from None


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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
        raise ConfigError(f"--address {address}: {first_line(error)}") from None
    except KeyboardInterrupt:
        raise FedFleetError(
            f"the job continues; to follow it again: fedfleet attach {job} --address {address}"
        ) from None
    if status != "SUCCEEDED":
        raise FedFleetError(f"job {job}: {status.lower()}; its log is above")


async def print_log(jobs: Any, job: str) -> None:
    async for lines in jobs.tail_job_logs(job):
        click.echo(lines, nl=False, file=sys.stdout)
