"""Which numbers of a method schedules over steps are for.

The method is built with the peak of each schedule, and once more with half of it: the numbers in which the two differ
are those of the schedule. Only the local rule may have them. It does nothing but local steps, whereas other parts of a
method also use their numbers before the first step, after the last one or on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...algorithms.contract import Algorithm
from ...algorithms.local import Rule
from ..errors import ConfigError
from ..method_form.numbers import Path, numbers
from ..method_form.scheduled import Scheduled, StepNumbers
from . import schedules

RULE, SERVER = "rule", "server"
"""The fields of a method that have its local rule and what the server does."""


def scheduled(spec: Any, build: Callable[[Any], Algorithm], round: int, rounds: int, steps: int) -> Scheduled:
    """The method of a specification with schedules over steps, in one round.

    build: makes a method of a specification without schedules. steps: K.
    """
    found = [(keys, each) for keys, each in schedules.schedules_of(spec) if schedules.is_over_steps(each)]
    method = build(schedules.resolve(spec, round, rounds, "method", peaks=True))
    before, rows = numbers(method), {}
    for keys, schedule in found:
        path = ".".join(("method", *keys))
        peak = schedules.peak(schedule, path)
        other = schedules.resolve(replaced(spec, keys, peak / 2), round, rounds, "method", peaks=True)
        halved = numbers(build(other))
        changed = [at for at, value in before.items() if halved.get(at) != value]
        if halved.keys() != before.keys() or any(
            before[at] != peak or RULE not in at or SERVER in at for at in changed
        ):
            raise ConfigError(
                f"{path}: a schedule over steps is for numbers of the local rule alone, and this one is used elsewhere;"
                " give over: rounds"
            )
        row = schedules.numbers_over_steps(schedule, round, rounds, steps, path)
        rows.update(dict.fromkeys(changed, row))
    if not rows:
        raise ConfigError(f"method: a schedule over steps changes nothing, got {found[0][1]}; leave it out")
    return Scheduled(method, StepNumbers(rows))


def rule_numbers(method: Algorithm, rule: Rule) -> StepNumbers | None:
    """The numbers of a method's rule in each local step, with paths that begin at the rule, for another part that has
    this rule; None where no schedule over steps is for it. rule: a part of the method, at most below other methods."""
    inner: Any = method
    while inner is not None and not isinstance(inner, Scheduled):
        inner = getattr(inner, "method", None)
    if inner is None:
        return None
    rows: dict[Path, Sequence[float]] = {}
    for path, row in inner.step_numbers.rows.items():
        end = path.index(RULE) + 1
        part: Any = inner.method
        for key in path[:end]:
            part = part[key] if isinstance(key, int) else getattr(part, key)
        if part is rule:
            rows[path[end:]] = row
    return StepNumbers(rows) if rows else None


def replaced(spec: Any, keys: tuple[str, ...], value: float) -> Any:
    """The specification with another value at the end of these keys."""
    if keys and isinstance(spec, list):
        return [replaced(each, keys[1:], value) if str(at) == keys[0] else each for at, each in enumerate(spec)]
    return {**spec, keys[0]: replaced(spec[keys[0]], keys[1:], value)} if keys else value
