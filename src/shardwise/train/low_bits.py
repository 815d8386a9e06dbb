"""AdamW with averages in fewer bits: bf16, 8 or 4 bits per number. The same update under every mesh.

Block-wise quantisation (Dettmers et al., arXiv:2110.02861; 4 bits: Li et al., arXiv:2309.01507): numbers are divided by
the largest of their block and rounded to a table of codes; the tables are torchao's. Its own optimizers cut a rank's
shard into blocks, so that another mesh has other blocks and other updates. Here a block is a part of a row of the whole
parameter (its last dim): shards along other dims hold whole blocks, and where `tp` splits the last dim the ranks agree
on the largest number. Codes have the shape of the parameter, so checkpoints load into any mesh, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwise.errors import ConfigError
from shardwise.parallel.counter import Elements, Numbers, Stream
from shardwise.parallel.init import local_slice
from shardwise.train.rounding import elements_in, rounded
from shardwise.train.torch_private import shard_like
from shardwise.train.update_rules import Groups, _Rule, local_shard

STATE_KINDS: tuple[str, ...] = ("bf16", "bf16-stochastic", "8bit", "4bit")
"""How averages may be kept, besides `fp32`."""
SMALLEST = 4096
"""Parameters with fewer elements, and those of one dim (norms, biases), keep wide averages."""
BLOCK = {"8bit": 256, "4bit": 128}


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
    values = tables.get_qmap_signed() if signed else tables.get_qmap_unsigned()
    return torch.tensor(values, dtype=torch.float32)


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
    unit = torch.where(scale > 0, values / scale, 0)
    return torch.bucketize(unit, middles.to(unit), right=True)


class LowBitAdamW(_Rule):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) that keeps its averages in few bits between steps.

    Cost: per element 4 bytes (bf16), 2 (8 bits) or 1 (4 bits) and a scale per block, where AdamW has 8; in a step the
    wide averages of one parameter at a time, and for a parameter whose rows `tp` splits two small all-reduces.
    """

    def __init__(
        self, params: Groups, dials: Mapping[str, Any], state: str, names: Mapping[int, str], seed: int
    ) -> None:
        """`names`: `id` of a parameter -> its name, by which random bits are keyed."""
        super().__init__(params, dict(dials))
        self._kind, self._names, self._seed = state, names, seed
        self._blocks: dict[int, Blocks] = {}
        self._elements: dict[int, Elements] = {}
        if state in BLOCK:
            table(int(state[0]), signed=True)  # refuses here what would fail in a step

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """`p -= lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay p)`, then round m and v."""
        assert parameter.grad is not None
        shard, wide = local_shard(parameter), torch.promote_types(parameter.dtype, torch.float32)
        grad, count = local_shard(parameter.grad).to(wide), int(state["step"])
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        read, write = self._codec(parameter)
        mean, square = read(state, wide)
        mean = mean.lerp(grad, 1 - beta1)
        square = square.mul(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = square.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
        shard.mul_(1 - lr * group["weight_decay"]).addcdiv_(mean, root, value=-lr / (1 - beta1**count))
        write(state, mean, square)

    def _codec(self, parameter: Tensor) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., None]]:
        """How the averages of a parameter are read, and written."""
        if self._kind in BLOCK and parameter.dim() > 1 and parameter.numel() >= SMALLEST:
            return (
                lambda state, wide: self._decoded(parameter, state, wide),
                lambda state, mean, square: self._encode(parameter, state, mean, square),
            )
        narrow = torch.bfloat16 if self._kind not in BLOCK else torch.promote_types(parameter.dtype, torch.float32)
        return (
            lambda state, wide: self._plain(parameter, state, narrow, wide),
            lambda state, mean, square: self._keep(parameter, state, mean, square),
        )

    def _plain(
        self, parameter: Tensor, state: dict[str, Any], narrow: torch.dtype, wide: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(parameter, dtype=narrow)
        return local_shard(state["exp_avg"]).to(wide), local_shard(state["exp_avg_sq"]).to(wide)

    def _keep(self, parameter: Tensor, state: dict[str, Any], mean: Tensor, square: Tensor) -> None:
        name = self._names[id(parameter)]
        for key, value in (("exp_avg", mean), ("exp_avg_sq", square)):
            if self._kind == "bf16-stochastic":
                state.setdefault("seed", self._seed)
                if id(parameter) not in self._elements:
                    self._elements[id(parameter)] = elements_in(parameter, name)
                stream = Stream.of(state["seed"], key, int(state["step"]), name)
                value = rounded(value.float(), Numbers(stream, self._elements[id(parameter)], value.device))
            local_shard(state[key]).copy_(value)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        bits = int(self._kind[0])
        return table(bits, True).to(device), table(bits, False).to(device)

    def _decoded(self, parameter: Tensor, state: dict[str, Any], wide: torch.dtype) -> tuple[Tensor, Tensor]:
        shard = local_shard(parameter)
        if "scale" not in state:
            return shard.new_zeros(shard.shape, dtype=wide), shard.new_zeros(shard.shape, dtype=wide)
        blocks, tables = self._blocks_of(parameter), self._tables(shard.device)
        scales = [blocks.spread(local_shard(state[key])) for key in ("scale", "scale_sq")]
        if self._kind == "4bit":
            both = local_shard(state["codes"]).int()
            codes = (both >> 4, both & 15)
        else:
            codes = (local_shard(state["codes"]).int(), local_shard(state["codes_sq"]).int())
        mean, square = (t.to(wide)[c] * s for t, c, s in zip(tables, codes, scales, strict=True))
        return mean, square

    def _encode(self, parameter: Tensor, state: dict[str, Any], mean: Tensor, square: Tensor) -> None:
        blocks, tables = self._blocks_of(parameter), self._tables(mean.device)
        scales = [blocks.largest(values, parameter) for values in (mean, square)]
        codes = [
            quantise(values, blocks.spread(scale), codes)
            for values, scale, codes in zip((mean, square), scales, tables, strict=True)
        ]
        if self._kind == "4bit":
            codes = [codes[0] << 4 | codes[1]]
        for key, value in zip(("codes", "codes_sq"), codes, strict=False):
            state[key] = _laid_out(value.to(torch.uint8), parameter)
        for key, scale in zip(("scale", "scale_sq"), scales, strict=True):
            state[key] = _by_row(scale, parameter)

    def _blocks_of(self, parameter: Tensor) -> Blocks:
        if id(parameter) not in self._blocks:
            self._blocks[id(parameter)] = Blocks.of(parameter, BLOCK[self._kind])
        return self._blocks[id(parameter)]


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
