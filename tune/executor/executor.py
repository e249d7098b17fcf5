"""Executes many runs at once, for searches and studies. Light to import: Ray loads only when something runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...engine.config.schema import Engine
from ...engine.errors import ConfigError
from .source import Source


class Executor:
    """Executes what sources hand out. Ray is used as it is or started by `start`; `close` stops it where it was
    started. Use as a context manager."""

    def __init__(
        self, engine: Engine, stop: Callable[[], Any], at_once: int | None = None, workers: int = 0, share: bool = False
    ) -> None:
        """engine: where Ray is and what a run takes. stop: asked often; once it says so no run is begun, and those
        under way end with a checkpoint. at_once: runs at most, as many as fit unless given. workers: worker processes
        of a run beside its own; 0: it takes place in its own process alone. share: with `at_once`, runs share the
        processors where there are fewer than they would take."""
        self.engine = engine.model_copy(update={"backend": "ray", "workers": max(1, workers)})
        self.stop, self.at_once, self.workers, self.share = stop, at_once, workers, share
        self.ours = self.started = False

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *error: object) -> None:
        if self.ours:
            import ray

            ray.shutdown()

    def start(self) -> None:
        """Connect to Ray or start it. Raises ConfigError where that cannot be, or a run could never be placed."""
        from ...engine.backends.ray.connect import connect

        if (self.engine.address or "").startswith("ray://"):
            raise ConfigError(
                f"engine.address={self.engine.address}: searches and studies cannot run through Ray's client; start "
                "the command on a node of the cluster and give auto or HOST:PORT"
            )
        if not self.started:
            self.ours, self.started = connect(self.engine), True

    def run(self, source: Source) -> None:
        """Until the source has no run left, or `stop` said so and what was under way has ended."""
        self.start()
        from .trials import execute

        bundles = self._bundles()
        execute(source, self.at_once or fitting(bundles), bundles, self.stop)

    def _bundles(self) -> list[dict[str, float]]:
        """What a run holds from its beginning to its end. Worker processes are bundles of its own placement group
        beside an empty one for the run itself, all on one node: it starts only where all fit, so runs cannot wait for
        each other's workers."""
        one = {"CPU": self.engine.cpus, "GPU": self.engine.gpus}
        if self.share and self.at_once:
            import ray

            have = ray.cluster_resources()
            for name, amount in one.items():
                part = math.floor(1e4 * have.get(name, 0.0) / self.at_once) / 1e4  # Ray's resolution
                one[name] = min(amount, part) if part else amount
        one = {name: amount for name, amount in one.items() if amount}
        return [{}, *[one] * self.workers] if self.workers else [one]


def fitting(bundles: list[dict[str, float]]) -> int:
    """How many runs fit into the cluster."""
    import ray

    have = ray.cluster_resources()
    need = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
    return max(1, min(int(have.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount))
