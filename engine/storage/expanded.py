"""Paths as users write them: a ~ at the beginning stands for a home folder, also where no shell has replaced it, as in
YAML and in `--out=~/runs`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ConfigError

HOME_IN_URL = re.compile(r"(?<=^sqlite:///)~[^/]*|(?<=^file:///)~[^/]*")


def expanded(path: str | Path) -> Path:
    """The path with its home folder. Raises ConfigError if there is no such user, or if the name cannot be written into
    files and messages because it is no text in UTF-8."""
    if not is_unicode(str(path)):
        raise ConfigError(f"{str(path)!a}: names of files and folders must be valid UTF-8; rename it")
    return Path(_home(str(path)))


def expanded_address(address: str) -> str:
    """The same for a path or a URL: sqlite:///~/a.db and file:///~/a are in the home folder, too."""
    return _home(HOME_IN_URL.sub(lambda home: _home(home[0]), address))


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded in UTF-8. Bytes of the command line that are no UTF-8 become lone surrogates, which
    cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _home(text: str) -> str:
    found = os.path.expanduser(text)
    if found.startswith("~"):
        user = found.partition("/")[0]
        raise ConfigError(f"{text}: {user} stands for the home folder of a user who is not known here; write ./{text}")
    return found
