"""The entry point of the command `fedfleet`. It imports nothing large, so that Ctrl-C works from the beginning."""

from __future__ import annotations

import sys

from .keyboard import arm, finish

WINDOWS = "error: FedFleet runs on Linux and macOS, got Windows; install WSL 2 and work in its Linux"


def main() -> None:
    if sys.platform == "win32":
        print(WINDOWS, file=sys.stderr)
        sys.exit(2)
    arm()
    from .cli import main as commands

    finish(commands)
