"""What several files of tests need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, which does not exist yet. No folder of data sets is known."""
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDFLEET_DATA", raising=False)
    return tmp_path / "cache"
