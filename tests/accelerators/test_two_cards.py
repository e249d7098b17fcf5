"""Workers on Ray that share two cards which are not there: which card each of them takes, and one worker's bits.

Ray grants the cards that it is told of, and a process of a worker sees those that it was granted. There, doubles of as
many cards take the place of torch.cuda, and tensors of cards are in the processor's memory, see card.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfleet.engine import run
from fedfleet.engine.kernels.recorded_visit import PROVEN_ROUNDS

from ..conftest import start_ray
from ..faults.runs import Watch, untimed
from ..test_conformance import Few, few
from .card import Cards, OnTheProcessor

ROUNDS = PROVEN_ROUNDS + 1
ARRIVED: list[None] = []
"""Not empty in a process of Ray to which the workload has come."""


def granted() -> Cards:
    """Doubles of the cards that this process sees."""
    cards = Cards(len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")))
    cards.install(pytest.MonkeyPatch())
    return cards


def arrived(values: dict[str, Any]) -> OnCards:
    """The workload in a process of Ray, with the cards that this process sees. The thread of a worker that trains has
    tensors of cards in the processor's memory."""
    from fedfleet.engine.backends.ray.worker_process import WorkerProcess  # a bare machine with a card has no Ray

    if not ARRIVED:
        ARRIVED.append(None)
        prepare = WorkerProcess._prepare

        def on_the_processor(self: WorkerProcess, *given: Any) -> None:
            OnTheProcessor().__enter__()  # until the process ends
            cards = granted()
            prepare(self, *given)
            note = [os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.current_device(), cards.fractions]
            Path(values["notes"], f"{os.getpid()}.json").write_text(json.dumps(note))

        pytest.MonkeyPatch().setattr(WorkerProcess, "_prepare", on_the_processor)
        granted()  # for the driver
    return OnCards(**values)


@dataclass(frozen=True)
class OnCards(Few):
    """Each worker notes in the folder `notes` which cards it sees, which one it uses, and its share of each."""

    notes: str = ""

    def __reduce__(self) -> Any:
        return arrived, ({each.name: getattr(self, each.name) for each in fields(self) if each.init},)


@pytest.fixture(scope="module")
def ray_with_two_cards() -> Iterator[None]:
    import ray

    from fedfleet.engine.backends.ray.connect import shutdown

    shutdown()
    others = ray.is_initialized()  # `ray_here`, which tests of other files have after these
    ray.shutdown()
    start_ray(num_gpus=2)
    yield
    ray.shutdown()
    if others:
        start_ray()


@pytest.mark.long
def test_workers_take_the_cards_that_they_were_granted(ray_with_two_cards, tmp_path, monkeypatch):
    """One worker has a card for itself, and two share the other one. Recorded steps are replayed in the last round."""
    Cards(2).install(monkeypatch)
    groups = [{"count": 1, "gpus": 1.0, "cpus": 0.25}, {"count": 2, "gpus": 0.5, "cpus": 0.25}]
    engine = {"device": "cuda", "backend": "ray", "workers": groups, "kernels": "graph", "block": 2}
    plan, watch = {"cohort": 6}, Watch()
    found = run(few("scaffold", OnCards(notes=str(tmp_path)), ROUNDS, plan=plan, engine=engine), observers=[watch])
    monkeypatch.undo()
    expected = run(few("scaffold", rounds=ROUNDS, plan=plan, engine={"block": 2, "device": "cpu"}))
    assert found.model_sha256 == expected.model_sha256
    assert untimed([*expected.rows]) == [
        {name: value for name, value in row.items() if not name.startswith("node/")} for row in untimed([*found.rows])
    ]
    assert not [text for text in watch.told if "replayed" in text]
    notes = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert {current for _, current, _ in notes} == {0}  # each sees one card, which is its first
    shares = {card: sorted(share for seen, _, (share,) in notes if seen == card) for card in ("0", "1")}
    assert sorted(shares.values()) == [[0.5, 0.5], [1.0]]
