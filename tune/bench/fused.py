"""The networks of the works as a user of plain PyTorch would write them, with torch's own fused layers.

The engine's networks run under `torch.func.vmap`, which some of torch's layers do not. `fused` replaces these by
torch's: BatchNorm2d, RNN and LSTM, Dropout, and scaled_dot_product_attention. Parameters and running statistics keep
their order and their shapes, so one flat vector of weights fits both networks.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ...workloads.models import norms, recurrent, transformer
from ...workloads.models.convolutional import Dropout


class FusedReader(nn.Module):
    """`recurrent.Reader` over torch's own recurrent layers."""

    def __init__(self, reader: recurrent.Reader) -> None:
        super().__init__()
        stack = reader.stack
        kind = nn.RNN if isinstance(stack, recurrent.Tanh) else nn.LSTM
        width = stack.get_parameter("weight_ih_l0").shape[1]
        self.stack = kind(width, stack.hidden, stack.layers, batch_first=True)
        self.pool, self.out = reader.pool, reader.out

    def forward(self, x: Tensor) -> Tensor:
        h = self.stack(x)[0]
        return self.out(h.amax(1) if self.pool == "max" else h[:, -1])


class FusedAttention(nn.Module):
    """`transformer.Attention` by torch's scaled_dot_product_attention."""

    def __init__(self, part: transformer.Attention) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv, self.out = part.heads, part.norm, part.qkv, part.out
        self.rate, self.drop = part.drop_weights.rate, nn.Dropout(part.drop.rate)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate)
        return self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, -1)))


def fused(module: nn.Module) -> nn.Module:
    """The network with torch's layers in place of those that are written for vmap; it shares the other layers."""
    if isinstance(module, norms.BatchNorm):
        return nn.BatchNorm2d(len(module.running_mean), affine=module.weight is not None)
    if isinstance(module, Dropout):
        return nn.Dropout(module.rate)
    if isinstance(module, recurrent.Reader):
        return FusedReader(module)
    if isinstance(module, transformer.Attention):
        return FusedAttention(module)
    for name, part in module.named_children():
        setattr(module, name, fused(part))
    return module


def state_of(model: nn.Module) -> list[Tensor]:
    """The model's parameters and running statistics, in the order of the engine's flat vector."""
    statistics = [value for value in model.buffers() if value.is_floating_point()]
    return [*model.parameters(), *statistics]
