"""An attack that looks at the messages of a round: the workers write what the Byzantine clients send.

Its rows lie behind those of the cohort in the files, so that the clients' own messages stay: a task that runs again
gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...algorithms.aggregation.contract import Aggregator
from ...algorithms.aggregation.messages import Messages
from ...algorithms.attacks.contract import CohortAttack, Plan, Seen
from ..errors import MethodFailed
from ..user_code import plugin_errors
from . import passes
from .message_rows import vector_leaves
from .passes import Work, pieces_of
from .round_messages import Matrix, RoundMessages
from .rule import Kept, StageState, answer_of, is_pairwise


def apply_attack(
    messages: RoundMessages, attack: CohortAttack, rule: Aggregator, state: StageState
) -> tuple[RoundMessages, StageState, dict[str, float]]:
    """(the messages with those of the Byzantine clients, the state of the stage, columns for the record). rule: for a
    round of this size. The attack acts on each vector by itself."""
    matrices = known_messages(messages, attack, rule)
    write_remembered(matrices, state.attack)
    if attack.directs:
        to = np.array([messages.extra_row + 1 + attack.remembers])
        write(matrices, "direction", [partial(passes.direction, **forging(matrix), to=to) for matrix in matrices])
    plans = list[Plan]()
    for matrix, (numbers, _) in zip(matrices, state.attack, strict=True):
        seen = seen_of(matrix, attack, rule, state)
        with plugin_errors(f"round {messages.number}: {attack.called} raised", MethodFailed):
            plans.append(attack.plan(seen, numbers))
    kept = kept_of(matrices, plans, state.attack)
    changed = forged(matrices, plans)
    columns = {f"attack/{name}": value for name, value in plans[0].columns.items()}
    return changed, state._replace(attack=kept), columns


def known_messages(messages: RoundMessages, attack: CohortAttack, rule: Aggregator) -> list[Matrix]:
    """For each vector the messages that the attack knows: those whose squared norm is finite, or all if there is none.
    Behind them lie the vectors that it remembers, its direction, and the extra vector of the rule if the attack
    searches against it, which it does not see."""
    honest = ~messages.byzantine
    known = honest if attack.knows == "honest" and honest.any() else ~honest
    sound = known[:, None] & np.isfinite(messages.norms2)
    chosen = np.where(sound.any(axis=0), sound, known[:, None])
    own = range(messages.extra_row + 1, messages.extra_row + 1 + attack.remembers + attack.directs)
    extra = [messages.extra_row] if attack.searches and rule.extra else []
    vectors, norms2 = messages.staged.single, messages.norms2
    return messages.matrices(vectors, chosen, norms2, [*own, *extra], shown=len(own), has_gram=attack.pairwise)


def about(matrix: Matrix) -> dict[str, Any]:
    """Arguments of `Seen` for one vector."""
    return matrix.messages.about(matrix.vector, "attack", matrix.messages.number, matrix.number)


def seen_of(matrix: Matrix, attack: CohortAttack, rule: Aggregator, state: StageState) -> Seen:
    """What the attacker sees of one vector."""
    clients, byzantine = matrix.messages.clients[matrix.chosen], matrix.messages.attackers
    error = error_of(matrix, rule, state.rule[matrix.number]) if attack.searches else None
    more = {"weights": np.ones(len(clients)), "clients": clients, "byzantine": byzantine, "error": error}
    return Seen(stored=matrix, **about(matrix), **more)


# --- what it writes ---------------------------------------------------------------------------------------------------
def forging(matrix: Matrix) -> dict[str, Any]:
    """What `passes.direction` and `passes.forged` are told of one vector."""
    rows, told = matrix.rows[: len(matrix.norms2)], about(matrix)
    return {"rows": rows, "byzantine": matrix.messages.attackers, "length": told["length"], "key": told["key"]}


def write(matrices: Sequence[Matrix], what: str, work: Sequence[Work]) -> list[np.ndarray]:
    """Run a pass that writes rows. Returns for each vector the squared norms of what was written."""
    norms2: dict[int, np.ndarray] = {}
    pieces = pieces_of([matrix.vector for matrix in matrices], False)
    for piece, part in matrices[0].messages.in_order(what, dict(enumerate(work)), pieces):
        norms2[piece.vector] = norms2[piece.vector] + part if piece.vector in norms2 else part
    return [norms2[number] for number in range(len(matrices))]


def forged(matrices: Sequence[Matrix], plans: Sequence[Plan]) -> RoundMessages:
    """The messages with those of the Byzantine clients, which the workers write."""
    messages = matrices[0].messages
    to = messages.forged_row + np.arange(messages.attackers)
    pairs = zip(matrices, plans, strict=True)
    work = [partial(passes.forged, **forging(matrix), to=to, numbers=plan.numbers) for matrix, plan in pairs]
    norms2 = write(matrices, "forged rows", work)
    several = max(len(each) for each in norms2) > 1
    all_norms2 = np.stack([np.broadcast_to(each, messages.attackers) for each in norms2], axis=1)
    return messages.with_rows(messages.byzantine, to if several else to[:1], all_norms2)


# --- what it remembers ------------------------------------------------------------------------------------------------
def write_remembered(matrices: Sequence[Matrix], state: Sequence[Kept]) -> None:
    """Write the vectors that the attack remembers into their rows."""
    for matrix, (_, remembered) in zip(matrices, state, strict=True):
        for place, spans in enumerate(remembered):
            matrix.messages.write(matrix.messages.extra_row + 1 + place, matrix.vector.spans, spans)


def kept_of(matrices: Sequence[Matrix], plans: Sequence[Plan], state: Sequence[Kept]) -> tuple[Kept, ...]:
    """What the attack keeps for the next round. state: what it kept before."""
    messages, kept = matrices[0].messages, list[list[np.ndarray]]()
    pieces = pieces_of([matrix.vector for matrix in matrices], False)
    for place in range(len(plans[0].remember)):
        work: dict[int, Work] = {}
        for matrix, plan in zip(matrices, plans, strict=True):
            weights = plan.remember[place]
            work[matrix.number] = partial(passes.weighted, rows=matrix.rows[: len(weights)], weights=weights)
        flat = [np.zeros(leaf.numel()) for leaf in vector_leaves(messages.staged.sample)]
        messages.answers("weighted sum", work, pieces, flat)
        kept.append(flat)
    found = list[Kept]()
    for matrix, plan, (_, before) in zip(matrices, plans, state, strict=True):
        vectors = tuple(
            tuple(
                torch.from_numpy(flat[span.leaf][span.begin : span.end].copy()).to(old.dtype)
                for span, old in zip(matrix.vector.spans, spans, strict=True)
            )
            for flat, spans in zip(kept, before, strict=True)
        )
        found.append((plan.state, vectors))
    return tuple(found)


# --- the search against the rule --------------------------------------------------------------------------------------
def error_of(matrix: Matrix, rule: Aggregator, state: Any) -> Callable[[np.ndarray], float]:
    """The function `Seen.error` for one vector. state: of the rule for this vector."""
    messages = matrix.messages
    known, byzantine = np.flatnonzero(matrix.chosen), np.flatnonzero(messages.byzantine)
    everyone = np.concatenate([known, byzantine])
    honest = not messages.byzantine[known].any()
    order = np.argsort(everyone, kind="stable") if honest else np.arange(len(everyone))
    forges, which = order >= len(known), order[order < len(known)]  # which of the known ones the others send
    left_out = len(messages.clients) - len(everyone) if honest else 0  # messages that are not finite
    f = messages.faults(len(everyone) + left_out, left_out)
    weights = messages.weights[everyone[order]] if matrix.vector.weighted else np.ones(len(everyone))
    extra, size = bool(rule.extra), len(matrix.rows)
    mean = np.zeros(size)
    mean[: len(known)] = 1.0 / len(known)

    def error(sent: np.ndarray) -> float:
        sends = np.zeros((len(everyone) + extra, size))
        sends[np.flatnonzero(~forges), which] = 1.0
        sends[np.flatnonzero(forges), : len(sent)] = sent
        if extra:
            sends[-1, -1] = 1.0
        stored = matrix.sending(sends, len(everyone), is_pairwise(rule))
        x = Messages(stored=stored, **messages.about(matrix.vector), weights=weights, f=f, state=state)
        return stored.distance(answer_of(rule, x, messages.full_cohort), mean)

    return error
