"""Measures Newton-Schulz iterations of matrices by the compiled kernel and by torch's, in float32 and bfloat16.

    python benchmarks/newton_schulz.py [120x400 1024x1024 …] [--scheme classic] [--iterations 5]

The times are milliseconds of processor time on one thread, the least of several. The errors are distances from the same
iterations in float64, relative to their result, the largest of six kinds of matrices: singular values that are alike,
that fall by four powers of ten, that are mostly zero, and one that is much larger than the others; and matrices of
which three rows, or three columns, are not zero.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from fedfleet.algorithms.parts.orthogonal import SCHEMES, newton_schulz, newton_schulz_plainly
from fedfleet.engine.kernels import operators

MATRICES = ["6x25", "10x84", "16x150", "84x120", "120x400", "300x1024", "512x512", "768x768", "640x1024", "1024x1024"]


def matrices(rows: int, cols: int) -> list[Tensor]:
    """One matrix of each kind."""
    u, v = torch.randn(rows, min(rows, cols)), torch.randn(cols, min(rows, cols))
    falling = torch.linalg.qr(u).Q * torch.logspace(0, -4, u.shape[1]) @ torch.linalg.qr(v).Q.mT
    few = [torch.randn(rows, cols) * (torch.arange(cols) < 3), torch.randn(rows, cols)]
    few[1][3:] = 0
    return [torch.randn(rows, cols), falling, u[:, :5] @ v[:, :5].mT, torch.rand(rows, cols), *few]


def least(call: Callable[[], object]) -> float:
    """The least processor time of a call in milliseconds, of at least three and of at most one second in all."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < 1.0:
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def measured(found: Callable[[Tensor], Tensor], given: list[Tensor], exact: list[Tensor]) -> str:
    """The time and the largest error as text."""
    errors = [float((found(m) - o).norm() / o.norm()) for m, o in zip(given, exact, strict=True)]
    return f"{least(lambda: found(given[0])):.3f} ({max(errors):.1e})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("matrices", nargs="*", default=MATRICES)
    parser.add_argument("--scheme", choices=list(SCHEMES), default="classic")
    parser.add_argument("--iterations", type=int, default=5)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    asked = parser.parse_args()
    for sides in asked.matrices:
        given = matrices(*map(int, sides.split("x")))
        exact = [newton_schulz(m.double(), asked.scheme, asked.iterations) for m in given]
        found: list[str] = []
        every = dict.fromkeys(operators.LARGEST_MATRIX, given[0].numel())
        for dtype in (None, torch.bfloat16):
            how = (asked.scheme, asked.iterations, dtype)
            with patch.dict(operators.LARGEST_MATRIX, every), operators.Native().around_steps():
                found.append(measured(lambda m: newton_schulz(m, *how), given, exact))  # noqa: B023
            found.append(measured(lambda m: newton_schulz_plainly(m, *how), given, exact))  # noqa: B023
        names = ("compiled", "torch", "compiled bfloat16", "torch bfloat16")
        print(f"{sides}:", ", ".join(f"{name} {text}" for name, text in zip(names, found, strict=True)), flush=True)


if __name__ == "__main__":
    main()
