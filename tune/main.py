"""The command `fedfleet`. Nothing heavy is imported here, so that Ctrl-C is heard from the first moment on."""

from __future__ import annotations

from .keyboard import arm, finish


def main() -> None:
    arm()
    from .cli import main as commands

    finish(commands)
