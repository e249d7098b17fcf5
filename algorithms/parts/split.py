"""Several rules, each for some of a model's tensors and with a state of its own.

The rule `groups` has other step sizes or weight decays for tensors whose names match patterns, as `parameter groups` of
PyTorch's optimisers. `muon_adamw` is in its own module.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from ..local import Rule
from ..tree import Layout, Tree
from .rules import Number


class Split(Rule):
    """Each tensor has the step of one of several rules. A rule that no tensor has keeps no state."""

    @property
    @abstractmethod
    def rules(self) -> tuple[Rule, ...]:
        """The rules."""

    @abstractmethod
    def number(self, name: str, shape: tuple[int, ...]) -> int:
        """The place in `rules` of the rule for a tensor."""

    def names(self, layout: Layout) -> tuple[list[str], ...]:
        """The names of the tensors of each rule."""
        found: tuple[list[str], ...] = tuple([] for _ in self.rules)
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            found[self.number(name, shape)].append(name)
        return found

    def init(self, x: Tree) -> tuple[Any, ...]:
        each = zip(self.rules, self.names(x.layout), strict=True)
        return tuple(rule.init(x.pick(names)) if names else () for rule, names in each)

    def step(self, y: Tree, v: Tree, state: tuple[Any, ...]) -> tuple[Tree, tuple[Any, ...]]:
        leaves, states = {}, []
        for rule, names, own in zip(self.rules, self.names(y.layout), state, strict=True):
            if names:
                moved, own = rule.step(y.pick(names), v.pick(names), own)
                leaves.update(moved.items())
            states.append(own)
        return Tree.join(y.layout, leaves), tuple(states)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name matches one of the patterns, * and ? as in file names."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Group:
    """Tensors whose names match one of the patterns `match`, and their own numbers, those of the rule unless given."""

    match: tuple[str, ...]
    lr: Number | None = None
    weight_decay: float | None = None

    @property
    def numbers(self) -> dict[str, Any]:
        """Those that are given, by their names."""
        both = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {name: value for name, value in both.items() if value is not None}


@dataclass(frozen=True)
class Grouped(Split):
    """The rule `own[i]` for tensors whose names match one of `matched[i]`, the first of which decides, and `rest` for
    all others."""

    rest: Rule
    own: tuple[Rule, ...]
    matched: tuple[tuple[str, ...], ...]

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        return {f"groups.{number}.match": each for number, each in enumerate(self.matched)}

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (*self.own, self.rest)

    def number(self, name: str, shape: tuple[int, ...]) -> int:
        return next((i for i, each in enumerate(self.matched) if matches(name, each)), len(self.matched))


def grouped(rule: Rule, groups: tuple[Group, ...]) -> Grouped:
    """rule: of the tensors that are in no group; groups: mappings of `match`, patterns of the names of tensors, * and ?
    as in file names, and the numbers that these tensors have instead, `lr` and `weight_decay`. A tensor is in the first
    group that it matches."""
    if not groups:
        raise ValueError("groups must have at least one group, got none; give one, or the rule alone")
    known = {field.name for field in fields(rule)}  # pyright: ignore[reportArgumentType] rules are dataclasses
    for number, group in enumerate(groups):
        if not group.match:
            raise ValueError(f"groups.{number}.match must have at least one pattern, got none; give one, as '*embed*'")
        if not group.numbers:
            raise ValueError(f"groups.{number} changes nothing; give it lr or weight_decay, or drop it")
        if missing := sorted(group.numbers.keys() - known):
            raise ValueError(
                f"groups.{number}.{missing[0]}: {type(rule).__name__.lower()} has no such number; give groups another "
                "rule, as adamw, and put clip around groups"
            )
    own = tuple(replace(rule, **group.numbers) for group in groups)  # pyright: ignore[reportArgumentType]
    return Grouped(rule, own, tuple(group.match for group in groups))
