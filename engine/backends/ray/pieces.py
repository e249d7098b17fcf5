"""Arguments and results of Ray's calls that travel with the call itself, cut into pieces.

Ray sends a value of up to 100 KiB with the call. It keeps a larger one in the shared memory of a node, from where the
other nodes fetch it: several messages between Ray's processes, which take longer than a round's other messages. A
model of a few megabytes is quicker in pieces of the call. Larger values are left to Ray's shared memory.
"""

from __future__ import annotations

import pickle
from typing import Any

import ray

PIECE = 90 * 1024
"""Bytes of a piece. Ray's limit, `max_direct_call_object_size`, is 100 KiB."""
MOST = 4 * 2**20
"""Bytes of the largest value that is cut into pieces. Ray sends at most 10 MiB with one call."""


def as_arguments(value: Any) -> tuple[Any, ...]:
    """The arguments of a remote method that calls `from_arguments` with them: pieces, or one reference."""
    pieces = cut(value, MOST // PIECE)
    return tuple(pieces) if pieces is not None else (ray.put(value),)


def from_arguments(arguments: tuple[Any, ...]) -> Any:
    """The value that `as_arguments` was given. Ray has replaced a reference by its value."""
    return joined(arguments) if arguments and isinstance(arguments[0], bytes) else arguments[0]


def cut(value: Any, most: int) -> list[bytes] | None:
    """The value in at most so many pieces; None if it is larger."""
    whole = pickle.dumps(value, protocol=5)
    if len(whole) > most * PIECE:
        return None
    return [whole[begin : begin + PIECE] for begin in range(0, len(whole), PIECE)]


def joined(pieces: Any) -> Any:
    """The value that was cut into these pieces, by a process of the same run."""
    return pickle.loads(b"".join(pieces))


def pieces_for(size: int) -> int:
    """How many pieces a value of this many bytes is cut into; 0 if it is too large for pieces."""
    return -(-size // PIECE) if size <= MOST else 0
