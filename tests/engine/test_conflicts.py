"""Every row of the table of what does not go together: a run that it refuses, and the message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedfleet.algorithms.contract import Known
from fedfleet.algorithms.fedavg import Plain
from fedfleet.algorithms.local import LocalMethod
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.engine.config.conflicts import Conflict
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.prepare import prepare
from fedfleet.tune.files import override
from tools.site.configuration import ALL_CONFLICTS

CLOCK, ASYNCHRONOUS = "systems={}", "federation.pace={name: buffered}"
ATTACK, RULE, PRIVATE = "attack={name: ipm, share: 0.2}", "aggregate=median", "privacy={clip: 1.0, noise: 0}"
OVER_STEPS = "method.rule.lr={schedule: linear, start: 0.1, over: steps}"
TURNS = "federation.sampler={name: turns, separation: 2}"
RANKS = "workload={name: digits, adapter: {name: lora, targets: 'fc*', ranks: [2, 1]}}"
LORA = "workload={name: digits, adapter: {name: lora, targets: 'fc*', rank: 2, train: ['out.*']}}"
STANDS = "as_if: {clients: 100, cohort: 10}"


def private(keys: str) -> str:
    """A section `privacy` with noise and further keys."""
    return f"privacy={{clip: 1.0, noise: 1.0, delta: 0.001, {keys}}}"


EXAMPLES: list[tuple[str, str, list[str]]] = [
    ("federation.pace.name", "systems", [ASYNCHRONOUS]),
    ("systems.server", "federation.pace.name", [ASYNCHRONOUS, "systems={server: 1}"]),
    ("privacy", "federation.pace.name", [ASYNCHRONOUS, CLOCK, PRIVATE]),
    ("attack", "federation.pace.name", [ASYNCHRONOUS, CLOCK, ATTACK]),
    ("aggregate", "federation.pace.name", [ASYNCHRONOUS, CLOCK, RULE]),
    ("federation.pace.select", "systems", ["federation.pace.select=1.5"]),
    ("federation.pace.deadline", "systems", ["federation.pace={deadline: 3, stragglers: drop}"]),
    ("federation.pace.least", "systems", ["federation.pace.least=2"]),
    ("evaluate.seconds", "systems", ["evaluate.seconds=5"]),
    ("privacy", "systems", [CLOCK, PRIVATE]),
    ("attack", "systems", [CLOCK, ATTACK]),
    ("aggregate", "systems", [CLOCK, RULE]),
    ("privacy", "federation.mean", ["federation.mean=normalised", PRIVATE]),
    ("attack", "federation.mean", ["federation.mean=normalised", ATTACK]),
    ("aggregate", "federation.mean", ["federation.mean=normalised", RULE]),
    ("privacy", "federation.sampler", ["federation.sampler=weighted", PRIVATE]),
    ("privacy", "federation.sampler", ["federation.sampler={name: uniform, first: all}", PRIVATE]),
    ("attack", "federation.sampler", ["federation.sampler=weighted", ATTACK]),
    ("aggregate", "federation.sampler", ["federation.sampler=weighted", RULE]),
    ("federation.sampler", "systems", ["federation.sampler=binomial", CLOCK]),
    ("federation.local.epochs", "run", [OVER_STEPS, "federation.local={epochs: 1, batch: 8}"]),
    ("federation.pace.name", "run", [OVER_STEPS, ASYNCHRONOUS, CLOCK]),
    ("federation.pace.stragglers", "run", [OVER_STEPS, "federation.pace={deadline: 3, stragglers: partial}", CLOCK]),
    ("systems.work", "run", [OVER_STEPS, "systems={work: {name: uniform, p: 0.5}}"]),
    ("federation.weights", "privacy", ["federation.weights=examples", PRIVATE]),
    ("privacy.delta", "federation.clients", ["privacy={clip: 1.0, noise: 1.0, delta: 0.2}"]),
    ("privacy.delta", "privacy.as_if.clients", [f"privacy={{clip: 1.0, noise: 1.0, delta: 0.05, {STANDS}}}"]),
    ("privacy.as_if.cohort", "federation.cohort", [private("as_if: {clients: 100, cohort: 2}")]),
    ("privacy.as_if", "federation.sampler", [TURNS, private(STANDS)]),
    ("privacy", "engine.device", ["engine.device=mps", PRIVATE]),
    ("privacy.as_if", "privacy.mechanism", [private(f"mechanism: tree, {STANDS}")]),
    (
        *("privacy.clip", "privacy.mechanism"),
        ["privacy={clip: {name: quantile}, noise: 1.0, delta: 0.001, mechanism: tree}"],
    ),
    ("privacy.mechanism", "federation.sampler", [private("mechanism: tree")]),
    (
        *("privacy.noise", "privacy.mechanism"),
        [TURNS, "privacy={clip: 1.0, noise: {schedule: cosine, start: 2.0, end: 1.0}, delta: 0.001, mechanism: tree}"],
    ),
    (
        *("privacy.noise", "federation.sampler"),
        [TURNS, "privacy={clip: 1.0, noise: {schedule: cosine, start: 2.0, end: 1.0}, delta: 0.001}"],
    ),
    ("privacy.accountant", "federation.sampler", [private("accountant: pld")]),
    ("aggregate.f", "attack", ["aggregate={name: krum, f: known}"]),
    ("privacy", "attack", [PRIVATE, ATTACK]),
    ("privacy", "aggregate", [PRIVATE, RULE]),
    ("aggregate", "federation.weights", [RULE, "federation.weights=examples"]),
    (
        *("attack", "aggregate.vectors"),
        ["aggregate={name: krum, f: 1, vectors: joint}", "attack={name: optimal_ipm, share: 0.2}"],
    ),
    ("aggregate.vectors", "aggregate.name", ["aggregate={name: median, vectors: joint}"]),
    ("aggregate.before", "aggregate.name", ["aggregate={name: median, before: [nnm]}"]),
    ("aggregate.before", "aggregate.name", ["aggregate={name: mean, before: [{name: nnm, f: 1}]}"]),
    ("engine.kernels", "federation.sampler", ["federation.sampler=oort", "engine.kernels=chain"]),
    ("federation.pace.least", "federation.cohort", ["federation.pace.least=6", CLOCK]),
    ("federation.pace.least", "federation.clients", ["federation.pace.least=11", "federation.sampler=poisson", CLOCK]),
    ("federation.mean", "federation.sampler", ["federation.mean=unbiased", "federation.sampler=oort"]),
    (
        *("federation.pace.select", "federation.sampler"),
        ["federation.pace.select=1.5", "federation.sampler=weighted", CLOCK],
    ),
    ("privacy", "method", ["method=fednova", PRIVATE]),
    ("aggregate", "method", ["method=cfl", "federation.cohort=10", RULE]),
    ("aggregate", "method", ["method=eager_diloco", "federation.cohort=10", RULE]),
    ("attack", "method", ["method=eager_diloco", "federation.cohort=10", ATTACK]),
    ("attack", "method", ["method=cfl", "federation.cohort=10", "attack={name: drop, share: 0.2}"]),
    ("attack", "method", ["method=fednova", ATTACK]),
    ("aggregate", "method", ["method=qffl", RULE]),
    ("aggregate", "method", ["method=fednova", RULE]),
    (
        *("workload", "method"),
        ["method=cfl", "federation.cohort=10", "workload={name: digits, model: {name: resnet18, norm: batch}}"],
    ),
    ("workload", "method", ["method=fednova", "workload={name: digits, model: {name: resnet18, norm: batch}}"]),
    ("federation.mean", "method", ["method=qffl", "federation.mean=unbiased"]),
    (
        *("federation.sampler", "method"),
        ["method={name: streaming_diloco, overlap: 0}", "federation.sampler=replacement", "federation.cohort=10"],
    ),
    (
        *("federation.sampler", "method"),
        ["method=fedavg_m", "federation.sampler=agnostic", "federation.cohort=10"],
    ),
    *(
        (key, "method", ["method=eager_diloco", f"federation.cohort={cohort}", *more])
        for key, cohort, more in (
            ("federation.cohort", 5, []),
            ("systems", 10, [CLOCK]),
            ("federation.without", 10, ["federation.without=[1]"]),
            ("engine.on_failure", 10, ["engine.on_failure=drop"]),
        )
    ),
    ("federation.pace.name", "method", [ASYNCHRONOUS, CLOCK, "method={name: fedmud, layers: all, nearest: true}"]),
    ("federation.pace.name", "method", [ASYNCHRONOUS, CLOCK, "method=follows"]),
    (
        *("federation.pace.buffer", "method"),
        ["federation.pace={name: buffered, buffer: 1}", CLOCK, "method={name: fedavg, rule: adam, carry: average}"],
    ),
    ("federation.pace.once", "method", ["federation.pace={name: buffered, once: false}", CLOCK, "method=scaffold"]),
    ("federation.pace.base", "method", ["federation.pace={name: buffered, base: current}", CLOCK, "method=fed_sgda_m"]),
    (
        *("federation.pace.c", "federation.pace.b"),
        ["federation.pace={name: buffered, weight: threshold, divide: weights}", CLOCK],
    ),
    ("engine.precision", "workload", ["engine.precision=bfloat16", "workload=quadratic"]),
    ("engine.base", "workload", ["engine.base=bfloat16"]),
    ("engine.base", "workload", ["engine.base=float16", LORA]),
    ("engine.base", "personal.frozen", ["engine.base=bfloat16", LORA, "personal={frozen: ['*.lora_a']}"]),
    ("engine.base", "precision", ["engine.base=bfloat16", "engine.precision=bfloat16"]),
    ("engine.kernels", "run", ["engine.kernels=graph"]),
    ("engine.state_memory", "engine.backend", ["engine.state_memory=1", "engine.backend=ray"]),
    ("checkpoint.every", "out", ["checkpoint.every=1"]),
    ("checkpoint.seconds", "out", ["checkpoint.seconds=5"]),
    ("checkpoint.folder", "out", ["checkpoint.folder=copies"]),
    ("tracking.clients", "out", ["tracking.clients=true"]),
    ("federation.cohort", "clients", ["federation.cohort=11"]),
    ("federation.without", "clients", ["federation.without=[10]"]),
    ("federation.without", "clients", ["federation.without=[1, 1]"]),
    ("federation.without", "clients", [f"federation.without={list(range(10))}"]),
    ("federation.sampler.separation", "clients", ["federation.sampler={name: turns, separation: 3}"]),
    ("federation.mean", "sampler", ["federation.mean=normalised", "federation.sampler=binomial"]),
    ("federation.pace.select", "clients", ["federation.pace.select=4"]),
    ("federation.pace.open", "cohort", ["federation.pace={name: buffered, open: 6}"]),
    ("federation.pace.buffer", "clients", ["federation.pace={name: buffered, buffer: 11}"]),
    ("federation.sampler", "pace.name", [ASYNCHRONOUS, "federation.sampler=weighted"]),
    ("federation.mean", "pace.name", [ASYNCHRONOUS, "federation.mean=normalised"]),
    ("federation.local.steps", "epochs", ["federation.local={steps: 1, epochs: 1}"]),
    ("federation.local.accumulate", "batch", ["federation.local={batch: 65536, accumulate: 65536}"]),
    ("federation.pace.deadline", "stragglers", ["federation.pace.deadline=3"]),
    ("federation.pace.stragglers", "deadline", ["federation.pace.stragglers=drop"]),
    ("federation.pace.notice", "deadline", ["federation.pace.notice=never"]),
    ("federation.pace.relative_to", "b", ["federation.pace={name: buffered, weight: threshold, relative_to: 5}"]),
    ("federation.pace.weight", "divide", ["federation.pace={name: buffered, divide: weights, buffer: 1}"]),
    ("engine.precision", "dtype", ["engine.precision=tf32", "engine.dtype=float64"]),
    ("engine.precision", "device", ["engine.precision=tf32"]),
    ("privacy.epsilon", "noise", ["privacy={clip: 1.0, noise: 0, epsilon: 1.0}"]),
    ("privacy.noise", "epsilon", ["privacy={clip: 1.0, delta: 0.001}"]),
    ("privacy.delta", "noise", ["privacy={clip: 1.0, noise: 1.0}"]),
    ("privacy.scales", "shares", ["privacy={clip: 1.0, noise: 0, scales: {delta: 1}, shares: {delta: 1}}"]),
    ("privacy.clip", "shares", ["privacy={clip: {name: quantile}, noise: 0, shares: {delta: 1}}"]),
    ("privacy.as_if.cohort", "clients", [private("as_if: {clients: 2, cohort: 5}")]),
    ("federation.unseen", "clients", ["federation.clients=9", "federation.cohort=3", "federation.unseen=[2, 30]"]),
    ("federation.unseen", "evaluate.clients.own", ["federation.unseen=2", "evaluate.clients.own=false"]),
    ("evaluate.clients.adapt", "own", ["evaluate.clients={own: false, adapt: {epochs: 1}}"]),
    ("evaluate.clients.adapt.steps", "epochs", ["evaluate.clients={adapt: {steps: 1, epochs: 1}}"]),
    ("evaluate.clients.export", "method", ["evaluate.clients.export=whole"]),
    ("evaluate.clients.export", "out", ["personal={tensors: head}", "evaluate.clients.export=personal"]),
    ("evaluate.server", "personal.tensors", ["personal={tensors: head}", "evaluate.server=true"]),
    ("evaluate.clients.statistics", "run", ["evaluate.clients.statistics=training"]),
    (
        *("personal.rule", "run"),
        ["personal={tensors: head, rule: {name: sgd, lr: {schedule: linear, start: 0.1, over: steps}}}"],
    ),
    ("engine.state_dtype", "method", ["method=ditto", "engine.state_dtype=bfloat16"]),
    ("personal", "method", ["personal={tensors: head}", "method=local_only"]),
    ("personal.tensors", "method", ["method=flora", LORA, "personal={tensors: ['out.*']}"]),
    ("aggregate", "method", ["method=flora", LORA, RULE]),
    ("workload.adapter.ranks", "systems", [RANKS, CLOCK]),
    ("workload.adapter.ranks", "evaluate.clients.adapt", [RANKS, "evaluate.clients={adapt: {steps: 1}}"]),
    (
        *("evaluate.clients.own", "personal.tensors"),
        [LORA, "personal={tensors: ['*.lora_b']}", "evaluate.clients.own=false"],
    ),
    ("evaluate.clients.adapt", "method", ["method=flora", LORA, "evaluate.clients={adapt: {steps: 1}}"]),
    ("aggregate", "method", ["method=local_only", RULE]),
    ("attack", "method", ["method=local_only", ATTACK]),
    ("aggregate", "personal.tensors", ["personal={tensors: head}", "aggregate=fltrust"]),
    ("personal.tensors", "frozen", ["personal={split: together}"]),
    ("personal.split", "tensors", ["personal={frozen: head, split: [1, 1]}"]),
    ("personal.rule", "tensors", ["personal={frozen: head, rule: sgd}"]),
    ("personal.carry", "tensors", ["personal={frozen: head, carry: keep}"]),
    ("personal.order", "split", ["personal={tensors: head, order: shared}"]),
]  # fmt: skip
"""Of each row the setting that is refused, what it does not go with, and what a configuration changes to have both."""


class Follows(LocalMethod):
    """FedAvg whose clients must know every broadcast."""

    def broadcast(self, server: Any) -> Any:
        return super().broadcast(server), Known(torch.zeros(1))

    def unpack(self, public: Any) -> Any:
        return super().unpack(public[0])


def rows() -> Iterator[tuple[str, Conflict, list[str]]]:
    """(what stands before the keys of a row, the row, the changes that it refuses), for all rows."""
    of_pair: dict[tuple[str, str], list[list[str]]] = {}
    for key, other, changes in EXAMPLES:
        of_pair.setdefault((key, other), []).append(changes)
    for section, conflicts in ALL_CONFLICTS.items():
        for row in conflicts:
            if left := of_pair.get((f"{section}{row.key}", row.other)):
                yield section, row, left.pop(0)


def test_every_row_has_an_example():
    wanted = Counter((f"{section}{row.key}", row.other) for section, own in ALL_CONFLICTS.items() for row in own)
    assert Counter((key, other) for key, other, _ in EXAMPLES) == wanted


@pytest.mark.parametrize(("section", "row", "changes"), rows(), ids=lambda value: getattr(value, "key", ""))
def test_it_is_refused_with_key_reason_and_remedy(section: str, row: Conflict, changes: list[str]):
    data: dict[str, Any] = {
        "workload": "digits",
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
        "federation": {"clients": 10, "cohort": 5, "rounds": 3, "local": {"steps": 1, "batch": 8}},
        "engine": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    data = override(data, changes)
    if data["method"] == "follows":
        data["method"] = Follows(Sgd(0.1), Plain(), Mean())
    with pytest.raises(ConfigError) as error:
        prepare(experiment(data), "refused")
    assert str(error.value).startswith(f"{section}{row.key}: {row.why}")
    assert str(error.value).endswith(f"; {row.remedy}")
