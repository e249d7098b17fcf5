"""Tables of what can be chosen by name. Listing the project's own entries does not import torch."""

from __future__ import annotations

import json
from typing import Any

from ..engine.config.registry import Registry, find_plugin, summary

COSTS = ("paper", "state", "down", "up", "gradients")
UNKNOWN = "–"
HEADS = ("name", "what it is", "paper", "state/client", "down", "up", "gradients/step")


def listing(kind: str, table: str, plugins: tuple[str, ...] = ()) -> str:
    """The entries of a kind, such as methods. table: of the registry, "" for files; plugins: to load as well."""
    if kind in ("experiments", "studies"):
        from .files import shipped as experiments
        from .study.spec import shipped as studies

        shipped = experiments if kind == "experiments" else studies
        return columns([("name", "first line"), *((n, headline(p.read_text())) for n, p in shipped().items())])
    entries = Registry(find_plugin(name) for name in plugins).tables[table]
    if kind == "methods":
        rows = [(n, summary(e), *costs(n, e, plugins)) for n, e in entries.items()]
        note = "state, down and up are counted in trees of the model's size, per client and round"
        if any(UNKNOWN in row for row in rows):
            note += f"; {UNKNOWN}: a plug-in does not say it"
        return columns([HEADS, *rows]) + "\n" + note
    return columns([("name", "what it is"), *((n, summary(e)) for n, e in entries.items())])


def costs(name: str, entry: Any, plugins: tuple[str, ...]) -> tuple[str, ...]:
    """The columns COSTS of a method. Those that the entry of a plug-in does not have are counted for the model of
    handwritten digits, or are UNKNOWN."""
    said = {column: str(getattr(entry, column, UNKNOWN)) for column in COSTS}
    if UNKNOWN in said.values():
        counted = trees(name, plugins)
        said = {column: text if text != UNKNOWN else counted.get(column, UNKNOWN) for column, text in said.items()}
    return tuple(said.values())


def trees(name: str, plugins: tuple[str, ...]) -> dict[str, str]:
    """`state`, `down` and `up` of a method with its default arguments; {} if it cannot be built without arguments."""
    from ..engine.errors import FedFleetError
    from ..engine.method_form.state_spec import StateSpec
    from ..engine.run_spec import RunSpec
    from ..engine.user_code import plugin_errors
    from .files import load

    run_spec = RunSpec.of("list", load("digits", (f"method={name}", f"plugins={json.dumps(plugins)}")))
    try:
        with plugin_errors("method"):
            counted = StateSpec(run_spec.method(), run_spec.checked_initial_model())
    except FedFleetError:
        return {}
    sizes = {"state": counted.kept, "down": counted.down, "up": counted.up}
    return {column: f"{size / counted.model:.3g}" for column, size in sizes.items()}


def headline(text: str) -> str:
    """The first line of a file, without the comment sign."""
    return text.split("\n")[0].lstrip("# ")


def columns(rows: list[tuple[str, ...]]) -> str:
    """The rows as lines of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
