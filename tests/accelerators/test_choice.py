"""Which device a run gets where the experiment leaves it open, on cards that are not there."""

from __future__ import annotations

import pytest
import yaml

from fedfleet.engine.accelerators.choice import on_this_machine, share_of_a_gpu
from fedfleet.engine.api import resume, rounds, run
from fedfleet.engine.config.schema import Engine
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.prepare import prepare

from ..faults.runs import Watch, interrupt, same, small
from ..test_conformance import few
from .card import Cards, OnTheProcessor


@pytest.fixture(params=[1, 2])
def count(request, monkeypatch):
    Cards(request.param).install(monkeypatch)
    return request.param


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"device": "cuda"}),
        ({"device": "cuda"}, {"device": "cuda"}),
        ({"device": "cpu", "workers": 4}, {"device": "cpu", "workers": 4}),
        ({"backend": "local", "kernels": "graph"}, {"device": "cuda"}),
        ({"kernels": "chain"}, {}),
        ({"device": "cuda:1", "workers": 2}, {"device": "cuda:1", "workers": 2}),
        ({"gpus": 0.5, "workers": 3}, {"gpus": 0.5, "workers": 3}),
        ({"address": "auto"}, {}),
        ({"workers": [{"count": 2}]}, {"workers": ({"count": 2},)}),
    ],
    ids=str,
)
def test_what_becomes_of_settings(given, found, count):
    engine = Engine(**given)
    assert on_this_machine(engine) == Engine(**{**given, **found})


@pytest.mark.parametrize("given", [{"workers": 4}, {"backend": "ray", "workers": 4, "device": "cuda"}])
def test_workers_share_the_cards(given, count):
    found = on_this_machine(Engine(**given))
    assert (found.device, found.workers, found.gpus) == ("cuda", 4, count / 4)
    assert on_this_machine(Engine(backend="ray")).workers == count
    prepare(few("fedavg", engine=found.model_dump(exclude_unset=True)), "run")


@pytest.mark.parametrize(("workers", "gpus", "share"), [(1, 1, 1.0), (3, 1, 0.3333), (4, 3, 0.5), (2, 3, 1.0)])
def test_shares_lie_on_one_card_each(workers, gpus, share):
    assert share_of_a_gpu(workers, gpus) == share
    assert int(1 / share) * gpus >= workers


def test_without_a_card():
    assert on_this_machine(Engine()) == Engine()
    watch = Watch()
    run(few("fedavg", rounds=1), observers=[watch])
    assert "device: cpu, as engine.device=auto finds no GPU" in watch.told
    with pytest.raises(ConfigError, match=r"engine\.device=cuda, gpus=0 a worker: no CUDA device is here; use cpu"):
        run(few("fedavg", engine={"device": "cuda"}))


def test_one_process_uses_one_card_unless_workers_are_asked_for(count):
    found = few("fedavg", engine={"backend": "auto", "device": "cuda"})
    assert RunSpec.of("run", found).backend.name == "local"
    assert RunSpec.of("run", few("fedavg", engine={"backend": "auto", "gpus": 1})).backend.name == "ray"


@pytest.mark.long
def test_a_run_says_its_device_and_a_resumed_one_keeps_it(tmp_path, monkeypatch):
    """A run that began without a card goes on without one, and the other way round."""
    asked = {"kernels": "torch", "checkpoint": {"every": 2}}
    on_cpu = run(small(tmp_path / "none", kernels="torch"))
    with pytest.raises(Interrupted):
        run(small(tmp_path, **asked), tmp_path / "cpu", [Watch(r3=interrupt)])
    Cards(1).install(monkeypatch)
    watch = Watch(r3=interrupt)
    with OnTheProcessor(), pytest.raises(Interrupted):
        run(small(tmp_path, **asked), tmp_path / "cuda", [watch])
    assert "device: cuda, a card of tests" in watch.told
    assert yaml.safe_load((tmp_path / "cuda" / "config.yaml").read_text())["engine"]["device"] == "cuda"
    for name, device in (("cpu", "cpu"), ("cuda", "cuda")):
        watch = Watch()
        with OnTheProcessor():
            same(resume(small(tmp_path, **asked), tmp_path / name, [watch]), on_cpu)
        assert any(text.startswith(f"device: {device}") for text in watch.told)


def test_rounds_of_a_loop(monkeypatch):
    Cards(1).install(monkeypatch)
    seen = []
    with OnTheProcessor(), rounds(few("fedavg", rounds=1, engine={"kernels": "torch"})) as running:
        seen += running
    assert len(seen) == 1
    assert running.result.experiment.engine.device == "cuda"
