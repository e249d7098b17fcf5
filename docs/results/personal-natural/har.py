"""Writes UCI HAR (Anguita et al. 2013) as a table for the study personal/har.

    python docs/results/personal-natural/har.py "UCI HAR Dataset" har.parquet

The folder is that of the archive, with train/Inertial Signals and test/Inertial Signals. A row of the table is a
window of 128 samples of nine signals, `input` (9 x 128), with the activity, `label` (0 to 5), and the person, `client`.
The last quarter of the windows of each person and activity, in the order of time, is marked in `held_out`. Windows
overlap by half, so the last one before that quarter is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SIGNALS = [f"{what}_{axis}" for what in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]


def part(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(windows (n, 9, 128), labels (n,), persons (n,)) of the part train or test, in the order of the files."""
    signals = [np.loadtxt(folder / name / "Inertial Signals" / f"{one}_{name}.txt", ndmin=2) for one in SIGNALS]
    labels = np.loadtxt(folder / name / f"y_{name}.txt", dtype=np.int64, ndmin=1) - 1
    return np.stack(signals, 1).astype(np.float32), labels, np.loadtxt(folder / name / f"subject_{name}.txt", dtype=int)


def marks(labels: np.ndarray, persons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out), (n,) bool each."""
    kept, held = np.ones(len(labels), bool), np.zeros(len(labels), bool)
    for person in np.unique(persons):
        for label in np.unique(labels):
            rows = np.flatnonzero((persons == person) & (labels == label))
            first = len(rows) - len(rows) // 4  # of the held out ones
            held[rows[first:]] = True
            kept[rows[first - 1 : first]] = first == len(rows)  # the window at the cut
    return kept, held


def main(folder: str, out: str) -> None:
    parts = [part(Path(folder), name) for name in ("train", "test")]
    windows, labels, persons = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    kept, held = marks(labels, persons)
    inputs = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(windows[kept])).storage
    columns = {"input": inputs, "label": labels[kept], "client": persons[kept], "held_out": held[kept]}
    pq.write_table(pa.table(columns), out)
    print(f"{kept.sum()} windows of {len(np.unique(persons))} persons, {held.sum()} of them held out, are in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
