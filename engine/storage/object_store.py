"""A folder of files that are complete or absent: of this machine (a path, file:///…), or one that several machines
reach (s3://bucket/…, gs://…, whatever pyarrow opens).

Credentials come from the environment or the machine (AWS_ACCESS_KEY_ID and the like). A URL is written to
configurations, logs and trackers, so a URL that holds a secret is refused.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..errors import ConfigError, first_line
from .atomic_write import write
from .plain_files import open_plain
from .secrets import without_secrets


def join_url(url: str, name: str) -> str:
    """The address of the entry `name` in a folder. A query stays at the end of the URL."""
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def split_url(url: str) -> tuple[str, str]:
    """The inverse of `join_url`: (the address of the folder, the name)."""
    base, mark, query = url.partition("?")
    folder, _, name = base.rstrip("/").rpartition("/")
    return f"{folder}{mark}{query}", name


class LocalFolder:
    """Reads and writes files by name, all relative to the folder. Links are not followed. Every failure raises OSError,
    but for files that cannot be removed, which stay."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, data: bytes) -> None:
        """Write a file and have it on the disk; folders in its name are created."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        write(self.path / name, data, on_disk=True)

    def read(self, name: str) -> bytes:
        with os.fdopen(open_plain(self.path / name, os.O_RDONLY), "rb") as file:
            return file.read()

    def names(self, name: str = "") -> list[str]:
        """The sorted names of the files and folders in a folder; empty if there is no such folder."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.path / name))
        return []

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content. Does nothing if there is neither."""
        path = self.path / name
        with suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


class RemoteFolder:
    """The same for a URL, by pyarrow. Every failure raises OSError."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an address that pyarrow cannot open."""
        from pyarrow import ArrowException, fs

        self.fs: Any = fs
        try:
            self.files, self.path = fs.FileSystem.from_uri(without_secrets(url))
        except (ValueError, ArrowException) as error:
            raise ConfigError(
                f"checkpoint.folder: {first_line(error)}; give a path, file:///… or s3://bucket/…"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"checkpoint.folder={url}: {first_line(error)}; choose another folder, or make this one available"
            ) from None

    def full_path(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def write(self, name: str, data: bytes) -> None:
        try:
            out = self.files.open_output_stream(self.full_path(name))
        except FileNotFoundError:  # this file system has real folders
            self.files.create_dir(self.full_path(name).rpartition("/")[0], recursive=True)
            out = self.files.open_output_stream(self.full_path(name))
        with out:
            out.write(data)

    def read(self, name: str) -> bytes:
        with self.files.open_input_file(self.full_path(name)) as file:
            return file.read()

    def names(self, name: str = "") -> list[str]:
        everything = self.fs.FileSelector(self.full_path(name), allow_not_found=True)
        return sorted(info.base_name for info in self._found(everything))

    def _found(self, selector: Any) -> Any:
        return self.files.get_file_info(selector)

    def remove(self, name: str) -> None:
        kind = self._found(self.full_path(name)).type
        if kind == self.fs.FileType.Directory:
            self.files.delete_dir(self.full_path(name))
        elif kind == self.fs.FileType.File:
            self.files.delete_file(self.full_path(name))


Folder = LocalFolder | RemoteFolder


def open_folder(address: str) -> Folder:
    """The folder at a path or a URL. Raises ConfigError if the URL holds a secret, or if pyarrow cannot open it."""
    if "://" not in address:
        return LocalFolder(Path(address).absolute())
    local = address.startswith("file://")
    return LocalFolder(Path(url2pathname(urlsplit(address).path))) if local else RemoteFolder(address)
