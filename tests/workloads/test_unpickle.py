"""Pickles of arrays: sound ones are read as pickle reads them, and all others only raise an error."""

from __future__ import annotations

import pickle
import pickletools
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfleet.workloads.files.unpickle import arrays

WHERE = Path("batch")
BYTES = np.arange(6, dtype=np.uint8).reshape(2, 3)
BATCHES: dict[str, dict[Any, Any]] = {
    "bytes": {"data": BYTES, "labels": [1, 2], "filenames": ["a.png", "b.png"]},
    "names of bytes": {b"data": BYTES, b"labels": [1, 2], b"filenames": [b"a.png"] * 2},
    "columns first": {"data": np.asfortranarray(BYTES)},
    "other numbers": {code: np.arange(4).astype(code) for code in ("i8", "<i4", ">i2", "f4", ">f8", "b1", "u4")},
    "no rows": {"data": np.zeros((0, 3072), np.uint8), "labels": []},
    "constants": {"none": None, "yes": True, "no": False, "half": 0.5, "large": 2**70, "pair": (1, (2, 3, 4, 5))},
}


def flagged(flags: int) -> bytes:
    """The state of a type with chosen flags: 0x3f says that its numbers are references to objects."""
    return b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK" + bytes([flags]) + b"tb"


def python_2(kind: bytes = b"u1", kind_state: bytes = flagged(0)) -> bytes:
    """A batch as Python 2 and NumPy wrote the published ones: names and pixels are byte strings."""
    return b"".join(
        [
            b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85",
            b"U\x01b\x87Rq\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U",
            bytes([len(kind)]) + kind + b"K\x00K\x01\x87Rq\x07" + kind_state,
            b"\x89T\x06\x00\x00\x00\x00\xf1\x02\x03\x04\xfftbU\x06labelsq\x08]q\x09(K\x01K\x02eu.",
        ]
    )


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_what_is_sound_is_read_as_pickle_reads_it(name, protocol):
    data = pickle.dumps(BATCHES[name], protocol)
    found = arrays(data, WHERE)
    assert list(found) == [k.decode() if isinstance(k, bytes) else k for k in BATCHES[name]]
    for value, expected in zip(found.values(), BATCHES[name].values(), strict=True):
        if isinstance(expected, np.ndarray):
            assert value.dtype == expected.dtype
            assert np.array_equal(value, expected)
        elif name != "names of bytes":
            assert value == expected


def test_a_batch_of_python_2():
    found = arrays(python_2(), WHERE)
    assert found["data"].tolist() == [[0, 241, 2], [3, 4, 255]]
    assert found["data"].dtype == np.uint8
    assert found["labels"] == [1, 2]


# --- attacks ----------------------------------------------------------------------------------------------------------
def deep(depth: int, last: bytes) -> bytes:
    return b"\x80\x02}(K\x01" + b"\x85" * depth + last


ATTACKS = {
    "a list of types": python_2(b"i8,O"),
    "objects": python_2(b"O"),
    "a type and more": python_2(b"u1\n"),
    "a record": python_2(b"u1,u1"),
    "flags of objects": python_2(kind_state=flagged(0x3F)),
    "one flag": python_2(kind_state=flagged(1)),
    "fields": python_2(kind_state=b"(K\x03U\x01|NU\x01a\x85}U\x01aK\x01sJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"),
    "a state of a function": b"\x80\x02c_codecs\nencode\n}U\x01aK\x01sb.",
    "a state of a class": b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.",
    "an array made by its class": b"\x80\x02cnumpy\nndarray\nK\x04\x85U\x02i8\x86\x81.",
    "an array called by its class": b"\x80\x02cnumpy\nndarray\nK\x04\x85\x85R.",
    "more bytes than there are": python_2().replace(b"(K\x01K\x02K\x03\x86", b"(K\x01M\xff\xffM\xff\xff\x86"),
    "a negative side": python_2().replace(b"(K\x01K\x02K\x03\x86", b"(K\x01J\xfe\xff\xff\xffJ\xfd\xff\xff\xff\x86"),
    "a key too deep for its hash": deep(300_000, b"K\x01u."),
    "a value too deep to show": deep(300_000, b"cnumpy\ndtype\n\x93."),
    "bytes of 2^62": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
    "text of 2^62": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",
    "code": b"\x80\x02cposix\nsystem\nU\x04exit\x85R.",
    "code by its parts": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04exit\x85R.",
    "an extension": b"\x80\x02\x82\x01.",
    "something outside": b"\x80\x02U\x01aQ.",
    "an instance": b"\x80\x02(iposix\nsystem\n.",
    "a key that is a list": b"\x80\x02}]K\x01s.",
    "an array that never got its numbers": b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    b"K\x00\x85U\x01b\x87Rs.",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_one_sentence(name):
    with pytest.raises(ValueError, match="batch must be a whole file") as caught:
        arrays(ATTACKS[name], WHERE)
    assert len(str(caught.value)) < 400


LIMITED = """
import pathlib, resource
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
from tests.workloads.test_unpickle import ATTACKS
from fedfleet.workloads.files.unpickle import arrays
assert arrays(b"\\x80\\x02}r\\xff\\xff\\xff\\xff.", pathlib.Path("a memo that pickle takes 64 GiB for")) == {}
for name, data in ATTACKS.items():
    print(name, flush=True)
    try:
        arrays(data, pathlib.Path("batch"))
    except ValueError:
        continue
    raise SystemExit(1)
print("all")
"""


def test_no_attack_ends_the_process():
    """They run in another process with at most 4 GiB, because a crash would end the process of the test."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", LIMITED], cwd=root, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all"), (done.stdout, done.stderr)


def test_the_same_bytes_over_and_over_take_no_more_memory_than_the_file_has():
    begin = b"\x80\x02}(U\x01bT" + struct.pack("<i", 10**6) + bytes(10**6) + b"q\x01"
    again = b"U\x01xc_codecs\nencode\nh\x01\x85R"
    with pytest.raises(ValueError, match="the same bytes over and over"):
        arrays(begin + again * 1000 + b"u.", WHERE)


# --- any bytes at all -------------------------------------------------------------------------------------------------
def broken(seed: int) -> bytes:
    """A sound batch with some bytes changed, moved or removed, or instructions in random order."""
    draw = random.Random(seed)
    data = bytearray(draw.choice([python_2(), *(pickle.dumps(b, p) for b in BATCHES.values() for p in (2, 4))]))
    if draw.random() < 0.2:
        codes = [code.code.encode("latin1") for code in pickletools.opcodes]
        pieces = [*codes, b"K\x01", b"U\x02i8", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"h\x01", b"q\x01", b"\x85"]
        return b"\x80\x02" + b"".join(draw.choices(pieces, k=draw.randrange(40))) + b"."
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(data))
        what = draw.random()
        if what < 0.6:
            data[at] = draw.randrange(256)
        elif what < 0.8:
            del data[at : at + draw.randrange(1, 5)]
        else:
            begin = draw.randrange(len(data))
            data[at:at] = data[begin : begin + draw.randrange(1, 20)]
    return bytes(data)


FUZZ = """
import pathlib, sys
import numpy as np
from tests.workloads.test_unpickle import broken
from fedfleet.workloads.files.unpickle import arrays
sound = 0
for seed in range(6000):
    try:
        found = arrays(broken(seed), pathlib.Path("batch"))
    except ValueError as error:
        assert "must be a whole file" in str(error), (seed, error)
        continue
    sound += 1
    for value in found.values():
        if isinstance(value, np.ndarray):
            assert value.dtype.kind in "uifb" and not value.dtype.hasobject and value.flags.owndata, seed
            value.sum(), value.copy()
print(sound)
"""


def test_any_bytes_give_plain_numbers_or_a_sentence():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", FUZZ], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert int(done.stdout) > 100
