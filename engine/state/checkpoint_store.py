"""The checkpoints in a folder: what a run needs to continue to the same bits.

    blobs/DIGEST        bytes, named by their SHA-256: the server, the table, the records of 1000 rounds, …
    round-000050.json   the manifest of the checkpoint of round 50: names and digests of its blobs, and its own digest

The checkpoints in a run's folder, their copies elsewhere and those of forks are all stored so. Blobs are written first,
and the manifest makes a checkpoint of them; a blob that several checkpoints name is there once. What no manifest names
is removed. A checkpoint that does not match its digests is damaged, and the one before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from ..config.earlier import today
from ..errors import first_line
from ..records.best_model import FILE as BEST
from ..records.best_model import Best
from ..records.history import History
from ..storage.object_store import Folder
from ..storage.sha256 import sha256, sha256_of_json
from ..storage.tensor_bytes import tensor_bytes

FORMAT = 5
"""The version of the format of a checkpoint."""
OLD_FORMATS = (3, 4)
"""Copies, and the checkpoints of a run's folder, before both had one format; they can be read."""
SEGMENT = 1000
"""The number of rounds whose records are in one blob, so that complete ones are written once."""
NAME = re.compile(r"round-([0-9]{6,})(\.json)?")
BLOBS, OLD_MANIFEST, OLD_PACKS = "blobs", "manifest.json", "rows"
Manifest = dict[str, Any]
T = TypeVar("T")


class Snapshot(NamedTuple):
    """The driver's state after round `round`, for N clients."""

    round: int
    server: list[Tensor]  # the leaves of the states of server, stage and planner, and of versions that are in use
    row: np.ndarray  # (N,) the row of each client's state, -1 for none
    digest: np.ndarray  # (N, 16) the digest of each client's row
    visits: np.ndarray  # (N,) how often each client has taken part
    last_visit: np.ndarray  # (N,) the last round in which it has, 0 for none, -1 for one that is not known
    records: History  # of all rounds so far
    config: dict[str, Any]
    plan: dict[str, Any]
    """The execution plan: what the bits depend on besides the configuration (clients in a block, and kernels)."""
    frozen: Mapping[str, Any] = MappingProxyType({})
    """Names and digest of the model's frozen tensors, see `frozen_facts` of the run; their numbers are not in it."""
    best: Best | None = None
    """The best model so far, without frozen tensors, if the run keeps it."""


class Damaged(Exception):
    """A checkpoint that cannot be used; the text says what is wrong with it."""


class CheckpointStore:
    """Writes, reads and removes the checkpoints in a folder.

    `manifests`: those of the sound checkpoints that have been read or written here, by round.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.manifests: dict[int, Manifest] = {}

    def rounds(self) -> list[int]:
        """The rounds of which there are checkpoints, sound or not, ascending."""
        return sorted({int(found[1]) for found in map(NAME.fullmatch, self.folder.names()) if found})

    # --- writing ------------------------------------------------------------------------------------------------------
    def put(self, data: bytes) -> str:
        """Store bytes, unless a checkpoint has them already. Returns their digest."""
        digest = sha256(data)
        if digest not in self._named():
            self.folder.write(f"{BLOBS}/{digest}", data)
        return digest

    def write(self, snapshot: Snapshot, **more: Any) -> None:
        """Write a checkpoint. more: further entries of its manifest; `packs` are [digest, number of rows] of blobs."""
        manifest = {
            "format": FORMAT,
            "round": snapshot.round,
            "config": snapshot.config,
            "plan": snapshot.plan,
            "columns": list(snapshot.records.columns),
            **({"frozen": dict(snapshot.frozen)} if snapshot.frozen else {}),
            **more,
            "files": {name: self.put(data) for name, data in contents(snapshot)},
        }
        sealed = {**manifest, "digest": sha256_of_json(manifest)}
        self.folder.write(f"{name_of(snapshot.round)}.json", json.dumps(sealed, indent=1).encode())
        self.manifests[snapshot.round] = manifest

    def keep(self, numbers: Iterable[int]) -> None:
        """Remove all checkpoints but the sound ones of these rounds, their manifests first, then the blobs that no
        manifest names."""
        self.manifests = {number: self.manifests[number] for number in numbers}
        for name in map(name_of, set(self.rounds()) - self.manifests.keys()):
            for file in (f"{name}.json", f"{name}/{OLD_MANIFEST}", name):
                self.folder.remove(file)
        for name in set(self.folder.names(BLOBS)) - self._named():
            self.folder.remove(f"{BLOBS}/{name}")
        if all(manifest["format"] == FORMAT for manifest in self.manifests.values()):
            self.folder.remove(OLD_PACKS)

    def _named(self) -> set[str]:
        """The digests of the blobs that manifests name."""
        named: set[str] = set()
        for manifest in self.manifests.values():
            named.update(manifest["files"].values(), (digest for digest, _ in manifest.get("packs", [])))
        return named

    # --- reading ------------------------------------------------------------------------------------------------------
    def read(self, number: int) -> Snapshot:
        """The checkpoint of a round. Raises Damaged."""
        self.manifests.pop(number, None)  # a blob that turns out to be damaged will be written again
        manifest = self.manifest(number)
        with damage_of("the checkpoint"):
            files = {name: self.blob(manifest, name, digest) for name, digest in manifest["files"].items()}
            snapshot = snapshot_of(manifest, files)
        self.manifests[number] = manifest
        return snapshot

    def blob(self, manifest: Manifest, name: str, digest: str) -> bytes:
        """The content of a blob that a manifest names. name: of the file or the pack. Raises Damaged."""
        with damage_of(name):
            data = self.folder.read(path_of(manifest, name, digest))
        if sha256(data) != digest:
            raise Damaged(f"{name} does not match its digest")
        return data

    def manifest(self, number: int) -> Manifest:
        """The manifest of the checkpoint of a round, without its own digest. Raises Damaged."""
        with damage_of("the manifest"):
            manifest = json.loads(self._manifest_text(number))
            if not isinstance(manifest, dict):
                raise Damaged(f"the manifest holds a {type(manifest).__name__}, not an object")
            sealed = manifest.pop("digest", None)
            if sealed != sha256_of_json(manifest) or manifest["round"] != number:
                raise Damaged("the manifest does not match its digest")
            if manifest["format"] not in (*OLD_FORMATS, FORMAT):
                raise Damaged(f"its format is {manifest['format']}, use the version of FedFleet that wrote it")
        return manifest

    def _manifest_text(self, number: int) -> bytes:
        try:
            return self.folder.read(f"{name_of(number)}.json")
        except FileNotFoundError:
            return self.folder.read(f"{name_of(number)}/{OLD_MANIFEST}")

    def sound(
        self, read: Callable[[int], T], damaged: Callable[[int, Damaged], object] = lambda number, why: None
    ) -> Iterator[T]:
        """What `read` makes of the checkpoint of each round, the newest first. Those for which it raises Damaged are
        left out, and `damaged` is called with them."""
        for number in reversed(self.rounds()):
            try:
                found = read(number)
            except Damaged as why:
                damaged(number, why)
                continue
            yield found

    def newest_manifest(self) -> Manifest:
        """The manifest of the newest checkpoint that has a sound one. Raises Damaged."""
        wrong = dict[int, Damaged]()
        for manifest in self.sound(self.manifest, wrong.__setitem__):
            return manifest
        whys = (f" ({name_of(number)}: {why})" for number, why in wrong.items())
        raise Damaged(f"no sound checkpoint{''.join(whys)}")


@contextmanager
def damage_of(name: str) -> Iterator[None]:
    """Turn any error that shows that `name` is damaged into Damaged."""
    try:
        yield
    except Damaged:
        raise
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except Exception as error:  # damage shows itself in any kind of error
        raise Damaged(f"{name}: {type(error).__name__}: {first_line(error)}") from error


# --- names and contents -----------------------------------------------------------------------------------------------
def name_of(number: int) -> str:
    """The name of the checkpoint of a round."""
    return f"round-{number:06d}"


def path_of(manifest: Manifest, name: str, digest: str) -> str:
    """Where a blob lies. In old formats, files lay under their names beside `round-000050/manifest.json`, and packs in
    `rows/`."""
    if manifest["format"] == FORMAT:
        return f"{BLOBS}/{digest}"
    return f"{name_of(manifest['round'])}/{name}" if name in manifest["files"] else f"{OLD_PACKS}/{digest}.safetensors"


def segment(begin: int) -> str:
    """The name of the records of round `begin` and the following ones."""
    return f"rounds-{begin // SEGMENT:03d}.safetensors"


def contents(snapshot: Snapshot) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of what a manifest names."""
    yield "server.safetensors", tensor_bytes({f"leaf{i}": leaf for i, leaf in enumerate(snapshot.server)})
    table = {"row": snapshot.row, "digest": snapshot.digest, "visits": snapshot.visits}
    table["last_visit"] = snapshot.last_visit
    yield "table.safetensors", tensor_bytes(table)
    if snapshot.best is not None:
        yield BEST, snapshot.best.saved()
    for begin in range(0, len(snapshot.records), SEGMENT):
        yield segment(begin), tensor_bytes(snapshot.records.packed(begin, begin + SEGMENT))


def snapshot_of(manifest: Manifest, files: dict[str, bytes]) -> Snapshot:
    """The inverse of `contents`. files: by name."""
    from safetensors.numpy import load as load_arrays
    from safetensors.torch import load

    server, table = load(files["server.safetensors"]), load_arrays(files["table.safetensors"])
    rounds = manifest["round"]
    return Snapshot(
        rounds,
        [server[f"leaf{i}"] for i in range(len(server))],
        table["row"] if "row" in table else row_of_old_copy(table, manifest["packs"]),
        table["digest"],
        table["visits"],
        table["last_visit"] if "last_visit" in table else np.where(table["visits"] > 0, -1, 0),  # of an earlier version
        History.of(manifest["columns"], [load_arrays(files[segment(at)]) for at in range(0, rounds, SEGMENT)]),
        today(manifest["config"]),
        manifest["plan"],
        manifest.get("frozen", {}),
        Best.loaded(files[BEST]) if BEST in files else None,
    )


def row_of_old_copy(table: dict[str, np.ndarray], packs: list[list[Any]]) -> np.ndarray:
    """(N,) the rows in a copy of format 3, whose table has the pack and the place in the pack of each."""
    begins = np.cumsum([0, *(count for _, count in packs)])
    return np.where(table["pack"] >= 0, begins[table["pack"]] + table["place"], -1)
