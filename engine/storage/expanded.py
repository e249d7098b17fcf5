"""Paths as users write them, whether files can be created there, and the folder of what is kept for later commands.

A ~ at the beginning stands for a home folder, also where no shell has replaced it, as in YAML and in `--out=~/runs`.
"""

from __future__ import annotations

import os
import re
import tempfile
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


def cache_folder() -> Path:
    """$FEDFLEET_CACHE, else $XDG_CACHE_HOME/fedfleet, else ~/.cache/fedfleet."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("FEDFLEET_CACHE") or f"{cache}/fedfleet").expanduser()


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


def check_folder(key: str, path: str | Path) -> None:
    """Raise ConfigError unless files can be created in this folder, which may not exist yet.

    Nothing is left behind. `key`: the configuration key that the message names.
    """
    try:
        folder = Path(path).expanduser().absolute()
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.TemporaryDirectory(prefix=".fedfleet-", dir=existing) as trial:
            # Creates the same names below a writable folder, so that a name that is too long is found here.
            (Path(trial) / folder.relative_to(existing)).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{key}: no folder can be made here ({reason}), got {str(path)!r}; choose another") from error
