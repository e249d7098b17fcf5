"""How the clients of a run compute: torch's kernels, compiled ones, and recordings, on processors and on GPUs.

Kernels are classes of `contract.Kernels`, and the table KERNELS (`table.py`) has them by the names of engine.kernels.
Further ones, for example for a GPU, are one file and one entry of this table.

table                the table KERNELS, and how an entry is added to it
contract             what kernels are asked: which runs can have them, and what they compute in another way than torch
torchs               `torch`: torch's own kernels
cuda_graph           `graph`: torch's own kernels on a GPU, where the steps of a block are replayed from CUDA graphs
fused_chain          `chain`: loss and gradient of a small network in one compiled call, and plain descent in one call
operators            `native`: compiled convolutions and Newton-Schulz iterations in the place of torch's
attention            `attention`: `native`, and attention of short sequences in one compiled call
channels_last        `channels_last`: images with their channels last and Winograd's filtering
block_convolutions   `products`: the same, and a block's convolutions are batched products
streams              `streams`: the clients of a block on several streams of one CUDA graph, each as it is alone
recorded_visit, tape visits of a block that are recorded once and replayed: as a CUDA graph, or as operations of torch
agreement            whether two results agree, to the bit or within rounding: all proofs compare by it
library, csrc/       the compiled library and its sources, of which library.cpp is the one that is compiled
replacements         functions of torch that kernels replace, and which of their arguments compiled kernels take

What each kind earns on which work is measured by benchmarks/kernel_rent.py; benchmarks/RESULTS.md has the figures.

Vectors have the width that the library was compiled for. Sums, and so bits, differ between AVX-512 and AVX2, as those
of torch's kernels do; `compiled_for` in plan.json names it.
"""
