"""FLTrust: messages are trusted as far as they point where the server's own update on trusted data points.

Cao et al., NDSS 2021, arXiv:2012.13995. g is the displacement of the method's own client pass on `root` examples:

    TS_i = max(0, cos(x_i, g));  answer: sum of TS_i (|g| / |x_i|) x_i / sum of TS_i, 0 if that is 0

The trusted examples are drawn from the training rows and are taken away from no client. The server trains on them like
client number N, without a state of its own. Control variates have no trusted counterpart: `vectors` is "joint".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .contract import Aggregator, Vectors
from .messages import Answer, Messages


@dataclass(frozen=True, kw_only=True)
class FlTrust(Aggregator):
    """root: the number of trusted examples. bias: the probability that one of them is of the first class; the others
    have the remaining probability in equal parts, so that 0.1 is uniform for ten classes."""

    root: int = 100
    bias: float = 0.1
    vectors: Vectors = "joint"

    pairwise: ClassVar[bool] = True
    extra: ClassVar[Literal["", "last", "trusted"]] = "trusted"
    called: ClassVar[str] = "FLTrust"
    takes_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.root < 1:
            raise ValueError(f"root >= 1 must hold, got root={self.root}")
        if not 0 <= self.bias <= 1:
            raise ValueError(f"0 <= bias <= 1 must hold, got bias={self.bias}")
        if self.vectors != "joint":
            raise ValueError(f"vectors must be joint, got {self.vectors!r}: only the displacement has a trusted one")

    def aggregate(self, x: Messages) -> Answer:
        gram = x.gram(extra=True)
        norms = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
        own, trusted = norms[:-1], norms[-1]
        sizes = own * trusted
        cosines = np.divide(gram[:-1, -1], sizes, out=np.zeros_like(sizes), where=sizes > 0)
        trust = np.maximum(0.0, cosines)
        weights = np.zeros(x.count + 1)
        if trust.sum() > 0:
            weights[:-1] = trust * np.divide(trusted, own, out=np.zeros_like(own), where=own > 0) / trust.sum()
        return x.sum(weights)
