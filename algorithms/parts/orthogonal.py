"""Orthogonalisation of matrices: U V^T for M = U S V^T, by Newton-Schulz iterations or exactly.

Jordan et al. 2024 (Muon); Amsel et al. 2025, arXiv:2505.16932 (Polar Express); "You" triples as in MuLoCo, Therien et
al. 2025, arXiv:2505.23725. Each iteration maps every singular value s to a s + b s^3 + c s^5. Only `svd` guarantees
singular values of 1: `jordan` leaves them between 0.68 and 1.14 after five iterations, `classic` never exceeds 1 but is
slow on small ones (0.01 becomes 0.23 after five).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Scheme:
    """The coefficients (a, b, c) of each iteration, of which the last are repeated, and what the input is divided by
    first: |M| (1 + cushion) + eps, as in the sources of Polar Express, or, where eps is 0, |M| but at least 1e-7, as in
    torch."""

    triples: tuple[Triple, ...]
    cushion: float = 0.0
    eps: float = 0.0

    def divisor(self, norm: Tensor) -> Tensor:
        """What a matrix is divided by; `norm`: |M|, of any shape."""
        norm = norm * (1 + self.cushion) if self.cushion else norm
        return norm + self.eps if self.eps else norm.clamp(min=EPS)

    def coefficients(self, iterations: int) -> tuple[Triple, ...]:
        """The coefficients of so many iterations."""
        last = self.triples[-1]
        return self.triples[:iterations] + (last,) * (iterations - len(self.triples))


_POLAR_RAW: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# All but the last are divided by (1.01, 1.01^3, 1.01^5), so that rounding cannot push a singular value out of range.
_POLAR_SAFE = tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_RAW[:-1]) + _POLAR_RAW[-1:]

SCHEMES: dict[str, Scheme] = {
    "jordan": Scheme(((3.4445, -4.7750, 2.0315),)),
    "classic": Scheme(((1.875, -1.25, 0.375),)),
    "you": Scheme(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    "polar_express": Scheme(_POLAR_SAFE, cushion=0.01, eps=1e-7),
    "polar_express_5": Scheme(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        cushion=0.02,
        eps=1e-6,
    ),
}

EPS = 1e-7


def newton_schulz(m: Tensor, scheme: str, iterations: int, dtype: torch.dtype | None = None) -> Tensor:
    """Approximately U V^T on the last two axes of m (..., rows, cols); iterations = 0 gives M / |M|, zero gives zero.

    It is computed in `dtype` (bfloat16 in Jordan's program and in torch) and returned in m's dtype. On two axes the
    order of operations is that of `torch.optim.Muon`.
    """
    if is_batchedtensor(m):
        return _NewtonSchulz.apply(m, scheme, iterations, dtype)
    faster = FASTER.get()
    if faster is not None:
        found = faster(m, None, matrices_of(m.shape), (scheme, iterations, dtype))
        if found is not None:
            return found
    return newton_schulz_plainly(m, scheme, iterations, dtype)


How = tuple[str, int, torch.dtype | None]
"""The arguments of `newton_schulz` after the first."""


class Part(NamedTuple):
    """A part of two vectors y and v, from `start` on, and what it becomes: keep y + share o. There o is `newton_schulz`
    of the matrix (rows, cols) in v. If rows is 0, the part has `cols` numbers, and o is that part of v itself."""

    start: int
    rows: int
    cols: int
    keep: float
    share: float


@lru_cache
def matrices_of(shape: torch.Size) -> tuple[Part, ...]:
    """The matrices of a tensor of this shape; what is wanted is their result itself."""
    rows, cols = shape[-2:]
    return tuple(Part(k * rows * cols, rows, cols, 0.0, 1.0) for k in range(shape[:-2].numel()))


Faster = Callable[[Tensor, Tensor | None, tuple[Part, ...], How], Tensor | None]
"""A kernel for these iterations: (v, y, parts, how) -> what the parts of y become, in the shape of v, which has the
directions; without y, of zeros. Together the parts are the whole tensor. None for what the kernel does not support."""

FASTER: ContextVar[Faster | None] = ContextVar("FASTER", default=None)
"""Faster kernels, which the engine may set."""


def newton_schulz_plainly(m: Tensor, scheme: str, iterations: int, dtype: torch.dtype | None = None) -> Tensor:
    """`newton_schulz` with torch's products, whatever else there is."""
    chosen = SCHEMES[scheme]
    x = m.to(dtype) if dtype is not None else m
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = torch.linalg.matrix_norm(x, keepdim=True) if x.ndim > 2 else x.norm()
    x = iterate(x / chosen.divisor(norm), chosen.coefficients(iterations))
    return (x.mT if tall else x).to(m.dtype)


def iterate(x: Tensor, triples: tuple[Triple, ...]) -> Tensor:
    """x <- a x + (b G + c G^2) x with G = x x^T, for each triple, on the last two axes."""
    if x.ndim == 2:
        for a, b, c in triples:
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x
    flat = x.reshape(-1, *x.shape[-2:])
    for a, b, c in triples:
        gram = flat @ flat.mT
        flat = torch.baddbmm(flat, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), flat, beta=a)
    return flat.reshape(x.shape)


class _NewtonSchulz(torch.autograd.Function):
    """`newton_schulz` under vmap. It keeps products fused, which vmap's own rule for `baddbmm` takes apart (1.3 times
    slower)."""

    generate_vmap_rule = False

    @staticmethod
    def forward(m: Tensor, scheme: str, iterations: int, dtype: torch.dtype | None) -> Tensor:
        return newton_schulz(m, scheme, iterations, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps nothing: no gradient flows through a step of the optimiser."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], m: Tensor, scheme: str, iterations: int, dtype: torch.dtype | None
    ) -> tuple[Tensor, int]:
        return _NewtonSchulz.apply(m.movedim(in_dims[0] or 0, 0), scheme, iterations, dtype), 0


def svd(m: Tensor) -> Tensor:
    """U V^T exactly, on the last two axes; singular values below 1e-7 of the largest are dropped."""
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    kept = s > EPS * s.amax(-1, keepdim=True)
    return (u * kept.to(m.dtype).unsqueeze(-2)) @ vh


def schatten(m: Tensor, p: float) -> Tensor:
    """-lmo of the unit ball of Schatten's norm of order p, on the last two axes: the D with |D|_p = 1 for which <D, M>
    is largest, which is then M's norm of the dual order. Equal largest singular values share the step of order 1."""
    if math.isinf(p):
        return svd(m)
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    ratio = s / s.amax(-1, keepdim=True).clamp(min=torch.finfo(m.dtype).tiny)
    powers = (ratio == 1).to(m.dtype) if p == 1 else ratio ** (1 / (p - 1))  # the dual order is q = p / (p - 1)
    total = (powers**p).sum(-1, keepdim=True).clamp(min=1) ** (1 / p)  # at least 1 for any matrix but 0
    return (u * (powers / total).unsqueeze(-2)) @ vh
