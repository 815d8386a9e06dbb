"""How long one kernel runs: matrix products, attention, element-wise operators, by shape and dtype.

A pure roofline is off by 1.5 to 2 times: tiles run in waves over the units of the device, a tile costs a fill of its
inner dimension, and small heads leave a fused attention short of work. Times are seconds, sizes elements.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from shardwise.hardware.cluster import Device
from shardwise.model.ops import Attention, Pointwise, attention_flops
from shardwise.plan.stack import AttentionKernel, Stack

BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}
TAIL = 2e-6
"""Seconds from the start of a kernel to its first useful work, and from its last to its end."""

HIGHEST = 0.87
"""Largest published share of a nominal rate in a product: 271 of 312 TFLOP/s on an A100 (stas00/ml-engineering). Boards
that run above their nominal clock reach more: `curve.best` where that is larger."""

PLAIN = 0.85
"""Share of the nominal rate that products in fp32 reach at least, where that is half the rate of 16 bits or less: it is
the matrix units that are hard to feed (read off V100, T4 and MI100)."""

# Tile rows, columns, and the share of a unit's rate that a tile of such a size reaches (less reuse of what it loads).
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.62))
_SPLITS = (1, 2, 4, 8)
_BACKWARD_ATTENTION = 2.5
"""Backward over forward operations of fused attention: five products against two (arXiv:2205.14135)."""
_BACKWARD_RATE = 0.78
"""Rate of that backward against the forward's (arXiv:2307.08691, figures 4 to 6)."""
_RISE = 512
"""Keys at which fused attention reaches half of its share of the rate; FlashAttention 2's on a device: `rise`."""
_WIDE = {"fp32": "fp32", "tf32": "fp32", "fp64": "fp64"}
"""Whose rate attention in a type has, of types without matrix units for it."""
_PASSES = {"unfused": 11.0, "fused-softmax": 6.5}
"""Times that the score matrix is read or written in a forward pass, where it is kept in memory."""
_AUTOCAST = {True: 13.7, False: 9.3}
"""The same of primitives under autocast, which has softmax and dropout in fp32: with dropout or without, a third of
what both passes move, counted in 16 bits. Forward: product 1, scale 2, mask into fp32 3, softmax 4, dropout 4.5, cast
3, product 1; backward: products 4, cast 3, dropout 4.5, softmax 6, cast 3, scale 2. Without dropout, as in pictures,
there is no mask and no scale either, and the softmax casts: 12 and 16."""


@lru_cache(maxsize=65536)
def matmul_time(m: int, n: int, k: int, device: Device, dtype: str, groups: int = 1) -> float:
    """Time of `groups` products `[m, k] x [k, n]`.

    Tiles of the output run in waves over the device's units; a wave takes its tile's operations, with a fill of
    `curve.depth` on the inner size; the best of some tile sizes and splits of the inner size is taken; and no product
    is faster than its operands and result pass through memory. Source: wave quantisation as in the matrix
    multiplication guides of the vendors; the constants are fitted.
    """
    low = dtype in ("fp8", "fp4")
    best = device.low_best if low else device.curve.best
    if dtype == "fp32" and device.rates.fp32 <= _half(device) / 2:
        best = max(best, PLAIN)
    unit = device.rates.of(dtype) * best / device.curve.units
    depth, units = device.curve.depth * (2.0 if low else 1.0), device.curve.units
    compute = float("inf")
    for rows, columns, rate in _TILES:
        tiles = groups * ceil(m / rows) * ceil(n / columns)
        for split in _SPLITS:
            if split > 1 and (k / split < 512 or tiles * split > 2 * units):
                break
            # the last wave is not as sharp as its ceiling: clocks rise and tiles overlap while units are idle
            waves = max(1.0, 0.5 * (ceil(tiles * split / units) + tiles * split / units))
            compute = min(compute, waves * 2.0 * rows * columns * (k / split + depth) / (unit * rate))
    traffic = groups * (m * k + k * n + m * n) * (2.0 if low else BYTES[dtype])
    return max(compute, traffic / (device.bandwidth * device.stream)) + TAIL


def fastest_matmul(m: int, n: int, k: int, device: Device, dtype: str, groups: int = 1) -> float:
    """The least time of such products, whatever the software: at the largest share of the rate that any reached."""
    return groups * 2.0 * m * n * k / (max(HIGHEST, device.curve.best) * device.rates.of(dtype))


def misaligned(outs: int, ins: int) -> int:
    """0 where rows of a product's operands and of its result have multiples of 8 numbers; 2 with an odd one, else 1.

    The last sizes of all three, in both passes, are the sizes of the weight.
    """
    return 0 if outs % 8 == 0 and ins % 8 == 0 else 1 + (outs % 2 or ins % 2)


def unaligned_share(outs: int, ins: int, device: Device) -> float:
    """What the rows of a weight leave of the rate in 16 bits: kernels load 8 numbers at once, of other sizes fewer.

    >>> from shardwise.hardware.cluster import load_cluster
    >>> [unaligned_share(outs, 1024, load_cluster("h100").device) for outs in (50304, 50258, 50257)]
    [1.0, 0.36, 0.18]
    """
    by, share = misaligned(outs, ins), device.curve.unaligned
    return share / by if by and share < 1 else 1.0


def pointwise_time(elements: float, device: Device, width: float) -> float:
    """Time to move so many elements of `width` bytes through memory."""
    return elements * width / (device.bandwidth * device.stream) + TAIL


UPCAST = 9.0
"""What the primitives of an RMSNorm move over the one kernel that does it, in 16 bits: 36 B per element against
4 (to fp32 6, square 8, mean 4, scale 8, back 6, weight 4). In fp32: 28 against 8, as of others with 6 kernels."""
UPCAST_BACK = 2.3
"""Its backward pass over that: 82 B per element, where other operators take 1.6 times theirs: gradients of scale and
weight in 16 bits (14), casts (8), of both factors, square and mean in fp32 (60)."""
GELU_APART = 9.0
"""What the primitives of GELU's formula move over the one kernel: 36 B per element in 16 bits against 4 (power 4, four
products with a number 16, tanh 4, two additions and the last product 12)."""
SCANS = 3.35e12
"""Bytes per second of memory beyond which a scan is no faster (an H100's): its kernels are Triton's, which reach less
of a Blackwell (state-spaces/mamba, issue 904). Nemotron-3 takes as long for it on B200, GB200 and GB300 as on H100."""
WIDE_NORM, WIDE_NORM_BACK = 3.5, 1.3
"""The same of a LayerNorm under autocast, whose residual stream is in fp32: 8 B per element and 6 to cast what it gives
for the product behind it, against 4; backward 12 and 6."""
WIDE_ADD, WIDE_ADD_BACK = 2 / 3, 1.8
"""What adding to that stream moves more than in 16 bits: 10 B per element against 6; backward a cast of the gradient
for the block's own part, and the sum with the stream's (18 B)."""
BIAS_BACK = 0.5
"""Of adding experts' biases: their gradient reads what is given, and nothing is written."""
BACK = 1.6
"""Of any other operator's backward pass over the forward's."""


def passes_of(op: Pointwise, stack: Stack, width: float) -> tuple[float, float]:
    """What an operator's kernels move over one that does it all, of `width` bytes; its backward pass over that."""
    is_norm = op.name in ("norm", "qk-norm")
    if op.name == "expert-bias":
        return 1.0 if stack.fused else 0.5 * (op.kernels + 1), BIAS_BACK
    if stack.fused or (stack.fused_norms and is_norm) or (stack.fused_rope and op.name == "rope"):
        return 1.0, BACK
    if op.upcast and width < 4:
        return UPCAST, UPCAST_BACK
    if is_norm and stack.residual_bytes > width:
        return WIDE_NORM, WIDE_NORM_BACK
    if op.name == "gelu" and stack.gelu_apart:  # autocast takes powers in fp32, and so what follows them
        return GELU_APART * max(stack.residual_bytes / width, 1.0), BACK
    passes = 1.0 + 0.5 * (op.kernels - 1)
    if op.name == "residual" and stack.residual_bytes > width:
        return passes + WIDE_ADD, WIDE_ADD_BACK
    return passes, stack.picks_back if op.name == "permute" else BACK


def attention_kernel(op: Attention, batch: float, tp: int, stack: Stack) -> AttentionKernel:
    """The stack's own, or what it falls back to: Megatron-LM's fused softmax takes four heads at a time.

    `batch`: sequences of a micro-batch; a fraction is a mean, of which nothing can be said.
    """
    falls_back = stack.attention == "fused-softmax" and batch % 1 == 0 and batch * op.heads / tp % 4
    return "unfused" if falls_back else stack.attention


def attention_time(
    op: Attention, shape: tuple[float, int, int], tp: int, device: Device, stack: Stack, dtype: str = "bf16"
) -> float:
    """Forward time on one of `tp` ranks; `shape`: sequences, queries of each on this rank, keys of each.

    Fused: operations over the rate that its kernel reaches; heads below 128 and short sequences reach less of it. The
    kernel of wider numbers uses no matrix units: with tf32 it took as long as without, on an H200.
    Not fused: two products and the passes over the score matrix, which is not halved by a causal mask; in fp32 both at
    its rate and width.
    """
    batch, queries, keys = shape
    heads = op.heads / tp
    if stack.attention in _PASSES:
        scores = batch * heads * queries * keys
        flops = 2.0 * scores * (op.qk_dim + op.v_dim)
        kernel = attention_kernel(op, batch, tp, stack)
        wide = kernel == "unfused" and stack.residual_bytes > 2 and dtype not in _WIDE
        passes = _AUTOCAST[stack.drops_scores] if wide else _PASSES[kernel]
        moved = scores * (4.0 if dtype in _WIDE else 2.0) * passes
        rate = min(_half(device), device.rates.of(dtype)) if dtype in _WIDE else _half(device)
        share = PLAIN if dtype == "fp32" and rate <= _half(device) / 2 else 0.5
        return flops / (rate * share) + moved / (device.bandwidth * device.stream) + 6 * TAIL
    flops = batch * queries * attention_flops(op, keys) / tp
    rate = _half(device) if dtype not in _WIDE else min(_half(device), device.rates.of(_WIDE[dtype]))
    return flops / (rate * attention_rate(op, keys, device, stack)) + TAIL


def _half(device: Device) -> float:
    """The rate of 16-bit types: units before bf16's have fp16 alone."""
    return max(device.rates.bf16, device.rates.fp16)


def attention_rate(op: Attention, keys: int, device: Device, stack: Stack) -> float:
    """Share of the 16-bit rate that fused attention reaches, forward."""
    kernel = stack.attention
    if kernel == "triton" and not device.attention.triton:
        kernel = "flash2"
    top: float = getattr(device.attention, kernel)
    half = device.attention.rise if kernel == "flash2" else _RISE
    size = min(op.qk_dim, 128)
    return top * (0.45 + 0.55 * size / 128) * keys / (keys + half)


def attention_backward(forward: float, stack: Stack) -> float:
    """Backward time from the forward's."""
    if stack.attention in _PASSES:
        return 2.0 * forward
    return forward * _BACKWARD_ATTENTION / _BACKWARD_RATE
