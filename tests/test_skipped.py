"""What the end of the tests' output says of tests that were skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_output_ends_with_how_many_were_skipped_for_which_reason(tmp_path: Path):
    """As `make test` prints it, which runs tests in other processes."""
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-k", "real_set or data_root"]
    (tmp_path / "test_here.py").write_text(
        "import pytest\nfrom tests.conftest import data_root, real_set\n\n"
        "@pytest.mark.parametrize('number', range(3))\ndef test_real_set(number, real_set):\n    real_set('absent')\n\n"
        "def test_data_root(data_root):\n    pass\n\n"
        "@pytest.mark.skip(reason='not now')\ndef test_skipped_data_root():\n    pass\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"FEDFLEET_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
    options = ["-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, *options, str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    *_, many, one, last = done.stdout.splitlines()
    assert many == f"3 skipped: absent is not in {tmp_path}", done.stdout
    assert one == "1 skipped: not now"
    assert last.startswith("1 passed, 4 skipped in ")
