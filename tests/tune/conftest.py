"""What several files of tests need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one. No folder of data sets is known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDFLEET_DATA", raising=False)
    return tmp_path
