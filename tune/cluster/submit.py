"""An experiment as a job of a cluster, by Ray's Jobs API."""

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

from ...engine.backends.ray.connect import TOKEN, answers, first_words
from ...engine.errors import ConfigError, FedFleetError
from ...engine.runs.launch import new_run_id
from ..keyboard import keyboard
from .ship import FILE, pack

TICK = 0.5
ASKED = b"GET /api/version HTTP/1.0\r\n\r\n"
"""What any web server answers by its protocol's name; Ray's client would wait for ever for one that does not."""


def client(address: str) -> Any:
    """Of the cluster's dashboard; ConfigError says why that cannot be."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    if address != "auto":
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"--address must be the dashboard's http://HOST:PORT or auto, got {address!r}")
        host, colon, port = address.partition("//")[2].rstrip("/").rpartition(":")
        if colon and port.isdigit():
            answers(f"{host}:{port}")
            if address.startswith("http://") and not first_words(f"{host}:{port}", ASKED, 5).startswith(b"HTTP/"):
                raise ConfigError(
                    f"--address {address}: something answers there, but it is no dashboard of a cluster; give the "
                    "address that `ray start --head` told for it"
                )
    try:
        return JobSubmissionClient(address)
    except AuthenticationError:
        raise ConfigError(f"--address {address}: the cluster wants a token, or another one; {TOKEN}") from None
    except (ConnectionError, RuntimeError) as error:
        if "401" in str(error) or "403" in str(error):
            raise ConfigError(f"--address {address}: the cluster wants a token, or another one; {TOKEN}") from None
        raise ConfigError(
            f"--address {address}: no dashboard of a cluster answers there ({first_line(error)})"
        ) from None


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def send(source: str, overrides: Iterable[str], address: str, out: str | None) -> str:
    """The job's id, once the cluster has accepted it."""
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
            raise FedFleetError(f"the cluster at {address} did not take the job: {first_line(error)}") from None


def follow(job: str, address: str, stop: bool = False) -> None:
    """Print the job's log until it is over. FedFleetError where it failed; Ctrl-C leaves it going."""
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
        raise FedFleetError(f"left; the job goes on, fedfleet attach {job} --address {address} comes back") from None
    if status != "SUCCEEDED":
        raise FedFleetError(f"job {job}: {status.lower()}; its log is above")


async def print_log(jobs: Any, job: str) -> None:
    async for lines in jobs.tail_job_logs(job):
        click.echo(lines, nl=False, file=sys.stdout)
