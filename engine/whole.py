"""Files that are whole or not there."""

from pathlib import Path


def beside(path: Path) -> Path:
    """Where `write` puts what is not whole yet."""
    return path.with_name(f".{path.name}")


def write(path: Path, text: str) -> None:
    """All of it or, if the process is killed, what was there before."""
    beside(path).write_text(text, encoding="utf-8")
    beside(path).replace(path)
