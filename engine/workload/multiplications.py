"""The multiplications of a network, by which `engine.backend: auto` tells short runs from long ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...workloads.workload import Workload

SMALL = 1 << 24
"""The most numbers of a network that gets some to count its multiplications."""
ATEN = torch.ops.aten


def by_inner(place: int) -> Callable[..., int]:
    """Of a product whose sums run over the last axis of the argument at this place."""
    return lambda given, out: out.numel() * given[place].shape[-1]


def of_convolution(given: Any, out: Tensor) -> int:
    x, weight, transposed = given[0], given[1], given[6]
    return (x if transposed else out).numel() * weight[0].numel()


def of_lstm(given: Any, out: Any) -> int:
    """Of a layer for x (T, B, width), whose weights, of inputs and of hidden states, multiply each place."""
    x, of_inputs, of_hidden = given[:3]
    return x.shape[0] * x.shape[1] * (of_inputs.numel() + of_hidden.numel())


def of_attention(given: Any, out: Any) -> int:
    """Of scores and of sums of values, for queries (B, heads, T, d) and keys (B, heads, S, d)."""
    q, k, v = given[:3]
    return q.shape[:-1].numel() * k.shape[-2] * (k.shape[-1] + v.shape[-1])


COUNTED: dict[Any, Callable[[Any, Any], int]] = {
    ATEN.mm.default: by_inner(0),
    ATEN.bmm.default: by_inner(0),
    ATEN.mv.default: by_inner(0),
    ATEN.addmm.default: by_inner(1),
    ATEN.baddbmm.default: by_inner(1),
    ATEN.convolution.default: of_convolution,
    ATEN.mkldnn_rnn_layer.default: of_lstm,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default: of_attention,
}
"""Operations -> the multiplications of a call, from its arguments and its result."""
CHEAP = {
    ATEN.embedding.default,
    ATEN.index_select.default,
    ATEN.cat.default,
    ATEN.stack.default,
    ATEN._to_copy.default,
    ATEN.clone.default,
    ATEN.native_layer_norm.default,
    ATEN.native_group_norm.default,
}
"""Further operations on weights that take no time beside products. Others are views and those at single entries."""


class Products(TorchDispatchMode):
    """Counts the multiplications of the operations in its context: `count`, infinity if one that reads weights is
    unknown."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.count: float = 0
        self.weights = {id(weight): weight for weight in weights}  # and views of them, which stay alive

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `kernels.tape.Tape`: torch's compiler would be loaded only to pass over this class."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in COUNTED:
            self.count += COUNTED[func](args, out)
        elif any(id(arg) in self.weights for arg in args):
            parts = out if isinstance(out, tuple | list) else (out,)
            if func._schema.returns and func._schema.returns[0].alias_info is not None:
                self.weights |= {id(part): part for part in parts}
            elif func not in CHEAP and torch.Tag.pointwise not in func.tags:
                self.count = math.inf
        return out


def multiplications(workload: Workload) -> float:
    """The number of multiplications in a forward pass of the workload's network for one example, in its products:
    linear and convolutional layers, recurrent ones, attention. Infinity where other operations read weights, or where
    the workload does not say what its network gets."""
    network, shape = workload.outline, workload.outline_input
    if network is None or shape is None:
        return math.inf
    found = counted(network, shape, torch.float32)
    return found if found < math.inf else counted(network, shape, torch.int64)  # tokens are whole numbers


def counted(network: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """The multiplications for one input of this type, infinity if the network does not take it."""
    training, parameters = network.training, dict(network.named_parameters())
    tensors = {**parameters, **dict(network.named_buffers())}
    # A forward pass on "meta" has torch import its compiler, which takes a second.
    device = "cpu" if sum(value.numel() for value in tensors.values()) <= SMALL else "meta"
    # With gradients, torch takes the operations that it takes in training, and no kernel for a whole layer.
    numbers = {
        name: torch.zeros(value.shape, dtype=value.dtype, device=device, requires_grad=name in parameters)
        for name, value in tensors.items()
    }
    products = Products([value for value in numbers.values() if value.dim() > 1])
    try:
        with torch.enable_grad(), products:
            torch.func.functional_call(network.eval(), numbers, (torch.ones(1, *shape, dtype=dtype, device=device),))
    except Exception:  # whatever a user's module raises; the run tells it
        return math.inf
    finally:
        network.train(training)
    return products.count
