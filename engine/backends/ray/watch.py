"""Whether the processes that a run on Ray needs are alive, as far as they are on this machine or can be reached.

Ray tells a launcher that its driver has died, but not that Ray itself has: it waits for a minute for a server of the
head (GCS) that is gone, and then ends every process that is connected to it without an exception.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import psutil
import ray
from ray.util.client import ray as client

from ...errors import ConfigError
from .connect import check_listening

NAMES = {"gcs_server": "Ray's head (gcs_server)", "raylet": "Ray's node (raylet)"}
"""Types of Ray's processes -> their names in messages."""
HEAD_SECONDS = 2.0
"""The time between two looks at the head of a cluster."""
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The environment variable with the seconds after which Ray's processes end if the head has not come back. A head that
has not answered for half of this time counts as lost."""
END_SECONDS = 5.0
"""The time in which a process that was killed must be gone."""


class Watch:
    """The processes of a run, as its launcher sees them."""

    def __init__(self, address: str | None) -> None:
        """address: `engine.address`, None if Ray was started here."""
        self.driver: psutil.Process | None = None
        self.gone = 0.0  # when it was noticed that the driver is gone
        self.ray: dict[str, psutil.Process] = {}
        node = getattr(sys.modules.get("ray._private.worker"), "_global_node", None)
        for kind, infos in getattr(node, "all_processes", {}).items():
            for info in infos if kind in NAMES else ():
                with suppress(psutil.Error):
                    self.ray[kind] = psutil.Process(info.process.pid)
        self.head = ray.get_runtime_context().gcs_address if address and not client.is_connected() else ""
        self.looked = self.answered = time.monotonic()
        self.patience = float(os.environ.get(RECONNECT, "60")) / 2

    def see_driver(self, process: int) -> None:
        """process: the id of the driver's process, which is on this machine unless Ray's client is used."""
        if not client.is_connected():
            with suppress(psutil.Error):
                self.driver = psutil.Process(process)

    def lost(self) -> str:
        """Which part of Ray is gone, "" if all that is known is there."""
        for kind, process in self.ray.items():
            if not alive(process):
                return f"{NAMES[kind]} has died, process {process.pid}"
        return self._lost_head()

    def _lost_head(self) -> str:
        now = time.monotonic()
        if not self.head or now < self.looked + HEAD_SECONDS:
            return ""
        try:
            check_listening(self.head, seconds=HEAD_SECONDS)
        except ConfigError:
            self.looked = time.monotonic()
            gone = self.looked - self.answered
            return f"the head of the cluster, {self.head}, has not answered for {gone:.0f} s" * (gone > self.patience)
        self.looked = self.answered = time.monotonic()
        return ""

    def driver_gone_for(self) -> float:
        """The seconds since it was noticed that the driver's process is gone; 0 while it is there."""
        if self.driver is None or alive(self.driver):
            return 0.0
        self.gone = self.gone or time.monotonic()
        return time.monotonic() - self.gone

    def ask_driver(self) -> None:
        """Ask the driver to write a checkpoint and to end, without Ray."""
        if self.driver is not None:
            with suppress(psutil.Error):
                self.driver.send_signal(signal.SIGTERM)

    def end_driver(self) -> None:
        """Kill the driver, and wait until it is gone."""
        if self.driver is not None:
            with suppress(psutil.Error):
                self.driver.kill()
                self.driver.wait(END_SECONDS)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
