"""The model of the fleet: distributions, availability, files, durations and losses."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.engine.config.registry import Registry
from fedfleet.engine.config.schema import Local, Systems
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.fleet.contract import keys
from fedfleet.engine.fleet.visits import Fleet, Traffic, build_parts, examples_seen
from fedfleet.workloads.client_index import ClientIndex

MANY = np.arange(20_000)


def fleet(sizes=(1000,) * 4, local=None, traffic=(1e6, 1e6, 1e6), **systems):
    section = Systems(**systems)
    plan = Local.model_validate(local or {"steps": 5, "batch": 10})
    parts = build_parts(section, Registry(), plan, len(sizes))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Fleet(0, section, parts, plan, ClientIndex(offsets, np.arange(offsets[-1])), Traffic(*traffic))


def file_of(path, columns, **metadata):
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    return str(path)


FOUR = {"compute": [10.0, 20.0, 40.0, 80.0], "down": [8000.0] * 4, "up": [8000.0] * 4, "client": [0, 1, 2, 3]}


# --- draws ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "quantile"),
    [
        ({"name": "lognormal", "median": 80, "sigma": 0.8}, lambda u, z: 80 * np.exp(0.8 * z)),
        ({"name": "uniform", "low": 2, "high": 6}, lambda u, z: 2 + 4 * u),
        ({"name": "exponential", "mean": 3}, lambda u, z: -3 * np.log1p(-u)),
        (
            {"name": "percentiles", "points": [[0, 1], [50, 10], [100, 1000]]},
            lambda u, z: 10.0 ** (2 * u if u <= 0.5 else 4 * u - 1),
        ),
    ],
)
def test_distributions_have_their_quantiles(spec, quantile):
    """At the deciles the share below is within four standard errors, sqrt(u (1 - u) / n) each."""
    drawn = Registry().build("DISTRIBUTIONS", spec, "compute").draw(keys(7, "test", MANY))
    for u, z in ((0.1, -1.2815515655446004), (0.5, 0.0), (0.9, 1.2815515655446004)):
        assert abs((drawn <= quantile(u, z)).mean() - u) < 4 * (u * (1 - u) / len(MANY)) ** 0.5


def test_discrete_distributions_have_their_shares():
    build = Registry().build
    zipf = build("DISTRIBUTIONS", {"name": "zipf", "a": 1.5, "most": 100}, "compute").draw(keys(1, "test", MANY))
    weights = np.arange(1, 101) ** -1.5
    mean = (np.arange(1, 101) * weights).sum() / weights.sum()
    assert round(mean, 2) == 7.70  # the published mean of this law
    error = 4 * (((np.arange(1, 101) - mean) ** 2 * weights).sum() / weights.sum() / len(MANY)) ** 0.5
    assert abs(zipf.mean() - mean) < error
    tiers = {"name": "tiers", "tiers": [[0.5315, 9.17], [0.464, 3.28], [0.0045, 1]], "least": 179}
    drawn = build("DISTRIBUTIONS", tiers, "compute").draw(keys(1, "test", MANY))
    for share, factor in tiers["tiers"]:
        assert abs((drawn == 179 * factor).mean() - share) < 4 * (share * (1 - share) / len(MANY)) ** 0.5


def test_half_normal_and_gaussian():
    build = Registry().build
    half = build("DISTRIBUTIONS", {"name": "halfnormal", "sigma": 2}, "compute").draw(keys(1, "test", MANY))
    assert abs(half.mean() - 2 * (2 / np.pi) ** 0.5) < 4 * 2 * (1 - 2 / np.pi) ** 0.5 / len(MANY) ** 0.5
    gauss = build("DISTRIBUTIONS", {"name": "gaussian", "mean": 1, "sigma": 1, "least": 0.5}, "compute")
    drawn = gauss.draw(keys(1, "test", MANY))
    assert drawn.min() == 0.5
    assert abs((drawn == 0.5).mean() - 0.30854) < 4 * (0.3085 * 0.6915 / len(MANY)) ** 0.5


def test_phones_have_the_published_percentiles():
    """Scores of phones with more than 2 GB: 608, 1406, 1768, 2734, 3746; bandwidths: median 6.1 Mbit/s, 26 % < 3."""
    numbers = Registry().build("DEVICES", "phones", "devices").numbers(3, MANY, 1)
    scores = 80 * 1768 / numbers.compute
    for share, score in ((0.05, 608), (0.25, 1406), (0.5, 1768), (0.75, 2734), (0.95, 3746)):
        assert abs((scores <= score).mean() - share) < 4 * (share * (1 - share) / len(MANY)) ** 0.5
    assert abs(np.median(numbers.down) / 6100 - 1) < 0.05
    assert abs((numbers.down < 3000).mean() - 0.26) < 0.015
    assert abs(np.corrcoef(np.log(numbers.compute), np.log(numbers.down))[0, 1]) < 4 / len(MANY) ** 0.5


@pytest.mark.parametrize("devices", ["lognormal", "phones", {"name": "lognormal", "per": "visit", "jitter": 0.3}])
def test_a_draw_does_not_depend_on_who_else_is_asked(devices):
    sessions = {"name": "sessions", "length": 50, "pause": 20}
    one = fleet((30,) * 50, devices=devices, dropout=0.3, availability=sessions)
    together = one.visits(np.arange(50), 3, np.arange(50), 40.0)
    for i in (0, 17, 49):
        alone = one.visits(np.array([i]), 3, np.array([i]), 40.0)
        for a, b in zip(alone, together, strict=True):
            assert a[0] == b[i]
    by_client = one.visits(np.arange(50), np.full(50, 3), np.arange(50), np.full(50, 40.0))
    assert all(np.array_equal(a, b) for a, b in zip(by_client, together, strict=True))


# --- durations --------------------------------------------------------------------------------------------------------
def test_durations_by_hand(tmp_path):
    """Forward passes of 10, 20, 40, 80 ms, batches of 10, 5 steps, 10^6 bytes at 8000 kbit/s each way:
    3 * 50 * ms / 1000 seconds and two seconds of transfers."""
    devices = {"name": "table", "file": file_of(tmp_path / "d.parquet", FOUR, unit="forward")}
    four = fleet(devices=devices)
    whole = four.visits(np.arange(4), 1, np.zeros(4, int), 0.0)
    assert whole.duration.tolist() == pytest.approx([3.5, 5.0, 8.0, 14.0])
    cut = four.visits(np.arange(4), 1, np.zeros(4, int), 0.0, deadline=5.0)
    assert cut.steps.tolist() == [5, 5, 2, 1]
    assert cut.duration.tolist() == pytest.approx([3.5, 5.0, 4.4, 4.4])
    none = four.visits(np.arange(4), 1, np.zeros(4, int), 0.0, deadline=2.5)
    assert none.steps.tolist() == [1, 0, 0, 0]
    assert none.lost.tolist() == [np.inf, 2.5, 2.5, 2.5]
    small = fleet(devices=devices, traffic=(1e5, 1e5, 1e6)).visits(np.arange(4), 1, np.zeros(4, int), 0.0)
    assert small.duration.tolist() == pytest.approx([1.7, 3.2, 6.2, 12.2])  # a tenth of the bytes


def test_a_published_simulators_numbers():
    """FedScale's test: one example, one step, 1000 ms, rates of 1 kbit/s, messages of 1 kbit: 3.0 s and 2.0 s."""
    devices = {"name": "equal", "compute": 1000, "down": 1, "up": 1}
    one = fleet((1,), {"steps": 1, "batch": 1}, (125, 125, 1), devices=devices, examples="nominal")
    visit = one.visits(np.array([0]), 1, np.array([0]), 0.0)
    assert visit.compute.tolist() == [3.0]
    assert (visit.down + visit.up).tolist() == [2.0]


def test_examples_are_those_of_the_batches():
    """25 rows in batches of 10: passes of 10, 10, 5; five steps in visits 0, 1, 2 see 45, 40, 40 examples."""
    seen = examples_seen(np.full(3, 25), 10, np.arange(3) * 5, np.full(3, 5))
    assert seen.tolist() == [45, 40, 40]


@pytest.mark.parametrize(("unit", "seconds"), [("forward", 7.5), ("example", 2.5), ("step", 0.25), ("visit", 0.05)])
def test_units(unit, seconds):
    devices = {"name": "equal", "compute": 50, "down": 1, "up": 1, "unit": unit}
    visit = fleet((100,), devices=devices, traffic=(0, 0, 0)).visits(np.array([0]), 1, np.array([0]), 0.0)
    assert visit.duration.tolist() == pytest.approx([seconds])


# --- work and losses --------------------------------------------------------------------------------------------------
def test_partial_work_has_its_law():
    ten = fleet((100,) * 4000, {"steps": 10, "batch": 10}, work={"name": "uniform", "p": 0.5})
    steps = ten.visits(np.arange(4000), 1, np.zeros(4000, int), 0.0).steps
    counts = np.bincount(steps, minlength=11)
    assert counts[0] == 0
    expected = np.array([0.5 / 9] * 9 + [0.5]) * 4000
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 27.88  # 99.9 % of chi^2 with 9 degrees of freedom
    none = fleet((100,) * 50, {"steps": 10, "batch": 10}, work={"name": "uniform", "p": 0})
    assert set(none.visits(np.arange(50), 1, np.zeros(50, int), 0.0).steps) == {10}


def test_a_range_of_epochs_and_work_by_speed(tmp_path):
    two_to_five = fleet((25,) * 4000, {"epochs": 5, "batch": 10}, work={"name": "range", "low": 2, "high": 5})
    counts = np.bincount(two_to_five.visits(np.arange(4000), 1, np.zeros(4000, int), 0.0).steps, minlength=16)
    assert set(np.flatnonzero(counts)) == {6, 9, 12, 15}
    assert ((counts[[6, 9, 12, 15]] - 1000) ** 2 / 1000).sum() < 16.27  # chi^2, 3 degrees of freedom
    devices = {"name": "table", "file": file_of(tmp_path / "d.parquet", FOUR)}
    by_speed = fleet(devices=devices, work={"name": "speed", "full": 20})
    assert by_speed.visits(np.arange(4), 1, np.zeros(4, int), 0.0).steps.tolist() == [5, 5, 2, 1]


def test_dropouts_come_at_a_fraction_of_the_visit():
    lossy = fleet((100,) * 5000, dropout=0.2)
    visits = lossy.visits(np.arange(5000), 1, np.zeros(5000, int), 0.0)
    assert abs((~visits.arrives).mean() - 0.2) < 4 * (0.16 / 5000) ** 0.5
    when = (visits.lost / visits.duration)[~visits.arrives]
    assert abs(when.mean() - 0.5) < 4 / (12 * len(when)) ** 0.5
    again = lossy.visits(np.arange(5000), 2, np.zeros(5000, int), 0.0)
    assert (visits.arrives != again.arrives).any()  # by the round's number, or a client would be lost for ever


def test_clients_that_go_offline(tmp_path):
    """The visit takes 10 s from 0; the client is online in [0, 4) and from 8 on."""
    trace = file_of(tmp_path / "a.parquet", {"client": [0, 0], "from": [0.0, 8.0], "to": [4.0, 50.0]})
    devices = {"name": "equal", "compute": 2000, "down": 1, "up": 1, "unit": "step"}
    for how, lost in (("session", 4.0), ("end", np.inf), ("never", np.inf)):
        one = fleet(
            (10,),
            devices=devices,
            traffic=(0, 0, 0),
            interrupt=how,
            availability={"name": "trace", "file": trace},
        )
        assert one.visits(np.array([0]), 1, np.array([0]), 0.0).lost.tolist() == [lost]


# --- availability -----------------------------------------------------------------------------------------------------
def test_sessions_of_a_trace_go_on_where_another_one_begins(tmp_path):
    """Client 0 is online at all times, client 1 too, in two sessions; client 2 from 60 over the period's end to 30."""
    columns = {"client": [0, 1, 1, 2, 2, 3], "from": [0.0, 0.0, 40.0, 0.0, 60.0, 10.0]}
    file = file_of(tmp_path / "t", {**columns, "to": [100.0, 40.0, 100.0, 30.0, 100.0, 100.0]}, period="100")
    part = Registry().build("AVAILABILITIES", {"name": "trace", "file": file, "assign": "number"}, "availability")
    four = np.arange(4)
    assert part.until(0, four, 20.0).tolist() == [np.inf, np.inf, 30, 100]
    assert part.until(0, four, 270.0).tolist() == [np.inf, np.inf, 330, 300]
    assert part.until(0, four, 50.0).tolist() == [np.inf, np.inf, 50, 100]
    assert part.next(0, four, 305.0).tolist() == [305, 305, 305, 310]


@pytest.mark.parametrize(("assign", "aligned"), [("random", True), ("modulo", False)])
def test_files_of_the_same_length_are_aligned_unless_one_is_assigned_by_number_modulo(assign, aligned, tmp_path):
    """In the files, the two slow devices are those that are offline in second 5."""
    devices = file_of(tmp_path / "d", {name: FOUR[name] for name in ("compute", "down", "up")})
    columns = {"client": [0, 1, 2, 3], "from": [0.0, 0.0, 20.0, 20.0], "to": [10.0, 10.0, 30.0, 30.0]}
    trace = {"name": "trace", "file": file_of(tmp_path / "t", columns), "assign": assign}
    slow = Registry().build("DEVICES", {"name": "table", "file": devices}, "devices").numbers(0, MANY, 1).compute > 30
    offline = ~Registry().build("AVAILABILITIES", trace, "availability").online(0, MANY, 5.0)
    assert (slow == offline).mean() == (1.0 if aligned else pytest.approx(0.5, abs=0.02))


@pytest.mark.parametrize("spec", [{"length": 10, "pause": 0.1, "spread": 1}, {"length": 600, "pause": 60, "spread": 1}])
@pytest.mark.parametrize("t", [1000.0, 80_000.0])
def test_a_session_ends_where_its_client_is_offline(spec, t):
    part = Registry().build("AVAILABILITIES", {"name": "sessions", **spec}, "availability")
    clients = np.arange(2000)
    end, online = part.until(0, clients, t), part.online(0, clients, t)
    assert (online == (end > t)).all()
    assert np.isfinite(end).all()
    assert not part.online(0, clients[online], end[online]).any()
    assert not part.online(0, clients[online], np.nextafter(end[online], np.inf)).any()
    middle = t + (end - t)[online] * np.linspace(0, 0.999, online.sum())
    assert part.online(0, clients[online], middle).all()


def test_a_trace_has_half_open_sessions_in_any_order_of_questions(tmp_path):
    """FedScale's test: active 1, 3, 6, 9, inactive 1, 4, 7, 10, asked 2, 6, 8, 9, 10, 15 in turn: F T F T F F, with the
    trace repeated after 10. Its empty session [1, 1) is refused by our files, so it is left out."""
    columns = {"client": [0] * 3, "from": [3.0, 6.0, 9.0], "to": [4.0, 7.0, 10.0]}
    part = Registry().build(
        "AVAILABILITIES",
        {"name": "trace", "file": file_of(tmp_path / "a.parquet", columns, period="10")},
        "availability",
    )
    one = np.array([0])
    for t, online in ((6, True), (9, True), (2, False), (8, False), (10, False), (15, False), (16, True)):
        assert part.online(0, one, float(t))[0] == online
    assert part.until(0, one, 6.5).tolist() == [7.0]
    assert part.next(0, one, 4.0).tolist() == [6.0]
    assert part.next(0, one, 10.0).tolist() == [13.0]
    assert part.next(0, one, 13.5).tolist() == [13.5]


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "bernoulli", "p": 0.3, "slot": 10},
        {"name": "sine", "slot": 10},
        {"name": "sessions", "length": 20, "pause": 30, "spread": 0.5},
        {"name": "diurnal", "zones": [[0.5, 0], [0.5, 8]]},
    ],
)
def test_online_until_and_next_agree(spec):
    """Stepped in small steps of time: `until` is where a session ends, `next` where the next one begins."""
    part = Registry().build("AVAILABILITIES", spec, "availability")
    clients, step = np.arange(5), 600.0 if spec["name"] == "diurnal" else 0.5
    grid = np.arange(0, 400) * step
    online = np.stack([part.online(1, clients, t) for t in grid])
    for k in range(0, 200, 7):
        until, following = part.until(1, clients, grid[k]), part.next(1, clients, grid[k])
        for i in clients:
            later = online[k:, i]
            if later[0]:
                assert following[i] == grid[k]
                ends = np.flatnonzero(~later)
                if len(ends):
                    assert grid[k + ends[0] - 1] < until[i] <= grid[k + ends[0]]
            else:
                assert until[i] == grid[k]
                begins = np.flatnonzero(later)
                if len(begins):
                    assert grid[k + begins[0] - 1] < following[i] <= grid[k + begins[0]]


def test_shares_of_time_online():
    """sessions with spread 0: on / (on + off); sine: on average half of q_i."""
    build, clients = Registry().build, np.arange(200)
    sessions = build("AVAILABILITIES", {"name": "sessions", "length": 20, "pause": 60}, "availability")
    share = np.mean([sessions.online(0, clients, t).mean() for t in np.linspace(1000, 9000, 400)])
    assert abs(share - 0.25) < 0.005  # 200 clients, 100 cycles each
    sine = build("AVAILABILITIES", {"name": "sine", "slot": 1.0}, "availability")
    chance = np.mean([sine.chance(0, clients, np.full(200, s)) for s in range(24)], axis=0)
    q = sine.chance(0, clients, np.zeros(200, int)) / 0.5
    assert np.allclose(chance, 0.5 * q)


def test_the_first_time_with_enough_clients(tmp_path):
    columns = {"client": [0, 1, 2], "from": [5.0, 7.0, 9.0], "to": [20.0, 8.0, 30.0]}
    trace = {"name": "trace", "file": file_of(tmp_path / "a.parquet", columns), "assign": "number"}
    three = fleet((10,) * 3, availability=trace)
    assert three.eligible(0.0).tolist() == []
    assert [three.first_time(0.0, least) for least in (1, 2)] == [5.0, 7.0]
    assert three.first_time(8.5, 2) == 9.0
    with pytest.raises(ConfigError, match=r"^systems: 3 clients must be online at one time"):
        three.first_time(0.0, 3)


def test_memory_decides_who_is_eligible(tmp_path):
    columns = {**FOUR, "memory": [1e6, 3e6, 4e6, 8e6]}
    devices = {"name": "table", "file": file_of(tmp_path / "d.parquet", columns)}
    assert fleet(devices=devices, traffic=(1, 1, 1e6)).eligible(0.0).tolist() == [2, 3]
    assert fleet().eligible(0.0) is None


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("systems", "message"),
    [
        ({"devices": "phone"}, "systems.devices.name: no kind of devices is called phone; did you mean phones?"),
        ({"devices": 3}, "devices: must be a name or {name: …, arguments}, got 3"),
        ({"dropout": 1.5}, "dropout must be less than 1, got 1.5"),
        ({"devices": {"name": "equal", "compute": 0}}, "systems.devices: value > 0 must hold, got 0"),
        ({"devices": {"name": "table", "file": "no.parquet"}}, "systems.devices: there is no file no.parquet"),
        ({"work": {"name": "range", "low": 2, "high": 5}}, "systems.work: federation.local.epochs must be high=5"),
        ({"availability": {"name": "bernoulli", "p": 2}}, "systems.availability: 0 <= p <= 1 must hold, got 2"),
    ],
)
def test_mistakes_are_one_sentence(systems, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        fleet(**systems)


@pytest.mark.parametrize(
    ("columns", "metadata", "message"),
    [
        ({"client": [0, 0], "from": [1.0, 3.0], "to": [4.0, 5.0]}, {}, "must be sorted by client and time"),
        ({"client": [0], "from": [1.0], "to": [1.0]}, {}, "from < to must hold, got from=1, to=1; drop the row"),
        ({"client": [0], "from": [-1.0], "to": [1.0]}, {}, "from must be 0 or more, got -1"),
        ({"client": [0], "from": [None], "to": [1.0]}, {}, "from must have no missing value, got 1"),
        ({"client": [0], "from": [1.0]}, {}, "has no column to"),
        ({"client": [0], "from": [1.0], "to": [9.0]}, {"period": "8"}, "period >= to must hold, got 8 < 9"),
    ],
)
def test_unusable_traces_are_refused(tmp_path, columns, metadata, message):
    file = file_of(tmp_path / "a.parquet", columns, **metadata)
    with pytest.raises(ConfigError, match=re.escape(message)):
        fleet(availability={"name": "trace", "file": file})


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        ({"compute": [0.0, 1.0, 1.0, 1.0]}, {}, "compute must be more than 0, got 0"),
        ({"up": [float("nan"), 1.0, 1.0, 1.0]}, {}, "up must be finite"),
        ({"client": [0, 1, 2, 2]}, {}, "every client must have one row, got two"),
        ({"client": [0, 1, 2, 5]}, {}, "the file must have every client, got none with number 3"),
        ({}, {"unit": "epoch"}, "unit must be forward, example, step, visit, got 'epoch'"),
    ],
)
def test_unusable_tables_of_devices_are_refused(tmp_path, change, metadata, message):
    file = file_of(tmp_path / "d.parquet", {**FOUR, **change}, **metadata)
    with pytest.raises(ConfigError, match=re.escape(message)):
        fleet(devices={"name": "table", "file": file})
