"""Rows of client states that a fork has in common with the run that it is a fork of.

    FORK/state/shared.json     the ends of the ranges of rows that are shared, ascending
    FORK/state/shared-0/…      hard links to files of rows of other runs, which this run only reads
    FORK/state/rows00.bin, …   the fork's own rows, with numbers from the last end on

No state is copied: a link is another name of the same file. The file stays as long as it has a name, so that either
folder may be removed. The rows that the fork needs are never written again by the run that wrote them: while a
checkpoint pins them, because of the pin; after it is removed, because of its mark (`checkpoint.fork_mark`); and if
that run is resumed, because files with links are only extended (`RowTable.first`).

Files on another file system cannot be linked. Then the rows are copied, into the fork's own files at the same places.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .row_files import FILES, SHARED, locate, make_files, make_row_folder, paths, rows_in_files, shared_folder


def shared_ends(folder: str) -> tuple[int, ...]:
    """The ends of the ranges of rows that the run with this folder of rows shares; () for a run that is no fork.

    Raises ConfigError if the file that says so is damaged.
    """
    file = Path(folder) / SHARED
    try:
        ends = json.loads(file.read_text("utf-8"))["ends"]
        if list(map(int, ends)) == sorted(ends):
            return tuple(ends)
        wrong = "the ends must ascend"
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        wrong = str(error)
    raise ConfigError(f"{file} is damaged ({wrong}); make the fork again")


def share_rows(parent: str, fork: str, rows: np.ndarray, width: int, unsafe: str = "") -> str:
    """Give a new fork the rows (c,) of the run that it is a fork of, by links if possible.

    parent, fork: their folders of rows. width: the bytes of a row. unsafe: why the parent might write to these rows, so
    that they must be copied; "" if it will not. Returns why they were copied, "" if they are shared. Raises ConfigError
    if the parent's files are not there, and OSError if the rows cannot be copied.
    """
    found = ranges_of(parent, width)
    if len(rows) and (not found or int(rows.max()) >= found[-1][0]):
        raise ConfigError(f"{parent} does not hold the client states of the checkpoint; put its files back")
    why = unsafe
    if not why:
        try:
            link(found, fork, rows)
        except OSError as error:
            why = error.strerror or str(error)
    if why:
        make_files(fork, int(rows.max(initial=-1)) + 1, width)
        copy(found, fork, rows, width)
    return why


def ranges_of(folder: str, width: int) -> list[tuple[int, list[str]]]:
    """(end, files) of every range of rows of a run, ascending: those that it shares, then its own."""
    ends = shared_ends(folder)
    found = [(end, paths(shared_folder(folder, number))) for number, end in enumerate(ends)]
    own = rows_in_files(folder, width)
    return [*found, (own, paths(folder))] if own > max([0, *ends]) else found


def link(ranges: Sequence[tuple[int, list[str]]], fork: str, rows: np.ndarray) -> None:
    """Link the files of those ranges that have some of the rows. Raises OSError, and leaves no link, if it cannot."""
    make_row_folder(fork)
    made: list[str] = []
    begin = 0
    try:
        for number, (end, files) in enumerate(ranges):
            if ((begin <= rows) & (rows < end)).any():
                folder = shared_folder(fork, number)
                Path(folder).mkdir()
                for source, name in zip(files, paths(folder), strict=True):
                    os.link(source, name)
                    made.append(name)
            begin = end
    except OSError:
        for name in made:
            os.unlink(name)
        for number in range(len(ranges)):
            if os.path.isdir(folder := shared_folder(fork, number)):
                os.rmdir(folder)
        raise
    ends = [end for end, _ in ranges]
    if ends:
        (Path(fork) / SHARED).write_text(json.dumps({"ends": ends}) + "\n", encoding="utf-8")


def copy(ranges: Sequence[tuple[int, list[str]]], fork: str, rows: np.ndarray, width: int) -> None:
    """Copy rows to the same places of the fork's own files."""
    own = [os.open(path, os.O_WRONLY) for path in paths(fork)]
    try:
        begin = 0
        for end, files in ranges:
            for number in range(FILES):
                places = [locate(row)[1] for row in rows.tolist() if begin <= row < end and locate(row)[0] == number]
                if places:
                    with open(files[number], "rb") as source:
                        for place in places:
                            os.pwrite(own[number], os.pread(source.fileno(), width, place * width), place * width)
            begin = end
        for file in own:
            os.fsync(file)
    finally:
        for file in own:
            os.close(file)
