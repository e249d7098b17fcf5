"""Restores the folder of a run that another machine began, from its copies in `checkpoint.folder`."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from ..errors import ConfigError, first_line
from ..state.checkpoint_store import CheckpointStore, Damaged, Manifest
from ..storage.atomic_write import write
from ..storage.lock import exclusive
from ..storage.object_store import join_url, open_folder, split_url
from ..storage.secrets import redacted
from .run_directory import LAUNCHER, read_run_id
from .saved_files import refuse_other_kind


def bring(url: str, out: Path | None = None) -> Path:
    """Make a run folder that can be resumed, with the configuration and the small files of a run.

    url: the folder with the run's copies, or a folder with the copies of only one run. out: the folder to make. The
    driver reads the checkpoint itself from the copies. Returns the folder.
    """
    url = run_at(url)
    manifest = newest_manifest(url)
    folder = out or Path("runs") / split_url(url)[1]
    small = manifest.get("run_files") or manifest["beside"]  # its name before format 5
    files = {name: text for name, text in small.items() if re.fullmatch(r"[\w-]+\.json", name)}
    with exclusive(folder, LAUNCHER):
        if (folder / "config.yaml").exists():
            if read_run_id(folder) != split_url(url)[1]:
                raise ConfigError(f"--out {folder} holds another run; choose another folder")
            return folder
        refuse_other_kind(folder, "run")
        config = manifest["config"]
        config["checkpoint"]["folder"] = split_url(url)[0]
        for name, text in files.items():
            write(folder / name, text)
        write(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))
    return folder


def run_at(url: str) -> str:
    """The address of the folder with the copies of one run: `url`, or the only such folder in it."""
    try:
        if copies_at(url).rounds():
            return url
        inside = [name for name in open_folder(url).names() if copies_at(join_url(url, name)).rounds()]
    except OSError as error:
        raise ConfigError(
            f"{redacted(url)} cannot be read ({redacted(first_line(error))}); give what checkpoint.folder was, and "
            "credentials in the environment if it needs some"
        ) from None
    if len(inside) == 1:
        return join_url(url, inside[0])
    held = (
        f"several runs, {', '.join(inside)}; name one" if inside else "no checkpoint; give what checkpoint.folder was"
    )
    raise ConfigError(f"{url} holds {held}")


def newest_manifest(url: str) -> Manifest:
    """The manifest of a run's newest sound copy. Raises ConfigError if there is none."""
    try:
        return copies_at(url).newest_manifest()
    except Damaged as wrong:
        raise ConfigError(f"{url} holds {wrong}") from None


def copies_at(url: str) -> CheckpointStore:
    return CheckpointStore(open_folder(url))
