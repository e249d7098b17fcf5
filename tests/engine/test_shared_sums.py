"""Sums that a worker writes into files in memory, and the driver adds where they lie."""

import gc
import os
import resource

import numpy as np
import pytest

from fedfleet.engine.backends.ray.shared_sums import FILE_BYTES, FILES, FilesOfWorker, OwnFiles
from fedfleet.engine.reduction.tree import PartialSum, TreeNode


def sums(seed: int) -> list[PartialSum]:
    """Of two nodes, with an array of each length, type and number of dimensions that makes a difference."""
    rng = np.random.default_rng(seed)
    leaves = [rng.normal(size=(3, 5)), np.array(rng.normal()), np.zeros((0, 4)), rng.normal(size=7).astype(np.float32)]
    return [PartialSum(TreeNode(0, 2), leaves), PartialSum(TreeNode(1, 0), [3 * leaf for leaf in leaves])]


@pytest.fixture
def files() -> tuple[OwnFiles, FilesOfWorker]:
    own = OwnFiles()
    return own, FilesOfWorker(os.getpid(), own.files)


def same(found: list[PartialSum], expected: list[PartialSum]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.at == other.at
        for a, b in zip(one.leaves, other.leaves, strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.tobytes() == b.tobytes()


def test_sums_arrive_as_they_were_written(files):
    own, theirs = files
    for number in range(FILES):
        places = own.write(number, sums(number))
        assert places is not None
        same(theirs.read(number, places), sums(number))


def test_a_file_is_free_when_none_of_its_arrays_is_in_use(files):
    own, theirs = files
    taken = [theirs.take() for _ in range(FILES)]
    assert taken == list(range(FILES))
    assert theirs.take() is None
    found = theirs.read(2, own.write(2, sums(2)))
    row = found[0].leaves[0][1]
    del found
    gc.collect()
    assert theirs.take() is None  # a view of one of its arrays is in use
    assert row.tolist() == sums(2)[0].leaves[0][1].tolist()
    del row
    gc.collect()
    assert theirs.take() == 2


def test_the_driver_cannot_write_into_sums(files):
    own, theirs = files
    leaf = theirs.read(0, own.write(0, sums(0)))[0].leaves[0]
    assert not leaf.flags.writeable
    assert not leaf.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        leaf += 1


def test_what_is_too_large_or_nothing_comes_with_the_reply(files):
    own, _ = files
    large = np.broadcast_to(np.zeros(1), FILE_BYTES // 8 + 1)
    assert own.write(0, [PartialSum(TreeNode(0, 0), [large])]) is None
    assert own.write(0, []) is None


def test_there_are_no_files_where_a_limit_forbids_them():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES - 1, hard))
    try:
        own = OwnFiles()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert FilesOfWorker(os.getpid(), own.files).take() is None


def test_there_are_no_files_of_a_process_that_is_not_here():
    assert FilesOfWorker(2**22 + 1, [3]).take() is None
