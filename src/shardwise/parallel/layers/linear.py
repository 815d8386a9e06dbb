"""`ColumnParallelLinear` and `RowParallelLinear`: tensor-parallel linear layers for models built by hand.

The pair that makes a feed-forward with one all-reduce forward and one backward:

    up = ColumnParallelLinear.from_linear(nn.Linear(512, 2048), mesh)
    down = RowParallelLinear.from_linear(nn.Linear(2048, 512), mesh)
    y = down(torch.relu(up(x)))           # x and y: the same on every tp rank

Formulas: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from shardwise.errors import ModelError
from shardwise.parallel.layers.regions import add_up, fan_out, gather, split
from shardwise.parallel.mesh import Mesh

AXIS = "tp"


def check_divides(tp: int, size: int, what: str, remedy: str = "") -> None:
    """Refuse a dim that the axis does not divide.

    Raises:
        ModelError: With the degrees that would work and, when given, another remedy.
    """
    if size % tp:
        working = ", ".join(str(d) for d in range(1, min(size, 64) + 1) if size % d == 0)
        raise ModelError(
            f"tensor parallelism: tp={tp} does not divide {what}; use tp in {{{working}}}"
            + (f", or {remedy}" if remedy else ""),
            row="module.tp-divides",
        )


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are split over the `tp` axis: rank r computes features [r*out/tp, (r+1)*out/tp).

    Parameters are `weight` and `bias` as in `nn.Linear`, as DTensors sharded on dim 0: checkpoints, gradient norms and
    `shard_data` see the global shape. Drop-in: with `gather_output=True` it computes what the `nn.Linear` does.

    Shapes: input (..., in_features), the same on every tp rank; output (..., out_features / tp), or
    (..., out_features) with `gather_output`.

    Cost: forward none, or one all-gather of the output; backward one all-reduce of the input's gradient.

    Raises:
        ModelError: `out_features` is not a multiple of the axis, or an input has the wrong last dim.

    Example:
        >>> layer = ColumnParallelLinear.from_linear(nn.Linear(8, 16), mesh)  # doctest: +SKIP
        >>> layer(torch.ones(2, 8)).shape  # on tp=2  # doctest: +SKIP
        torch.Size([2, 8])
    """

    def __init__(
        self, in_features: int, out_features: int, mesh: Mesh, *, bias: bool = True, gather_output: bool = False
    ) -> None:
        """Fresh weights, drawn as `nn.Linear` draws them on the mesh's device; tp rank 0 gives the values."""
        super().__init__()
        _adopt(self, nn.Linear(in_features, out_features, bias=bias, device=_device(mesh)), mesh, Shard(0), Shard(0))
        self.gather_output = gather_output

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: Mesh, *, gather_output: bool = False) -> ColumnParallelLinear:
        """The same layer, split: weights are exactly those of `linear` on tp rank 0."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        _adopt(layer, linear, mesh, Shard(0), Shard(0))
        layer.gather_output = gather_output
        return layer

    tp_mesh: DeviceMesh
    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's outputs, or all of them with `gather_output`."""
        _check_last_dim(whole, self.in_features, f"ColumnParallelLinear({self.in_features}, {self.out_features})")
        weight, bias = _local(self.weight), None if self.bias is None else _local(self.bias)
        outputs = F.linear(fan_out(whole, self.tp_mesh), weight, bias)
        return gather(outputs, self.tp_mesh, outputs.dim() - 1) if self.gather_output else outputs

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"{self.in_features}, {self.out_features}, tp={self.tp_mesh.size()}, gather_output={self.gather_output}"


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are split over the `tp` axis; the ranks' results are summed, the bias added once.

    Parameters are `weight` (DTensor sharded on dim 1) and `bias` (replicated).

    Shapes: input (..., in_features / tp), what a `ColumnParallelLinear` gives, or (..., in_features) the same on
    every tp rank with `input_is_parallel=False`; output (..., out_features), the same on every tp rank.

    Cost: forward one all-reduce of the output; backward none, or one all-gather without `input_is_parallel`.

    Raises:
        ModelError: `in_features` is not a multiple of the axis, or an input has the wrong last dim.

    Example:
        >>> layer = RowParallelLinear.from_linear(nn.Linear(16, 8), mesh)  # doctest: +SKIP
        >>> layer(torch.ones(2, 8)).shape  # on tp=2  # doctest: +SKIP
        torch.Size([2, 8])
    """

    def __init__(
        self, in_features: int, out_features: int, mesh: Mesh, *, bias: bool = True, input_is_parallel: bool = True
    ) -> None:
        """Fresh weights, drawn as `nn.Linear` draws them on the mesh's device; tp rank 0 gives the values."""
        super().__init__()
        _adopt(self, nn.Linear(in_features, out_features, bias=bias, device=_device(mesh)), mesh, Shard(1), Replicate())
        self.input_is_parallel = input_is_parallel

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: Mesh, *, input_is_parallel: bool = True) -> RowParallelLinear:
        """The same layer, split: weights are exactly those of `linear` on tp rank 0."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        _adopt(layer, linear, mesh, Shard(1), Replicate())
        layer.input_is_parallel = input_is_parallel
        return layer

    tp_mesh: DeviceMesh
    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The whole output, the same on every tp rank."""
        needed = self.in_features // self.tp_mesh.size() if self.input_is_parallel else self.in_features
        _check_last_dim(inputs, needed, f"RowParallelLinear({self.in_features}, {self.out_features})")
        shard = inputs if self.input_is_parallel else split(inputs, self.tp_mesh, inputs.dim() - 1)
        outputs = add_up(F.linear(shard, _local(self.weight)), self.tp_mesh)
        return outputs if self.bias is None else outputs + _local(self.bias)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        sizes = f"{self.in_features}, {self.out_features}, tp={self.tp_mesh.size()}"
        return f"{sizes}, input_is_parallel={self.input_is_parallel}"


def _adopt(
    layer: ColumnParallelLinear | RowParallelLinear, linear: nn.Linear, mesh: Mesh, weight: Placement, bias: Placement
) -> None:
    """Register the linear layer's parameters on `layer`, distributed over the axis."""
    tp_mesh = mesh.device_mesh[AXIS]
    kind = type(layer).__name__
    size, what = (linear.in_features, "in_features") if weight == Shard(1) else (linear.out_features, "out_features")
    check_divides(tp_mesh.size(), size, f"{what}={size} of {kind}")
    layer.tp_mesh = tp_mesh
    layer.in_features, layer.out_features = linear.in_features, linear.out_features
    layer.register_parameter("weight", _distributed(linear.weight, tp_mesh, weight))
    layer.register_parameter("bias", None if linear.bias is None else _distributed(linear.bias, tp_mesh, bias))


def _distributed(parameter: torch.Tensor, tp_mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    shared = distribute_tensor(parameter.detach(), tp_mesh, (placement,))
    return nn.Parameter(shared, requires_grad=parameter.requires_grad)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard; the gradient goes back to the DTensor with the parameter's own placement."""
    return parameter.to_local()  # type: ignore[attr-defined, no-any-return]


def _device(mesh: Mesh) -> torch.device | None:
    """The mesh's device, unless the caller builds on another one (`with torch.device("meta")`)."""
    default = torch.get_default_device()
    return default if default.type == "meta" else mesh.device


def _check_last_dim(inputs: torch.Tensor, needed: int, where: str) -> None:
    if inputs.shape[-1] != needed:
        raise ModelError(
            f"{where}: the input has {inputs.shape[-1]} features (shape {tuple(inputs.shape)}), needed {needed}; "
            "a column layer takes the whole input and gives 1/tp of its outputs, a row layer takes those "
            "(or the whole input with input_is_parallel=False)"
        )
