"""AdamW with averages in fewer bits: bf16, 8 or 4 bits per number. The same update under every mesh.

Block-wise quantisation (Dettmers et al., arXiv:2110.02861; 4 bits: Li et al., arXiv:2309.01507): numbers are divided by
the largest of their block and rounded to a table of codes; the tables are torchao's. Its own optimizers cut a rank's
shard into blocks, so that another mesh has other blocks and other updates. Here a block is a part of a row of the whole
parameter (its last dim): shards along other dims hold whole blocks, and where the last dim is split the ranks agree on
the largest number. Codes have the shape of the parameter, so checkpoints load into any mesh, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwise.errors import ConfigError
from shardwise.model.torch_private import with_values
from shardwise.parallel.init import local_slice
from shardwise.parallel.randomness.counter import Elements, Numbers, Stream
from shardwise.train.torch_private import shard_like
from shardwise.train.updates.rounding import elements_in, rounded
from shardwise.train.updates.update_rules import Groups, _Rule, local_shard

STATE_KINDS: tuple[str, ...] = ("bf16", "bf16-stochastic", "8bit", "4bit")
"""How averages may be kept, besides `fp32`."""
SMALLEST = 4096
"""Parameters with fewer elements, and those of one dim (norms, biases), keep wide averages."""
BLOCK = {"8bit": 256, "4bit": 128}
MOMENTS, CODES, SCALES = ("exp_avg", "exp_avg_sq"), ("codes", "codes_sq"), ("scale", "scale_sq")
"""Names of the state: of averages in a floating-point type, or of their codes (4 bits: both in one) and scales."""


@cache
def table(bits: int, signed: bool) -> Tensor:
    """The values of all codes, ascending, in fp32: torchao's.

    Raises:
        ConfigError: torchao is not installed.
    """
    try:
        tables = import_module(f"torchao.optim.subclass_{bits}bit")
    except ImportError as error:
        raise ConfigError(
            f"adamw: state_dtype={bits}bit, found no library with its tables ({error}); needed: torchao 0.18; "
            "run: pip install 'shardwise[fp8]', or use state_dtype='bf16'"
        ) from error
    make = tables.get_qmap_signed if signed else tables.get_qmap_unsigned
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # torchao computes with it, and keeps what it has made first
    try:
        with with_values(), torch.device("cpu"):
            return torch.tensor(make.__wrapped__(), dtype=torch.float32)
    finally:
        torch.set_default_dtype(usual)


@dataclass(frozen=True)
class Blocks:
    """How a rank's shard of a parameter lies in the blocks of the whole: parts of rows."""

    size: int
    columns: Tensor
    """Place in its row of each of this rank's columns."""
    count: int
    """Blocks in a row."""

    @staticmethod
    def of(parameter: Tensor, size: int) -> Blocks:
        """From the parameter's placements."""
        local, width = local_shard(parameter), parameter.shape[-1]
        places = torch.arange(width, device=local.device).expand(parameter.shape)
        mine = local_slice(places, parameter) if isinstance(parameter, DTensor) else places
        # a shard without rows has columns whose places nobody asks for
        line = mine[(0,) * (mine.dim() - 1)] if mine.numel() else places.new_zeros(local.shape[-1])
        return Blocks(size, line, -(-width // size))

    def largest(self, values: Tensor, parameter: Tensor) -> Tensor:
        """`(..., count)`: the largest magnitude in each block, over all ranks that hold a part of it."""
        where = (self.columns // self.size).expand(values.shape)
        found = values.new_zeros((*values.shape[:-1], self.count))
        found.scatter_reduce_(-1, where, values.abs(), "amax")
        for group in _groups_along_rows(parameter):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return found

    def spread(self, scale: Tensor) -> Tensor:
        """Each block's number at its elements: `(..., count)` to the shape of the shard."""
        return scale.index_select(-1, self.columns // self.size)


def _groups_along_rows(parameter: Tensor) -> list[dist.ProcessGroup]:
    if not isinstance(parameter, DTensor):
        return []
    mesh, last = parameter.device_mesh, parameter.dim() - 1
    split = [axis for axis, placement in enumerate(parameter.placements) if placement.is_shard(last)]
    return [mesh.get_group(axis) for axis in split if mesh.size(axis) > 1]


def quantise(values: Tensor, scale: Tensor, codes: Tensor) -> Tensor:
    """The code of each number: the nearest value of the table times the scale, the upper one of two as near."""
    middles = (codes[:-1] + codes[1:]) / 2
    unit = (values / scale).masked_fill_(~(scale > 0), 0)
    return torch.bucketize(unit, middles.to(unit), right=True, out_int32=True).to(torch.uint8)


class Plain:
    """The averages of a parameter in one floating-point type, each of the parameter's shape.

    Args:
        parameter: whose averages; its layout is theirs.
        dtype: of the averages.
        random: the parameter's name and a seed: numbers are rounded stochastically; None: to nearest.
    """

    def __init__(self, parameter: Tensor, dtype: torch.dtype, random: tuple[str, int] | None = None) -> None:
        """See the class."""
        self._parameter, self._dtype, self._random = parameter, dtype, random
        self._elements: Elements | None = None

    def fresh(self) -> dict[str, Tensor]:
        """Tensors of the names, types and layouts of the state, to be filled."""
        seed = {"seed": torch.empty((), dtype=torch.int64)} if self._random is not None else {}
        return {key: torch.empty_like(self._parameter, dtype=self._dtype) for key in MOMENTS} | seed

    def read(self, state: dict[str, Any], wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """This rank's part of both averages, in `wide`; zeros where there are none yet."""
        self._make(state)
        mean, square = (local_shard(state[key]).to(wide) for key in MOMENTS)
        return mean, square

    def write(self, state: dict[str, Any], mean: Tensor, square: Tensor) -> None:
        """Round both into the state."""
        self._make(state)
        for key, value in zip(MOMENTS, (mean, square), strict=True):
            if self._random is not None:
                name, seed = self._random
                state.setdefault("seed", seed)
                if self._elements is None:
                    self._elements = elements_in(self._parameter, name)
                stream = Stream.of(state["seed"], key, int(state["step"]), name)
                value = rounded(value.float(), Numbers(stream, self._elements, value.device))
            local_shard(state[key]).copy_(value)

    def roundings(self, state: dict[str, Any], mean: Tensor, square: Tensor) -> list[Rounding]:
        """How far what the state holds is from what was written."""
        kept, finfo = self.read(state, mean.dtype), torch.finfo(self._dtype)
        most = finfo.eps / (1 if self._random is not None else 2)
        units = [value.abs().clamp(min=finfo.tiny) for value in (mean, square)]
        return [
            Rounding(_largest((now - was).abs() / unit), most, "relative")
            for now, was, unit in zip(kept, (mean, square), units, strict=True)
        ]

    def _make(self, state: dict[str, Any]) -> None:
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(self._parameter, dtype=self._dtype)


class Coded:
    """The averages of a parameter as codes of 8 or 4 bits, and a scale for each block of a row.

    Args:
        parameter: whose averages, of two dims or more; its layout is that of the codes.
        kind: `8bit` or `4bit`.
        wide: type of the scales; None: the parameter's, fp32 of half types.

    Raises:
        ConfigError: torchao is not installed.
    """

    def __init__(self, parameter: Tensor, kind: str, wide: torch.dtype | None = None) -> None:
        """See the class."""
        self._parameter, self._kind = parameter, kind
        self._wide = wide or torch.promote_types(parameter.dtype, torch.float32)
        self._blocks = Blocks.of(parameter, BLOCK[kind])
        bits, device = int(kind[0]), local_shard(parameter).device
        self._tables = (table(bits, True).to(device), table(bits, False).to(device))

    def fresh(self) -> dict[str, Tensor]:
        """Tensors of the names, types and layouts of the state, to be filled."""
        shard = local_shard(self._parameter)
        scale = shard.new_empty((*shard.shape[:-1], self._blocks.count), dtype=self._wide)
        codes = [shard.new_empty(shard.shape, dtype=torch.uint8) for _ in range(1 if self._kind == "4bit" else 2)]
        return self._named(codes, [scale, scale.clone()])

    def read(self, state: dict[str, Any], wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """This rank's part of both averages, in `wide`: values of the tables times scales; zeros at first."""
        shard = local_shard(self._parameter)
        if "scale" not in state:
            return shard.new_zeros(shard.shape, dtype=wide), shard.new_zeros(shard.shape, dtype=wide)
        codes = local_shard(state["codes"])
        both = (codes >> 4, codes & 15) if self._kind == "4bit" else (codes, local_shard(state["codes_sq"]))
        mean, square = (
            t.to(wide)[c.int()].mul_(self._blocks.spread(local_shard(state[key])))
            for t, c, key in zip(self._tables, both, SCALES, strict=True)
        )
        return mean, square

    def write(self, state: dict[str, Any], mean: Tensor, square: Tensor) -> None:
        """Quantise both into the state; where ranks split rows, all of them take part."""
        mean, square = mean.to(self._wide), square.to(self._wide)
        scales = [self._blocks.largest(values, self._parameter) for values in (mean, square)]
        codes = [
            quantise(values, self._blocks.spread(scale), codes)
            for values, scale, codes in zip((mean, square), scales, self._tables, strict=True)
        ]
        if self._kind == "4bit":
            codes = [codes[0] << 4 | codes[1]]
        state |= self._named(codes, scales)

    def roundings(self, state: dict[str, Any], mean: Tensor, square: Tensor) -> list[Rounding]:
        """How far what the state holds is from what was written, in parts of a block's largest number."""
        kept, found = self.read(state, mean.dtype), []
        for key, codes, low, now, was in zip(SCALES, self._tables, (-1.0, 0.0), kept, (mean, square), strict=True):
            unit = self._blocks.spread(local_shard(state[key])).clamp(min=torch.finfo(mean.dtype).tiny)
            inner = torch.cat([(codes[1:] - codes[:-1]) / 2, codes[:1] - low, 1 - codes[-1:]])
            found.append(Rounding(_largest((now - was).abs() / unit), float(inner.max()), "of its block's largest"))
        return found

    def _named(self, codes: list[Tensor], scales: list[Tensor]) -> dict[str, Tensor]:
        named = {key: _laid_out(value, self._parameter) for key, value in zip(CODES, codes, strict=False)}
        return named | {key: _by_row(scale, self._parameter) for key, scale in zip(SCALES, scales, strict=True)}


class Rounding(NamedTuple):
    """What it cost a number to be kept."""

    largest: float
    """NaN where a number is not finite."""
    most: float
    """What rounding to the nearest representable number (stochastically: to one of the two nearest) can cost."""
    of: str
    """In which unit: `relative`, or `of its block's largest`."""


def _largest(errors: Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0


class LowBitAdamW(_Rule):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) that keeps its averages in few bits between steps.

    Cost: per element 4 bytes (bf16), 2 (8 bits) or 1 (4 bits) and a scale per block, where AdamW has 8; in a step the
    wide averages of one parameter at a time, and for a parameter whose rows ranks split two small all-reduces.
    """

    def __init__(
        self, params: Groups, dials: Mapping[str, Any], state: str, names: Mapping[int, str], seed: int
    ) -> None:
        """`names`: `id` of a parameter -> its name, by which random bits are keyed."""
        super().__init__(params, dict(dials))
        self._kind, self._names, self._seed = state, names, seed
        self._kept: dict[int, Plain | Coded] = {}
        if state in BLOCK:
            table(int(state[0]), signed=True)  # refuses here what would fail in a step

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """`p -= lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay p)`, then round m and v."""
        assert parameter.grad is not None
        shard, wide = local_shard(parameter), torch.promote_types(parameter.dtype, torch.float32)
        grad, count = local_shard(parameter.grad).to(wide), int(state["step"])
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        averages = self.averages(parameter)
        mean, square = averages.read(state, wide)
        mean = mean.lerp(grad, 1 - beta1)
        square = square.mul(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = square.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
        shard.mul_(1 - lr * group["weight_decay"]).addcdiv_(mean, root, value=-lr / (1 - beta1**count))
        del root  # to write takes most
        averages.write(state, mean, square)

    def averages(self, parameter: Tensor) -> Plain | Coded:
        """How those of one of its parameters are kept."""
        if id(parameter) not in self._kept:
            self._kept[id(parameter)] = self._made(parameter)
        return self._kept[id(parameter)]

    def _made(self, parameter: Tensor) -> Plain | Coded:
        if self._kind not in BLOCK:
            random = (self._names[id(parameter)], self._seed) if self._kind == "bf16-stochastic" else None
            return Plain(parameter, torch.bfloat16, random)
        if parameter.dim() > 1 and parameter.numel() >= SMALLEST:
            return Coded(parameter, self._kind)
        return Plain(parameter, torch.promote_types(parameter.dtype, torch.float32))


def _laid_out(local: Tensor, parameter: Tensor) -> Tensor:
    return shard_like(local, parameter) if isinstance(parameter, DTensor) else local


def _by_row(scale: Tensor, parameter: Tensor) -> Tensor:
    """Scales with the layout of the parameter's rows; whole along them on every rank that splits them."""
    if not isinstance(parameter, DTensor):
        return scale
    last = parameter.dim() - 1
    placements = [Replicate() if place.is_shard(last) else place for place in parameter.placements]
    shape = torch.Size([*parameter.shape[:-1], scale.shape[-1]])
    stride = tuple(torch.empty(shape, device="meta").stride())
    return DTensor.from_local(scale, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)
