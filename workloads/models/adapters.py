"""Low-rank adapters: small trained factors beside the frozen weights of any network. Hu et al. 2022, arXiv:2106.09685;
the scale of `stabilised`: Kalajdzievski 2023, arXiv:2312.03732.

For a weight W, (m, n), with factors A, (r, n), and B, (m, r):

    y = W x + b + s B (A drop(x)),    s = alpha / r, or alpha / sqrt(r) with `stabilised`

The product B A is never built in training: clients that are vectorised would hold m n numbers each. B is 0 at first, so
that the network computes what it did. The names of the factors are those of the adapted module with `.lora_a` and
`.lora_b`; the network's own names stay.

    module       weight as it is stored     A                  B              fan_in
    linear       (m, n)                     (r, n)             (m, r)         n
    transposed   (n, m), GPT-2's Conv1D     (r, n)             (m, r)         n
    embedding    (words, width)             (r, words)         (width, r)     -
    convolution  (o, i, kh, kw)             (r, i, kh, kw)     (o, r, 1, 1)   i kh kw

A projection of queries, keys and values that is one weight may have a pair for each of some parts, with `fused`: B has
the rows of the part, and the other outputs get 0, as in loralib's MergedLinear. Names are such as `c_attn.q.lora_a`.

The A of a convolution has its stride, padding and dilation. A is drawn uniformly from ±1 / sqrt(fan_in), as the
authors' code does; that of an embedding is 0, and its B is drawn from the standard normal distribution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import counted
from ..pair import Pair, Ranks
from ..stateless import parameters_of
from ..workload import Adapter, Params
from .dropout import Dropout
from .fused import check_parts, part_sizes
from .peft_files import TENSORS, read, written
from .published import load, stored_in
from .stored import StoredTensors

AUTO = (
    ("q", "v"),
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("q_lin", "v_lin"),
    ("c_attn",),
    ("qkv_proj",),
    ("query_key_value",),
)
"""The last parts of the names of the modules that `targets: auto` adapts: the first of these rows that the network has
all of. They are the projections for queries and values of its attention, by the names that published networks use."""
MULTIPLE = re.compile(r"(\d+\.?\d*|\.\d+)r")
"""An alpha that is a multiple of the rank."""
SHOWN = 6
"""The largest number of names in a message."""


class LowRank(nn.Module):
    """What an adapted module has beside its own class: the factors, and their path beside its forward."""

    lora_a: Tensor
    lora_b: Tensor
    lora_scale: float
    lora_drop: nn.Module
    transposed = False
    """Whether the weight is stored as (inputs, outputs)."""

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        """The module's own output, and s times that of the low-rank path."""
        return super().forward(x, *more, **named) + self.lora_scale * self.beside(x)

    def beside(self, x: Tensor) -> Tensor:
        """B (A drop(x))."""
        raise NotImplementedError

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B for a weight."""
        raise NotImplementedError


class LinearLowRank(LowRank):
    def beside(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(self.lora_drop(x), self.lora_a), self.lora_b)

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (rank, weight.shape[1]), (weight.shape[0], rank)


class TransposedLowRank(LinearLowRank):
    transposed = True

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (rank, weight.shape[0]), (weight.shape[1], rank)


class EmbeddingLowRank(TransposedLowRank):
    def beside(self, x: Tensor) -> Tensor:
        return F.linear(F.embedding(x, self.lora_a.T), self.lora_b)


class ConvolutionLowRank(LowRank):
    def beside(self, x: Tensor) -> Tensor:
        layer: Any = self
        return F.conv2d(layer._conv_forward(self.lora_drop(x), self.lora_a, None), self.lora_b)

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (rank, *weight.shape[1:]), (weight.shape[0], rank, 1, 1)


class Part(nn.Module):
    """The factors of some consecutive outputs of a module. rows: the first one, and the one behind the last."""

    lora_a: Tensor
    lora_b: Tensor
    lora_drop: nn.Module

    def __init__(self, rows: tuple[int, int]) -> None:
        super().__init__()
        self.rows = rows


class Fused(LowRank):
    """A module with factors for parts of its outputs. parts: their names, in the order of the outputs."""

    parts: tuple[str, ...]
    outputs: int

    def beside(self, x: Tensor) -> Tensor:
        pieces, end = list[Tensor](), 0
        for name in self.parts:
            part: Any = getattr(self, name)
            found = F.linear(F.linear(part.lora_drop(x), part.lora_a), part.lora_b)
            begin, after = part.rows
            pieces += [found.new_zeros(*found.shape[:-1], begin - end), found]
            end = after
        return torch.cat([*pieces, pieces[-1].new_zeros(*pieces[-1].shape[:-1], self.outputs - end)], -1)


class FusedTransposed(Fused):
    transposed = True


def form_of(module: nn.Module, name: str) -> type[LowRank]:
    """How a module is adapted. name: of the module, for messages. Raises ValueError if it cannot be."""
    kind = type(module).__name__
    if isinstance(module, nn.Conv2d):
        if module.groups != 1:
            raise ValueError(
                f"targets: {name} is a convolution with groups={module.groups}, which has no low-rank form; adapt "
                "another module"
            )
        return ConvolutionLowRank
    if isinstance(module, nn.Embedding):
        return EmbeddingLowRank
    if isinstance(module, nn.Linear):
        return LinearLowRank
    if kind == "Conv1D" and type(module).__module__.startswith("transformers."):
        return TransposedLowRank
    raise ValueError(
        f"targets: {name} is a {kind}, which has no low-rank form; choose linear, convolution or embedding modules"
    )


def adapted_in(network: nn.Module) -> dict[str, Any]:
    """name -> module with factors, of a network in its order: an adapted module, or a `Part` of one."""
    return {
        name: part
        for name, part in network.named_modules()
        if isinstance(part, LowRank | Part) and not isinstance(part, Fused)
    }


@dataclass(frozen=True)
class Lora(Adapter):
    """LoRA: frozen weights W with s B A beside them.

    `targets`: which modules are adapted: a pattern of their names or several, `linear` for all linear layers but the
    last one, or `auto` for the projections of queries and values of an attention. `rank`: r, the number of rows of A, 8
    unless clients differ in it. `ranks`: client i has the i-th of them, cycled, and the factors have the largest one.
    `alpha`: s is alpha / rank, or with `stabilised` (rsLoRA) alpha / sqrt(rank), for each client with its rank; a text
    such as 2r means 2 rank. `init`: A is drawn uniformly from ±1 / sqrt(fan_in), or from the normal distribution of
    standard deviation 1 / r (`gaussian`). `zero_b`: whether the product of the factors is 0 at first; if not, the
    factor that would be 0 is drawn as the other one, with a key of its own, which is for tests. `dropout`: the rate at
    which entries of the inputs of A are dropped in training. `fused`: one pair for the whole weight of a projection of
    queries, keys and values together (whole), or one for each of some of its parts, as in [q, v]. `train`: patterns of
    parameters that are trained as they are, such as a new head. `weights`: a safetensors file with the weights that are
    frozen, such as the model of another run; those of a last layer of another shape are not read. `factors`: a folder
    of the package peft with the factors that training begins with, and with parameters of `train` if it has some.
    """

    targets: str | tuple[str, ...] = "auto"
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    alpha: float | str = 16.0
    stabilised: bool = False
    init: Literal["uniform", "gaussian"] = "uniform"
    zero_b: bool = True
    dropout: float = 0.0
    fused: Literal["whole"] | tuple[Literal["q", "k", "v"], ...] = "whole"
    train: tuple[str, ...] = ()
    weights: str | None = None
    factors: str | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank >= 1 must hold, got rank={self.rank}")
        if self.rank is not None and self.ranks:
            raise ValueError(f"give rank or ranks, got rank={self.rank} with ranks={[*self.ranks]}; leave rank out")
        if any(rank < 1 for rank in self.ranks):
            raise ValueError(f"ranks must be 1 or more, got ranks={[*self.ranks]}; raise them, or give rank")
        if isinstance(self.alpha, str) and MULTIPLE.fullmatch(self.alpha) is None:
            raise ValueError(f"alpha must be a number, or as 2r a multiple of the rank, got alpha={self.alpha!r}")
        if not 0 < self.alpha_of(self.rows) < math.inf:
            raise ValueError(f"0 < alpha < infinity must hold, got alpha={self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"0 <= dropout < 1 must hold, got dropout={self.dropout}")
        if self.init not in ("uniform", "gaussian"):
            raise ValueError(f"init must be uniform or gaussian, got init={self.init!r}")
        if self.fused != "whole" and (not self.fused or not {*self.fused} <= {*"qkv"}):
            raise ValueError(f"fused must be whole or some of q, k, v, got fused={self.fused!r}; give whole, or [q, v]")

    @property
    def rows(self) -> int:
        """The number of rows of A: the rank, or the largest one of the clients."""
        return max(self.ranks) if self.ranks else 8 if self.rank is None else self.rank

    def alpha_of(self, rank: int) -> float:
        """alpha for a rank."""
        return float(self.alpha[:-1]) * rank if isinstance(self.alpha, str) else self.alpha

    def scale(self, rank: int) -> float:
        """s for a rank."""
        return self.alpha_of(rank) / (math.sqrt(rank) if self.stabilised else rank)

    @property
    def of_clients(self) -> Ranks | None:
        """The ranks and scales of clients; None where all have the same."""
        return Ranks(self.ranks, tuple(self.scale(rank) for rank in self.ranks)) if self.ranks else None

    @property
    def keeps_weights(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.weights is None

    def files(self) -> Mapping[str, Path]:
        found = {} if self.weights is None else {"frozen weights": Path(self.weights).expanduser()}
        return found if self.factors is None else {**found, "factors": Path(self.factors).expanduser() / TENSORS}

    def adapt(self, network: nn.Module) -> None:
        if self.weights is not None:
            load(network, Path(self.weights).expanduser())
        targets = self.targets_in(network)
        trained = set(chosen(self.train, "train", [*parameters_of(network)], "parameter"))
        adapted = {id(module.weight) for module in targets.values() if hasattr(module, "weight")}
        for name, (parameter, _) in parameters_of(network).items():
            if name in trained and id(parameter) in adapted:
                raise ValueError(
                    f"train: {name} is frozen beside its factors and trained; take it out of train, or its module out "
                    "of targets"
                )
            parameter.requires_grad_(name in trained)
        if self.fused != "whole":
            check_parts(network, [*targets], self.fused)
        for name, module in targets.items():
            sizes = None if self.fused == "whole" else part_sizes(network, name)
            if sizes is None:
                self._adapt_module(module, name)
            else:
                self._adapt_parts(module, name, sizes)

    def targets_in(self, network: nn.Module) -> dict[str, nn.Module]:
        """name -> module, of those that are adapted. Raises ValueError where `targets` do not fit the network."""
        modules = {
            name: part for name, part in network.named_modules() if not [*part.children()] and [*part.parameters()]
        }
        linear = [name for name, part in modules.items() if isinstance(part, nn.Linear)]
        if self.targets == "linear":
            names = linear[:-1]
            if not names:
                raise ValueError(f"targets: linear needs two linear layers, got {len(linear)}; give patterns")
        elif self.targets == "auto":
            names = attention(modules)
            if not names:
                raise ValueError(
                    f"targets: auto knows no projections of this network; give patterns, as of its linear layers "
                    f"{shown(linear) or '(none)'}, or linear"
                )
        else:
            patterns = (self.targets,) if isinstance(self.targets, str) else self.targets
            names = chosen(patterns, "targets", [*modules], "module")
        for name in names:
            if isinstance(getattr(modules[name], "weight", None), Tensor) and "weight" not in modules[name]._parameters:
                raise ValueError(
                    f"targets: {name} must have a weight of its own, got one that it computes, as after pruning or "
                    "weight_norm; leave it out"
                )
        return {name: modules[name] for name in names}

    def _adapt_module(self, module: Any, name: str) -> None:
        form, kind = form_of(module, name), type(module)
        self._add_factors(module, name, module.weight, module.weight.shape, *form.shapes(module.weight, self.rows))
        module.lora_scale = self.scale(self.rows)
        module.lora_drop = Dropout(self.dropout) if self.dropout and form is not EmbeddingLowRank else nn.Identity()
        module.__class__ = type(f"Adapted{kind.__name__}", (form, kind), {"__module__": __name__})

    def _adapt_parts(self, module: Any, name: str, sizes: Mapping[str, int]) -> None:
        """Add factors for the parts of `fused`. sizes: part -> its outputs, of all parts."""
        form, kind = FusedTransposed if form_of(module, name).transposed else Fused, type(module)
        outputs, inputs = module.weight.shape[::-1] if form.transposed else module.weight.shape
        if sum(sizes.values()) != outputs:
            raise ValueError(
                f"fused: {name} must have {sum(sizes.values())} outputs, got {outputs}; give fused: whole, or leave it "
                "out"
            )
        end, parts = 0, list[str]()
        for part, size in sizes.items():
            begin, end = end, end + size
            if part in self.fused:
                made = Part((begin, end))
                shapes = (size, inputs), (self.rows, inputs), (size, self.rows)
                self._add_factors(made, f"{name}.{part}", module.weight, *shapes)
                made.lora_drop = Dropout(self.dropout) if self.dropout else nn.Identity()
                module.add_module(part, made)
                parts.append(part)
        module.lora_scale, module.parts, module.outputs = self.scale(self.rows), tuple(parts), outputs
        module.__class__ = type(f"Adapted{kind.__name__}", (form, kind), {"__module__": __name__})

    def _add_factors(
        self, to: Any, name: str, weight: Tensor, shape: Sequence[int], a: tuple[int, ...], b: tuple[int, ...]
    ) -> None:
        """Add factors A and B of these shapes. name, shape: of the weight or the part that they change; weight: for the
        type and the device. Raises ValueError if the rank is too large for it."""
        most = min(b[0], math.prod(a[1:]))
        if self.rows > most:
            sizes, key = " x ".join(map(str, shape)), "ranks" if self.ranks else "rank"
            raise ValueError(
                f"{key}: 1 <= rank <= {most} must hold for {name} ({sizes}), got {self.rows}; lower {key}, or leave "
                "the module out"
            )
        for factor, shape in (("lora_a", a), ("lora_b", b)):
            made = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            to.register_parameter(factor, nn.Parameter(made))

    def initial(self, network: nn.Module, seed: int) -> dict[str, Tensor]:
        if self.factors is not None:
            return read(Path(self.factors).expanduser(), self, network, adapted_in(network))
        return {
            (f"{name}.{factor}" if name else factor): value
            for number, (name, module) in enumerate(adapted_in(network).items())
            for factor, value in self.drawn(module, seed, number)
        }

    def stored(self, network: nn.Module) -> StoredTensors | None:
        return None if self.weights is None else stored_in(Path(self.weights).expanduser(), network)

    def pairs(self, network: nn.Module) -> tuple[Pair, ...]:
        places, found = parameters_of(network), list[Pair]()
        name_of = {id(value): name for name, (value, _) in places.items()}
        for name, module in adapted_in(network).items():
            owner: Any = network.get_submodule(name.rpartition(".")[0]) if isinstance(module, Part) else module
            prefix, weight = f"{name}." if name else "", name_of[id(owner.weight)]
            drawn = "b" if isinstance(module, EmbeddingLowRank) else "a"
            names, tied = (weight, f"{prefix}lora_a", f"{prefix}lora_b"), len(places[weight][1]) > 1
            rows = module.rows if isinstance(module, Part) else None
            found.append(Pair(*names, owner.lora_scale, owner.transposed, drawn, tied, self.of_clients, rows))
        return tuple(found)

    def merged(self, network: nn.Module, p: Params) -> dict[str, Tensor]:
        """W + s B A in the place of W, A and B, computed in float64 and rounded once, to the type of the factors where
        that of W is narrower. Raises ValueError for an adapted weight that another module has, too."""
        found = dict(p)
        for pair in self.pairs(network):
            if pair.tied:
                raise ValueError(
                    f"{pair.weight} belongs to several modules, of which one alone is adapted; write the adapter alone"
                )
            factors = {name: found.pop(name).double() for name in (pair.a, pair.b)}
            weight, dtype = found[pair.weight].double(), torch.promote_types(p[pair.weight].dtype, p[pair.a].dtype)
            found[pair.weight] = (weight + pair.change(factors, weight.shape)).to(dtype)
        return found

    def written(self, network: nn.Module, p: Params) -> dict[str, Any]:
        return written(self, network, adapted_in(network), p)

    def drawn(self, module: Any, seed: int, number: int) -> Iterator[tuple[str, Tensor]]:
        """The initial factors of an adapted module. number: its place among them."""
        a, b = module.lora_a.shape, module.lora_b.shape
        keys = {factor: counted.key(seed, "adapter", number, factor) for factor in "ab"}

        def drawn(factor: str, shape: torch.Size) -> Tensor:
            if isinstance(module, EmbeddingLowRank):
                return counted.normal(keys[factor], shape.numel()).view(shape)
            if self.init == "gaussian":
                return (counted.normal(keys[factor], shape.numel()) / self.rows).view(shape)
            return ((2 * counted.uniform(keys[factor], shape.numel()) - 1) / math.sqrt(math.prod(a[1:]))).view(shape)

        zero = ("a" if isinstance(module, EmbeddingLowRank) else "b") if self.zero_b else ""
        for factor, shape in (("a", a), ("b", b)):
            yield f"lora_{factor}", torch.zeros(shape) if factor == zero else drawn(factor, shape)


def attention(modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of the modules that `targets: auto` means, [] if there are none."""
    ends = {name: name.rpartition(".")[2] for name in modules}
    for wanted in AUTO:
        if {*wanted} <= {*ends.values()}:
            return [name for name, end in ends.items() if end in wanted]
    return []


def chosen(patterns: tuple[str, ...], key: str, names: list[str], what: str) -> list[str]:
    """The names that one of the patterns matches. Raises ValueError for a pattern that matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern.strip("*."), names, SHOWN, 0.3) or names[:SHOWN]
            raise ValueError(f"{key}: no {what} is called {pattern}; nearest are {', '.join(near)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def shown(names: list[str]) -> str:
    """Names for a message."""
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
