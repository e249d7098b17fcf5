"""What a worker does with the messages of clients before they are added up: it writes them to rows, or changes them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ...algorithms.aggregation.contract import Mean
from ...algorithms.contract import Message
from ...workloads import counted
from ...workloads.base import ClientIndex
from ..config.run_spec import RunSpec
from ..errors import ConfigError
from .message_rows import MessageRows
from .planning import planned_rule
from .vectors import vector_leaves, vectors_of, with_vector_leaves


def is_plain_mean(run_spec: RunSpec, folder: str) -> bool:
    """Whether messages are added up as they are. folder: of the rows, "" where no messages are collected, also where
    the steps of a run that collects them are only measured."""
    return not folder and (isinstance(rule := planned_rule(run_spec), Mean) or not rule.adds)


class StagedMessages:
    """The messages of some clients, (c, ...) in every leaf. files: the rows, None where messages are added up."""

    def __init__(self, run_spec: RunSpec, sample: Message, folder: str) -> None:
        """sample: a decoded message. folder: of the rows, "" for none."""
        self.rule = planned_rule(run_spec)
        self.vectors = vectors_of(sample, self.rule.vectors, len(run_spec.buffers))
        self.files = MessageRows(folder, vector_leaves(sample)) if folder else None

    def norms2(self, message: Message) -> np.ndarray:
        """(c, V) float64: the squared norms of the vectors."""
        flat = [leaf.reshape(len(leaf), -1) for leaf in vector_leaves(message)]
        found = np.zeros((len(flat[0]) if flat else 0, len(self.vectors)))
        for number, vector in enumerate(self.vectors):
            for span in vector.spans:
                part = flat[span.leaf][:, span.begin : span.end]
                found[:, number] += torch.linalg.vector_norm(part, dim=1, dtype=torch.float64).square().cpu().numpy()
        return found

    def contributions(self, message: Message) -> Message:
        """What the rule adds up of each message."""
        leaves = vector_leaves(message)
        flat = [leaf.reshape(len(leaf), -1).clone() for leaf in leaves]
        for vector in self.vectors:
            x = torch.cat([flat[span.leaf][:, span.begin : span.end] for span in vector.spans], dim=1)
            for spans in (vector.spans, vector.follows):
                if spans:
                    y = torch.cat([flat[span.leaf][:, span.begin : span.end] for span in spans], dim=1)
                    added = vmap(self.rule.contribution)(x, y)
                    for span, part in zip(spans, added.split([span.length for span in spans], dim=1), strict=True):
                        flat[span.leaf][:, span.begin : span.end] = part
        return with_vector_leaves(message, [new.view(old.shape) for new, old in zip(flat, leaves, strict=True)])


def trusted_examples(run_spec: RunSpec, train: Mapping[str, Tensor], clients: int) -> ClientIndex:
    """The rows of the server's trusted examples, as those of a client with the number `clients`.

    One of them is of the first class with the probability that the rule gives, else of one of the other classes, all
    of which are equally likely. Within a class they are drawn without replacement, as long as it has rows.
    """
    rule = run_spec.stage.rule
    count, bias = int(getattr(rule, "root", 100)), float(getattr(rule, "bias", 0.1))
    if "label" not in train or train["label"].ndim != 1:
        raise ConfigError(f"aggregate: {rule.called} draws trusted examples by class, and the workload has no labels")
    labels = train["label"].numpy()
    generator = counted.numpy_generator(run_spec.experiment.seed, "trusted")
    classes = np.unique(labels)
    others = max(1, len(classes) - 1)
    shares = np.array([bias if place == 0 else (1 - bias) / others for place in range(len(classes))])
    wanted = generator.multinomial(count, shares / shares.sum())
    chosen = []
    for label, number in zip(classes, wanted, strict=True):
        rows = np.flatnonzero(labels == label)
        chosen.append(generator.choice(rows, number, replace=number > len(rows)))
    rows = np.concatenate(chosen).astype(np.int64)
    offsets = np.zeros(clients + 2, dtype=np.int64)
    offsets[-1] = len(rows)
    return ClientIndex(offsets, rows)
