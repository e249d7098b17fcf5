"""Programs for GPUs in Triton: convolutions of clients with weights of their own, and maximum pooling.

A convolution is a product whose left factor, the columns of the images, is never written: a program computes a tile of
the result and reads what it needs from the images. All clients are in one launch, an image (I, H, W) of client c has
the number c B + b, and each program belongs to one client and one group of its channels. K x L is the size of a
weight; steps (SH, SW), padding (PH, PW) and distances (DH, DW) are those of `torch.conv2d` along both axes. Sums run in
a fixed order, which follows from the shapes of one client alone.

`TRITON_INTERPRET=1` in the environment runs them on the processor, where a test compares them with torch's kernels.
"""

# Triton compiles the bodies of these functions, so that pyright cannot follow their types.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportInvalidTypeForm=false, reportUnknownArgumentType=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

constexpr = tl.constexpr


@triton.jit
def outputs(
    x, w, bias, y, clients_stride, biases_stride, B, H, W, OH, OW,
    G: constexpr, IG: constexpr, OG: constexpr, K: constexpr, L: constexpr,
    SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr, DH: constexpr, DW: constexpr,
    BIASED: constexpr, PRECISION: constexpr, BM: constexpr, BN: constexpr, BK: constexpr,
):  # fmt: skip
    """y (C, B, G OG, OH, OW): a tile of BM places of the images and BN channels of the result."""
    places, taps = B * OH * OW, IG * K * L
    tiles = tl.cdiv(places, BM)
    owner = (tl.program_id(0) // tiles).to(tl.int64)
    client, group = owner // G, (owner % G).to(tl.int32)
    place = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    channel = tl.program_id(1) * BN + tl.arange(0, BN)
    example, within = place // (OH * OW), place % (OH * OW)
    top, left = within // OW * SH - PH, within % OW * SW - PW
    image = x + client * B * (G * IG) * H * W + example * (G * IG) * H * W + group * IG * H * W
    weight = w + client * clients_stride + (group * OG + channel) * taps
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, taps, BK):
        tap = start + tl.arange(0, BK)
        row = top[:, None] + (tap % (K * L) // L * DH)[None, :]
        column = left[:, None] + (tap % L * DW)[None, :]
        inside = (place < places)[:, None] & (tap < taps)[None, :]
        inside = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        a = tl.load(image[:, None] + (tap // (K * L))[None, :] * H * W + row * W + column, inside, 0.0)
        b = tl.load(weight[None, :] + tap[:, None], (channel < OG)[None, :] & (tap < taps)[:, None], 0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIASED:
        own = tl.load(bias + client * biases_stride + group * OG + channel, channel < OG, 0.0)
        total += own.to(tl.float32)[None, :]
    target = y + client * B * (G * OG) * OH * OW + (example * (G * OG) + group * OG) * (OH * OW) + within
    written = (place < places)[:, None] & (channel < OG)[None, :]
    tl.store(target[:, None] + channel[None, :] * OH * OW, total.to(y.dtype.element_ty), written)


@triton.jit
def input_gradients(
    gy, w, gx, clients_stride, B, H, W, OH, OW,
    G: constexpr, IG: constexpr, OG: constexpr, K: constexpr, L: constexpr,
    SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr, DH: constexpr, DW: constexpr,
    PRECISION: constexpr, BM: constexpr, BN: constexpr, BK: constexpr,
):  # fmt: skip
    """gx (C, B, G IG, H, W): a tile of BM places of the images and BN channels of the images."""
    places, taps = B * H * W, OG * K * L
    tiles = tl.cdiv(places, BM)
    owner = (tl.program_id(0) // tiles).to(tl.int64)
    client, group = owner // G, (owner % G).to(tl.int32)
    place = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    channel = tl.program_id(1) * BN + tl.arange(0, BN)
    example, within = place // (H * W), place % (H * W)
    bottom, right = within // W + PH, within % W + PW
    image = gy + client * B * (G * OG) * OH * OW + example * (G * OG) * OH * OW + group * OG * OH * OW
    weight = w + client * clients_stride + group * OG * (IG * K * L) + channel * (K * L)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, taps, BK):
        tap = start + tl.arange(0, BK)
        row = bottom[:, None] - (tap % (K * L) // L * DH)[None, :]
        column = right[:, None] - (tap % L * DW)[None, :]
        inside = (place < places)[:, None] & (tap < taps)[None, :] & (row >= 0) & (column >= 0)
        inside = inside & (row % SH == 0) & (column % SW == 0)
        row, column = row // SH, column // SW
        inside = inside & (row < OH) & (column < OW)
        output = tap // (K * L)
        a = tl.load(image[:, None] + output[None, :] * OH * OW + row * OW + column, inside, 0.0)
        behind = weight[None, :] + (output * (IG * K * L) + tap % (K * L))[:, None]
        b = tl.load(behind, (channel < IG)[None, :] & (tap < taps)[:, None], 0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    target = gx + client * B * (G * IG) * H * W + (example * (G * IG) + group * IG) * (H * W) + within
    written = (place < places)[:, None] & (channel < IG)[None, :]
    tl.store(target[:, None] + channel[None, :] * H * W, total.to(gx.dtype.element_ty), written)


@triton.jit
def weight_gradients(
    x, gy, parts, C, B, H, W, OH, OW, SHARE: constexpr,
    G: constexpr, IG: constexpr, OG: constexpr, K: constexpr, L: constexpr,
    SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr, DH: constexpr, DW: constexpr,
    PRECISION: constexpr, BM: constexpr, BN: constexpr, BK: constexpr,
):  # fmt: skip
    """parts (S, C, G OG, IG K L) float32: a tile of BM channels and BN weights of the gradient, from the s-th SHARE
    places of the results."""
    places, taps = B * OH * OW, IG * K * L
    tiles = tl.cdiv(OG, BM)
    owner = (tl.program_id(0) // tiles).to(tl.int64)
    client, group = owner // G, (owner % G).to(tl.int32)
    channel = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    tap = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    down, along = tap % (K * L) // L * DH - PH, tap % L * DW - PW
    slope = gy + client * B * (G * OG) * OH * OW + group * OG * OH * OW + channel * OH * OW
    image = x + client * B * (G * IG) * H * W + group * IG * H * W + tap // (K * L) * H * W
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, SHARE, BK):
        place = part * SHARE + start + tl.arange(0, BK)
        example, within = place // (OH * OW), place % (OH * OW)
        real = place < places
        a = tl.load(
            slope[:, None] + (example * (G * OG) * OH * OW + within)[None, :],
            (channel < OG)[:, None] & real[None, :],
            0.0,
        )
        row = (within // OW * SH)[:, None] + down[None, :]
        column = (within % OW * SW)[:, None] + along[None, :]
        inside = real[:, None] & (tap < taps)[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        b = tl.load(image[None, :] + (example * (G * IG) * H * W)[:, None] + row * W + column, inside, 0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    target = parts + ((part * C + client) * (G * OG) + group * OG + channel) * taps
    tl.store(target[:, None] + tap[None, :], total, (channel < OG)[:, None] & (tap < taps)[None, :])


@triton.jit
def largest(
    x, y, which, N, H, W, OH, OW,
    K: constexpr, L: constexpr, SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr,
    DH: constexpr, DW: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """y (N, OH, OW): the largest number of each window of the images x (N, H, W), and the place in the window where it
    comes first. A NaN counts as the largest, as in torch."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = index < N * OH * OW
    image, within = index // (OH * OW), index % (OH * OW)
    top, left = within // OW * SH - PH, within % OW * SW - PW
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    found = tl.full((BLOCK,), -1, tl.int32)
    for k in tl.static_range(K):
        for j in tl.static_range(L):
            row, column = top + k * DH, left + j * DW
            inside = real & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            value = tl.load(x + image * H * W + row * W + column, inside, float("-inf")).to(tl.float32)
            larger = inside & ((value > most) | (value != value) | (found < 0))
            most, found = tl.where(larger, value, most), tl.where(larger, k * L + j, found)
    tl.store(y + index, most.to(y.dtype.element_ty), real)
    tl.store(which + index, found.to(tl.uint8), real)


@triton.jit
def largest_gradients(
    gy, which, gx, N, H, W, OH, OW,
    K: constexpr, L: constexpr, SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr,
    DH: constexpr, DW: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """gx (N, H, W): to each number, the gradients of the windows in which it is the largest."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = index < N * H * W
    image, within = index // (H * W), index % (H * W)
    bottom, right = within // W + PH, within % W + PW
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        for j in tl.static_range(L):
            row, column = bottom - k * DH, right - j * DW
            inside = real & (row >= 0) & (column >= 0) & (row % SH == 0) & (column % SW == 0)
            row, column = row // SH, column // SW
            inside = inside & (row < OH) & (column < OW)
            window = image * OH * OW + row * OW + column
            mine = inside & (tl.load(which + window, inside, 255).to(tl.int32) == k * L + j)
            total += tl.load(gy + window, mine, 0.0).to(tl.float32)
    tl.store(gx + index, total.to(gx.dtype.element_ty), real)
