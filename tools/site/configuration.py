"""The page of all configuration keys: type, range, default and meaning come from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from fedfleet.engine.config.conflicts import Conflict
from fedfleet.engine.config.schema import (
    LARGEST_COUNT,
    Adapt,
    AsIf,
    Asynchronous,
    ClientModels,
    Engine,
    Experiment,
    Federation,
    Local,
    Pace,
    Personal,
    Privacy,
    Systems,
    WorkerGroup,
)
from fedfleet.engine.privacy.privacy_plan import MECHANISM_CONFLICTS
from fedfleet.engine.runs.built_conflicts import BUILT_CONFLICTS
from fedfleet.tune.arguments import in_words
from fedfleet.tune.search.plan import SearchSettings
from fedfleet.tune.study.spec import Study

from .text import table

HEAD = """\
# Configuration keys

This page is generated from the schema. An experiment file is YAML with these keys; a key that does not exist is
refused with the nearest valid name. On the command line `a.b=c` overrides a key: the command line has priority over the
file, and the file over the default. The number of a method's argument may be replaced by a
[schedule](../howto/experiments.md#schedules), and any value by a [range](../howto/search.md#ranges) that a search
fills in.
"""
SECTIONS = {
    "federation": "who is trained, how often, and how results are averaged",
    "engine": "how and where the run is computed",
    "evaluate": "when and on which rows the model is evaluated",
    "checkpoint": "when a run can be resumed, and from where",
    "tracking": "where records are written in addition to the folder of the run",
}
GROUPS = """\
## A group of workers

`engine.workers` may be a list of groups of equal workers, see [clusters](../howto/cluster.md#workers). These are the
keys of one entry of the list.
"""
PRIVACY = """\
## The section `privacy`

Client-level differential privacy, see [the guide](../privacy.md). Without this section nothing is clipped or noised.
"""
SYSTEMS = """\
## The section `systems`

The clients' devices in virtual time, see [the guide](../howto/fleets.md). Without this section there is no virtual
clock.
"""
PERSONAL = """\
## The section `personal`

Tensors of the model that stay with each client, or are not trained, see [the guide](../howto/personal.md). Without this
section all tensors are shared.
"""
CLIENT_MODELS = """\
## The section `evaluate.clients`

How clients' own models are evaluated, see [the guide](../howto/personal.md#evaluation).
"""
PACE = """\
## The pace of rounds

`federation.pace` has these keys in a run with rounds, see [the guide to fleets](../howto/fleets.md).
"""
ASYNCHRONOUS = """\
## The pace of an asynchronous run

`federation.pace` has these keys where its `name` is `buffered` or `fedasync`, see
[the guide](../howto/asynchronous.md).
"""
SEARCH = """\
## The section `search`

`fedfleet search` reads this section of an experiment file; `fedfleet run` refuses it.
"""
STUDY = """\
## The study file

`fedfleet study` reads a file with these keys; [the guide to studies](../howto/studies.md) shows a whole file.
"""
CONFLICTS = """\
## What does not go together { #conflicts }

These settings are refused before a run starts, in one sentence with the key, the values and the remedy. `out` is the
folder of the run, and `run` all of its settings together. A plug-in may refuse more.
"""
ALL_CONFLICTS = {
    "": (*Experiment.conflicts, *MECHANISM_CONFLICTS, *BUILT_CONFLICTS),
    "federation.": Federation.conflicts,
    "federation.local.": Local.conflicts,
    "federation.pace.": (*Pace.conflicts, *Asynchronous.conflicts),
    "engine.": Engine.conflicts,
    "privacy.": Privacy.conflicts,
    "privacy.as_if.": AsIf.conflicts,
    "personal.": Personal.conflicts,
    "evaluate.clients.": ClientModels.conflicts,
    "evaluate.clients.adapt.": Adapt.conflicts,
}
"""What stands before the keys of rows -> the rows."""
FILLED_IN = ("name", "notes")
"""Keys of a study that the command line fills in."""


class Key(NamedTuple):
    """One row of the tables. `default`: None if the key is required."""

    name: str
    type: str
    default: Any
    required: bool
    meaning: str


def page() -> str:
    parts = [HEAD, "## Top level\n", rows(key for key in keys(Experiment) if "." not in key.name)]
    for section, title in SECTIONS.items():
        found = [key for key in keys(Experiment) if key.name.startswith(f"{section}.")]
        parts += [f"## `{section}`: {title}\n", rows(found)]
    parts += [
        GROUPS,
        rows(keys(WorkerGroup)),
        PRIVACY,
        rows([*keys(Privacy, "privacy."), *keys(AsIf, "privacy.as_if.")]),
    ]
    parts += [SYSTEMS, rows(keys(Systems, "systems."))]
    parts += [PERSONAL, rows(keys(Personal, "personal."))]
    own = [*keys(ClientModels, "evaluate.clients."), *keys(Adapt, "evaluate.clients.adapt.")]
    parts += [CLIENT_MODELS, rows(own)]
    parts += [PACE, rows(keys(Pace, "federation.pace."))]
    parts += [ASYNCHRONOUS, rows(keys(Asynchronous, "federation.pace."))]
    parts += [SEARCH, rows(keys(SearchSettings, "search."))]
    parts += [STUDY, rows(key for key in keys(Study) if key.name not in FILLED_IN)]
    return "\n".join([*parts, CONFLICTS, conflicts()])


def conflicts() -> str:
    """The table of what does not go together, in the order of the keys."""
    found = [(prefix, each) for prefix, some in ALL_CONFLICTS.items() for each in some]
    shown = sorted(conflict_row(prefix, each) for prefix, each in found)
    return table(("key", "with", "why", "remedy"), shown)


def conflict_row(prefix: str, conflict: Conflict) -> tuple[str, str, str, str]:
    key, other = (f"`{prefix}{each}`" for each in (conflict.key, conflict.other))
    return key, other, conflict.why, conflict.remedy


def rows(found: Iterable[Key]) -> str:
    shown = [(f"`{k.name}`", k.type, "required" if k.required else yaml_of(k.default), k.meaning) for k in found]
    return table(("key", "type and range", "default", "meaning"), shown)


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """All keys of a section and of the sections inside it. Raises ValueError for a key without a description."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys(inner, f"{prefix}{name}.")
            continue
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):  # its keys have a table of their own
            default = None
        yield Key(
            prefix + name,
            ", ".join([in_words(inner), *bounds(field.metadata)]),
            default,
            field.is_required(),
            meaning(field.description or "", prefix + name),
        )


def meaning(words: str, key: str) -> str:
    """The description of a key, with links to the tables of other sections."""
    if not words:
        raise ValueError(f"{key} has no description: write a text below it")
    words = words.replace("see `Pace`", "see [the pace of rounds](#the-pace-of-rounds)")
    asynchronous = "see [its keys](#the-pace-of-an-asynchronous-run)"
    words = words.replace("see `Asynchronous`", asynchronous)
    words = words.replace("see `WorkerGroup`", "see [a group of workers](#a-group-of-workers)")
    return words


def bounds(limits: Iterable[Any]) -> Iterator[str]:
    """The limits of a field in words. The upper limit that all counts have is left out."""
    for limit in limits:
        if (least := getattr(limit, "ge", None)) is not None:
            yield f"{least} or more"
        if (above := getattr(limit, "gt", None)) is not None:
            yield f"more than {above}"
        if (most := getattr(limit, "le", None)) is not None and most != LARGEST_COUNT:
            yield f"{most} at most"
        if (below := getattr(limit, "lt", None)) is not None:
            yield "less than 2^63" if below == 2**63 else f"less than {below}"


def yaml_of(default: Any) -> str:
    """A default as YAML has it; empty if there is none."""
    if default is None or default == "" or default == () or default == {}:
        return "`[]`" if default == () else "`{}`" if default == {} else ""
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default, default=list)}`"
