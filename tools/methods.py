"""docs/methods.md, from the table: `python -m tools.methods > docs/methods.md`."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fedfleet.engine.config.registry import Registry, resolve, signature, summary

from . import measured

COMMON = {
    "rule": "the local optimiser",
    "server_lr": "the server's step size",
    "over": "cohort: the mean over those sampled; all: those who were not sampled count as not having moved",
    "carry": "the rule's state after a round: reset, keep (with the client) or average",
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

Made by `python -m tools.methods > docs/methods.md` from the table in `algorithms/table.py` and the recipes; not
edited by hand. Arguments are keys of an experiment, `method: {name: scaffold, start: gradient}`; wherever one is a
number, a schedule may stand for it. State, down and up are counted in trees of the model's size, per client and round:
times the bytes of a model, they are what a client keeps, receives and sends with the defaults below. Each file's head
has the equations, what is uncertain about them, and every departure from the paper.
"""


def page() -> str:
    tables = Registry().tables
    sections = [section(name, entry, tables) for name, entry in tables["METHODS"].items()]
    return "\n".join([HEAD, *sections, measured.section(tables["METHODS"])])


def section(name: str, entry: Any, tables: Mapping[str, Mapping[str, Any]]) -> str:
    target = resolve(entry)
    module = inspect.getmodule(target)
    file = "/".join(module.__name__.split(".")[1:]) + ".py" if module else ""
    costs = f"state {entry.state}, down {entry.down}, up {entry.up}, gradients a step {entry.gradients}"
    lines = [f"## `{name}`", "", f"{summary(entry)[0].upper()}{summary(entry)[1:]}. {entry.paper}; `{file}`.", ""]
    lines += [*textwrap.wrap(citation(module), 120, break_on_hyphens=False, break_long_words=False), ""]
    lines += [f"Costs: {costs}.", "", "| argument | default | meaning |", "| --- | --- | --- |"]
    said, (_, parameters) = sentences(target), signature(target)
    for key, parameter in parameters.items():
        default = shown(parameter.default, tables) if parameter.default is not parameter.empty else ""
        default = f"`{default}`" if default else ""
        own = said.get(key, "")
        meaning = COMMON.get(key, own) if not own or own.startswith("see ") else own
        lines.append(f"| `{key}` | {default} | {meaning} |".replace("|  |", "| |"))
    return "\n".join([*lines, ""])


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


if __name__ == "__main__":
    print(page(), end="")
