"""Files that are whole or not there."""

from pathlib import Path


def write(path: Path, text: str) -> None:
    """All of it or, if the process is killed, what was there before."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    beside.replace(path)
