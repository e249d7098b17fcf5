"""Which workers go to which node, and what they take of a cluster: all of it at once, or nothing.

A placement group has a bundle for each worker. Without it, two runs that start together could have half of their
workers each, and wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import ray
from ray import PlacementGroupID
from ray.util.client import ray as client
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ...config.schema import Engine, WorkerGroup
from ...errors import ConfigError, NoRoom

TRY_SECONDS = 5.0
"""The time for which one placement is tried, before another one is planned with the resources that are free by then."""
LOOK_SECONDS = 0.2
"""How often the free resources of a placement group are looked at. A look costs some milliseconds."""
NODE = "ray.io/node-id"


class Node(NamedTuple):
    """A node of the cluster."""

    id: str
    name: str  # for log lines
    room: dict[str, float]  # its resources, or its free resources
    labels: dict[str, str]

    def fits(self, group: WorkerGroup) -> int:
        """The number of workers of a group for which the node has room."""
        if any(self.labels.get(key) != value for key, value in group.labels.items()):
            return 0
        return min(int(self.room.get(name, 0.0) / amount + 1e-9) for name, amount in group.needs().items() if amount)


class Spot(NamedTuple):
    """Where a worker goes: its node, and the group that it belongs to."""

    node: str
    group: WorkerGroup


def on_node(node: str) -> Any:
    """Ray's scheduling strategy for what must run on a node, by Ray's id of it."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def cluster(free: bool = False) -> list[Node]:
    """The nodes that are alive, this process's node first. free: with their free resources, not with all of them."""
    mine = ray.get_runtime_context().get_node_id()
    found = [node for node in ray.nodes() if node["Alive"]]
    found.sort(key=lambda node: (node["NodeID"] != mine, node["NodeID"]))
    left: dict[str, Any] = {}
    free = free and not client.is_connected()  # Ray Client does not report free resources
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
    """The group of each worker. With workers=auto on an existing cluster, all nodes are filled with workers."""
    if engine.workers != "auto" or not engine.address:
        return [group for group in engine.groups() for _ in range(group.count)]
    (group,) = engine.groups()
    return [group] * sum(node.fits(group) for node in nodes)


def placed(
    workers: Iterable[WorkerGroup], nodes: Sequence[Node], spread: bool = False
) -> tuple[list[Spot], list[WorkerGroup]]:
    """(where the workers go, the groups of those for which there is no room).

    The first nodes are filled first, so that few nodes are used. spread: each worker goes to the node with the fewest.
    """
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


def planned(engine: Engine, here: str | None = None) -> list[Spot]:
    """Where the workers of a run go. here: Ray's id of the node where all of them must be, if they must.

    They go to the driver's node if it has room for all of them (unless engine.placement=spread), else to nodes with
    free resources, else to nodes where they have to wait. Raises ConfigError for a worker that fits on no node.
    """
    if here is not None:
        return [Spot(here, group) for group in wanted(engine, [])]
    nodes = cluster()
    workers = wanted(engine, nodes)
    if not workers:
        raise ConfigError(
            f"engine.workers=auto: no node has {engine.cpus:g} CPU and {engine.gpus:g} GPU for a worker; lower "
            "engine.cpus or engine.gpus"
        )
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
    """A placement group of Ray, with a bundle for each worker. `spots`: where each worker goes. run_id: see
    `leave_all_of`."""

    def __init__(self, spots: list[Spot], run_id: str) -> None:
        self.spots = spots
        bundles, selector = [spot.group.needs() for spot in spots], [{NODE: spot.node} for spot in spots]
        name = f"{name_of_groups(run_id)}{next(_made)}"
        self.group = placement_group(bundles, "PACK", name, bundle_label_selector=selector)

    def granted(self, seconds: float) -> bool:
        return bool(ray.wait([self.group.ready()], timeout=seconds)[0])

    def of(self, bundle: int) -> Any:
        """Ray's scheduling strategy for the actor of a worker. bundle: the worker's position in `spots`."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)

    def leave(self) -> None:
        remove_placement_group(self.group)


_made = count()


def name_of_groups(run_id: str) -> str:
    """What the names of a run's placement groups begin with."""
    return f"fedfleet-{run_id}-"


def leave_all_of(run_id: str) -> None:
    """Remove the placement groups of a run whose driver has died. Ray keeps them, and what they reserve, as long as the
    process that has started the run is there."""
    for group, about in placement_group_table().items():
        if about["name"].startswith(name_of_groups(run_id)) and about["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))


def take(
    engine: Engine, check: Callable[[], None], log: Callable[[str], None], run_id: str, here: str | None = None
) -> Placement:
    """Reserve the resources of all workers of a run. here: see `planned`.

    check: called while waiting; it may raise an exception to stop the run. log: log callback. Raises ConfigError if a
    worker fits on no node, and NoRoom if the resources are not free within `engine.wait` seconds.
    """
    end = time.monotonic() + engine.wait
    waits = False
    while True:
        placement = Placement(planned(engine, here), run_id)
        if placement.granted(max(0.0, min(TRY_SECONDS, end - time.monotonic()))):
            return placement
        lack = lacking(placement.spots)
        placement.leave()
        check()
        if time.monotonic() >= end:
            raise NoRoom(
                f"engine.workers: no room for {len(placement.spots)} workers within {engine.wait:g} s (engine.wait); "
                f"{lack}; lower engine.workers, {'choose engine.backend=local, ' if here else ''}or wait for what "
                "others hold"
            )
        if not waits:
            log(f"waits for room for {len(placement.spots)} workers: {lack}")
        waits = True


def check_bundles(engine: Engine) -> None:
    """Raise ConfigError if this process is in a placement group, as a trial of Ray Tune is, that has no room for the
    workers beside what this process holds itself."""
    group = get_current_placement_group()
    if group is None:
        return
    held = ray.get_runtime_context().get_assigned_resources()
    labels = {key: value for each in engine.groups() for key, value in each.labels.items()}  # known to Ray alone
    room = [Node(str(index), "", dict(bundle), labels) for index, bundle in enumerate(group.bundle_specs)]
    for node in room:
        if all(node.room.get(name, 0.0) >= amount for name, amount in held.items()):
            node.room.update({name: node.room[name] - amount for name, amount in held.items()})
            break
    workers = wanted(engine, room)
    spots, left = placed(workers, room)
    if left or not workers:
        needs = ", ".join(f"{name!r}: {amount:g}" for name, amount in engine.groups()[0].needs().items())
        raise ConfigError(
            f"engine.workers: the placement group of this trial has room for {len(spots)} of {len(workers)} workers "
            f"beside the trial itself; {remedy_in_trials(f' {{{needs}}}')}"
        )


def remedy_in_trials(bundle: str = "") -> str:
    """What gives the workers of a run in a trial of Ray Tune their room, as a clause. bundle: what a worker needs."""
    return (
        f"choose engine.backend=local, or give the trial one more bundle{bundle} for each worker "
        "(tune.with_resources, tune.PlacementGroupFactory)"
    )


def await_bundles(engine: Engine, group: PlacementGroup, check: Callable[[], None]) -> None:
    """Return when a placement group has free resources for the workers. Raises NoRoom after `engine.wait` seconds.

    check: called while waiting; it may raise an exception to stop the run.
    """
    asked: dict[str, float] = {}
    for each in wanted(engine, []):
        for name, amount in each.needs().items():
            asked[name] = asked.get(name, 0.0) + amount
    end = time.monotonic() + engine.wait
    while True:
        nodes = cluster(free=True)
        free = {name: sum(node.room.get(f"{name}_group_{group.id.hex()}", 0.0) for node in nodes) for name in asked}
        lack = [name for name, amount in asked.items() if free[name] < amount - 1e-9]
        if not lack:
            return
        check()
        if time.monotonic() > end:
            raise NoRoom(
                f"engine.workers: the workers take {asked[lack[0]]:g} {lack[0]}, of which the placement group of this "
                f"trial has {free[lack[0]]:g} free after {engine.wait:g} s (engine.wait); {remedy_in_trials()}"
            )
        time.sleep(LOOK_SECONDS)


def lacking(spots: list[Spot]) -> str:
    """A clause with the resources that the workers need, and how much of each is free on all nodes."""
    asked: dict[str, float] = {}
    for spot in spots:
        for name, amount in spot.group.needs().items():
            asked[name] = asked.get(name, 0.0) + amount
    free = [node.room for node in cluster(free=True)]
    parts = [f"{amount:g} {name}, free {sum(room.get(name, 0.0) for room in free):g}" for name, amount in asked.items()]
    return f"they take {'; '.join(parts)}"
