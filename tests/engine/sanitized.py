"""Calls every function of the kernels' library on extreme sizes and values, in a library that is built with
AddressSanitizer and UndefinedBehaviorSanitizer. test_sanitized.py runs this file as a program, with compiler flags as
arguments."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from fedfleet.algorithms.parts.orthogonal import SCHEMES, Part, matrices_of, newton_schulz_plainly
from fedfleet.engine.kernels import library
from fedfleet.engine.kernels.attention import OneCallAttention
from fedfleet.engine.kernels.channels_last import ChannelsLast
from fedfleet.engine.kernels.operators import AT_ONCE, Native, add_up, iterated

from .test_attention import SIZES, causal, first_alone, of_projections, scattered
from .test_channels_last import CONVOLUTIONS
from .test_fused_chain import CHAINS, at, batch_of, both, workload
from .test_kernels import CONVS, drawn, gradients

ODD = (torch.nan, torch.inf, -torch.inf)


def chains() -> None:
    for chain in CHAINS.values():
        made = workload(*chain)
        x, torchs, own = both(made)
        assert own.chain is not None
        for examples in (0, 1, 6, 13, 32):
            for weighted in (False, True):
                batch = batch_of(made, 2, examples, weighted and examples > 0)
                alone = {name: column[0] for name, column in batch.items()}
                for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
                    at(own, x, x.flat, {**alone, "label": alone["label"].to(dtype)})
                strided = {**batch, "input": batch["input"].flip(1).transpose(0, 1).contiguous().transpose(0, 1)}
                points = torch.stack([x.flat, 2 * x.flat], 1).mT  # neither column is contiguous
                own.chain.gradient(points, strided)
                own.chain.descend(points[0], batch, 0.1, x.flat, torch.zeros_like(x.flat))
                own.chain.descend(points[0], batch, 0.1, None, None)
                own.chain.descend(points[0], batch, 0.1, None, None, (0.1, points[1]))
                own.chain.outputs(points, strided)
                if examples:
                    wrong(own, x, alone)
                    for value in ODD:
                        broken(own, torchs, x, alone, value)


def wrong(own: Any, x: Any, batch: dict[str, Tensor]) -> None:
    """Inputs that do not fit are refused before they are read."""
    label = batch["label"]
    given: dict[str, Any] = {
        "label below": {"label": label - 8},
        "label above": {"label": label + 7},
        "label far": {"label": label + (1 << 62)},
        "fractions": {"label": label.float()},
        "fewer labels": {"label": label[1:]},
        "smaller inputs": {"input": batch["input"][..., 1:]},
        "more shares": {"weight": torch.ones(len(label) + 1)},
    }
    for name, change in given.items():
        try:
            at(own, x, x.flat, {**batch, **change})
        except (IndexError, RuntimeError):
            continue
        raise AssertionError(f"{name} is taken")


def broken(own: Any, torchs: Any, x: Any, batch: dict[str, Tensor], value: float) -> None:
    """Values that are not finite have the same effect as in torch."""
    inputs = batch["input"].clone()
    inputs.view(-1)[inputs.numel() // 2] = value
    mine, theirs = (at(trainer, x, x.flat, {**batch, "input": inputs}) for trainer in (own, torchs))
    assert mine[1].isfinite() == theirs[1].isfinite()


def singles() -> None:
    for inputs, outputs, side, padding, height, width in CONVS:
        tensors = [drawn(2, 3, inputs, height, width), drawn(2, outputs, inputs, side, side), drawn(2, outputs)]

        def conv(x: Tensor, w: Tensor, b: Tensor, padding: int = padding) -> Tensor:
            return F.conv2d(x, w, b, padding=padding)

        with Native().around_losses():
            gradients(vmap(conv), *tensors)
            gradients(conv, *(t[0].mT.contiguous().mT if t.ndim > 2 else t[0].expand(outputs) for t in tensors))
            gradients(conv, *(t[0] for t in tensors[:2]), torch.ones(1).expand(outputs))


def filtered() -> None:
    for x_shape, weight_shape, options in CONVOLUTIONS.values():
        for value in (0.0, *ODD):
            x, weight = drawn(*x_shape), drawn(*weight_shape)
            x.view(-1)[-1] = value
            with ChannelsLast().around_losses():
                gradients(lambda x, weight, options=options: F.conv2d(x, weight, **options), x, weight)


def attentions() -> None:
    for sequences, heads, places, width in SIZES:
        q, k, v = (drawn(sequences, places, heads, width + i)[..., :width] for i in range(3))
        masks = causal(places), first_alone(places), torch.ones(places, places) > 0
        for unseen in (*masks, scattered(sequences, 1, places, places)):
            for value in (0.0, *ODD):
                k[-1, -1, -1, -1] = value
                with OneCallAttention().around_losses():
                    gradients(lambda *given, mask=unseen: of_projections(*given, mask), q, k.clone(), v)


def rest() -> None:
    for shape in ((1, 1), (3, 7), (5, 5), (17, 33), (33, 17), (32, 32), (63, 71), (2, 35, 70)):
        x = drawn(*shape)
        for scheme in SCHEMES:
            for precision, close in ((None, 1e-3), (torch.bfloat16, 0.3)):
                own = iterated(x, None, matrices_of(x.shape), (scheme, 3, precision))
                assert own is not None
                torch.testing.assert_close(own, newton_schulz_plainly(x, scheme, 3), rtol=close, atol=close / 10)
        assert iterated(x.mT.contiguous().mT, None, matrices_of(x.shape), ("jordan", 1, None)) is not None
        for value in (0.0, *ODD):
            iterated(torch.full_like(x, value), None, matrices_of(x.shape), ("classic", 5, torch.bfloat16))
        flat, first = x.flatten(), x.numel() // 3
        parts = (Part(0, 0, first, 1.0, 0.1), Part(first, 1, len(flat) - first, 0.5, 0.1))
        assert iterated(flat, flat, parts, ("classic", 5, torch.bfloat16)) is not None
    for size in (1, 15, 16, 17, 1000):
        for count in range(1, AT_ONCE + 1):
            for more in (False, True):
                add_up(torch.zeros(size, dtype=torch.float64), list(drawn(count, size)), more, True)


if __name__ == "__main__":
    library.FLAGS = tuple(sys.argv[1:])
    torch.set_num_threads(1)
    chains()
    singles()
    filtered()
    attentions()
    rest()
    print("all are sound")
