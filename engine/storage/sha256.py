"""SHA-256 digests as hexadecimal text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def sha256(content: str | bytes | Iterable[bytes | memoryview]) -> str:
    """64 hexadecimal digits: of a text in UTF-8, of bytes, or of pieces one after the other."""
    if isinstance(content, str):
        content = content.encode()
    sha = hashlib.sha256()
    for piece in (content,) if isinstance(content, bytes) else content:
        sha.update(piece)
    return sha.hexdigest()


def sha256_of_json(value: Any) -> str:
    """The digest of a value as JSON with sorted keys: equal values have equal digests."""
    return sha256(json.dumps(value, sort_keys=True))


def sha256_of_file(path: Path) -> str:
    """The digest of a file's content, read in pieces of 1 MiB."""
    with path.open("rb") as file:
        return sha256(iter(lambda: file.read(1 << 20), b""))


def sha256_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The digest of the names, types, shapes and numbers of tensors, in the order of names."""
    from torch import uint8

    def pieces() -> Iterable[bytes | memoryview]:
        for name in sorted(tensors):
            tensor = tensors[name]
            yield f"{name}\0{tensor.dtype} {tuple(tensor.shape)}\0".encode()
            yield tensor.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().tobytes()

    return sha256(pieces())
