"""Which workers go to which node, and what they take of a cluster: all of it at once, or nothing.

A placement group has a bundle for each worker. Without it, two runs that start together could have half of their
workers each, and wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.client import ray as client
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ...config.schema import Engine, WorkerGroup
from ...errors import ConfigError, NoRoom

TRY_SECONDS = 5.0
"""How long one plan is tried, before another is made of what is free by then."""
NODE = "ray.io/node-id"


class Node(NamedTuple):
    id: str
    name: str  # for a log
    room: dict[str, float]
    labels: dict[str, str]

    def fits(self, group: WorkerGroup) -> int:
        """How many of its workers the node has room for."""
        if any(self.labels.get(key) != value for key, value in group.labels.items()):
            return 0
        return min(int(self.room.get(name, 0.0) / amount + 1e-9) for name, amount in group.needs().items() if amount)


class Spot(NamedTuple):
    """Of a worker: its node and its group."""

    node: str
    group: WorkerGroup


def on_node(node: str) -> Any:
    """Ray's scheduling strategy for what must run on a node, by Ray's id of it."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def cluster(free: bool = False) -> list[Node]:
    """The nodes that are alive, the one of this process first. free: with what is not taken, not with all they have."""
    mine = ray.get_runtime_context().get_node_id()
    found = [node for node in ray.nodes() if node["Alive"]]
    found.sort(key=lambda node: (node["NodeID"] != mine, node["NodeID"]))
    left: dict[str, Any] = {}
    free = free and not client.is_connected()  # who is no part of the cluster is not told
    if free:
        from ray._private.state import available_resources_per_node

        left = available_resources_per_node()
    return [
        Node(
            node["NodeID"],
            f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
            dict(left.get(node["NodeID"], {}) if free else node["Resources"]),
            dict(node.get("Labels") or {}),
        )
        for node in found
    ]


def wanted(engine: Engine, nodes: Sequence[Node]) -> list[WorkerGroup]:
    """A group a worker. `auto` on a cluster that was there before: as many as all nodes have room for."""
    if engine.workers != "auto" or not engine.address:
        return [group for group in engine.groups() for _ in range(group.count)]
    one = WorkerGroup(count=1, cpus=engine.cpus, gpus=engine.gpus)
    return [one] * sum(node.fits(one) for node in nodes)


def placed(
    workers: Iterable[WorkerGroup], nodes: Sequence[Node], spread: bool = False
) -> tuple[list[Spot], list[WorkerGroup]]:
    """(where they go, those that there is no room for): the first nodes are filled first, so that few are used; else
    each goes where the fewest are."""
    room = [node._replace(room=dict(node.room)) for node in nodes]
    spots: list[Spot] = []
    left: list[WorkerGroup] = []
    for group in workers:
        fitting = [node for node in room if node.fits(group)]
        if spread:
            fitting.sort(key=lambda node: sum(spot.node == node.id for spot in spots))
        node = next(iter(fitting), None)
        if node is None:
            left.append(group)
            continue
        for name, amount in group.needs().items():
            node.room[name] = node.room.get(name, 0.0) - amount
        spots.append(Spot(node.id, group))
    return spots, left


def planned(engine: Engine) -> list[Spot]:
    """Where a run's workers go: on the driver's node if it has room for all (unless they are to be spread), else
    wherever something is free, else where they will have to wait for it. ConfigError for a worker that fits nowhere."""
    nodes = cluster()
    workers = wanted(engine, nodes)
    if not workers:
        raise ConfigError(f"engine.workers=auto: no node has {engine.cpus:g} CPU and {engine.gpus:g} GPU for a worker")
    spread = engine.placement == "spread"
    spots, left = placed(workers, [] if spread else nodes[:1])
    if left:
        spots, left = placed(workers, cluster(free=True), spread)
    if left:
        spots, left = placed(workers, nodes, spread)
    if left:
        need = ", ".join(f"{amount:g} {name}" for name, amount in left[0].needs().items())
        labels = "".join(f", label {key}={value}" for key, value in left[0].labels.items())
        raise ConfigError(
            f"engine.workers: {len(left)} of {len(workers)} workers fit on no node, one needs {need}{labels}; lower "
            "engine.workers, engine.cpus or engine.gpus (fractions are allowed)"
        )
    return spots


class Placement:
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


def take(engine: Engine, check: Callable[[], None], log: Callable[[str], None]) -> Placement:
    """ConfigError for what fits on no node, NoRoom for what is not free within `engine.wait` seconds."""
    end = time.monotonic() + engine.wait
    waits = False
    while True:
        placement = Placement(planned(engine))
        if placement.granted(max(0.0, min(TRY_SECONDS, end - time.monotonic()))):
            return placement
        lack = lacking(placement.spots)
        placement.leave()
        check()
        if time.monotonic() >= end:
            raise NoRoom(
                f"engine.workers: no room for {len(placement.spots)} workers within {engine.wait:g} s (engine.wait); "
                f"{lack}; lower engine.workers, or wait for what others hold"
            )
        if not waits:
            log(f"waits for room for {len(placement.spots)} workers: {lack}")
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
