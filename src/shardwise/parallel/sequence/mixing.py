"""What mixes the tokens of a sequence by other means than attention: of a part of the sequence it gives another result.

Seen by the functions of torch that a forward calls, and the dims that they run over, and by types of modules. Not seen:
`torch.einsum` over the tokens, what is put beside them (`torch.cat`, as gathers do it), sums of one number per token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.parallel.layers.tensor_hooks import wrap_forward

SOFTMAX = (torch.softmax, F.softmax, torch.Tensor.softmax)
CONVOLUTIONS = (
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)
_ALONG_A_DIM = (
    torch.cumsum,
    torch.Tensor.cumsum,
    torch.cumprod,
    torch.Tensor.cumprod,
    torch.logcumsumexp,
    torch.roll,
    torch.Tensor.roll,
    torch.flip,
    torch.Tensor.flip,
)
"""Functions whose second argument is the dim, or the dims last, that they mix along."""
_REDUCING = (
    "sum", "mean", "prod", "std", "var", "amax", "amin", "max", "min", "argmax", "argmin", "median", "logsumexp",
    "sort", "argsort", "cummax", "cummin", "log_softmax", "count_nonzero",
)  # fmt: skip
_DIM_OF: Mapping[Any, int] = {
    **{getattr(torch, name): 1 for name in (*_REDUCING, "std_mean", "var_mean")},
    **{getattr(torch.Tensor, name): 1 for name in _REDUCING},
    **{function: 1 for function in (F.log_softmax, *SOFTMAX)},
    **{function: 2 for function in (torch.norm, torch.topk, torch.diff, torch.Tensor.norm, torch.Tensor.topk)},
    **{function: 2 for function in (torch.Tensor.diff, torch.linalg.vector_norm, F.normalize)},
    **{function: 2 for function in (torch.fft.fft, torch.fft.ifft, torch.fft.rfft)},
}
"""Functions that reduce, order or weigh along a dim -> which of their arguments that is."""
REDUCING = frozenset(_DIM_OF)
_TO_ONE = ("sum", "mean", "prod", "std", "var", "amax", "amin", "max", "min", "argmax", "argmin", "median", "norm")
_WHOLE = frozenset(
    (*(getattr(owner, name) for owner in (torch, torch.Tensor) for name in _TO_ONE), torch.linalg.vector_norm)
)
"""Functions that give one number of all elements where they are told no dim."""
SUMS = (torch.sum, torch.Tensor.sum)
_POOLING = (F.adaptive_avg_pool1d, F.avg_pool1d, torch.max_pool1d, F.max_pool1d)
_MODULES = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.MaxPool1d,
    nn.AvgPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
)
_CUTTING = (torch.Tensor.__getitem__, F.pad)
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
MIXING = frozenset((*_DIM_OF, *_POOLING, *CONVOLUTIONS, *_ALONG_A_DIM, *_CUTTING, *_PRODUCTS))
"""Functions that `mixed` is asked about."""


def mixed(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: tuple[int, int], *, numbers: bool = False
) -> str:
    """How a call mixes tokens of tensors that begin with `shape` (rows, tokens of this rank); empty: it does not.

    `numbers`: a tensor of one number per token counts, too; in a forward it may be a row's statistics, as of experts.
    It is said of a loss, whose sums over everything are added up.
    """
    tensor, name = args[0] if args else kwargs.get("input"), getattr(func, "__name__", "a function")
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        return ""
    if func in CONVOLUTIONS:
        kernel = (args[1] if len(args) > 1 else kwargs["weight"]).shape[2:]
        return f"{name} with a kernel {tuple(kernel)}" if any(size > 1 for size in kernel) else ""
    if func in _PRODUCTS:
        other = args[1] if len(args) > 1 else None
        return f"{name} over the tokens" if isinstance(other, torch.Tensor) and _sums(other, shape) else ""
    if func in _POOLING:
        return f"{name} along the sequence" if (tensor.shape[0], tensor.shape[-1]) == shape else ""
    if tensor.shape[:2] != shape:
        return ""
    if func is torch.Tensor.__getitem__:
        return "a part of the sequence" if _cuts(args[1], shape[1]) else ""
    if func is F.pad:
        widths = args[1] if len(args) > 1 else kwargs["pad"]
        place = 2 * (tensor.dim() - 2)  # pairs of widths begin with the last dim
        return "pad along the sequence" if any(widths[place : place + 2]) else ""
    if func in _DIM_OF and tensor.dim() == 2 and not numbers:
        return ""
    if func in _ALONG_A_DIM:
        found = args[-1] if len(args) > 1 else kwargs.get("dim", kwargs.get("dims"))
    else:
        found = args[_DIM_OF[func]] if len(args) > _DIM_OF[func] else kwargs.get("dim")
    if func in _WHOLE and found is None and "axis" not in kwargs and not numbers:
        return f"{name} over all tokens"
    dims = found if isinstance(found, tuple | list) else [found]
    return f"{name} along the sequence" if any(type(d) is int and d % tensor.dim() == 1 for d in dims) else ""


def _sums(other: torch.Tensor, shape: tuple[int, int]) -> bool:
    """Whether a product with it is over the dim of its tokens."""
    return other.dim() == 3 and other.shape[:2] == shape


def _cuts(index: Any, tokens: int) -> bool:
    """Whether an index takes some of the tokens, which are along the second dim."""
    if not isinstance(index, tuple) or len(index) < 2 or not isinstance(index[0], slice):
        return False
    if isinstance(index[1], slice):
        return index[1].indices(tokens) != (0, tokens, 1)
    return type(index[1]) is int


def mixing_module(root: nn.Module) -> tuple[str, nn.Module] | None:
    """The first module that mixes tokens in a way that cannot be split, by its type."""
    return next(((name, module) for name, module in root.named_modules() if is_mixing(module)), None)


def is_mixing(module: nn.Module) -> bool:
    """Whether modules of its type mix tokens."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d):
        return any(size != 1 for size in module.kernel_size)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) > 1
    return isinstance(module, _MODULES)


class _Watch(TorchFunctionMode):
    """While a block runs that sees a part of the sequence: what mixes tokens in it is refused.

    Tensors of the whole sequence, as of modules that gather it, are of another length and pass.
    """

    def __init__(self, name: str, tokens: torch.Tensor) -> None:
        super().__init__()
        self.name, self.shape = name, (tokens.shape[0], tokens.shape[1])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        is_whole = func in CONVOLUTIONS and args[0].shape[-1] != self.shape[1]
        if func in MIXING and not is_whole and (found := mixed(func, args, kwargs or {}, self.shape)):
            raise _refusal(self.name, found)
        return func(*args, **(kwargs or {}))


def watch_blocks(root: nn.Module, blocks: Collection[str]) -> None:
    """Refuse blocks that mix tokens of which they see a part, when each is called first."""
    for name, block in root.named_modules():
        if name in blocks:
            _watch_first(block, name)


def _watch_first(block: nn.Module, name: str) -> None:
    seen: list[str] = []

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tokens = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim() > 1]
        if seen or not tokens:
            return forward(*args, **kwargs)
        seen.append(name)
        with _Watch(name, tokens[0]):
            return forward(*args, **kwargs)

    wrap_forward(block, run)


def refuse_mixing(name: str, module: nn.Module) -> None:
    """Of a module that is given a part of the sequence.

    Raises:
        ModelError: its type mixes tokens.
    """
    if is_mixing(module):
        raise _refusal(name, f"a {type(module).__name__}")


def refuse_batch_norms(root: nn.Module, blocks: Collection[str], holders: Collection[str]) -> None:
    """Refuse batch norms of blocks, but for those in a module that is given the whole sequence (`holders`).

    Raises:
        ModelError: the statistics of one would be of this rank's tokens.
    """
    for name, module in root.named_modules():
        is_norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        if is_norm and _is_within(name, blocks) and not _is_within(name, holders):
            raise _refusal(name, f"a {type(module).__name__}, whose statistics are of all tokens")


def _is_within(name: str, places: Collection[str]) -> bool:
    return any(name.startswith(f"{place}.") for place in places)


def _refusal(name: str, found: str) -> ModelError:
    return ModelError(
        f"sequence shards: {name}: found {found}, of which each rank has a part; do it in a module that holds column "
        "layers, which is given the whole sequence, or drop `seq` from the plan",
        row="module.mixes-tokens",
    )
