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
from .round_messages import RoundMessages, StoredRows
from .rule import Kept, StageState, answer_of, is_pairwise


def apply_attack(
    messages: RoundMessages, attack: CohortAttack, rule: Aggregator, state: StageState
) -> tuple[RoundMessages, StageState, dict[str, float]]:
    """(the messages with those of the Byzantine clients, the state of the stage, columns for the record). rule: for a
    round of this size. The attack acts on each vector by itself."""
    by_vector = known_messages(messages, attack, rule)
    write_remembered(by_vector, state.attack)
    if attack.directs:
        to = np.array([messages.extra_row + 1 + attack.remembers])
        write(by_vector, "direction", [partial(passes.forged, **forging(stored), to=to) for stored in by_vector])
    plans = list[Plan]()
    for stored, (numbers, _) in zip(by_vector, state.attack, strict=True):
        seen = seen_of(stored, attack, rule, state)
        with plugin_errors(f"round {messages.number}: {attack.called} raised", MethodFailed):
            plans.append(attack.plan(seen, numbers))
    kept = kept_of(by_vector, plans, state.attack)
    changed = forged(by_vector, plans)
    columns = {f"attack/{name}": value for name, value in plans[0].columns.items()}
    return changed, state._replace(attack=kept), columns


def known_messages(messages: RoundMessages, attack: CohortAttack, rule: Aggregator) -> list[StoredRows]:
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
    return messages.stored(vectors, chosen, norms2, [*own, *extra], shown=len(own), has_gram=attack.pairwise)


def about(stored: StoredRows) -> dict[str, Any]:
    """Arguments of `Seen` for one vector."""
    return stored.messages.about(stored.vector, "attack", stored.messages.number, stored.number)


def seen_of(stored: StoredRows, attack: CohortAttack, rule: Aggregator, state: StageState) -> Seen:
    """What the attacker sees of one vector."""
    clients, byzantine = stored.messages.clients[stored.chosen], stored.messages.attackers
    error = error_of(stored, rule, state.rule[stored.number]) if attack.searches else None
    more = {"weights": np.ones(len(clients)), "clients": clients, "byzantine": byzantine, "error": error}
    return Seen(stored=stored, **about(stored), **more)


# --- what it writes ---------------------------------------------------------------------------------------------------
def forging(stored: StoredRows) -> dict[str, Any]:
    """What `passes.forged` is told of one vector."""
    rows, told = stored.rows[: len(stored.norms2)], about(stored)
    return {"rows": rows, "byzantine": stored.messages.attackers, "length": told["length"], "key": told["key"]}


def write(by_vector: Sequence[StoredRows], what: str, work: Sequence[Work]) -> list[np.ndarray]:
    """Run a pass that writes rows. Returns for each vector the squared norms of what was written."""
    norms2: dict[int, np.ndarray] = {}
    pieces = pieces_of([stored.vector for stored in by_vector], False)
    for piece, part in by_vector[0].messages.in_order(what, dict(enumerate(work)), pieces):
        norms2[piece.vector] = norms2[piece.vector] + part if piece.vector in norms2 else part
    return [norms2[number] for number in range(len(by_vector))]


def forged(by_vector: Sequence[StoredRows], plans: Sequence[Plan]) -> RoundMessages:
    """The messages with those of the Byzantine clients, which the workers write."""
    messages = by_vector[0].messages
    to = messages.forged_row + np.arange(messages.attackers)
    pairs = zip(by_vector, plans, strict=True)
    work = [partial(passes.forged, **forging(stored), to=to, numbers=plan.numbers) for stored, plan in pairs]
    norms2 = write(by_vector, "forged rows", work)
    several = max(len(each) for each in norms2) > 1
    all_norms2 = np.stack([np.broadcast_to(each, messages.attackers) for each in norms2], axis=1)
    return messages.with_rows(messages.byzantine, to if several else to[:1], all_norms2)


# --- what it remembers ------------------------------------------------------------------------------------------------
def write_remembered(by_vector: Sequence[StoredRows], state: Sequence[Kept]) -> None:
    """Write the vectors that the attack remembers into their rows."""
    for stored, (_, remembered) in zip(by_vector, state, strict=True):
        for place, spans in enumerate(remembered):
            stored.messages.write(stored.messages.extra_row + 1 + place, stored.vector.spans, spans)


def kept_of(by_vector: Sequence[StoredRows], plans: Sequence[Plan], state: Sequence[Kept]) -> tuple[Kept, ...]:
    """What the attack keeps for the next round. state: what it kept before."""
    messages, kept = by_vector[0].messages, list[list[np.ndarray]]()
    pieces = pieces_of([stored.vector for stored in by_vector], False)
    for place in range(len(plans[0].remember)):
        work: dict[int, Work] = {}
        for stored, plan in zip(by_vector, plans, strict=True):
            weights = plan.remember[place]
            work[stored.number] = partial(passes.weighted, rows=stored.rows[: len(weights)], weights=weights)
        flat = [np.zeros(leaf.numel()) for leaf in vector_leaves(messages.staged.sample)]
        messages.answers("weighted sum", work, pieces, flat)
        kept.append(flat)
    found = list[Kept]()
    for stored, plan, (_, before) in zip(by_vector, plans, state, strict=True):
        vectors = tuple(
            tuple(
                torch.from_numpy(flat[span.leaf][span.begin : span.end].copy()).to(old.dtype)
                for span, old in zip(stored.vector.spans, spans, strict=True)
            )
            for flat, spans in zip(kept, before, strict=True)
        )
        found.append((plan.state, vectors))
    return tuple(found)


# --- the search against the rule --------------------------------------------------------------------------------------
def error_of(stored: StoredRows, rule: Aggregator, state: Any) -> Callable[[np.ndarray], float]:
    """The function `Seen.error` for one vector. state: of the rule for this vector."""
    messages = stored.messages
    known, byzantine = np.flatnonzero(stored.chosen), np.flatnonzero(messages.byzantine)
    everyone = np.concatenate([known, byzantine])
    honest = not messages.byzantine[known].any()
    order = np.argsort(everyone, kind="stable") if honest else np.arange(len(everyone))
    forges, which = order >= len(known), order[order < len(known)]  # which of the known ones the others send
    left_out = len(messages.clients) - len(everyone) if honest else 0  # messages that are not finite
    f = messages.faults(len(everyone) + left_out, left_out)
    weights = messages.weights[everyone[order]] if stored.vector.weighted else np.ones(len(everyone))
    extra, size = bool(rule.extra), len(stored.rows)
    mean = np.zeros(size)
    mean[: len(known)] = 1.0 / len(known)

    def error(sent: np.ndarray) -> float:
        sends = np.zeros((len(everyone) + extra, size))
        sends[np.flatnonzero(~forges), which] = 1.0
        sends[np.flatnonzero(forges), : len(sent)] = sent
        if extra:
            sends[-1, -1] = 1.0
        imagined = stored.sending(sends, len(everyone), is_pairwise(rule))
        x = Messages(stored=imagined, **messages.about(stored.vector), weights=weights, f=f, state=state)
        return imagined.distance(answer_of(rule, x, messages.full_cohort), mean)

    return error
