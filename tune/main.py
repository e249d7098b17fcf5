"""The entry point of the command `fedfleet`. It imports nothing large, so that Ctrl-C works from the beginning."""

from __future__ import annotations

from .keyboard import arm, finish


def main() -> None:
    arm()
    from .cli import main as commands

    finish(commands)
