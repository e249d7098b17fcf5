"""Muon on hidden matrices, AdamW on everything else: the inner optimiser of MuLoCo, and Jordan's way to use Muon.

Jordan et al. 2024; Therien et al. 2025, arXiv:2505.23725.

    hidden matrix   m <- mu m + (1 - mu) g;  W <- W (1 - lr decay) - lr scale orth(m)
    the rest        AdamW on g

The rest is every tensor with less than two axes and every one whose name matches a pattern of `aux`: by default
embeddings and the output head, by their usual names. With aux = [] AdamW is for vectors alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..local import Rule
from ..tree import Layout, Tree
from .muon import Ball, NewtonSchulz, Spectral, as_matrix
from .rules import Adam, Averaged


class Halves(NamedTuple):
    """Something of the hidden matrices, and the same of the rest: names, or states of rules."""

    hidden: Any
    rest: Any


@dataclass(frozen=True)
class Split(Rule):
    """The rule `hidden` for matrices, `rest` for everything else and for names that match one of `aux` (* and ? as in
    file names)."""

    hidden: Rule
    rest: Rule
    aux: tuple[str, ...] = ()

    def names(self, layout: Layout) -> Halves:
        """The names of the tensors that each rule is for."""
        hidden = [
            name
            for name, shape in zip(layout.names, layout.shapes, strict=True)
            if as_matrix(shape) and not any(fnmatchcase(name, pattern) for pattern in self.aux)
        ]
        return Halves(hidden, [name for name in layout.names if name not in hidden])

    def init(self, x: Tree) -> Halves:
        hidden, rest = self.names(x.layout)
        return Halves(self.hidden.init(x.pick(hidden)) if hidden else (), self.rest.init(x.pick(rest)) if rest else ())

    def step(self, y: Tree, v: Tree, state: Halves) -> tuple[Tree, Halves]:
        leaves, states = {}, []
        for names, rule, own in zip(self.names(y.layout), (self.hidden, self.rest), state, strict=True):
            if names:
                moved, own = rule.step(y.pick(names), v.pick(names), own)
                leaves.update(moved.items())
            states.append(own)
        return Tree.join(y.layout, leaves), Halves(*states)


def muon_adamw(
    lr: float = 0.02,
    mu: float = 0.95,
    nesterov: bool = False,
    ball: Ball = NewtonSchulz(scheme="you"),
    scale: str = "spectral",
    weight_decay: float = 0.01,
    rest: Rule = Adam(3e-4, (0.9, 0.95), weight_decay=0.01),
    aux: tuple[str, ...] = ("*embed*", "*head*", "out.*"),
) -> Split:
    """lr, mu, nesterov, ball, scale, weight_decay: of Muon; rest: the rule for vectors and for tensors whose names
    match one of `aux`."""
    return Split(Averaged(Spectral(lr, ball=ball, scale=scale, weight_decay=weight_decay), mu, nesterov), rest, aux)
