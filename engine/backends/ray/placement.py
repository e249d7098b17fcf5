"""All that a run's workers take of a cluster, at once or not at all: a placement group with a bundle a worker.

Two runs that start together could otherwise have half of their workers each, and wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...config.schema import Engine
from ...errors import NoRoom
from .nodes import Spot, cluster, planned

TRY_SECONDS = 5.0
"""How long one plan is tried, before another is made of what is free by then."""
NODE = "ray.io/node-id"


class Room:
    """`spots`: where each worker goes."""

    def __init__(self, spots: list[Spot]) -> None:
        self.spots = spots
        bundles = [spot.group.needs() for spot in spots]
        self.group = placement_group(bundles, "PACK", bundle_label_selector=[{NODE: spot.node} for spot in spots])

    def granted(self, seconds: float) -> bool:
        return bool(ray.wait([self.group.ready()], timeout=seconds)[0])

    def of(self, bundle: int) -> Any:
        """Where an actor goes that is this worker."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)

    def leave(self) -> None:
        remove_placement_group(self.group)


def take(engine: Engine, check: Callable[[], None], tell: Callable[[str], None]) -> Room:
    """ConfigError for what fits on no node, NoRoom for what is not free within `engine.wait` seconds."""
    end = time.monotonic() + engine.wait
    waits = False
    while True:
        room = Room(planned(engine))
        if room.granted(max(0.0, min(TRY_SECONDS, end - time.monotonic()))):
            return room
        told = lacking(room.spots)
        room.leave()
        check()
        if time.monotonic() >= end:
            raise NoRoom(
                f"engine.workers: no room for {len(room.spots)} workers within {engine.wait:g} s (engine.wait); "
                f"{told}; lower engine.workers, or wait for what others hold"
            )
        if not waits:
            tell(f"waits for room for {len(room.spots)} workers: {told}")
        waits = True


def lacking(spots: list[Spot]) -> str:
    """What the workers would take, and what is free, of what they take all nodes together."""
    asked: dict[str, float] = {}
    for spot in spots:
        for name, amount in spot.group.needs().items():
            asked[name] = asked.get(name, 0.0) + amount
    free = [node.room for node in cluster(free=True)]
    parts = [f"{amount:g} {name}, free {sum(room.get(name, 0.0) for room in free):g}" for name, amount in asked.items()]
    return f"they take {'; '.join(parts)}"
