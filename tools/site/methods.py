"""The pages of the methods: from the table, the recipes and the heads of their files."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

from fedfleet.engine.config.registry import Registry, resolve, signature, summary

from . import equations, measured
from .annotations import in_words
from .text import sentence, table

COMMON = {
    "rule": "the local optimiser",
    "server_lr": "the server's step size",
    "over": "`cohort`: the mean over the sampled clients; `all`: other clients count as not having moved",
    "carry": "what becomes of the rule's state after a round: `reset`, `keep` (with the client) or `average`",
    "nesterov": "Nesterov's form of the momentum",
    "betas": "weights of the old first and second moment",
    "beta2": "weight of the old second moment",
    "tau": "added to the root of the second moment",
    "bias_correction": "Adam's, for the moments' start at zero",
    "epsilon": "added to the denominator of the step",
    "norm": "whose ball the step is along: spectral, euclidean or max",
    "ball": "how matrices are orthogonalised; five classic Newton-Schulz iterations unless given",
    "scale": "factor of a matrix's step by its shape: none, jordan, moonlight or spectral",
    "aux": "names, * and ? as in file names, of matrices that the vectors' rule is for: embeddings, an output head",
    "local": "training on the clients: plain, scaffold or prox",
    "mu": "weight of prox, 0.1 unless given; only with local: prox",
    "compression": "makes what is sent smaller: one of `fedfleet list compressions`",
    "evaluate": "last: the model; last_two: the mean of the last two",
}
"""What an argument means where a recipe does not say, or refers to another."""

HEAD = """\
# Methods

This page is generated from the table of methods and from their files. A method is chosen by its name,
`method: {name: scaffold, start: gradient}`; wherever an argument is a number, a
[schedule](../../howto/experiments.md#schedules) may stand for it.

**State**, **down** and **up** count trees of the size of the model, per client and round: multiplied by the bytes of a
model, they are what a client keeps between rounds, receives and sends with the default arguments. "ratio" is an
argument of the method, and "places" are packed indices of entries. **Gradients** are counted per local step.
"""

NOTATION = """\
`x` is the model of the server, `y` the local iterate, `K` the number of local steps, `S` the clients of a round among
`N`, and `g` the gradient on the batch of the step. A quantity with index `i` belongs to client i. Names of several
letters are arguments of the method.
"""


def index() -> str:
    """The page that lists all methods, with their costs."""
    methods = Registry().tables["METHODS"]
    head = ("method", "what it is", "paper", "state", "down", "up", "gradients")
    rows = [
        (f"[`{name}`]({name}.md)", sentence(summary(e)), e.paper, e.state, e.down, e.up, e.gradients)
        for name, e in methods.items()
    ]
    return "\n".join([HEAD, table(head, rows), measured.section(methods)])


def page(name: str) -> str:
    """The page of one method. Its head also says what the method is, so that the site's search finds it."""
    tables = Registry().tables
    entry = tables["METHODS"][name]
    module = inspect.getmodule(resolve(entry))
    paragraphs = (inspect.getdoc(module) or "").split("\n\n")
    parts = [
        f"---\ntitle: {name}\n---\n",
        f"# `{name}`: {summary(entry)} {{ #{name} }}\n\n{paragraphs[0]}\n",
        f"{citation(module)}\n",
        f"## Equations\n\n{NOTATION}\n" + equations_of(paragraphs) + shared_equations(paragraphs[1]),
        f"## Arguments\n\n{arguments(entry, tables)}",
        "## Costs\n\n" + table(("state", "down", "up", "gradients per step"), [entry[3:]]) + f"\n{COSTS}",
        measured.of_one_method(name),
        f"## Notes and departures from the paper\n\n{notes(paragraphs)}",
        f"The code is in `{file_of(module)}`.\n",
    ]
    return "\n".join(part for part in parts if part)


COSTS = "Trees of the size of the model, per client and round; see [the list of methods](index.md).\n"


def file_of(module: Any) -> str:
    return "/".join(module.__name__.split(".")[1:]) + ".py"


def equations_of(paragraphs: Sequence[str]) -> str:
    """The indented paragraphs of a file's head as displays, each with the paragraph that introduces it."""
    parts = []
    for before, paragraph in pairwise(paragraphs):
        if paragraph.startswith("    "):
            introduced = before.endswith((":", ",")) and not before.startswith("    ")
            parts += [prose(before), ""] if introduced else []
            parts += [equations.display(paragraph), ""]
    return "\n".join(parts)


def shared_equations(citation: str) -> str:
    """The equations of the part that the second paragraph of a file's head refers to, as `parts/….py`; or nothing."""
    shared = re.search(r"`parts/(\w+)\.py`", citation)
    if not shared:
        return ""
    module = importlib.import_module(f"fedfleet.algorithms.parts.{shared[1]}")
    return equations_of((inspect.getdoc(module) or "").split("\n\n"))


def notes(paragraphs: Sequence[str]) -> str:
    """The paragraphs of a file's head after the citation that are neither equations nor their introductions."""
    kept = []
    for paragraph, following in pairwise([*paragraphs[2:], ""]):
        introduces = following.startswith("    ") and paragraph.endswith((":", ","))
        if not paragraph.startswith("    ") and not introduces:
            kept += [prose(paragraph), ""]
    return "\n".join(kept)


def prose(paragraph: str) -> str:
    """A paragraph of a docstring as Markdown: stars and angle brackets stand for themselves, lists stay lists."""
    pieces = re.split(r"(`[^`]*`)", paragraph)
    escaped = "".join(p if p.startswith("`") else re.sub(r"([*<_])", r"\\\1", p) for p in pieces)
    return re.sub(r"^([^\n:]+:)\n- ", r"\1\n\n- ", escaped)


def arguments(entry: Any, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of a method's arguments."""
    target = resolve(entry)
    said, (hints, parameters) = sentences(target), signature(target)
    rows = []
    for key, parameter in parameters.items():
        default = shown(parameter.default, tables) if parameter.default is not parameter.empty else ""
        own = said.get(key, "")
        meaning = COMMON.get(key, own) if not own or own.startswith("see ") else own
        rows.append((f"`{key}`", in_words(hints[key]), f"`{default}`" if default else "", sentence(meaning)))
    return table(("argument", "type", "default", "meaning"), rows)


def citation(module: Any) -> str:
    """The second paragraph of a method's file."""
    paragraphs = (inspect.getdoc(module) or "").split("\n\n")
    return " ".join(paragraphs[1].split()) if len(paragraphs) > 1 else ""


def sentences(target: Any) -> dict[str, str]:
    """What a recipe's docstring says of each argument: "lr, mu: a sentence; start: another"."""
    known, said, last = signature(target)[1], {}, ()
    for part in " ".join((inspect.getdoc(target) or "").split()).split(";"):
        names, colon, text = part.partition(":")
        keys = tuple(name.strip().split(" ")[-1] for name in names.split(","))
        if colon and all(key in known for key in keys):
            last, part = keys, text
            said.update(dict.fromkeys(keys, ""))
        for key in last:
            said[key] = "; ".join(filter(None, [said[key], part.strip().rstrip(".").replace("|", "\\|")]))
    return said


def shown(value: Any, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A default as an experiment file has it."""
    if is_dataclass(value) and hasattr(value, "table"):
        entries = tables[getattr(value, "table")]  # noqa: B009 any part's
        made = f":{type(value).__name__}"
        name = next((n for n, entry in entries.items() if str(getattr(entry, "build", "")).endswith(made)), None)
        if name is None:
            return recipe(value, entries)
        arguments = [f"{f.name}: {shown(getattr(value, f.name), tables)}" for f in fields(value)]
        return f"{{{', '.join([f'name: {name}', *arguments])}}}"
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def recipe(value: Any, entries: Mapping[str, Any]) -> str:
    """The name under which the table makes this part when no argument is given."""
    for name, entry in entries.items():
        target = resolve(entry)
        if all(p.default is not p.empty for p in signature(target)[1].values()) and target() == value:
            return name
    raise ValueError(f"no entry of the table makes {value!r} by default; give the recipe's default a name there")
