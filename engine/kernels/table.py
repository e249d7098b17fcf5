"""The table of kernels: all ways in which the clients of a run may compute, on processors and on GPUs.

To add one, for example for a GPU, write a class of `contract.Kernels` in a file of its own, as `cuda_graph.py` is one,
and enter it here, or in the table KERNELS of a plug-in. Nothing else has to know of it: `engine.kernels` takes its
name, and where that is `auto`, a run measures it in blocks of several sizes, after a proof on the data of the run. What
is chosen, the kernels and the size of the blocks, is the plan of the run (`planning/execution_plan.py`).
"""

from __future__ import annotations

from ...workloads.entry import Entry

_HERE = "fedfleet.engine.kernels."

KERNELS = {
    "torch": Entry(_HERE + "torchs:Torch", "torch's own"),
    "channels_last": Entry(_HERE + "channels_last:ChannelsLast", "torch's with the channels of images last in memory"),
    "native": Entry(_HERE + "operators:Native", "compiled convolutions and Newton-Schulz iterations"),
    "attention": Entry(_HERE + "attention:OneCallAttention", "native, and attention of a built-in GPT in one call"),
    "chain": Entry(_HERE + "fused_chain:FusedChain", "loss and gradient of a whole network in one compiled call"),
    "graph": Entry(_HERE + "cuda_graph:Graph", "torch's, and the steps of a block are replayed from a CUDA graph"),
    "products": Entry(_HERE + "block_convolutions:Products", "convolutions of a block as batched products, in a graph"),
    "streams": Entry(_HERE + "streams:Streams", "torch's, and each client of a block on a CUDA stream, in a graph"),
}
"""Kernels by the names of `engine.kernels`. A measurement tries them in this order."""
