"""What several files of tests need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedfleet.tune.executor import fork_server
from fedfleet.tune.executor.fork_server import ForkServer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one. No folder of data sets is known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDFLEET_DATA", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def one_fork_server() -> Iterator[None]:
    """The searches and studies that a file's tests call in this process get their processes from one fork server, which
    imports torch once: the next one takes it where the one before would have ended it."""
    end = ForkServer.close

    def close(server: ForkServer, seconds: float = 0.0) -> None:
        if server.alive and fork_server._begun in (None, server):
            fork_server._begun = server
        else:
            end(server, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkServer, "close", close)
        yield
    fork_server.not_needed()
