"""Where a run comes from: the user, the program, and the commit of the user's own repository."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Iterable
from pathlib import Path

from ...engine.config.registry import Plugin
from ...engine.runs.environment import git, own_commit
from ...engine.storage.secrets import redacted


def origin(plugins: Iterable[Plugin] = ()) -> dict[str, str]:
    """The tags under which MLflow shows the user, the program and the commit, and the tag `commit`.

    The commit is that of the repository that holds the first plug-in file, else of the current folder. If neither lies
    in a repository, there is none; `fedfleet.commit`, that of this package's sources, never takes its place.
    """
    files = [Path(plugin.path).parent for plugin in plugins if plugin.source is not None]
    found = next(filter(None, map(repository, [*files, Path.cwd()])), {})
    tags = {
        "mlflow.user": user(),
        "mlflow.source.name": Path(sys.argv[0]).name or "python",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": found.get("commit", ""),
        "mlflow.source.git.branch": found.get("branch", ""),
        "mlflow.source.git.dirty": found.get("dirty", ""),
        "mlflow.source.git.repoURL": found.get("url", ""),
        "commit": found.get("commit", ""),
        "fedfleet.commit": own_commit(),
    }
    return {name: value for name, value in tags.items() if value}


def repository(folder: Path) -> dict[str, str]:
    """`commit`, `branch`, `url` and `dirty` ("true" or "false") of the git repository that holds a folder; {} if there
    is none."""
    commit = git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    return {
        "commit": commit,
        "branch": git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "url": redacted(git(folder, "remote", "get-url", "origin")),
        "dirty": "true" if git(folder, "status", "--porcelain", "--untracked-files=no") else "false",
    }


def user() -> str:
    """The name of the user, "" if the system knows none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
