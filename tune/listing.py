"""Tables of what can be chosen by name. Listing the project's own entries does not import torch."""

from __future__ import annotations

from ..engine.config.registry import Registry, find_plugin, summary

COSTS = ("paper", "state", "down", "up", "gradients")
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
        rows = [(n, summary(e), *(str(getattr(e, c, "?")) for c in COSTS)) for n, e in entries.items()]
        note = "state, down and up are counted in trees of the model's size, per client and round"
        return columns([HEADS, *rows]) + "\n" + note
    return columns([("name", "what it is"), *((n, summary(e)) for n, e in entries.items())])


def headline(text: str) -> str:
    """The first line of a file, without the comment sign."""
    return text.split("\n")[0].lstrip("# ")


def columns(rows: list[tuple[str, ...]]) -> str:
    """The rows as lines of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
