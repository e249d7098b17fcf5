"""Muon on hidden matrices, AdamW on everything else: the inner optimiser of MuLoCo, and Jordan's way to use Muon.

Jordan et al. 2024; Therien et al. 2025, arXiv:2505.23725.

    hidden matrix   m <- mu m + (1 - mu) g;  W <- W (1 - lr decay) - lr scale orth(m)
    the rest        AdamW on g

The rest is every tensor with less than two axes and every one whose name matches a pattern of `aux`: by default
embeddings and the output head, by their usual names. With aux = [] AdamW is for vectors alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..local import Rule
from .muon import Ball, NewtonSchulz, Spectral, as_matrix
from .rules import Adam, Averaged
from .split import Split, matches


@dataclass(frozen=True)
class HiddenMatrices(Split):
    """The rule `hidden` for matrices, `rest` for everything else and for names that match one of `aux` (* and ? as in
    file names)."""

    hidden: Rule
    rest: Rule
    aux: tuple[str, ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.hidden, self.rest

    def number(self, name: str, shape: tuple[int, ...]) -> int:
        return 0 if as_matrix(shape) and not matches(name, self.aux) else 1


def muon_adamw(
    lr: float = 0.02,
    mu: float = 0.95,
    nesterov: bool = False,
    ball: Ball = NewtonSchulz(scheme="you"),
    scale: str = "spectral",
    weight_decay: float = 0.01,
    rest: Rule = Adam(3e-4, (0.9, 0.95), weight_decay=0.01),
    aux: tuple[str, ...] = ("*embed*", "*head*", "out.*"),
) -> HiddenMatrices:
    """lr, mu, nesterov, ball, scale, weight_decay: of Muon; rest: the rule for vectors and for tensors whose names
    match one of `aux`."""
    return HiddenMatrices(
        Averaged(Spectral(lr, ball=ball, scale=scale, weight_decay=weight_decay), mu, nesterov), rest, aux
    )
