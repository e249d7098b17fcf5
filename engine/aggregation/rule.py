"""The rule of aggregation on the messages that a round has collected, and what the stage keeps between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...algorithms.aggregation.contract import Aggregator, Mean
from ...algorithms.aggregation.messages import Answer, Messages, product
from ...algorithms.contract import Message
from ..errors import MethodFailed, TooFewMessages
from ..user_code import plugin_errors
from . import passes
from .message_rows import shaped, spans_of, vector_leaves, with_vector_leaves
from .passes import Work, pieces_of
from .round_messages import RoundMessages, StoredRows

Spans = tuple[Tensor, ...]
"""The numbers of a vector, a tensor for each of its spans."""
Parts = Callable[[Messages], tuple[np.ndarray, Any]]
"""`Algorithm.parts` of a round, with its settings and the server's state."""
Kept = tuple[tuple[Tensor, ...], tuple[Spans, ...]]
"""What an attack keeps of one vector: the numbers `Plan.state`, and the vectors that it remembers."""


class StageState(NamedTuple):
    """What the parts of the stage keep from round to round.

    rule: the state of the rule for each vector. last: for each vector the answer of the round before; () if the rule
    does not look at it. attack: what the attack keeps of each vector. noise: the state of the noise.
    """

    rule: tuple[Any, ...] = ()
    last: tuple[Spans, ...] = ()
    attack: tuple[Kept, ...] = ()
    noise: Any = ()


class Aggregated(NamedTuple):
    """The result of the stage in a round. columns: for the record. notes: sentences for the log."""

    mean: Message
    state: StageState
    columns: dict[str, float]
    notes: tuple[str, ...] = ()


# --- the rule's answer ------------------------------------------------------------------------------------------------
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


def sound_messages(messages: RoundMessages, rule: Aggregator) -> list[StoredRows]:
    """For each vector of the rule the messages that it sees. The mean sees all of them, every other rule those whose
    squared norm is finite."""
    vectors, (norms2, sound) = messages.staged.vectors, messages.norms2_of_rule()
    extra = [messages.extra_row] if rule.extra else []
    chosen, pairwise = sound | isinstance(rule, Mean), is_pairwise(rule)
    return messages.stored(vectors, chosen, norms2, extra, shown=len(extra), has_gram=pairwise)


def answer_for(rule: Aggregator, stored: StoredRows, weights: np.ndarray, state: Any) -> Answer:
    """The rule's answer for one vector. weights: (S,) of its messages. state: of the rule for this vector."""
    messages = stored.messages
    f = messages.faults(len(messages.clients), left_out=int((~stored.chosen).sum()))
    x = Messages(stored=stored, **messages.about(stored.vector), weights=weights, f=f, state=state)
    return answer_of(rule, x, messages.full_cohort)


# --- the message that takes the place of the mean ---------------------------------------------------------------------
def apply_rule(messages: RoundMessages, rule: Aggregator, state: StageState) -> Aggregated:
    """The rule's answer for all vectors. rule: for a round of this size."""
    by_vector = sound_messages(messages, rule)
    if is_pairwise(rule):
        by_vector[0].gram()  # of all vectors, in one pass
    pairs = list(zip(by_vector, state.rule, strict=True))
    answers = [answer_for(rule, stored, stored.client_weights, own) for stored, own in pairs]
    leaves, apart = computed(rule, pairs, answers)
    state = state._replace(rule=tuple(answer.state for answer in answers))
    if state.last:
        flat = [leaf.detach().cpu().reshape(-1) for leaf in leaves]
        state = state._replace(last=spans_of([stored.vector for stored in by_vector], flat))
    columns = robust_columns(by_vector, answers[0], apart)
    notes = tuple(answer.note for answer in answers if answer.note)
    return Aggregated(with_vector_leaves(messages.staged.sample, leaves), state, columns, notes[:1])


def apply_parts(messages: RoundMessages, rule: Aggregator, state: StageState, parts: Parts) -> Aggregated:
    """The sums of the messages that a method asks for, and what it has found. rule: a mean that decides for the
    message as a whole."""
    (stored,) = sound_messages(messages, rule)
    x = Messages(stored=stored, **messages.about(stored.vector), weights=stored.client_weights)
    with plugin_errors(f"round {messages.number}: the method's comparison of messages raised", MethodFailed):
        weights, found = parts(x)
    sample = messages.staged.sample
    samples, pieces = vector_leaves(sample), pieces_of([stored.vector], True)
    sums = list[Message]()
    for own in weights:
        flat = [np.zeros(leaf.numel()) for leaf in samples]
        if own.any():
            work = {0: partial(passes.weighted, rows=stored.rows, weights=own)}
            messages.answers("weighted sum", work, pieces, flat)
        sums.append(with_vector_leaves(sample, shaped([torch.from_numpy(values) for values in flat], samples)))
    return Aggregated(sample._replace(delta=tuple(each.delta for each in sums), sent=found), state, {})


def computed(
    rule: Aggregator, pairs: Sequence[tuple[StoredRows, Any]], answers: Sequence[Answer]
) -> tuple[list[Tensor], np.ndarray]:
    """(the leaves of the message that takes the place of the mean, (2,) |F - mean|^2 and |mean|^2 of the first vector
    over the honest messages). pairs: for each vector its messages and the rule's state."""
    (first, _), answer = pairs[0], answers[0]
    mean = first.honest / max(1, first.honest.sum())
    in_gram = is_pairwise(rule) and answer.weights is not None  # then workers need not compare the answer with the mean
    work = {
        number: work_of(rule, stored, state, answers[number], None if number or in_gram else mean)
        for number, (stored, state) in enumerate(pairs)
    }
    samples = vector_leaves(first.messages.staged.sample)
    flat = [np.zeros(sample.numel()) for sample in samples]
    pieces = pieces_of([stored.vector for stored, _ in pairs], True)
    apart = first.messages.answers("columns" if answer.weights is None else "weighted sum", work, pieces, flat)
    if in_gram:
        gram = first.gram()
        own, of_mean = (filled(each, len(gram)) for each in (answer.stored_weights(), mean))
        vectors = (own - of_mean, of_mean)
        apart = np.array([max(0.0, float(product(each, product(gram, each)))) for each in vectors])
    return shaped([torch.from_numpy(values) for values in flat], samples), apart


def work_of(rule: Aggregator, stored: StoredRows, state: Any, answer: Answer, mean: np.ndarray | None) -> Work:
    """What workers compute of the pieces of one vector. mean: (S,), the weights of the mean with which the answer is
    compared, or None."""
    statistics, count = statistics_weights(rule, stored, answer), len(stored.rows)
    if answer.weights is None:
        x = answer.messages
        more = {"f": x.f, "scale": answer.scale, "statistics": statistics, "mean": mean}
        return partial(passes.columns, **stored.combined(x.matrix), **more)
    weights, uniform = stored.client_weights, None
    if stored.vector.uniform and (weights != weights[:1]).any():
        uniform = answer_for(rule, stored, np.ones(len(weights)), state).stored_weights()
    given = {"weights": answer.stored_weights(), "uniform": uniform, "statistics": statistics, "mean": mean}
    filled_up = {name: None if each is None else filled(each, count) for name, each in given.items()}
    return partial(passes.weighted, rows=stored.rows, **filled_up)


def statistics_weights(rule: Aggregator, stored: StoredRows, answer: Answer) -> np.ndarray | None:
    """(S,) the weights of the messages for the running statistics of a vector: those of the answer, as far as these are
    weights of a mean of the messages and of what is there already. Otherwise a variance or a count could become
    negative. None where the rule's function of each coordinate serves them."""
    if rule.steps:
        weights = stored.messages.weights[stored.chosen]
        return weights / weights.sum()
    if answer.weights is None:
        return None
    weights = np.maximum(answer.stored_weights()[: len(stored.norms2)], 0.0)
    total = weights.sum()
    return weights / total if total > 1 + len(weights) * np.finfo(float).eps else weights


def robust_columns(by_vector: Sequence[StoredRows], answer: Answer, apart: np.ndarray) -> dict[str, float]:
    """The columns robust/…, see docs/howto/robustness.md. answer, apart: for the first vector, see `computed`."""
    first, those = by_vector[0], by_vector[0].honest
    chosen = np.stack([stored.chosen for stored in by_vector])
    columns = {"robust/broken": float((~chosen).any(axis=0).sum())}
    spread2 = float(first.norms2[those].mean()) - apart[1] if those.any() else 0.0
    columns["robust/error"] = float(np.sqrt(apart[0] / spread2)) if spread2 > 0 else 0.0
    if answer.weights is not None and first.messages.staged.plan.stage.attack is not None:
        own = answer.stored_weights()[: len(those)]
        columns["robust/kept_honest"] = float(own[those].sum())
        columns["robust/kept_byzantine"] = float(own[~those].sum())
    return columns | {f"robust/{name}": value for name, value in answer.columns.items()}


def filled(weights: np.ndarray, count: int) -> np.ndarray:
    """(count,): the weights, and 0 for the extra vectors behind the messages."""
    return np.append(weights, np.zeros(count - len(weights)))
