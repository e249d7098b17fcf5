"""SparseLoCo: DiLoCo that sends the largest changes alone, in two bits, and remembers the others.

Sarfi et al. 2025, arXiv:2508.15706, and the authors' code.

Choose it when DiLoCo's messages to the server are too large: clients send a small part of their changes, in two bits
each, and remember the rest. The server still sends the whole model, and a client keeps one vector of its size more than
in DiLoCo.

    y <- AdamW(y, g(y) clipped at norm 1)                                  H times
    z <- decay e + x - y;  C = the largest of every chunk of z, in `bits` bits;  e <- z - decode(C)
    x <- x - outer_lr * mean of decode(C)

Error feedback takes the place of the outer momentum. A chunk has `size` numbers of a tensor, the last one what is left,
of which `density` are sent, with their places. The kept numbers of a tensor are quantised together by the codec
`statistical`. The inner settings are those of the authors' runs on open networks: H = 30, and a warm-up with a cosine.

Departures:
- mean = "all" is the paper's mean over all workers; the code's mean in each coordinate, over the workers that sent it,
  is mean = "sent".
- e is in units of x - y; the code's is multiplied by outer_lr, which it multiplies the step by once more.
- Chunks are of the flat tensor; the code's are tiles of 64 x 64 of matrices, which are tiles = 64, and cost the same
  where 64 divides both sides.
- The server does not bound the norms of messages by their median; `aggregate` has rules that do.
- Where clients are sampled, the mean is over the cohort, and a client that was idle goes on with its old states.
"""

from __future__ import annotations

from .fedavg import Plain
from .local import LocalMethod, Rule, check_carry
from .parts.checks import positive
from .parts.coded import Coding, MeanOver
from .parts.compression import Compressed
from .parts.quantisers import SparseChunks
from .parts.rules import Clip, adamw
from .parts.servers import Mean


def sparse_loco(
    rule: Rule = Clip(adamw(1.3e-4, (0.9, 0.95), 1e-8, 0.1), 1.0),
    outer_lr: float = 1.0,
    density: float = 1 / 64,
    size: int = 4096,
    bits: int = 2,
    decay: float = 0.95,
    mean: MeanOver = "all",
    tiles: int | None = None,
) -> Compressed:
    """rule: the inner optimiser, whose state clients keep; outer_lr: of the outer step; density: the share of a chunk's
    numbers that is sent; size: the numbers of a chunk; bits: of a sent number, 0 sends floats; decay: the factor of the
    remembered error; mean: over all clients (all), or in each coordinate over those that sent it (sent); tiles:
    chunks are tiles of matrices, with sides of the largest divisors up to this number, in the place of `size` numbers.
    """
    check_carry(rule, "keep")
    positive(outer_lr=outer_lr)
    method = LocalMethod(rule, Plain(), Mean(outer_lr), "keep")
    return Compressed(method, Coding(SparseChunks(size, density, bits, tiles), "error", decay, mean))
