"""A folder that several machines reach: a path, or a URL that pyarrow opens (file:///…, s3://bucket/…, gs://…).

Credentials are those of the environment or the machine (AWS_ACCESS_KEY_ID and the like). A URL goes into
configurations, logs and trackers, so one that holds a secret is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .secrets import without_secrets


def below(url: str, name: str) -> str:
    """The address of what is in a folder; a query stays at the end."""
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def above(url: str) -> tuple[str, str]:
    """(the folder that it is in, its name)."""
    base, mark, query = url.partition("?")
    folder, _, name = base.rstrip("/").rpartition("/")
    return f"{folder}{mark}{query}", name


class Folder:
    """Files by name; whatever fails raises OSError. ConfigError for an address that cannot be one."""

    def __init__(self, url: str) -> None:
        import pyarrow as pa
        from pyarrow.fs import FileSystem

        self.url = url
        try:
            address = without_secrets(url) if "://" in url else str(Path(url).absolute())
            self.files, self.path = FileSystem.from_uri(address)
        except (ValueError, pa.ArrowException) as error:
            said = str(error).splitlines()[0]
            raise ConfigError(f"checkpoint.folder: {said}; give a path, file:///… or s3://bucket/…") from None
        except OSError as error:
            raise ConfigError(f"checkpoint.folder={url}: {first_line(error)}") from None

    def at(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def write(self, name: str, data: bytes) -> None:
        try:
            out = self.files.open_output_stream(self.at(name))
        except FileNotFoundError:  # a file system with real folders
            self.files.create_dir(self.at(name).rpartition("/")[0], recursive=True)
            out = self.files.open_output_stream(self.at(name))
        with out:
            out.write(data)

    def read(self, name: str) -> bytes:
        with self.files.open_input_file(self.at(name)) as file:
            return file.read()

    def names(self, name: str = "") -> list[str]:
        """Of files and folders in one, sorted; none where there is no such folder."""
        from pyarrow.fs import FileSelector

        return sorted(info.base_name for info in self._found(FileSelector(self.at(name), allow_not_found=True)))

    def _found(self, selector: Any) -> Any:
        return self.files.get_file_info(selector)

    def remove(self, name: str) -> None:
        """A file or a folder with all that is in it; nothing where there is none."""
        from pyarrow.fs import FileType

        kind = self._found(self.at(name)).type
        if kind == FileType.Directory:
            self.files.delete_dir(self.at(name))
        elif kind == FileType.File:
            self.files.delete_file(self.at(name))


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
