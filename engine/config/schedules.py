"""Hyperparameters that change from round to round, or from local step to local step.

Wherever a method takes a number, an experiment may give a schedule, {schedule: cosine, start: 0.1, end: 0.001}. Methods
see only numbers. A mapping with a name is not a schedule but a part with arguments, one of which may be called
`schedule`. `over` says what is counted: `rounds` (default), the local `steps` of the run, of which round t has the
steps (t - 1) K + 1 to t K, or the steps of a `visit`, which begin anew in every round.

In round or step t of T, of which p are over:

    constant      start
    cosine        end + (start - end) (1 + cos(pi p / T)) / 2
    linear        end + (start - end) (1 - p / T)
    exponential   start decay^p
    polynomial    start t^power          (TailOPT's step sizes and thresholds)
    wsd           start;  in the last `decay` ones end + (start - end) s(u), where u goes from 0 to 1 and s is
                  1 - u (shape: linear), (1 + cos(pi u)) / 2 (cosine) or 1 - sqrt(u) (sqrt)
    step          start gamma^(number of `milestones` below t)
    piecewise     `values` at the times `at`, straight lines between them, constant before and after

A round has its number from its beginning on, p = t - 1, and a step has it at its end, p = t: the first round has
`start`, and the last step has `end`. warmup = W is a rise to the start, start t / W, in the first W rounds or steps;
the others are then t - W, p - W and T - W, where milestones and the last `decay` stay where they are. `length` replaces
T: what is behind it has the last number. offset = -1 gives each step the number of the step before, and the first one
that of t = 0, as the schedulers of PyTorch and transformers do; it is for schedules over steps or a visit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ConfigError, nearest

OVER = ("rounds", "steps", "visit")
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda u: 1 - u,
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "sqrt": lambda u: 1 - math.sqrt(u),
}
"""Shapes of a fall from 1 to 0."""


class Moment(NamedTuple):
    """A time of a schedule. t: the number of the round or step, from 1; passed: how many are over; length: T; warmup:
    W, which none of these leaves out."""

    t: int
    passed: int
    length: int
    warmup: int = 0

    @property
    def over(self) -> int:
        """How many are over, without the warm-up."""
        return self.passed - self.warmup

    @property
    def rest(self) -> int:
        """T without the warm-up."""
        return self.length - self.warmup


def constant(now: Moment, start: float) -> float:
    return start


def cosine(now: Moment, start: float, end: float = 0.0) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * now.over / now.rest)) / 2


def linear(now: Moment, start: float, end: float = 0.0) -> float:
    return end + (start - end) * (1 - now.over / now.rest)


def exponential(now: Moment, start: float, decay: float) -> float:
    return start * decay**now.over


def polynomial(now: Moment, start: float, power: float = 0.0) -> float:
    return start * (now.t - now.warmup) ** power


def wsd(now: Moment, start: float, decay: int, end: float = 0.0, shape: str = "linear") -> float:
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    if not 1 <= decay <= now.rest:
        raise ValueError(f"1 <= decay <= {now.rest} must hold, the length without the warm-up, got decay={decay:g}")
    since = now.passed - (now.length - decay)
    return start if since <= 0 else end + (start - end) * SHAPES[shape](since / decay)


def step(now: Moment, start: float, milestones: Sequence[int], gamma: float = 0.1) -> float:
    return start * gamma ** sum(milestone < now.t for milestone in milestones)


def piecewise(now: Moment, at: Sequence[int], values: Sequence[float]) -> float:
    if len(at) != len(values) or not at or list(at) != sorted(set(at)):
        raise ValueError(f"at needs rising times, one for each of values, got at={list(at)}, values={list(values)}")
    if now.t >= at[-1]:
        return values[-1]
    after = next(i for i, time in enumerate(at) if now.t < time)
    if after == 0:
        return values[0]
    share = (now.t - at[after - 1]) / (at[after] - at[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "exponential": exponential,
    "polynomial": polynomial,
    "wsd": wsd,
    "step": step,
    "piecewise": piecewise,
}
OF_ALL = ("schedule", "over", "warmup", "length", "offset")
"""Keys that every schedule may have."""


def is_schedule(spec: Any) -> bool:
    """Whether a value is a schedule, and not a part that has an argument called `schedule`."""
    return isinstance(spec, Mapping) and "schedule" in spec and "name" not in spec


def schedules_of(spec: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """All schedules of a specification, each with the keys that lead to it."""
    if is_schedule(spec):
        yield path, spec
    elif isinstance(spec, Mapping | list):
        for key, value in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
            yield from schedules_of(value, (*path, str(key)))


def has_schedule(spec: Any) -> bool:
    """Whether a specification is a schedule or contains one."""
    return next(schedules_of(spec), None) is not None


def is_over_steps(schedule: Mapping[str, Any]) -> bool:
    """Whether a schedule counts local steps, of the run or of a visit."""
    return schedule.get("over") in ("steps", "visit")


def counts_steps(spec: Any) -> bool:
    """Whether a schedule of a specification counts the local steps of the run or of a visit."""
    return any(is_over_steps(each) for _, each in schedules_of(spec))


def resolve(spec: Any, t: int, rounds: int, path: str, peaks: bool = False) -> Any:
    """The specification with every schedule replaced by its number in round t (1 … `rounds`).

    `path`: the key of the specification, which messages name. `peaks`: schedules over steps become the number of their
    `peak`; they are refused otherwise, since they have no number of a round.
    """
    if isinstance(spec, list):
        return [resolve(value, t, rounds, f"{path}.{number}", peaks) for number, value in enumerate(spec)]
    if not isinstance(spec, Mapping):
        return spec
    if not is_schedule(spec):
        return {key: resolve(value, t, rounds, f"{path}.{key}", peaks) for key, value in spec.items()}
    over = spec.get("over", "rounds")
    if over not in OVER:
        raise ConfigError(f"{path}.over must be one of {', '.join(OVER)}, got {over!r}")
    if not is_over_steps(spec):
        if "offset" in spec:
            raise ConfigError(
                f"{path}.offset is for schedules over steps, got offset={spec['offset']}; leave it out, or give over: "
                "steps"
            )
        return number(spec, Moment(t, t - 1, rounds), path)
    if not peaks:
        raise ConfigError(
            f"{path}.over must be rounds here, got {over}; steps are for numbers of a method's local rule"
        )
    return peak(spec, path)


def peak(spec: Mapping[str, Any], path: str) -> float:
    """The number that a schedule over steps starts from after its warm-up; the largest one of `piecewise`."""
    values = spec.get("values", [spec.get("start", 1.0)])
    try:
        return max(float(value) for value in values)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{path}: {'values' if 'values' in spec else 'start'} must be numbers, got {values}"
        ) from None


def numbers_over_steps(spec: Mapping[str, Any], round: int, rounds: int, steps: int, path: str) -> list[float]:
    """The numbers of a schedule over steps in the `steps` local steps, K, of a round."""
    first, length = (0, steps) if spec["over"] == "visit" else ((round - 1) * steps, rounds * steps)
    offset = spec.get("offset", 0)
    if type(offset) is not int:
        raise ConfigError(f"{path}.offset must be a whole number of steps, got {offset!r}")
    times = [max(0, t + offset) for t in range(first + 1, first + steps + 1)]
    return [number(spec, Moment(t, t, length), path) for t in times]


def numbers_in_round(value: Any, round: int, rounds: int, steps: int, path: str) -> list[float]:
    """The numbers of a schedule, or of a number, in the `steps` local steps of a round; path: its key."""
    if not is_schedule(value):
        return [float(value)] * steps
    if is_over_steps(value):
        return numbers_over_steps(value, round, rounds, steps, path)
    return [number(value, Moment(round, round - 1, rounds), path)] * steps


def number(spec: Mapping[str, Any], now: Moment, path: str) -> float:
    """The number of a schedule at this moment. path: the schedule's key, which messages name."""
    name = spec["schedule"]
    if name not in SCHEDULES:
        raise ConfigError(f"{path}.schedule: no schedule is called {name}; {nearest(str(name), SCHEDULES)}")
    try:
        arguments = {key: argument(value) for key, value in spec.items() if key not in OF_ALL}
        inspect.signature(SCHEDULES[name]).bind(now, **arguments)
        return _number(SCHEDULES[name], arguments, now, int(spec.get("warmup", 0)), int(spec.get("length", now.length)))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{path}: schedule {name}: {error}") from None


def argument(value: Any) -> Any:
    """An argument as a schedule takes it: numbers as floats."""
    if isinstance(value, list | tuple):
        return [float(each) for each in value]
    return value if isinstance(value, str) and value in SHAPES else float(value)


def _number(form: Callable[..., float], arguments: Mapping[str, Any], now: Moment, warmup: int, length: int) -> float:
    if warmup and form is piecewise:
        raise ValueError("warmup has no effect here; begin at and values with it")
    if not 0 <= warmup < length:
        raise ValueError(f"0 <= warmup < {length} must hold, the length of the schedule, got warmup={warmup}")
    if now.t <= warmup and warmup:
        form(Moment(warmup + 1, warmup + 1, length, warmup), **arguments)  # so that its arguments are checked
        return arguments["start"] * now.t / warmup
    after = max(0, now.t - length)  # the form ends with T
    return form(Moment(now.t - after, now.passed - after, length, warmup), **arguments)
