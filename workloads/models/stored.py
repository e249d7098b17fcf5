"""Tensors in the files *.safetensors of a folder: what is there, by their headers alone, and one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files.roots import damaged
from .narrow import is_narrower

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"

CODES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The format's code of a type of floats -> torch's name."""


class Place(NamedTuple):
    """Where a tensor is, and what its header says. `name`: in the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # by the format's code, such as F32 and BF16


def headers(folder: Path) -> dict[str, Place]:
    """name -> where each tensor of the model in a folder is. No numbers are read. Raises ValueError for files that
    cannot be read."""
    return {name: place for file in files_in(folder) for name, place in headers_of(file).items()}


def headers_of(file: Path) -> dict[str, Place]:
    """The same for one file."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Place] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 it is no mapping
                part: Any = opened.get_slice(name)
                found[name] = Place(file, name, tuple(part.get_shape()), part.get_dtype())
    except (OSError, SafetensorError) as error:
        raise damaged(file, error) from error
    return found


def files_in(folder: Path) -> list[Path]:
    """The files of the model in a folder: one, or those that an index names. Raises ValueError for neither."""
    if (folder / ONE).is_file():
        return [folder / ONE]
    try:
        names = sorted({*json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"folder: {folder} must have {ONE} or a readable {INDEX}, got {type(error).__name__}"
        ) from error
    return [folder / name for name in names]


class StoredTensors(Mapping[str, Tensor]):
    """name -> tensor, each of which is read when it is asked for, so that no more than one of them need be in memory.

    places: name -> where it is. types: those that floats are converted to, one after the other. keep_narrow: whether
    those stay as they are whose type in the file is narrower.
    """

    def __init__(
        self, places: Mapping[str, Place], types: tuple[torch.dtype, ...] = (), keep_narrow: bool = False
    ) -> None:
        self.places, self.types, self.keep_narrow = places, types, keep_narrow

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        place = self.places[name]
        # The file is closed after each tensor, for its pages count as memory of the process as long as it is open.
        with safe_open(place.file, framework="pt") as opened:
            value = opened.get_tensor(place.name).clone()
        for dtype in self.types if value.is_floating_point() else ():
            value = value if self.keep_narrow and is_narrower(value.dtype, dtype) else value.to(dtype)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def outline(self) -> list[Any]:
        """What the tensors are besides the contents of `files`, as plain data."""
        places = [[name, str(place.file.resolve()), place.name] for name, place in self.places.items()]
        return [places, [str(dtype) for dtype in self.types], self.keep_narrow]

    @property
    def files(self) -> set[Path]:
        return {place.file for place in self.places.values()}

    @property
    def types_in_files(self) -> dict[str, torch.dtype]:
        """name -> the type in the file, of floats."""
        return {name: getattr(torch, CODES[place.dtype]) for name, place in self.places.items() if place.dtype in CODES}

    def some(self, names: tuple[str, ...]) -> StoredTensors:
        """Those with these names."""
        return StoredTensors({name: self.places[name] for name in names}, self.types, self.keep_narrow)

    def to(self, dtype: torch.dtype) -> StoredTensors:
        """The same in another type."""
        return StoredTensors(self.places, (*self.types, dtype), self.keep_narrow)

    def as_in_files(self, widest: torch.dtype) -> StoredTensors:
        """The numbers of the files, in the types that they have there, or in the widest one."""
        return StoredTensors(self.places, (widest,), keep_narrow=True)
