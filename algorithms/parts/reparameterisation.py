"""Reparameterisations: any method of local steps, run on factors instead of some weights.

    z: factors of the compressed weights, and all other tensors as they are
    lift(z) = the model;  pull(z, G) = its Jacobian's transpose times G, the gradient with respect to z
    K local steps of the method on z, with pull(z, gradient at lift(z));  the server's step on the mean of z

`Reparameterised` wraps a `LocalMethod`, which has no code for it. What is sent down is the method's public state on z
and, where factors are drawn anew, a number that counts the updates of the model: from it and the run's seed all parties
draw the same factors. A round in which no client takes part is no update. What is sent up is the change of z.

The model may be an update of a base, W + P(z), which is folded in every `reset` rounds: W <- W + P(z), then new factors
with P = 0. The server sends the averaged factors, never W: every client folds them in (`unpack`), also those that were
not sampled. So W is `Known`. With reset = 0 nothing is folded in, and the variables mean the same in every round.
States between rounds need that: momenta of the server, control variates, rules that keep their state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from ...workloads import counted
from ..contract import Algorithm, Client, Known, Local, Message, Oracle, Round, Server
from ..local import LocalMethod
from ..tree import Layout, Tree
from .factors import Form, Shapes
from .matrices import Sized, real_ratio

Draw = Literal["uniform", "fan_in", "fan_out"]
MOST_FACTORS = 128
"""The number of random factors that are kept: those of the last round or two."""


class Pull(torch.autograd.Function):
    """(n,): the transposed Jacobian of `lift` at z, (n,), times g, (P,). Under vmap it is plain autograd over a vmapped
    forward pass, as the gradient of the loss is."""

    generate_vmap_rule = False

    @staticmethod
    def forward(z: Tensor, g: Tensor, lift: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            (pulled,) = torch.autograd.grad(lift(leaf), leaf, g)
        return pulled

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps nothing."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, z: Tensor, g: Tensor, lift: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        z, g = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((z, g), in_dims[:2], strict=True)
        )
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            (pulled,) = torch.autograd.grad(vmap(lift)(leaf), leaf, g)
        return pulled, 0


class Report(NamedTuple):
    """What a compression does, for `fedfleet show`."""

    sized: tuple[Sized, ...]  # the compressed weights
    texts: list[str]  # what is sent of each, in words
    ratio: float  # numbers sent over numbers of the model


class Compressing(Algorithm):
    """A method that reports what it compresses."""

    stale = "what its clients send has a meaning only with the factors that were drawn for one round"

    @property
    def report(self) -> Report:
        raise NotImplementedError


class Broadcast(NamedTuple):
    method: Any  # the method's public state; its x is the mean of z
    turn: Any  # (), int64, 1 + the number of updates, from which the draw follows; () where none is drawn anew
    base: Known  # the base of the compressed weights, a Tree; () where the weights are the factors' product


class Unpacked(NamedTuple):
    method: Any  # the method's public state; its x is the z that the round starts from
    base: Any  # of the compressed weights, a Tree or ()
    fixed: dict[str, Tensor]  # factors that are drawn and not trained, by name


class Lifted:
    """An oracle of gradients with respect to z, from an oracle of gradients with respect to the weights."""

    def __init__(self, oracle: Oracle, space: Factored, unpacked: Unpacked) -> None:
        self.oracle, self.space, self.unpacked = oracle, space, unpacked

    @property
    def key(self) -> Tensor:
        return self.oracle.key

    @property
    def done(self) -> Tensor:
        return self.oracle.done

    @property
    def examples(self) -> Tensor:
        return self.oracle.examples

    def __call__(self, z: Tree, /) -> Tree:
        space, fixed = self.space, self.unpacked.fixed
        g = self.oracle(space.lift(z, fixed, self.unpacked.base))
        return Tree(Pull.apply(z.flat, g.flat, lambda flat: space.lift(Tree(flat, z.layout), fixed).flat), z.layout)


@dataclass(frozen=True)
class Factored:
    """The variables z. `layout`: the model's; `sized`, `form`: which weights are factored, and how; `draw`: what starts
    at random is uniform in U(-a, a) with a = `spread`, or normal with variance 2 / fan_in or 2 / fan_out."""

    layout: Layout
    sized: tuple[Sized, ...]
    form: Form
    draw: Draw
    spread: float
    seed: int

    def trained(self) -> dict[str, Shapes]:
        """weight -> factor -> shape, of the factors that are trained."""
        return {s.weight.name: self.form.trained(s.weight, s.size) for s in self.sized}

    def start(self, x: Tree, turn: int, still: bool = False) -> Tree:
        """z with new factors, and all else from x; `turn`: number of the draw; `still`: all factors are zero."""
        made, leaves = self.trained(), {}
        for number, (name, leaf) in enumerate(x.items()):
            if name not in made:
                leaves[name] = leaf
            for factor, shape in made.get(name, {}).items():
                random = factor in self.form.starts and not still
                leaves[f"{name}.{factor}"] = (
                    self._drawn(factor, shape, (turn, number), leaf) if random else leaf.new_zeros(shape)
                )
        return Tree.of(leaves)

    def fixed(self, turn: int, like: Tensor) -> dict[str, Tensor]:
        """The factors that are drawn and not trained, by name; `like`: has their dtype and device."""
        drawn = {}
        for s in self.sized:
            for factor, shape in self.form.fixed(s.weight, s.size).items():
                place = (turn, self.layout.names.index(s.weight.name))
                drawn[f"{s.weight.name}.fixed.{factor}"] = self._drawn(f"fixed.{factor}", shape, place, like)
        return drawn

    def _drawn(self, factor: str, shape: tuple[int, ...], place: tuple[int, int], like: Tensor) -> Tensor:
        """One random factor; `place`: the number of the draw and the position of the weight in the model."""
        if like.device.type == "meta":  # it has a shape and no numbers
            return like.new_empty(shape)
        scale = self.spread
        if self.draw != "uniform":
            name = self.layout.names[place[1]]
            sized = next(s for s in self.sized if s.weight.name == name)
            fan = self.form.fans(factor, sized.weight, sized.size)[self.draw == "fan_out"]
            scale = (2 / fan) ** 0.5
        key_parts = (self.seed, "factors", *place, factor)
        return random_factor(key_parts, shape, self.draw == "uniform", scale, like.dtype).to(like.device)

    def weights(self, z: Tree, fixed: dict[str, Tensor]) -> dict[str, Tensor]:
        """The compressed weights, or the updates of them, by name."""
        parts = {**dict(z.items()), **fixed}
        made = {}
        for s in self.sized:
            named = (*self.form.trained(s.weight, s.size), *(f"fixed.{k}" for k in self.form.fixed(s.weight, s.size)))
            made[s.weight.name] = self.form.weight(s.weight, {k: parts[f"{s.weight.name}.{k}"] for k in named})
        return made

    def lift(self, z: Tree, fixed: dict[str, Tensor], base: Any = ()) -> Tree:
        """The model at z; `base`: added to the compressed weights, () for none."""
        made = self.weights(z, fixed)
        if base != ():
            made = {name: base[name] + value for name, value in made.items()}
        return Tree.join(self.layout, {n: made[n] if n in made else z[n] for n in self.layout.names})

    @property
    def report(self) -> Report:
        return Report(self.sized, [self.form.text(s.size) for s in self.sized], real_ratio(self.layout, self.sized))


@lru_cache(MOST_FACTORS)
@torch.inference_mode(False)
def random_factor(
    key_parts: tuple[int | str, ...], shape: tuple[int, ...], uniform: bool, scale: float, dtype: torch.dtype
) -> Tensor:
    """A factor of this shape, in the processor's memory: uniform in U(-scale, scale), or normal with this standard
    deviation. key_parts: of `counted.key`.

    Every party draws the same factors: the clients of a round, the server's step and the model that is evaluated. In
    one process they share them. Nothing writes to them.
    """
    key = counted.key(*key_parts)
    draws = 2 * counted.uniform(key, prod(shape)) - 1 if uniform else counted.normal(key, prod(shape))
    return (draws * scale).to(dtype).view(shape)


def refuse_states(method: LocalMethod, why: str, server: bool = False) -> None:
    """Refuse a method that keeps more than x between rounds; `server`: also one whose server rule does. `why`: the
    reason and the remedy, for the message."""
    public, private = method.server_init(Tree.of({"probe": torch.zeros(1)}))
    kept = {
        "its estimator or rule shares a state": (public.shared, public.carried),
        "its clients keep a state": method.client_init(public),
        "its server rule (or evaluate: last_two) keeps a state": private if server else (),
    }
    for what, state in kept.items():
        if pytree.tree_leaves(state):
            raise ValueError(f"this method cannot be compressed so: {what} between rounds, but {why}")


class InSpace(Compressing):
    """A method whose clients take their steps on the variables z of `space`."""

    method: Any
    space: Factored

    def client_init(self, public: Unpacked) -> Client:
        return self.method.client_init(public.method)

    def client_begin(self, public: Unpacked, client: Client) -> Local:
        return self.method.client_begin(public.method, client)

    def client_step(self, public: Unpacked, client: Client, local: Local, oracle: Oracle) -> Local:
        return self.method.client_step(public.method, client, local, Lifted(oracle, self.space, public))

    def client_finish(self, public: Unpacked, client: Client, local: Local) -> tuple[Message, Client]:
        return self.method.client_finish(public.method, client, local)


@dataclass(frozen=True)
class Reparameterised(InSpace):
    """The method on z. `method`: a LocalMethod or, before round 1, its warm start; `based`: the factors make an update
    of a base; `reset`: rounds between merges of the update into the base, 0 for none."""

    method: Any
    space: Factored
    based: bool = False
    reset: int = 0

    def server_init(self, x: Tree) -> Server:
        base = x.pick(self.space.trained()) if self.based else ()
        inner = self.method.server_init(self.space.start(x, 0, still=self.reset > 0))
        turn = torch.tensor(1) if self.reset else ()
        return Server(Broadcast(inner.public, turn, Known(base)), inner.private)

    def unpack(self, public: Broadcast) -> Unpacked:
        z, base, drawn = public.method.x, public.base.value, 0
        if self.reset:
            drawn, since = divmod(int(public.turn) - 1, self.reset)
        if self.reset and since == 0:
            whole = self.space.lift(z, self.space.fixed(drawn - 1, z.flat), base)
            z, base = self.space.start(whole, drawn), whole.pick(base)
        return Unpacked(public.method._replace(x=z), base, self.space.fixed(drawn, z.flat))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        unpacked = self.unpack(server.public)
        inner = self.method.server_update(Server(unpacked.method, server.private), mean, round)
        turn = server.public.turn + 1 if self.reset else ()
        return Server(Broadcast(inner.public, turn, Known(unpacked.base)), inner.private)

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(Server(self.unpack(server.public).method, server.private), mean, round)

    def model(self, server: Server) -> Tree:
        unpacked = self.unpack(server.public)
        z = self.method.model(Server(unpacked.method, server.private))
        return self.space.lift(z, unpacked.fixed, unpacked.base)

    @property
    def variables(self) -> Any:
        """Where factors are drawn, it is decided by the draws what the trained ones stand for."""
        drawn = self.reset > 0 or any(self.space.form.fixed(s.weight, s.size) for s in self.space.sized)
        return (self.space if drawn else (self.space.sized, self.space.form), self.based, self.reset)

    @property
    def warm_start(self) -> Algorithm | None:
        inner = self.method.warm_start
        return None if inner is None else replace(self, method=inner)

    @property
    def report(self) -> Report:
        return self.space.report
