"""Measures Newton-Schulz iterations of matrices by the compiled kernel, and by torch's in float32 and bfloat16.

    python benchmarks/newton_schulz.py [120x400 1024x1024 …]

The figures are milliseconds of processor time for five iterations on one thread, the least of several times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from fedfleet.algorithms.parts.orthogonal import SCHEMES, iterate_plainly
from fedfleet.engine.kernels import operators

MATRICES = ["6x25", "10x84", "16x150", "84x120", "120x400", "300x1024", "512x512", "768x768", "640x1024", "1024x1024"]


def least(call: Callable[[], object]) -> float:
    """The least processor time of a call in milliseconds, of at least three and of at most two seconds in all."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < 2.0:
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("matrices", nargs="*", default=MATRICES)
    torch.set_num_threads(1)
    triples = SCHEMES["classic"].coefficients(5)
    for sides in parser.parse_args().matrices:
        x = torch.randn(*map(int, sides.split("x")))
        x /= x.norm()
        half = x.to(torch.bfloat16)
        with patch.object(operators, "LARGEST_MATRIX", x.numel()):
            own = least(lambda: operators.polynomials(x, triples))  # noqa: B023
        plain, bfloat16 = (least(lambda: iterate_plainly(each, triples)) for each in (x, half))  # noqa: B023
        print(f"{sides}: compiled {own:.3f}, torch {plain:.3f}, torch in bfloat16 {bfloat16:.3f}", flush=True)


if __name__ == "__main__":
    main()
