"""What one rank does while a machine is measured: a function per stage, which all ranks run at once.

They share memory and links as they would in training. A time is a low quantile of its repetitions, since other programs
only ever add to one; and of a rank that computes on one core, it is processor time, which they add little to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from math import ceil
from statistics import quantiles

import torch
import torch.distributed as dist
from torch.nn import functional as F

from shardwise.hardware.fit import Heads, Message, Product, Stream
from shardwise.hardware.local import Found, look, num_cores
from shardwise.launch.environment import Launch, read_environment
from shardwise.launch.variables import variables

SHAPES = (
    (256, 256, 256), (512, 512, 64), (192, 192, 1024), (1024, 192, 192), (448, 192, 1024), (1024, 448, 192),
    (512, 512, 512), (1024, 512, 256), (512, 1024, 1024), (2048, 256, 1024), (1024, 1024, 1024),
)  # fmt: skip
"""`m, n, k` of the products on a core, by growing work: outputs, and gradients of weights, of small blocks."""
WIDE = (
    (1024, 1024, 1024), (4096, 4096, 128), (4096, 4096, 512), (2048, 4096, 4096), (8192, 1024, 4096),
    (4096, 14336, 4096), (14336, 4096, 4096), (16384, 4096, 1024), (8192, 8192, 8192),
)  # fmt: skip
"""The same on an accelerator."""
UNALIGNED = ((8192, 16386, 1024), (8192, 1024, 16386), (8192, 16385, 1024), (8192, 1024, 16385))
"""Of 16 bits, there: rows that are no multiples of 8 numbers."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CORE_HEADS = ((4, 4, 32, 256), (2, 4, 64, 512), (1, 4, 128, 1024))
WIDE_HEADS = ((4, 16, 64, 2048), (4, 16, 128, 2048), (1, 16, 128, 8192))
"""Sequences, heads, size of a head, tokens."""
SIZES = (2**12, 2**15, 2**18, 2**20, 2**22, 2**24)
"""Bytes of a collective; between accelerators 8 times as much."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
KERNELS = 100
FILLED = 2**28
"""Bytes of the copies behind which an accelerator's calls are queued."""
# named by what they take in torch 2.13, by where they put it before
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def place() -> tuple[Found, int]:
    """(what is here, ranks of this node)."""
    return look(), _launch().local_world


def products(dtype: str, seconds: float) -> list[Product]:
    """Products of a dtype; shapes that would take too long are left out."""
    device = _device()
    shapes = SHAPES if device.type == "cpu" else WIDE + UNALIGNED * (dtype == "bf16")
    budget = seconds / len(shapes)
    found: list[Product] = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    for m, n, k in shapes:
        work = 2.0 * m * n * k
        if found and 5 * work / max(p.rate for p in found) > 3 * budget:
            continue
        found.append(Product(dtype, m, n, k, timed(_product(dtype, (m, n, k), device), device, budget)))
    torch.set_float32_matmul_precision(before)
    return found


def _product(dtype: str, shape: tuple[int, int, int], device: torch.device) -> Callable[[], object]:
    m, n, k = shape
    a, b = (torch.randn(size, device=device) / 8 for size in ((m, k), (n, k)))
    if dtype != "fp8":
        left, right = a.to(DTYPES[dtype]), b.to(DTYPES[dtype]).t()
        return lambda: left @ right
    kind, one = F.ScalingType.TensorWise, torch.ones((), device=device)
    low, other = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return lambda: F.scaled_mm(low, other, one, kind, one, kind, output_dtype=torch.bfloat16)


def memory(seconds: float) -> list[list[Stream]]:
    """[copies and triads over memory, element-wise operators as a model issues them]."""
    device = _device()
    count = 2**24 if device.type == "cpu" else 2**28
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    plain: list[tuple[int, Callable[[], object]]] = [
        (2, lambda: c.copy_(a)),
        (3, lambda: torch.add(a, b, alpha=2.0, out=c)),
    ]
    copies = [Stream("copy", 4.0 * count * moved, timed(work, device, seconds / 8)) for moved, work in plain]
    operators = []
    columns = 512 if device.type == "cpu" else 4096
    for size in (count // 32, count // 4):
        x, y = a[:size].view(-1, columns), b[:size].view(-1, columns)
        issued: list[tuple[str, int, Callable[[], object]]] = [
            ("add", 3, partial(torch.add, x, y)),
            ("silu", 2, partial(F.silu, x)),
            ("norm", 2, partial(F.layer_norm, x, (columns,))),
        ]
        operators += [Stream(name, 4.0 * size * n, timed(work, device, seconds / 8)) for name, n, work in issued]
    return [copies, operators]


def attention(seconds: float) -> list[Heads]:
    """Fused causal attention, forward: bf16 on an accelerator, fp32 on a core, as each would train."""
    device = _device()
    shapes, dtype = (CORE_HEADS, torch.float32) if device.type == "cpu" else (WIDE_HEADS, torch.bfloat16)
    found = []
    for batch, heads, size, length in shapes:
        q, k, v = (torch.randn(batch, heads, length, size, device=device, dtype=dtype) for _ in range(3))

        def work(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        found.append(Heads(batch, heads, size, length, timed(work, device, seconds / len(shapes))))
    return found


def host(seconds: float) -> tuple[float, float, float, float]:
    """Seconds of the host per kernel, recorded for a backward pass, per product, and per product with a bias; its rate.

    That is of bytes per second, copied to the device. A product's library looks for a kernel: of 16 bits where a
    device has those.
    """
    device = _device()
    weight = torch.ones(8, device=device, requires_grad=True)

    def chain() -> object:
        y = weight
        for _ in range(KERNELS // 2):
            y = F.silu(y + weight)
        return y

    is_cpu = device.type == "cpu"  # which makes a product before it goes on: one that takes no time is timed
    side, kind = (8, torch.float32) if is_cpu else (256, torch.bfloat16)
    small = torch.ones(side, side, device=device, dtype=kind)

    def products(bias: torch.Tensor | None = None) -> object:
        y = small
        for _ in range(KERNELS):
            y = F.linear(y, small, bias)
        return y

    issued = timed(chain, device, seconds / 4, wait=False) / KERNELS
    product = timed(products, device, seconds / 4, wait=False) / KERNELS
    biased = timed(lambda: products(small[0]), device, seconds / 4, wait=False) / KERNELS
    there = torch.empty(2**24, device=device)
    here = torch.ones(2**24, pin_memory=not is_cpu)
    return issued, product, biased, 4.0 * 2**24 / timed(lambda: there.copy_(here), device, seconds / 4)


def join() -> None:
    """Start torch.distributed among the ranks; objects travel on the host, tensors as the devices like it."""
    launch, device = _launch(), _device()
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, init_method=launch.init, rank=launch.rank, world_size=launch.world)


def links(per_node: int, seconds: float) -> dict[str, list[Message]]:
    """Messages by tier: `local` among the ranks of a node, `network` among the ranks with one index on every node."""
    launch, device = _launch(), _device()
    if launch.world == 1:
        return {}
    owns = not dist.is_initialized()
    if owns:
        join()
    nodes = launch.world // per_node
    tiers: dict[str, list[list[int]]] = {}
    if per_node > 1:
        tiers["local"] = [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
    if nodes > 1:
        tiers["network"] = [list(range(index, launch.world, per_node)) for index in range(per_node)]
    found = {}
    for tier, groups in tiers.items():
        made = [dist.new_group(ranks) for ranks in groups]  # every rank makes every group, in one order
        mine = next(index for index, ranks in enumerate(groups) if launch.rank in ranks)
        found[tier] = _messages(made[mine], device, seconds / len(tiers))
    if owns:
        dist.destroy_process_group()
    return found


def _messages(group: dist.ProcessGroup, device: torch.device, seconds: float) -> list[Message]:
    size, first = dist.get_world_size(group), dist.get_global_rank(group, 0)
    scale = 1 if device.type == "cpu" else 8
    budget = seconds / len(COLLECTIVES) / len(SIZES)
    found = []
    for kind in COLLECTIVES:
        for asked in SIZES:
            count = max(asked * scale // 4 // size, 1) * size
            work = _collective(kind, count, group, device)
            if work is None:
                continue
            work()
            _wait(device)
            dist.barrier(group)
            once = _lap(work, device, 2)
            number = torch.tensor(min(max(int(budget / once), 4), 60), device=device)
            dist.broadcast(number, first, group=group)  # all do it as often
            laps = [_lap(work, device, 1) for _ in range(int(number))]
            found.append(Message(kind, 4 * count, low(laps, 10) / (2 if kind == "send" else 1)))
    return found


def _collective(kind: str, count: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object] | None:
    """The call; of `send` a ping and a pong between neighbours, None for a rank that has none."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    whole, part = torch.ones(count, device=device), torch.ones(count // size, device=device)
    if kind == "all_reduce":
        whole.zero_()  # it adds to itself again and again
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: _gather(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: _scatter(part, whole, group=group)
    if kind == "all_to_all":
        out = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(out, whole, group=group)
    other = rank ^ 1
    if other >= size:
        return None
    peer = dist.get_global_rank(group, other)

    def ping_pong() -> None:
        for turn in range(2):
            if turn == rank % 2:
                dist.send(whole, peer, group=group)
            else:
                dist.recv(whole, peer, group=group)

    return ping_pong


def timed(work: Callable[[], object], device: torch.device, seconds: float, *, wait: bool = True) -> float:
    """Seconds of one call: the first quartile of samples over `seconds`, at least three, of 0.2 ms or more each.

    Args:
        work: what is called; once for warmth before.
        device: whose queue is waited for.
        seconds: for all samples.
        wait: False: the time to issue the work, not to do it.
    """
    if device.type != "cpu" and wait:
        return _queued(work, device, seconds)
    clock, share = time.perf_counter, 1.0
    if device.type == "cpu" and torch.get_num_threads() == 1:
        clock, share = time.process_time, max(1.0, _launch().local_world / num_cores())  # ranks that share a core
    work()
    _wait(device)
    once = _lap(work, device, 1, wait=wait)
    times = max(1, ceil(2e-4 / once))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 100):
        samples.append(_lap(work, device, times, wait=wait, clock=clock))
    return low(samples, 4) * share


def _queued(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The same by the device's own clock: calls are queued behind copies that last until all of them are there.

    Else the pace of a host that launches slower than they run would be measured. And a device that does nothing but
    products lowers its clock for their power, which one that trains, half of whose time is spent on memory, does not.
    """
    source, target = (torch.empty(FILLED, dtype=torch.uint8, device=device) for _ in range(2))
    start, stop = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    target.copy_(source)
    work()
    _wait(device)
    times = max(1, min(50, ceil(2e-3 / _lap(work, device, 2))))
    issued = _lap(work, device, times, wait=False) * times
    copies = ceil((1.5 * issued + 2e-4) / _lap(lambda: target.copy_(source), device, 4))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 100):
        for _ in range(copies):
            target.copy_(source)
        start.record()
        for _ in range(times):
            work()
        stop.record()
        _wait(device)
        samples.append(start.elapsed_time(stop) / 1e3 / times)
    return low(samples, 4)


def low(samples: list[float], parts: int) -> float:
    """The first of so many quantiles, never below the least sample.

    >>> low([1.0, 2.0, 300.0], 10)
    1.2
    """
    return quantiles(samples, n=parts, method="inclusive")[0]


def _lap(
    work: Callable[[], object],
    device: torch.device,
    times: int,
    *,
    wait: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    start = clock()
    for _ in range(times):
        work()
    if wait:
        _wait(device)
    end = clock()
    if not wait:
        _wait(device)
    return (end - start) / times


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _launch() -> Launch:
    return read_environment(variables(), command="shardwise probe")


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = _launch().local_rank
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)
