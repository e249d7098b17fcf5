"""Asynchronous runs: the order of events, the identities with synchronous runs, and the same bits after a resume."""

from __future__ import annotations

import random as python_random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedfleet.engine.api import resume, rounds, run
from fedfleet.engine.config.schema import Asynchronous, Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.fleet.asynchronous import AsynchronousPlanner
from fedfleet.engine.fleet.timeline import Timeline, drawn_positions, not_excluded, staleness_weight
from fedfleet.engine.fleet.visits import VisitTimes
from fedfleet.engine.rounds.driver import Driver
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads import counted
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.problems.quadratic import Quadratic
from fedfleet.workloads.workload import Split

from ..reference.asynchronous import Reference, scalar_descent, scalar_fednova
from .setups import driver_here, next_round, states_of

EQUAL = {"devices": {"name": "equal"}}
UNEQUAL = {"devices": {"name": "lognormal", "sigma": 1.0}, "dropout": 0.1}
SCAFFOLD = {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}}


# --- the order of events ----------------------------------------------------------------------------------------------
@dataclass
class RandomFleet:
    """Durations of few different values, zero among them, so that many events are at the same time; and losses."""

    number: int
    values: tuple[float, ...]
    loss: float
    all_eligible: bool = True
    remembered: None = None

    def one(self, client: int, refill: int, visit: int) -> tuple[float, bool]:
        """(seconds, whether the visit is lost then)."""
        draw = python_random.Random(f"{self.number} {client} {refill} {visit}")
        lost, value = draw.random() < self.loss, draw.choice(self.values)
        return (value * draw.choice((0.0, 1.0)) + 0.5, True) if lost else (value, False)

    def visits(self, clients, number, visited, start):
        found = [
            self.one(client, number, visit) for client, visit in zip(clients.tolist(), visited.tolist(), strict=True)
        ]
        seconds = np.array([each[0] for each in found])
        lost = np.array([each[0] if each[1] else np.inf for each in found])
        zeros = np.zeros(len(clients))
        return VisitTimes(np.ones(len(clients), dtype=np.int64), zeros, seconds, zeros, lost)


def drawing(seed):
    """The draw of a synchronous round, among the eligible clients."""

    def draw(refill, eligible, count):
        if count == len(eligible):
            return eligible
        random = counted.numpy_generator(seed, "cohort", refill)
        places = np.sort(random.choice(len(eligible), count, replace=False, shuffle=False))
        return [eligible[place] for place in places.tolist()]

    return draw


@pytest.mark.long
def test_the_order_of_events_is_the_references_on_a_thousand_random_fleets():
    random = np.random.default_rng(0)
    checked = 0
    for number in range(1000):
        n = int(random.integers(2, 9))
        slots, buffer = int(random.integers(1, n + 3)), int(random.integers(1, n + 1))
        most = [None, 0, 1, 3][int(random.integers(4))]
        opening, once = int(random.integers(1, slots + 1)), bool(random.integers(2))
        values = [(1.0,), (0.0,), (0.0, 1.0, 2.0), (1.0, 1.5, 7.0), tuple(random.random(20))][int(random.integers(5))]
        fleet = RandomFleet(number, values, float(random.choice([0.0, 0.3])))
        pace = Asynchronous(name="buffered", buffer=buffer, staleness=most, open=opening, once=once)
        reference = Reference(n, slots, buffer, fleet.one, drawing(number), most, opening, once)
        reference.run(12)
        timeline = Timeline(pace, number, n, slots, fleet)  # pyright: ignore[reportArgumentType]
        for update, (clock, jobs) in enumerate(reference.updates, 1):
            found = timeline.update(update)
            assert found.clock == clock
            assert [(job.client, job.version, job.staleness, job.visit) for job in found.jobs] == jobs
            checked += len(jobs)
        if len(reference.updates) < 12:
            with pytest.raises(ConfigError, match="no client is in flight"):
                timeline.update(len(reference.updates) + 1)
    assert checked > 20_000


def cyclic():
    """Draws the next clients in the order of their numbers, passing over those that are not eligible."""
    cursor = [0]

    def draw(refill, eligible, count):
        chosen = []
        while len(chosen) < count:
            if cursor[0] % 3 in eligible and cursor[0] % 3 not in chosen:
                chosen.append(cursor[0] % 3)
            cursor[0] += 1
        return sorted(chosen)

    return draw


def polynomial(staleness):
    return (1 + staleness) ** -0.5


@pytest.mark.parametrize(
    ("slots", "buffer", "options", "events", "models"),
    [
        (2, 1, {}, [(1, [(0, 0, 0)]), (2, [(1, 0, 1)]), (3, [(0, 2, 0)]), (5, [(1, 3, 0)]), (5, [(2, 1, 3)])],
         [2, 0.939340, 0.469670, 0.734835, 0.734835]),
        (2, 1, {"current": True, "divide": "none", "mix": 0.6}, None, [2.8, 2.672721, 1.870905, 1.609633, 1.846743]),
        (2, 2, {}, [(2, [(0, 0, 0), (1, 0, 0)]), (5, [(0, 1, 0), (1, 1, 0)]), (6, [(2, 0, 2), (0, 2, 0)]),
                    (9, [(1, 3, 0), (0, 3, 0)]), (11, [(2, 2, 2), (1, 4, 0)])],
         [2.25, 1.375, 0.742575, 0.621287, 0.806177]),
        (2, 2, {"divide": "weights"}, None, [2.25, 1.375, 0.573117, 0.536559, 0.797847]),
        (3, 3, {}, [(4, [(0, 0, 0), (1, 0, 0), (2, 0, 0)])], [2.5, 1.75, 1.375]),
    ],
)  # fmt: skip
def test_the_reference_has_the_golden_timeline(slots, buffer, options, events, models):
    """Three clients, durations 1, 2, 4, F_i = (x - i)^2 / 2, one step of size 0.5 from x = 4."""
    reference = Reference(3, slots, buffer, lambda client, refill, visit: (2.0**client, False), cyclic())
    reference.run(len(models))
    found = [(clock, [job[:3] for job in jobs]) for clock, jobs in reference.updates]
    if events is not None:
        assert found[: len(events)] == events
    computed = scalar_descent(reference.updates, polynomial, start=4.0, lr=lambda version: 0.5, **options)
    assert computed == pytest.approx(models, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"weight": "polynomial"}, [1, 0.707107, 0.577350, 0.5, 0.447214]),
        ({"weight": "constant"}, [1, 1, 1]),
        ({"weight": "hinge"}, [1, 1, 1, 1, 1, 1 / 11, 1 / 21]),
        ({"weight": "threshold", "b": 0, "c": 0}, [1, 0, 0]),
        ({"weight": "polynomial", "relative_to": 1}, [2**0.5, 1]),
    ],
)
def test_weights_of_stale_results(options, values):
    pace = Asynchronous(name="buffered", **options)
    assert [staleness_weight(pace, tau) for tau in range(len(values))] == pytest.approx(values, abs=1e-6)


# --- parameters -------------------------------------------------------------------------------------------------------
class Line(Quadratic):
    """F_i(x) = (x - i)^2 / 2 on the line, from x = 4."""

    def split(self, seed: int, clients: int) -> Split:
        train = {"a": np.ones((clients, 1, 1)), "b": np.arange(clients, dtype=float)[:, None]}
        whole = super().split(seed, 2)
        return whole._replace(train=train, client_index=ClientIndex.equal(np.arange(clients), clients))


def line(pace, systems, updates=9, method=None, **federation):
    plan = {"clients": 6, "cohort": 4, "rounds": updates, "local": {"steps": 1, "batch": 1}, "pace": pace, **federation}
    return experiment(
        {
            "workload": Line(dim=1, start=4.0),
            "method": method or {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.5}},
            "federation": plan,
            "systems": systems,
            "engine": {"backend": "local", "dtype": "float64", "block": 2},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )


def timeline_of(driver: Driver) -> Timeline:
    assert isinstance(driver.planner, AsynchronousPlanner)
    return driver.planner.timeline


@pytest.mark.parametrize(
    ("pace", "options"),
    [
        ({"name": "buffered", "buffer": 3}, {}),
        ({"name": "buffered", "buffer": 2, "divide": "weights"}, {"divide": "weights"}),
        ({"name": "buffered", "buffer": 2, "divide": "weights", "mix": 0.4}, {"divide": "weights", "mix": 0.4}),
        ({"name": "buffered", "buffer": 2, "mix": 0.4}, {"mix": 0.4}),
        ({"name": "fedasync", "buffer": 2, "divide": "weights", "weight": "polynomial"},
         {"current": True, "divide": "weights", "mix": 0.6}),
        ({"name": "buffered", "buffer": 4, "once": False}, {}),
        ({"name": "buffered", "buffer": 1, "staleness": 1}, {}),
        ({"name": "fedasync", "weight": "polynomial"}, {"current": True, "divide": "none", "mix": 0.6}),
        ({"name": "fedasync", "buffer": 2, "mix": 1.0, "divide": "buffer"}, {"current": True}),
    ],
)  # fmt: skip
def test_models_are_the_references(pace, options):
    """The reference goes through the same jobs one by one, in float64. The step size changes with the version."""
    rate = {"schedule": "exponential", "start": 0.5, "decay": 0.8}
    with driver_here(line(pace, UNEQUAL, method={"name": "fedavg", "rule": {"name": "sgd", "lr": rate}})) as driver:
        found, updates = [], []
        for number in range(1, 10):
            jobs = timeline_of(driver).update(number).jobs
            updates.append((0.0, [(job.client, job.version, job.staleness, job.visit) for job in jobs]))
            next_round(driver)
            found.append(float(driver.model().flat))
    weight = polynomial if Asynchronous.model_validate(pace).weight == "polynomial" else lambda tau: 1.0
    computed = scalar_descent(updates, weight, start=4.0, lr=lambda version: 0.5 * 0.8**version, **options)
    assert found == pytest.approx(computed, abs=1e-12)


@pytest.mark.parametrize(
    ("pace", "options"),
    [
        ({"name": "buffered", "buffer": 3}, {}),
        ({"name": "buffered", "buffer": 3, "divide": "weights"}, {"divide": "weights"}),
        ({"name": "buffered", "buffer": 3, "divide": "weights", "mix": 0.4}, {"divide": "weights", "mix": 0.4}),
        ({"name": "fedasync", "buffer": 2, "weight": "polynomial"}, {"current": True, "divide": "none", "mix": 0.6}),
    ],
)
def test_fednova_takes_the_mean_of_the_steps_over_the_buffer(pace, options):
    """Visits are cut short at random; the reference goes through the same jobs one by one."""
    systems = UNEQUAL | {"work": {"name": "uniform", "p": 0.7}}
    method = {"name": "fednova", "rule": {"name": "sgd", "lr": 0.1}}
    with driver_here(line(pace, systems, method=method, local={"steps": 5, "batch": 1})) as driver:
        found, updates = [], []
        for number in range(1, 10):
            jobs = timeline_of(driver).update(number).jobs
            updates.append([(job.client, job.version, job.staleness, job.steps) for job in jobs])
            record = next_round(driver)
            found.append(float(driver.model().flat))
            stale = [options.get("mix", 1.0) * polynomial(job.staleness) for job in jobs]
            assert record["async/weight"] == pytest.approx(sum(stale) / len(jobs))
    assert len({job[3] for jobs in updates for job in jobs}) > 2
    assert found == pytest.approx(scalar_fednova(updates, polynomial, start=4.0, lr=0.1, **options), abs=1e-12)


def test_fednova_with_equal_steps_is_fedavg():
    rule = {"name": "sgd", "lr": 0.1}
    pace = {"name": "buffered", "buffer": 3}
    one, other = (run(digits(pace, {"name": name, "rule": rule}, 4, UNEQUAL)) for name in ("fednova", "fedavg"))
    assert same(one, other)


@pytest.mark.parametrize(
    "pace", [{"name": "buffered", "buffer": 3}, {"name": "fedasync", "buffer": 2, "weight": "polynomial"}]
)
def test_averaged_states_are_states(pace):
    """The number of steps of Adam, which is averaged with the client weights: neither staleness nor `mix` shortens it,
    as they do with the change of the model."""
    method = {"name": "fedavg", "rule": {"name": "adam", "lr": 0.01}, "carry": "average"}
    counts = [0.0]
    with driver_here(digits(pace, method, 8, UNEQUAL)) as driver:
        for number in range(1, 9):
            jobs = timeline_of(driver).update(number).jobs
            next_round(driver)
            weights = np.array([polynomial(job.staleness) for job in jobs])
            own = np.array([counts[job.version] + 3 for job in jobs])
            counts.append(float((weights * own).sum() / weights.sum()))
            assert float(driver.server.public.carried.count) == pytest.approx(counts[-1], rel=1e-6)  # float32
    assert counts[-1] > 9


# --- identities -------------------------------------------------------------------------------------------------------
def digits(pace=None, method="fedavg", updates=4, systems=None, **more) -> Experiment:
    federation = {"clients": 12, "cohort": 6, "rounds": updates, "local": {"steps": 3, "batch": 5}}
    federation |= more.pop("federation", {}) | ({} if pace is None else {"pace": pace})
    engine = {"backend": "local", "kernels": "torch", "block": 4, **more.pop("engine", {})}
    return experiment(
        {
            "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [8]}},
            "method": method,
            "federation": federation,
            "systems": systems,
            "engine": engine,
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
            **more,
        }
    )


def same(left, right) -> bool:
    return all(torch.equal(left.model[name], right.model[name]) for name in left.model)


@pytest.mark.parametrize("method", [{"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}, SCAFFOLD, "fedadam"])
@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_a_buffer_of_the_cohort_and_equal_durations_are_synchronous_rounds(method, weights):
    plan = {"weights": weights}
    synchronous = run(digits(method=method, federation=plan))
    pace = {"name": "buffered", "buffer": 6}
    found = run(digits(pace, method, systems=EQUAL, federation=plan))
    assert same(synchronous, found)
    assert [row["train/loss"] for row in synchronous.rows] == [row["train/loss"] for row in found.rows]
    assert all(row["async/staleness"] == 0 for row in found.rows)


def test_fednova_with_a_schedule_weighs_jobs_by_the_method_of_their_own_round():
    momentum = {"schedule": "exponential", "start": 0.9, "decay": 0.5}
    method = {"name": "fednova", "rule": {"name": "momentum", "lr": 0.05, "mu": momentum}}
    systems = {"devices": {"name": "equal", "unit": "visit"}, "work": {"name": "uniform", "p": 0.7}}
    pace = {"name": "buffered", "buffer": 6, "open": 6, "weight": "constant"}
    local = {"local": {"steps": 6, "batch": 8}}
    one, other = (run(digits(each, method, systems=systems, federation=local)) for each in (None, pace))
    assert same(one, other)


def test_everyone_at_once_is_synchronous_whatever_the_durations():
    plan = {"clients": 6}
    found = run(digits({"name": "buffered", "buffer": 6}, systems=UNEQUAL | {"dropout": 0}, federation=plan))
    assert same(run(digits(federation=plan)), found)


def test_blocks_change_nothing_but_rounding():
    pace = {"name": "buffered", "buffer": 3}
    one, four = (run(digits(pace, SCAFFOLD, 8, UNEQUAL, engine={"block": block})) for block in (1, 4))
    for name, tensor in one.model.items():
        torch.testing.assert_close(tensor, four.model[name])


@pytest.mark.parametrize("buffer", [1, 3])
def test_control_variates_stay_the_mean_of_the_clients(buffer):
    """c = (1 / N) sum of c_i after every update, with losses and discarded results."""
    with driver_here(digits({"name": "buffered", "buffer": buffer, "staleness": 2}, SCAFFOLD, 12, UNEQUAL)) as driver:
        discarded = 0
        for _ in range(12):
            record = next_round(driver)
            discarded += record["async/discarded"] + record["client/lost"]
            own = [state.own.flat.double() for state in states_of(driver)]
            shared = driver.server.public.shared.flat.double()
            torch.testing.assert_close(torch.stack(own).sum(0) / 12, shared, atol=1e-6, rtol=1e-5)
        assert discarded


# --- the same bits ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pace", [{"name": "buffered", "buffer": 3}, {"name": "fedasync"}])
@pytest.mark.parametrize("after", [1, 4])
def test_a_run_that_is_resumed_has_the_same_bits(pace, after, tmp_path):
    """It is left while clients are in flight; the clock and the records go on too. Clients have unequal numbers of
    rows, so that the blocks that are trained again would get other batches with other blocks in their task."""
    data = {"name": "digits", "model": {"name": "mlp", "hidden": [8]}, "partition": {"name": "dirichlet", "beta": 0.1}}
    more = {"workload": data, "federation": {"clients": 40, "cohort": 16, "local": {"steps": 3, "batch": 64}}}
    made = digits(pace, SCAFFOLD, 8, UNEQUAL, engine={"block": 2}, **more)
    whole = run(made)
    with rounds(made, tmp_path / "run") as going:
        for _ in range(after):
            next(going)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    result = resume(tmp_path / "run")
    assert same(whole, result)
    for name in ("system/clock", "train/loss", "comm/bytes_down", "async/staleness"):
        assert [row[name] for row in whole.rows] == [row[name] for row in result.rows]


def test_more_updates_than_at_first_go_on_to_the_same_bits(tmp_path):
    """Results of clients that were in flight after the last update are used by those that follow."""
    pace = {"name": "buffered", "buffer": 3}
    with rounds(digits(pace, SCAFFOLD, 4, UNEQUAL), tmp_path / "run") as going:
        for _ in range(3):
            next(going)
    longer = resume(digits(pace, SCAFFOLD, 7, UNEQUAL), tmp_path / "run")
    assert same(run(digits(pace, SCAFFOLD, 7, UNEQUAL)), longer)


def test_evaluations_between_updates_change_nothing():
    """All tasks under way end before an evaluation, and a new phase begins after it."""
    never, always = (
        run(digits({"name": "buffered", "buffer": 2}, SCAFFOLD, 8, UNEQUAL, evaluate={"every": every}))
        for every in (0, 1)
    )
    assert same(never, always)
    assert sum("eval/accuracy" in row for row in always.rows) == 8


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_processes_on_ray_have_the_bits_of_one_process(workers):
    """With evaluations, and with many more versions than places in the broadcast."""
    pace, every = {"name": "buffered", "buffer": 3}, {"evaluate": {"every": 10}}
    here = run(digits(pace, SCAFFOLD, 30, UNEQUAL, **every))
    there = run(digits(pace, SCAFFOLD, 30, UNEQUAL, engine={"backend": "ray", "workers": workers}, **every))
    assert same(here, there)
    for name in ("train/loss", "system/clock", "async/staleness", "client/norm2"):
        assert [row[name] for row in here.rows] == [row[name] for row in there.rows]


def test_a_single_client_is_drawn_as_several_are():
    """The draw of one client is cheaper, and is the same member as by the draw of a synchronous round."""
    random = np.random.default_rng(0)
    for number in range(200):
        clients = int(random.integers(2, 40)) if number % 2 else 20_000
        excluded = np.sort(random.choice(clients, int(random.integers(0, clients - 1)), replace=False))
        rest = np.setdiff1d(np.arange(clients), excluded)
        place = counted.numpy_generator(0, "cohort", number).choice(len(rest), 1, replace=False, shuffle=False)
        found = drawn_positions(counted.numpy_generator(0, "cohort", number), len(rest), 1)
        assert found.tolist() == place.tolist()
        assert not_excluded(excluded.tolist(), found).tolist() == rest[place].tolist()


# --- refusals ---------------------------------------------------------------------------------------------------------
BUFFERED = {"name": "buffered", "buffer": 3}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"systems": None}, ["federation.pace", "add systems"]),
        ({"systems": {"server": 1}}, ["systems.server"]),
        ({"pace": {**BUFFERED, "open": 7}}, ["federation.pace.open", "got 7"]),
        ({"pace": {**BUFFERED, "buffer": 13}}, ["federation.pace.buffer", "13"]),
        ({"pace": {**BUFFERED, "bufer": 3}}, ["federation.pace.bufer", "buffer"]),
        ({"pace": {**BUFFERED, "a": 2}}, ["federation.pace.a"]),
        ({"aggregate": "median"}, ["aggregate", "asynchronous"]),
        ({"method": SCAFFOLD, "pace": {**BUFFERED, "once": False}}, ["once", "keep nothing"]),
        (
            {
                "method": {"name": "fedavg", "rule": {"name": "momentum", "lr": 0.1}, "carry": "average"},
                "pace": {"name": "buffered", "buffer": 1},
            },
            ["buffer", "carry=average"],
        ),
        ({"method": "local_adaalter", "pace": {"name": "buffered", "buffer": 1}}, ["buffer", "states are averaged"]),
        ({"method": {"name": "fedmud", "layers": "all", "nearest": True}}, ["no asynchronous form"]),
        (
            {"pace": {"name": "buffered", "buffer": 1, "divide": "weights"}},
            ["federation.pace.weight: has no effect with buffer: 1", "choose divide: buffer"],
        ),
        ({"pace": {**BUFFERED, "weight": "threshold", "divide": "weights"}}, ["federation.pace.c", "divide: weights"]),
        ({"pace": {**BUFFERED, "weight": "threshold"}, "method": "stem"}, ["federation.pace.c", "averages states"]),
        (
            {"engine": {"pending": 10**4}},  # 64 x 8 + 8 + 8 x 10 + 10 parameters and the squared norm, in float64
            ["engine.pending", "(6 clients in flight", "x 4,888 bytes of a message", "39,104", "got 10,000"],
        ),
    ],
)
def test_combinations_without_a_meaning_are_refused_in_one_sentence(changes, words):
    made = {"pace": BUFFERED, "systems": UNEQUAL, **changes}
    with pytest.raises(ConfigError) as error:
        prepare(digits(**made), "refused")
    for word in words:
        assert word in str(error.value), str(error.value)


def test_updates_without_any_weight_move_nothing():
    """Results that are older than b = 0 have the weight 0: the model stays where no result is fresh."""
    pace = {"name": "buffered", "buffer": 2, "weight": "threshold", "b": 0, "c": 0}
    with driver_here(digits(pace, updates=8, systems=UNEQUAL)) as driver:
        weights = []
        for _ in range(8):
            before = driver.model().flat.clone()
            weights.append(next_round(driver)["async/weight"])
            assert torch.equal(driver.model().flat, before) == (weights[-1] == 0)
    assert 0 in weights
    fresh = {**pace, "divide": "weights", "staleness": 0}  # what would have no weight is discarded
    prepare(digits(fresh, systems=UNEQUAL), "fresh")


def test_results_that_could_fill_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr("fedfleet.engine.fleet.asynchronous.available_memory", lambda: 50_000)
    with pytest.raises(ConfigError, match=r"^engine\.pending must be at least 39,104, .*, got 25,000; raise it"):
        run(digits(BUFFERED, systems=UNEQUAL))


def test_a_run_that_cannot_go_on_says_why():
    """Two clients, of which three would have to arrive from one version."""
    pace = Asynchronous(name="buffered", buffer=3)
    timeline = Timeline(pace, 0, 2, 2, RandomFleet(0, (1.0,), 0.0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"lower federation\.pace\.buffer"):
        timeline.update(1)
