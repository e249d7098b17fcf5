"""The kinds of kernels by name. A measurement tries them in this order."""

from __future__ import annotations

from ...workloads.entry import Entry

_HERE = "fedfleet.engine.kernels."

KERNELS = {
    "torch": Entry(_HERE + "torchs:Torch", "torch's own"),
    "channels_last": Entry(_HERE + "channels_last:ChannelsLast", "torch's with the channels of images last in memory"),
    "native": Entry(_HERE + "operators:Native", "compiled convolutions, pooling and Newton-Schulz iterations"),
    "chain": Entry(_HERE + "fused_chain:FusedChain", "loss and gradient of a whole network in one compiled call"),
    "graph": Entry(_HERE + "torchs:Graph", "torch's, and the steps of a block are replayed from a CUDA graph"),
}
