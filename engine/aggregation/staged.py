"""The messages of a run as one process handles them: what a worker does with them before they are added up.

A worker writes them to rows, or changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...algorithms.aggregation.contract import Aggregator, Mean
from ...algorithms.attacks.contract import Sender
from ...algorithms.contract import Message
from ...workloads import counted
from ...workloads.client_index import ClientIndex
from ..cohorts.samplers import CountedSampler
from ..errors import ConfigError
from ..kernels.vectorised import vectorised
from .message_rows import MessageFiles, Span, Vector, vector_leaves, vectors_of
from .stage_plan import StagePlan, sends

Leaves = Sequence[Tensor]


class StagedMessages:
    """The messages of a run: their vectors, their rows, and what happens to those of c clients.

    These are given by their vectors (`vector_leaves`), with the clients' axis first in every leaf. files: the rows,
    None where messages are added up.
    """

    def __init__(self, plan: StagePlan, sample: Message, folder: str) -> None:
        """sample: a decoded message. folder: of the rows, "" for none."""
        self.plan, self.rule, self.sample = plan, plan.rule, sample
        self.parts = replace(plan.stage, rule=plan.rule)  # of the stage, as passes call them
        self.files = MessageFiles(folder, vector_leaves(sample)) if folder else None

    @cached_property
    def vectors(self) -> list[Vector]:
        """The vectors that the rule acts on."""
        return vectors_of(self.sample, self.rule.vectors, self.plan.buffers)

    @cached_property
    def single(self) -> list[Vector]:
        """The vectors that an attack acts on, each by itself."""
        return vectors_of(self.sample, "each", self.plan.buffers)

    def attacked(self, leaves: Leaves, clients: np.ndarray, round: int) -> Leaves:
        """The messages, those of Byzantine clients replaced by what they send of their own. clients: (c,)."""
        attack = self.plan.stage.attack
        if not sends(attack) or not attack.active(round) or not self.plan.byzantine[clients].any():
            return leaves
        cohort, byzantine = self._cohort(round)
        flat = [leaf.reshape(len(leaf), -1).clone() for leaf in leaves]
        for place in np.flatnonzero(self.plan.byzantine[clients]).tolist():
            for number, vector in enumerate(self.single):
                key = counted.key(self.plan.seed, "attack", round, int(clients[place]), number)
                own = torch.cat([flat[span.leaf][place, span.begin : span.end] for span in vector.spans])
                sent = attack.send(own, Sender(cohort, byzantine, key.to(own.device)))
                for span, part in zip(vector.spans, sent.split([s.length for s in vector.spans]), strict=True):
                    flat[span.leaf][place, span.begin : span.end] = part
        return [new.view(old.shape) for new, old in zip(flat, leaves, strict=True)]

    def _cohort(self, round: int) -> tuple[int, int]:
        """(the number of clients in a round, without those that are left out; how many of them are Byzantine)."""
        seed, federation = self.plan.seed, self.plan.federation
        sampled = np.arange(federation.clients)
        if round:
            sampler = self.plan.sampler
            assert isinstance(sampler, CountedSampler)  # others go with no attack
            sampled = sampler.cohort(seed, round, federation.clients, federation.cohort)
        sampled = sampled[~np.isin(sampled, federation.without)]
        return len(sampled), int(self.plan.byzantine[sampled].sum())

    def norms2(self, leaves: Leaves) -> np.ndarray:
        """(c, V) float64: the squared norms of the vectors, each by itself."""
        flat = [leaf.reshape(len(leaf), -1) for leaf in leaves]
        found = np.zeros((len(flat[0]) if flat else 0, len(self.single)))
        for number, vector in enumerate(self.single):
            for span in vector.spans:
                part = flat[span.leaf][:, span.begin : span.end]
                found[:, number] += torch.linalg.vector_norm(part, dim=1, dtype=torch.float64).square().cpu().numpy()
        return found

    def contributions(self, leaves: Leaves) -> Leaves:
        """What the rule adds up of each message."""
        if isinstance(self.rule, Mean) or not self.rule.adds:
            return leaves
        flat = [leaf.reshape(len(leaf), -1).clone() for leaf in leaves]
        for vector in self.vectors:
            x, follows = (of_spans(flat, spans) for spans in (vector.spans, vector.follows))
            broken = ~(are_finite(x) & are_finite(follows))
            for spans in (vector.spans, vector.follows, vector.statistics):
                if spans:
                    y = of_spans(flat, spans)
                    averaged = self.rule.steps and spans is vector.statistics
                    added = y if averaged else vectorised(self.rule.contribution)(x, y)
                    added = added.masked_fill(broken[:, None], 0.0)
                    for span, part in zip(spans, added.split([span.length for span in spans], dim=1), strict=True):
                        flat[span.leaf][:, span.begin : span.end] = part
        return [new.view(old.shape) for new, old in zip(flat, leaves, strict=True)]


def of_spans(flat: Leaves, spans: Sequence[Span]) -> Tensor:
    """(c, n): the numbers of some spans, one span after another. flat: the leaves of c messages, (c, …) each."""
    parts = [flat[span.leaf][:, span.begin : span.end] for span in spans]
    return torch.cat(parts, dim=1) if parts else flat[0][:, :0]


def are_finite(x: Tensor) -> Tensor:
    """(c,) bool: whether the squared norm of each row of x, (c, n), is finite."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square().isfinite()


def trusted_examples(rule: Aggregator, seed: int, train: Mapping[str, Tensor], clients: int) -> ClientIndex:
    """The rows of the server's trusted examples, as those of a client with the number `clients`. seed: of the run.

    One of them is of the first class with the probability that the rule gives, else of one of the other classes, all
    of which are equally likely. Within a class they are drawn without replacement, as long as it has rows.
    """
    count, bias = int(getattr(rule, "root", 100)), float(getattr(rule, "bias", 0.1))
    if "label" not in train or train["label"].ndim != 1:
        raise ConfigError(
            f"aggregate: {rule.called} draws trusted examples by class, and the workload has no labels; choose another "
            "rule"
        )
    labels = train["label"].numpy()
    generator = counted.numpy_generator(seed, "trusted")
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
