"""The rule of aggregation on the messages that a round has collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...algorithms.aggregation.contract import Aggregator, Mean
from ...algorithms.aggregation.messages import Answer, Messages, product
from ...algorithms.contract import Message
from ..errors import MethodFailed, TooFewMessages
from ..user_code import plugin_errors
from .collected import Collected, StageState
from .passes import StoredRows, Work, columns, weighted
from .vectors import grouped, shaped, spans_of, vector_leaves, with_vector_leaves


class Aggregated(NamedTuple):
    """The result of the stage in a round. columns: for the record. notes: sentences for the log."""

    mean: Message
    state: StageState
    columns: dict[str, float]
    notes: tuple[str, ...] = ()


def is_pairwise(rule: Aggregator) -> bool:
    """Whether the rule, or what stands before it, compares messages in pairs."""
    return rule.pairwise or any(part.pairwise for part in rule.before)


def answer_of(rule: Aggregator, x: Messages, cohort: int) -> Answer:
    """The answer of a rule, with what stands before it. cohort: the number of clients that every round should have."""
    f = x.f
    for part in rule.before:
        own = part.faults(f)
        check_count(part.called, x, own, part.fewest(own), cohort)
        with plugin_errors(f"round {x.round}: {part.called} raised", MethodFailed):
            x = part.apply(replace(x, f=own))
    x = replace(x, f=f)
    check_count(rule.called, x, f, rule.fewest(f), cohort)
    if why := rule.refuses(x.count, f):
        raise TooFewMessages(f"round {x.round}: {why}")
    with plugin_errors(f"round {x.round}: {rule.called} raised", MethodFailed):
        return rule.aggregate(x)


def check_count(called: str, x: Messages, f: int, fewest: int, cohort: int) -> None:
    """Raise TooFewMessages unless a part of the stage accepts so few messages."""
    if x.count < fewest:
        raise TooFewMessages(
            f"round {x.round}: {x.count} of {cohort} messages are left, and {called} with f={f} needs {fewest} or "
            "more; see engine.on_failure"
        )


class Defence:
    """The rule of one round."""

    def __init__(self, collected: Collected, rule: Aggregator, state: StageState) -> None:
        """rule: for a round of this size."""
        self.collected, self.rule, self.state, self.cohort = collected, rule, state, collected.cohort
        self.vectors = collected.vectors(rule.vectors)
        self.norms2, sound = grouped(self.cohort.norms2, collected.vectors("each"), self.vectors)
        self.sound = sound | isinstance(rule, Mean)  # (S, V): all other messages are left out
        extra = [collected.extra_row] if rule.extra else []
        rows = [np.array([*self.cohort.rows[sound], *extra], dtype=np.int64) for sound in self.sound.T]
        self.passes = collected.passes(self.vectors, rows)

    def run(self) -> Aggregated:
        """The rule's answer for all vectors."""
        if is_pairwise(self.rule):
            self.passes.grams()
        answers = [self._answer(number, self._weights(number)) for number in range(len(self.vectors))]
        weights = None if answers[0].weights is None else answers[0].stored_weights()
        leaves, apart = self._computed(answers, weights)
        state = self.state._replace(rule=tuple(answer.state for answer in answers))
        if state.last:
            state = state._replace(last=spans_of(self.vectors, [leaf.detach().cpu().reshape(-1) for leaf in leaves]))
        record = self._columns(apart, weights)
        record |= {f"robust/{name}": value for name, value in answers[0].columns.items()}
        notes = tuple(answer.note for answer in answers if answer.note)
        return Aggregated(with_vector_leaves(self.collected.sample, leaves), state, record, notes[:1])

    @property
    def honest(self) -> np.ndarray:
        """(S,) bool: which of the messages of the first vector are honest."""
        return ~self.cohort.byzantine[self.sound[:, 0]]

    # --- what the rule gets -------------------------------------------------------------------------------------------
    def _weights(self, number: int) -> np.ndarray:
        """(S,) the client weights of a vector's messages."""
        weights = self.cohort.weights[self.sound[:, number]]
        return weights if self.vectors[number].weighted else np.ones(len(weights))

    def _answer(self, number: int, weights: np.ndarray) -> Answer:
        """The rule's answer for one vector."""
        sound, byzantine = self.sound[:, number], self.cohort.byzantine
        f = max(0, self.collected.faults(len(byzantine), int(byzantine.sum())) - int((~sound).sum()))
        norms2, extra = self.norms2[sound, number], 1 if self.rule.extra else 0
        about, most = self.collected.about(self.vectors[number]), self.rule.most_places(self.vectors[number].length)
        stored = StoredRows(norms2=norms2, passes=self.passes, number=number, extra=extra, most_places=most)
        x = Messages(stored=stored, **about, weights=weights, f=f, state=self.state.rule[number])
        return answer_of(self.rule, x, self.collected.full_cohort)

    # --- what becomes of its answer -----------------------------------------------------------------------------------
    def _computed(self, answers: Sequence[Answer], weights: np.ndarray | None) -> tuple[list[Tensor], np.ndarray]:
        """(the leaves of the message that takes the place of the mean, (2,) |F - mean|^2 and |mean|^2 of the first
        vector over the honest messages). weights: of the messages in the first answer, if it is a sum."""
        mean, gram = self.honest / max(1, self.honest.sum()), self.passes.known_grams
        in_gram = gram is not None and weights is not None  # then the comparison needs no look at the messages
        work = {n: self._work(n, answer, None if n or in_gram else mean) for n, answer in enumerate(answers)}
        samples = vector_leaves(self.collected.sample)
        flat = [np.zeros(sample.numel()) for sample in samples]
        apart = self.passes.answers("columns" if self.rule.by == "columns" else "weighted sum", work, flat)[0]
        if gram is not None and weights is not None:
            own, honest = (filled(each, len(gram[0])) for each in (weights, mean))
            pairs = [(each, product(gram[0], each)) for each in (own - honest, honest)]
            apart = np.array([max(0.0, float(product(*pair))) for pair in pairs])
        return shaped([torch.from_numpy(values) for values in flat], samples), apart

    def _work(self, number: int, answer: Answer, mean: np.ndarray | None) -> Work:
        """What workers compute of the pieces of one vector. mean: (S,), the weights of the mean with which the answer
        is compared, or None."""
        rows, statistics = self.passes.rows[number], self._statistics(number, answer)
        if answer.weights is None:
            rows, x = rows[: self.sound[:, number].sum()], answer.messages
            return partial(
                columns, rows=rows, matrix=x.matrix, f=x.f, scale=answer.scale, statistics=statistics, mean=mean
            )
        weights, plain = self._weights(number), None
        if self.vectors[number].plain and (weights != weights[:1]).any():
            plain = filled(self._answer(number, np.ones(len(weights))).stored_weights(), len(rows))
        return partial(
            weighted,
            rows=rows,
            weights=filled(answer.stored_weights(), len(rows)),
            plain=plain,
            statistics=None if statistics is None else filled(statistics, len(rows)),
            mean=None if mean is None else filled(mean, len(rows)),
        )

    def _statistics(self, number: int, answer: Answer) -> np.ndarray | None:
        """(S,) the weights of the messages for the running statistics of a vector: those of the answer, as far as these
        are weights of a mean of the messages and of what is there already. Otherwise a variance or a count could become
        negative. None where the rule's function of each coordinate serves them."""
        if self.rule.steps:
            weights = self.cohort.weights[self.sound[:, number]]
            return weights / weights.sum()
        if answer.weights is None:
            return None
        weights = np.maximum(answer.stored_weights()[: self.sound[:, number].sum()], 0.0)
        total = weights.sum()
        return weights / total if total > 1 + len(weights) * np.finfo(float).eps else weights

    def _columns(self, apart: np.ndarray, weights: np.ndarray | None) -> dict[str, float]:
        """The columns robust/… of the first vector, see docs/howto/robustness.md. apart, weights: see `_computed`."""
        honest = self.honest
        record = {"robust/broken": float((~self.sound).any(1).sum())}
        spread2 = float(self.norms2[self.sound[:, 0], 0][honest].mean()) - apart[1] if honest.any() else 0.0
        record["robust/error"] = float(np.sqrt(apart[0] / spread2)) if spread2 > 0 else 0.0
        if weights is not None and self.collected.run_spec.stage.attack is not None:
            own = weights[: len(honest)]
            record["robust/kept_honest"] = float(own[honest].sum())
            record["robust/kept_byzantine"] = float(own[~honest].sum())
        return record


def filled(weights: np.ndarray, count: int) -> np.ndarray:
    """(count,): the weights, and 0 for the extra vectors behind the messages."""
    return np.append(weights, np.zeros(count - len(weights)))
