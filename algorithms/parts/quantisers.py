"""The codecs of the table CODECS: numbers on grids of a few bits, rounded types, and the largest numbers alone.

Douillard et al. 2025 (Streaming DiLoCo), Therien et al. 2025 (MuLoCo) and Sarfi et al. 2025 (SparseLoCo) send such
codes of what a model has moved; QSGD is Alistarh et al. 2017, natural compression Horvath et al. 2019.

    linear       lo + q unit,  unit = (max v - lo) / (2^b - 1)
    statistical  q = rint(c / unit + 2^(b-1)),  c = v - mean v,  unit = 6 sigma / 2^b;  q stands for the mean of its c
    absmax       q unit,  unit = max |v| / (2^(b-1) - 1)
    sign         + or - mean |v|, + at 0
    qsgd         sign(v) l |v|_2 / L,  L = 2^(b-1) - 1,  l = |v| L / |v|_2 rounded at random, without bias
    natural      sign(v) 2^e, rounded at random, without bias
    e3m0         sign(v) max |v| times 0 or a power of two from 1/64 to 1, the nearest one
    top_k        the k largest magnitudes and their places; of equal ones the first
    sparse       the largest magnitudes of every chunk, by `statistical` all together, and their places in the chunks;
                 a chunk is `size` numbers of the flat tensor, or with `tiles` a tile of a matrix, whose sides are the
                 largest divisors up to `tiles` of those of the matrix; further axes count as columns

All compute in float64, whatever the type of the vector is, and send floats of its type. Numbers that are not finite
decode to numbers that are not finite, so that a run that diverges is seen to. `per` gives each group of so many numbers
floats of its own. `linear` and `statistical` are not odd: the code of -v is not that of v negated.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ...workloads import counted
from .checks import one_of, positive, positive_fraction
from .codecs import Coder, Sparse, pack_numbers, share, unpack_numbers, width

RANGE = 6
"""The width of the statistical grid, in standard deviations."""
MAGNITUDES = (0.0, *(2.0**e for e in range(-6, 1)))
"""Those that `e3m0` has, as parts of the largest one."""


class Packed(NamedTuple):
    numbers: Tensor  # (bytes,) uint8, whole numbers of some bits each
    floats: Tensor  # those of all groups, one group after the other


def rows(v: Tensor, per: int | None) -> list[Tensor]:
    """v, (n,), in groups of `per` numbers: a matrix of the full groups, and one of the last, shorter one; all of it is
    one group where `per` is None."""
    n = len(v)
    if per is None or per >= n:
        return [v.reshape(1, n)]
    full = n - n % per
    return [v[:full].reshape(-1, per), *([v[full:].reshape(1, -1)] if full < n else [])]


def or_one(unit: Tensor) -> Tensor:
    """A grid's unit, 1 where it is 0."""
    return torch.where(unit == 0, 1.0, unit)


def on_grid(position: Tensor, least: int, most: int) -> Tensor:
    """The nearest whole numbers from `least` to `most`, int64; of two equally near ones the even one."""
    return torch.nan_to_num(position.round().clamp(least, most), nan=0.0).to(torch.int64)


def bounded(v: Tensor, dtype: torch.dtype) -> Tensor:
    """v in another type, whose largest number stands for what is larger; what is not finite stays so."""
    most = torch.finfo(dtype).max
    return torch.where(v.isfinite(), v.clamp(-most, most), v).to(dtype)


class Grid(Coder):
    """Each number becomes a whole number of `bits` bits; a group of numbers shares some floats."""

    bits: int
    per: int | None

    @property
    @abstractmethod
    def shared(self) -> int:
        """The number of floats of one group."""

    @abstractmethod
    def quantise(self, v: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """(whole numbers (g, m) from 0 to 2^bits - 1, floats (g, shared)) of g groups (g, m) in float64; `draws`: (g,
        m), uniform in [0, 1), of a codec that is `random`."""

    @abstractmethod
    def restore(self, numbers: Tensor, floats: Tensor) -> Tensor:
        """(g, m) in the type of the floats."""

    def encode(self, v: Tensor, key: Tensor) -> Packed:
        draws = counted.uniform(key, len(v)) if self.random else v
        pairs = zip(rows(v.double(), self.per), rows(draws, self.per), strict=True)
        found = [self.quantise(group, drawn) for group, drawn in pairs]
        numbers, floats = (torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*found, strict=True))
        return Packed(pack_numbers(numbers, self.bits), bounded(floats, v.dtype))

    def decode(self, code: Packed, n: int) -> Tensor:
        at, found = 0, []
        for group in rows(unpack_numbers(code.numbers, n, self.bits), self.per):
            count = len(group) * self.shared
            floats = code.floats[at : at + count].view(len(group), self.shared)
            found.append(self.restore(group, floats).reshape(-1))
            at += count
        return torch.cat(found)

    def bytes(self, n: int) -> int:
        groups = 1 if self.per is None else -(-n // self.per)
        return -(-n * self.bits // 8) + 4 * self.shared * groups

    def words(self, n: int) -> str:
        return f"{self.bits} bit{'s' if self.bits > 1 else ''} each"


def check_grid(codec: Grid, name: str, least: int, most: int, instead: str = "") -> None:
    """Check the bits and the groups of a codec. `instead`: what the message says of fewer bits."""
    if not least <= codec.bits <= most:
        why = instead if codec.bits < least else ""
        raise ValueError(f"{least} <= bits <= {most} must hold for {name}, got bits={codec.bits}{why}")
    if codec.per is not None and codec.per < 1:
        raise ValueError(f"per >= 1 must hold, got per={codec.per}; leave it out for one group")


@dataclass(frozen=True)
class Linear(Grid):
    """2^bits equal steps from the smallest to the largest number"""

    bits: int = 8
    per: int | None = None
    shared: ClassVar[int] = 2  # lo and unit

    def __post_init__(self) -> None:
        check_grid(self, "linear", 1, 16)

    def quantise(self, v: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        most = 2**self.bits - 1
        lo = v.amin(-1, keepdim=True)
        unit = or_one((v.amax(-1, keepdim=True) - lo) / most)
        return on_grid((v - lo) / unit, 0, most), torch.cat([lo, unit], -1)

    def restore(self, numbers: Tensor, floats: Tensor) -> Tensor:
        lo, unit = floats.split(1, -1)
        return lo + numbers.to(floats.dtype) * unit


@dataclass(frozen=True)
class Statistical(Grid):
    """2^bits bins over six standard deviations, each with the mean of its numbers"""

    bits: int = 8
    per: int | None = None

    def __post_init__(self) -> None:
        check_grid(self, "statistical", 2, 8, ", which would send the mean alone; choose sign")

    @property
    def shared(self) -> int:
        return 1 + 2**self.bits  # the mean, and what each bin stands for

    def quantise(self, v: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        bins, m = 2**self.bits, v.shape[-1]
        mean = v.mean(-1, keepdim=True)
        c = v - mean
        deviation = (c.square().sum(-1, keepdim=True) / max(1, m - 1)).sqrt()
        numbers = on_grid(c / or_one(RANGE * deviation / bins) + bins / 2, 0, bins - 1)
        none = v.new_zeros(len(v), bins)
        counts = none.scatter_add(-1, numbers, torch.ones_like(c))
        lookup = none.scatter_add(-1, numbers, c) / counts.clamp(min=1)
        return numbers, torch.cat([mean, lookup], -1)

    def restore(self, numbers: Tensor, floats: Tensor) -> Tensor:
        return floats[..., 1:].gather(-1, numbers) + floats[..., :1]


@dataclass(frozen=True)
class AbsMax(Grid):
    """equal steps from minus to plus the largest magnitude"""

    bits: int = 8
    per: int | None = None
    shared: ClassVar[int] = 1  # unit

    def __post_init__(self) -> None:
        check_grid(self, "absmax", 2, 16, "; choose sign")

    @property
    def most(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def quantise(self, v: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        unit = or_one(v.abs().amax(-1, keepdim=True) / self.most)
        return on_grid(v / unit, -self.most, self.most) + self.most, unit

    def restore(self, numbers: Tensor, floats: Tensor) -> Tensor:
        return (numbers - self.most).to(floats.dtype) * floats


@dataclass(frozen=True)
class Sign(Grid):
    """the sign of each number, times their mean magnitude"""

    per: int | None = None
    bits: ClassVar[int] = 1
    shared: ClassVar[int] = 1  # the mean magnitude

    def __post_init__(self) -> None:
        check_grid(self, "sign", 1, 1)

    def quantise(self, v: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        return (v >= 0).to(torch.int64), v.abs().mean(-1, keepdim=True)

    def restore(self, numbers: Tensor, floats: Tensor) -> Tensor:
        return (2 * numbers - 1).to(floats.dtype) * floats


@dataclass(frozen=True)
class Qsgd(Grid):
    """random multiples of the norm of a group, unbiased, as in QSGD"""

    bits: int = 4
    per: int | None = 512
    shared: ClassVar[int] = 1  # the norm
    random: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_grid(self, "qsgd", 2, 8, "; choose sign")

    @property
    def most(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def quantise(self, v: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        place = v.abs() * self.most / or_one(norm)
        level = place.floor() + (draws < place - place.floor())
        return on_grid(v.sign() * level, -self.most, self.most) + self.most, norm

    def restore(self, numbers: Tensor, floats: Tensor) -> Tensor:
        return (numbers - self.most).to(floats.dtype) * (floats / self.most)


@dataclass(frozen=True)
class Natural(Grid):
    """random powers of two, unbiased, as in natural compression"""

    bits: ClassVar[int] = 9  # the sign, and the exponent of a float32
    per: ClassVar[None] = None
    shared: ClassVar[int] = 0
    random: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True

    def quantise(self, v: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The exponent is e + 127; 0 stands for zero and 255 for infinity. Below 2^-126 a number becomes 0 or 2^-126,
        and at 2^127 it is rounded down."""
        mantissa, exponent = torch.frexp(v.abs())
        up = draws < 2 * mantissa - 1
        code = (exponent + 126 + up).clamp(max=254).to(torch.int64)
        code = torch.where(v.abs() < 2.0**-126, (draws < v.abs() * 2.0**126).to(torch.int64), code)
        code = torch.where(v.isfinite(), code, 255)
        return code + 256 * (v < 0), v[..., :0]

    def restore(self, numbers: Tensor, floats: Tensor) -> Tensor:
        powers = 2.0 ** torch.arange(-127, 128, dtype=torch.float64, device=numbers.device)
        powers[0] = 0.0
        table = torch.cat([powers, powers.new_tensor([torch.inf])]).to(floats.dtype)
        return torch.where(numbers < 256, 1, -1) * table[numbers % 256]


@dataclass(frozen=True)
class E3m0(Grid):
    """the largest magnitude times 0 or a power of two from 1/64 to 1: a float of 4 bits"""

    per: int | None = None
    bits: ClassVar[int] = 4  # the sign, and one of eight magnitudes
    shared: ClassVar[int] = 1  # the largest magnitude

    def __post_init__(self) -> None:
        check_grid(self, "e3m0", 4, 4)

    def quantise(self, v: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        largest = v.abs().amax(-1, keepdim=True)
        of_largest = v.abs() / or_one(largest)
        middles = [(a + b) / 2 for a, b in pairwise(MAGNITUDES)]
        magnitude = torch.stack([of_largest > middle for middle in middles]).sum(0)
        return magnitude + 8 * (v < 0), largest

    def restore(self, numbers: Tensor, floats: Tensor) -> Tensor:
        table = torch.tensor(MAGNITUDES, dtype=floats.dtype, device=floats.device)
        return torch.where(numbers < 8, 1, -1) * table[numbers % 8] * floats


@dataclass(frozen=True)
class Cast(Coder):
    """each number in a type of 2 bytes, rounded to the nearest"""

    unbiased: ClassVar[bool] = True
    to: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        one_of("bfloat16", "float16", to=self.to)

    def bytes(self, n: int) -> int:
        return 2 * n

    def words(self, n: int) -> str:
        return f"{self.to} each"

    def encode(self, v: Tensor, key: Tensor) -> Tensor:
        return bounded(v, getattr(torch, self.to))

    def decode(self, code: Tensor, n: int) -> Tensor:
        return code


def largest(v: Tensor, k: int) -> Tensor:
    """(…, k) places of the largest magnitudes of the last axis, in rising order; of equal magnitudes the first ones."""
    order = torch.argsort(v.abs(), dim=-1, descending=True, stable=True)
    return torch.sort(order[..., :k], dim=-1).values


def at_places(places: Tensor, n: int) -> Tensor:
    """(n,) bool: true at these places, (k,)."""
    return torch.zeros(n, dtype=torch.bool, device=places.device).scatter(0, places, True)


class Placed(Coder):
    """A codec that sends some of the numbers, with their places."""

    @abstractmethod
    def sent(self, code: Any, n: int) -> Tensor:
        """(n,) bool: which numbers were sent."""


@dataclass(frozen=True)
class Largest(Placed):
    """the largest magnitudes of a tensor, and their places"""

    ratio: float = 1 / 32

    def __post_init__(self) -> None:
        positive_fraction(ratio=self.ratio)

    def bytes(self, n: int) -> int:
        k = share(self.ratio, n)
        return 4 * k + -(-k * width(n) // 8)

    def words(self, n: int) -> str:
        return f"{share(self.ratio, n):,} largest"

    def encode(self, v: Tensor, key: Tensor) -> Sparse:
        places = largest(v, share(self.ratio, len(v)))
        return Sparse(v.gather(0, places), pack_numbers(places, width(len(v))))

    def places(self, code: Sparse, n: int) -> Tensor:
        return unpack_numbers(code.places, share(self.ratio, n), width(n))

    def decode(self, code: Sparse, n: int) -> Tensor:
        return code.values.new_zeros(n).scatter(0, self.places(code, n), code.values)

    def sent(self, code: Sparse, n: int) -> Tensor:
        return at_places(self.places(code, n), n)


class Chosen(NamedTuple):
    values: Any  # the kept values in a few bits, or (k,) as they are
    places: Tensor  # (bytes,) uint8, packed places in their chunks


@dataclass(frozen=True)
class SparseChunks(Placed):
    """the largest magnitudes of every chunk of a tensor in a few bits, and their places, as in SparseLoCo"""

    size: int = 4096
    density: float = 1 / 64
    bits: int = 2
    tiles: int | None = None

    def __post_init__(self) -> None:
        positive(size=self.size)
        positive_fraction(density=self.density)
        if self.tiles is not None and (self.tiles < 1 or self.size != type(self).size):
            raise ValueError(
                f"tiles >= 1 must hold, and size is that of chunks without tiles, got tiles={self.tiles}, "
                f"size={self.size}; leave one of them out"
            )
        if self.bits != 0 and not 2 <= self.bits <= 8:
            raise ValueError(f"2 <= bits <= 8 must hold for sparse, or bits=0 for floats, got bits={self.bits}")

    def of_shape(self, shape: tuple[int, ...]) -> Coder:
        if self.tiles is None or not shape:
            return self
        first, *rest = shape
        height, length = (first, math.prod(rest)) if rest else (1, first)
        tile = largest_divisor(height, self.tiles), largest_divisor(length, self.tiles)
        return Tiles(SparseChunks(math.prod(tile), self.density, self.bits), height, length, *tile)

    def kept(self, m: int) -> int:
        """How many of the m numbers of a chunk are sent."""
        return max(1, int(self.density * m + 0.5))

    def count(self, n: int) -> int:
        """How many of the n numbers of a tensor are sent."""
        full, rest = divmod(n, self.size)
        return full * self.kept(self.size) + (self.kept(rest) if rest else 0)

    def width(self, n: int) -> int:
        """Bits of a place in a chunk."""
        return width(min(self.size, n))

    def bytes(self, n: int) -> int:
        k = self.count(n)
        values = Statistical(self.bits).bytes(k) if self.bits else 4 * k
        return -(-k * self.width(n) // 8) + values

    def words(self, n: int) -> str:
        return f"{self.count(n):,} largest, {f'{self.bits} bits' if self.bits else 'a float'} each"

    def encode(self, v: Tensor, key: Tensor) -> Chosen:
        chunks = rows(v, self.size)
        places = [largest(chunk, self.kept(chunk.shape[-1])) for chunk in chunks]
        values = torch.cat([c.gather(-1, p).reshape(-1) for c, p in zip(chunks, places, strict=True)])
        packed = pack_numbers(torch.cat([p.reshape(-1) for p in places]), self.width(len(v)))
        return Chosen(Statistical(self.bits).encode(values, key) if self.bits else values, packed)

    def places(self, code: Chosen, n: int) -> Tensor:
        """(k,): the places of the kept values in the tensor."""
        inside = unpack_numbers(code.places, self.count(n), self.width(n))
        at, found = 0, []
        for chunk in rows(torch.arange(n, device=inside.device), self.size):
            k = self.kept(chunk.shape[-1])
            end = at + k * len(chunk)
            found.append(chunk.gather(-1, inside[at:end].reshape(-1, k)).reshape(-1))
            at = end
        return torch.cat(found)

    def decode(self, code: Chosen, n: int) -> Tensor:
        values = Statistical(self.bits).decode(code.values, self.count(n)) if self.bits else code.values
        return values.new_zeros(n).scatter(0, self.places(code, n), values)

    def sent(self, code: Chosen, n: int) -> Tensor:
        return at_places(self.places(code, n), n)


def largest_divisor(n: int, most: int) -> int:
    """The largest number up to `most` that divides n."""
    return next(divisor for divisor in range(min(n, most), 0, -1) if n % divisor == 0)


@dataclass(frozen=True)
class Tiles(Placed):
    """`chunks` of the tiles (h, w) of a matrix (m, n), one tile after the other, each in row-major order. h divides m,
    and w divides n, so that a chunk is a tile."""

    chunks: SparseChunks
    m: int
    n: int
    h: int
    w: int

    def bytes(self, n: int) -> int:
        return self.chunks.bytes(n)

    def words(self, n: int) -> str:
        return f"{self.chunks.words(n)}, in tiles {self.h} x {self.w}"

    def encode(self, v: Tensor, key: Tensor) -> Chosen:
        tiles = v.view(self.m // self.h, self.h, self.n // self.w, self.w).transpose(1, 2)
        return self.chunks.encode(tiles.reshape(-1), key)

    def decode(self, code: Chosen, n: int) -> Tensor:
        return self._in_rows(self.chunks.decode(code, n))

    def sent(self, code: Chosen, n: int) -> Tensor:
        return self._in_rows(self.chunks.sent(code, n))

    def _in_rows(self, tiles: Tensor) -> Tensor:
        """The flat matrix from its tiles."""
        return tiles.view(self.m // self.h, self.n // self.w, self.h, self.w).transpose(1, 2).reshape(-1)
