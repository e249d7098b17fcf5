"""How different the clients are that a partition makes: their numbers of rows, and the labels of their rows."""

from __future__ import annotations

import numpy as np

from ...workloads.client_index import ClientIndex


def measures(client_index: ClientIndex, label: np.ndarray | None) -> dict[str, np.ndarray]:
    """Name -> (N,), a number for each client. label: (n,), of all training rows; without integers only rows are
    counted.

    `labels` is the number of different labels, `label_entropy` the entropy of their shares in bits, and
    `total_variation` the distance between the shares of a client and those of all clients' rows, from 0 to 1.
    """
    sizes = client_index.sizes
    found: dict[str, np.ndarray] = {"rows": sizes}
    if label is None or label.ndim != 1 or not np.issubdtype(label.dtype, np.integer):
        return found
    classes, own = np.unique(label[client_index.rows], return_inverse=True)
    whole = np.bincount(own) / len(own)
    clients = len(sizes)
    # one number for each pair of a client and a class that occurs: the table of all pairs may be large
    pairs, counts = np.unique(np.repeat(np.arange(clients), sizes) * len(classes) + own, return_counts=True)
    client, of_class = pairs // len(classes), pairs % len(classes)
    law = counts / sizes[client]
    found["labels"] = np.bincount(client, minlength=clients)
    found["label_entropy"] = np.bincount(client, -law * np.log2(law), clients) + 0.0
    # the sum of max(p - q, 0): classes that a client lacks add nothing to it
    found["total_variation"] = np.bincount(client, np.maximum(law - whole[of_class], 0), clients)
    return found


def spread(values: np.ndarray) -> dict[str, float]:
    """The least, the median, the mean and the largest of a measure over all clients."""
    return {
        "min": float(values.min()),
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "max": float(values.max()),
    }
