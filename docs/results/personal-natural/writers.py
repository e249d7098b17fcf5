"""Writes the digits of the 100 most diligent writers of MNIST as a table for the study personal/natural.

    FEDFLEET_DATA=data python docs/results/personal-natural/writers.py writers.parquet

The folder of the data sets has mnist/MNIST/raw and mnist/QMNIST/raw, whose labels name the writers (Yadav and Bottou
2019, arXiv:1905.10498). A row of the table is an image, `image` (784 bytes), with its `label` and its writer, `client`.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedfleet.workloads.data.mnist import Mnist

WRITERS = 100


def main(out: str) -> None:
    rows, _ = Mnist().load()
    writers, counts = np.unique(rows["client"], return_counts=True)
    kept = writers[np.argsort(-counts, kind="stable")[:WRITERS]]
    of_kept = np.isin(rows["client"], kept)
    images = pa.FixedSizeListArray.from_arrays(pa.array(rows["input"][of_kept].reshape(-1)), 784)
    table = pa.table({"image": images, "label": rows["label"][of_kept], "client": rows["client"][of_kept]})
    pq.write_table(table, out)
    print(f"{len(table)} images of {len(kept)} writers, {counts.max()} at most, are in {out}")


if __name__ == "__main__":
    main(sys.argv[1])
