"""A folder that several machines can reach: a path, or a URL that pyarrow opens (file:///…, s3://bucket/…, gs://…).

Credentials come from the environment or the machine (AWS_ACCESS_KEY_ID and the like). A URL is written to
configurations, logs and trackers, so a URL that holds a secret is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError, first_line
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


class Folder:
    """Reads and writes files by name, all relative to the folder. Every failure raises OSError.

    The constructor raises ConfigError for an address that pyarrow cannot open.
    """

    def __init__(self, url: str) -> None:
        import pyarrow as pa
        from pyarrow.fs import FileSystem

        self.url = url
        try:
            address = without_secrets(url) if "://" in url else str(Path(url).absolute())
            self.files, self.path = FileSystem.from_uri(address)
        except (ValueError, pa.ArrowException) as error:
            raise ConfigError(
                f"checkpoint.folder: {first_line(error)}; give a path, file:///… or s3://bucket/…"
            ) from None
        except OSError as error:
            raise ConfigError(f"checkpoint.folder={url}: {first_line(error)}") from None

    def full_path(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def write(self, name: str, data: bytes) -> None:
        """Write a file; folders in its name are created."""
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
        """The sorted names of the files and folders in a folder; empty if there is no such folder."""
        from pyarrow.fs import FileSelector

        return sorted(info.base_name for info in self._found(FileSelector(self.full_path(name), allow_not_found=True)))

    def _found(self, selector: Any) -> Any:
        return self.files.get_file_info(selector)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content. Does nothing if there is neither."""
        from pyarrow.fs import FileType

        kind = self._found(self.full_path(name)).type
        if kind == FileType.Directory:
            self.files.delete_dir(self.full_path(name))
        elif kind == FileType.File:
            self.files.delete_file(self.full_path(name))
