"""A disk without room: the message names the file and says what to do, and the old content of a file remains."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from fedfleet.engine.storage.atomic_write import write
from fedfleet.tune.exit_status import report_errors


def test_the_file_that_does_not_fit_is_named(tmp_path: Path):
    """A limit on the size of files has the same effect as a full disk: the kernel refuses to write further."""
    file = tmp_path / "report.md"
    write(file, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write(file, "new" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(file)
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["report.md"])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "out/report.md"),
            "error: out/report.md: No space left on device; make room, and give the same command again\n",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            "error: a file: Disk quota exceeded; make room, and give the same command again\n",
        ),
    ],
)
def test_what_to_do_is_said(error: OSError, told: str, capsys: pytest.CaptureFixture[str]):
    @report_errors
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 1
    assert capsys.readouterr().err == told
