"""The page of the columns of the record, from the docstrings of `engine/records/parquet.py` and `per_client.py`."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

from fedfleet.engine.backends.ray.ray_pool import RayPool
from fedfleet.engine.records import client_models, parquet, per_client

from .text import sentence, table

HEAD = """\
# Columns of the record

`rounds.parquet` in the folder of a run, `Result.records` in Python, and the metrics in MLflow have these columns, one
row for each round. A cell is empty if the number was not measured in that round.
"""
CLUSTER = """\
## On several nodes

A run on more than one node has further columns:
"""
CLIENTS = """\
## Single clients

With `tracking.clients: true` each round has a file `clients/round-000001.parquet` in the folder of the run. Without
`systems` it has a row for each client of the cohort; with it, for each client that was selected, and the first numbers
are empty for those whose results were not used. An update of an [asynchronous run](../howto/asynchronous.md) has rows
for its results, and for the clients that were lost or too stale since the update before.
"""
OWN_MODELS = """\
## Clients' own models

A run that evaluates [clients' own models](../howto/personal.md#evaluation) has `clients.parquet` in its folder, with a
row for each client that the last evaluation has looked at.
"""
SECONDS = """\
## Seconds

A name of a time has one meaning in all places:
"""
TIMES = (
    (
        "`time/seconds`",
        "seconds of one round, from the drawing of the cohort to the end of the evaluation, if there is one; in "
        "round 1 also the pass over all clients that some methods begin with. The commit of the round and its "
        "checkpoint are not included",
    ),
    (
        "`seconds`",
        "the sum of `time/seconds` over the rounds, also those before a run was resumed: in `result.json`, "
        "`Result.seconds`, `fedfleet run`, `fedfleet compare`, reports, charts against seconds, and a search's "
        "objective `seconds`. Seconds to a target are those up to the evaluation that reached it",
    ),
    (
        "`total_seconds`",
        "from the call to its end, with the start of Ray, the data, the measurement of plans and the last files; of a "
        "run that was resumed, its last part: in `result.json`, `Result.total_seconds` and `fedfleet run`",
    ),
    (
        "virtual seconds",
        "`system/clock` and `system/seconds`: the time of the clients' devices that a run with `systems` simulates",
    ),
)
NAMES = re.compile(r"^(\S.*?)\s{2,}(\S.*)$")


def page() -> str:
    head = ("column", "meaning")
    rounds, clients = table(head, rows_of(columns())), table(head, rows_of(columns(per_client)))
    times = table(("name", "meaning"), [(name, sentence(text)) for name, text in TIMES])
    own = table(head, rows_of(columns(client_models)))
    return "\n".join([HEAD, rounds, SECONDS, times, CLIENTS, clients, OWN_MODELS, own, CLUSTER, table(head, cluster())])


def rows_of(named: list[tuple[list[str], str]]) -> list[tuple[str, str]]:
    return [(", ".join(f"`{name}`" for name in names), sentence(text)) for names, text in named]


def columns(module: ModuleType = parquet) -> list[tuple[list[str], str]]:
    """(names, meaning) of every line of the list in the module's docstring. Names after the first one share its
    folder."""
    found: list[tuple[list[str], str]] = []
    for line in (inspect.getdoc(module) or "").splitlines()[2:]:
        if named := NAMES.match(line):
            found.append((in_full(named[1].split(", ")), named[2]))
        elif line.strip() and found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    return found


def in_full(names: list[str]) -> list[str]:
    """["time/data", "wait"] -> ["time/data", "time/wait"], and …_up -> the first name with its end replaced."""
    first = names[0]
    folder, stem = first.rpartition("/")[0], first.rpartition("_")[0]
    return [first, *(stem + n[1:] if n.startswith("…_b") else first_with(first, n, folder) for n in names[1:])]


def first_with(first: str, name: str, folder: str) -> str:
    if name.startswith("…"):
        return f"{first if first.endswith('…') else first.rpartition('_')[0]}{name[1:]}"
    return f"{folder}/{name}" if folder else name


def cluster() -> list[tuple[str, str]]:
    """The columns of a run on several nodes, from the docstring of the method that counts them."""
    text = " ".join((inspect.getdoc(RayPool.facts) or "").split())
    parts = re.split(r"(node/\w+): ", text)[1:]
    return [(f"`{n}`", sentence(words)) for n, words in zip(parts[::2], parts[1::2], strict=True)]
