"""What each random function of torch computes, from numbers that are keyed: one row per function.

A row is a function `draw(source, *args, **kwargs)` with the arguments of torch's. It returns `SKIP` where the call
draws nothing (evaluation, probability 0), and torch runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.parallel.randomness.counter import DIGITS, Numbers

SKIP = object()
"""Nothing to draw: the call is torch's."""


class Source(Protocol):
    """Where a draw takes its numbers from."""

    def numbers(self, shape: tuple[int, ...], device: torch.device) -> Numbers:
        """One number per element of a tensor of this shape."""
        ...


def _dropout(source: Source, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not (training and 0 < p <= 1):
        return SKIP
    return _dropped(source, input, p, inplace, tuple(input.shape))


def _dropped(source: Source, input: Any, p: float, inplace: bool, shape: tuple[int, ...]) -> Any:
    keep = source.numbers(shape, input.device).keep(p)
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    if inplace:
        return input.masked_fill_(~keep, 0.0).mul_(scale)
    return torch.where(keep, input * scale, 0.0)  # for the backward pass one byte per element is kept: the mask


def _channels(dims_of_batched: int) -> Callable[..., Any]:
    """Dropout of whole channels; an input of one dim less has no rows, but for `dropout2d`, which always has."""

    def draw(source: Source, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not (training and 0 < p <= 1):
            return SKIP
        kept = 1 if dims_of_batched and input.dim() == dims_of_batched - 1 else 2
        return _dropped(source, input, p, inplace, (*input.shape[:kept], *([1] * (input.dim() - kept))))

    return draw


def _alpha(by_channel: bool) -> Callable[..., Any]:
    """Klambauer et al., Self-Normalizing Neural Networks, arXiv:1706.02515, section 2: keeps mean and variance."""

    def draw(source: Source, input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
        if not (training and 0 < p < 1):
            return SKIP
        shape = (*input.shape[:2], *([1] * (input.dim() - 2))) if by_channel else tuple(input.shape)
        drop = ~source.numbers(shape, input.device).keep(p)
        saturation = -1.7580993408473766
        a = ((1 - p) * (1 + p * saturation**2)) ** -0.5
        out = (input.masked_fill_ if inplace else input.masked_fill)(drop, saturation)
        return out.mul_(a).add_(-a * p * saturation)

    return draw


def _bernoulli(source: Source, input: Any, p: Any = None, *, generator: Any = None, out: Any = None) -> Any:
    _own(generator, out)
    result = torch.empty_like(input, requires_grad=False)
    return _bernoulli_(source, result, input.detach() if p is None else p)


def _bernoulli_(source: Source, self: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    _own(generator)
    numbers = source.numbers(tuple(self.shape), self.device)
    if isinstance(p, torch.Tensor):
        exact = torch.float64 if p.dtype == torch.float64 else torch.float32
        return self.copy_(numbers.uniform(exact) < p)
    return self.copy_(numbers.keep(1.0 - p))


def _created(kind: str) -> Callable[..., Any]:
    """`torch.rand` and `torch.randn`."""

    def draw(source: Source, *size: Any, generator: Any = None, out: Any = None, **options: Any) -> Any:
        _own(generator, out)
        shape = options.pop("size", size)
        shape = tuple(shape[0]) if shape and not isinstance(shape[0], int) else tuple(shape)
        requires_grad = options.pop("requires_grad", False)
        empty = torch.empty(shape, **options)
        return _filled(source, empty, kind).requires_grad_(requires_grad)

    return draw


def _like(kind: str) -> Callable[..., Any]:
    """`torch.rand_like` and `torch.randn_like`."""

    def draw(source: Source, input: Any, *, generator: Any = None, **options: Any) -> Any:
        _own(generator)
        requires_grad = options.pop("requires_grad", False)
        return _filled(source, torch.empty_like(input, **options), kind).requires_grad_(requires_grad)

    return draw


def _filled(source: Source, empty: Any, kind: str) -> Any:
    _check_real(empty)
    numbers = source.numbers(tuple(empty.shape), empty.device)
    return empty.copy_(numbers.uniform(empty.dtype) if kind == "rand" else numbers.normal(empty.dtype))


def _uniform_(source: Source, self: Any, low: float = 0.0, high: float = 1.0, **options: Any) -> Any:
    _own(options.get("generator"))
    _check_real(self)
    low, high = options.get("from", low), options.get("to", high)
    unit = source.numbers(tuple(self.shape), self.device).uniform(self.dtype)
    return self.copy_(unit.mul_(high - low).add_(low))


def _normal_(source: Source, self: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    _own(generator)
    _check_real(self)
    return self.copy_(source.numbers(tuple(self.shape), self.device).normal(self.dtype).mul_(std).add_(mean))


def _normal(source: Source, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Any:
    """`torch.normal` with a mean and a deviation that are tensors or numbers."""
    _own(options.pop("generator", None), options.pop("out", None))
    if size is None:
        like = mean + torch.zeros_like(std) if isinstance(std, torch.Tensor) else mean
        empty = torch.empty_like(like, requires_grad=False)
    else:
        empty = torch.empty(size, **options)
    return _filled(source, empty, "randn").mul_(std).add_(mean)


def _exponential_(source: Source, self: Any, lambd: float = 1.0, *, generator: Any = None) -> Any:
    _own(generator)
    _check_real(self)
    return self.copy_(source.numbers(tuple(self.shape), self.device).exponential(self.dtype).div_(lambd))


def _gumbel_softmax(
    source: Source, logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Any:
    """Jang et al., arXiv:1611.01144, as `F.gumbel_softmax`; `eps` does nothing there either."""
    gumbels = -source.numbers(tuple(logits.shape), logits.device).exponential(logits.dtype).log()
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(logits).scatter_(dim, index, 1.0) - soft.detach() + soft


def _own(*given: Any) -> None:
    if any(value is not None for value in given):
        raise ModelError(
            "a random call of the model draws from a generator of its own, or into out=; found generator= or out=, "
            "needed: numbers keyed by location; leave the argument out"
        )


def _check_real(tensor: Any) -> None:
    if tensor.dtype not in DIGITS:
        raise ModelError(
            f"a random call of the model fills {tensor.dtype}; needed: one of {', '.join(map(str, DIGITS))}; draw in "
            "fp32 and convert, or fill real and imaginary part one by one"
        )


_T: Any = torch.Tensor
_VF: Any = torch
DRAWS: Mapping[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.dropout_: lambda source, input, p, train: _dropout(source, input, p, train, inplace=True),
    F.dropout1d: _channels(3),
    F.dropout2d: _channels(0),
    F.dropout3d: _channels(5),
    torch.feature_dropout: _channels(0),
    _VF.feature_dropout_: lambda source, input, p, train: _channels(0)(source, input, p, train, inplace=True),
    F.alpha_dropout: _alpha(by_channel=False),
    torch.alpha_dropout: _alpha(by_channel=False),
    F.feature_alpha_dropout: _alpha(by_channel=True),
    torch.feature_alpha_dropout: _alpha(by_channel=True),
    F.gumbel_softmax: _gumbel_softmax,
    torch.bernoulli: _bernoulli,
    _T.bernoulli: _bernoulli,
    _T.bernoulli_: _bernoulli_,
    torch.rand: _created("rand"),
    torch.randn: _created("randn"),
    torch.rand_like: _like("rand"),
    torch.randn_like: _like("randn"),
    torch.normal: _normal,
    _T.uniform_: _uniform_,
    _T.normal_: _normal_,
    _T.exponential_: _exponential_,
}
"""The random functions that are keyed."""

_ATTENTION = (
    "its mask is drawn inside a fused kernel; set this dropout to 0, or write the attention out: "
    "softmax, F.dropout on the probabilities, matrix product (Hugging Face: attn_implementation='eager')"
)
_BY_RAND = "draw with torch.rand, torch.randn or torch.bernoulli, which are keyed, and compute from that"
UNKEYED: Mapping[Any, str] = {
    F.scaled_dot_product_attention: _ATTENTION,
    F.multi_head_attention_forward: _ATTENTION,
    torch.lstm: "set the dropout of the recurrent layers to 0, and put nn.Dropout between single layers",
    torch.gru: "set the dropout of the recurrent layers to 0, and put nn.Dropout between single layers",
    torch.rnn_tanh: "set the dropout of the recurrent layers to 0, and put nn.Dropout between single layers",
    torch.rnn_relu: "set the dropout of the recurrent layers to 0, and put nn.Dropout between single layers",
    F.rrelu: "use leaky_relu, or " + _BY_RAND,
    torch.rrelu: "use leaky_relu, or " + _BY_RAND,
    torch.multinomial: "use the Gumbel trick: (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)",
    torch.poisson: _BY_RAND,
    torch.binomial: _BY_RAND,
    torch.randperm: "use torch.rand(n).argsort()",
    torch.randint: "use (torch.rand(size) * high).long()",
    torch.randint_like: "use (torch.rand_like(x) * high).long()",
    _T.random_: "use (torch.rand_like(x) * high).long()",
    _T.cauchy_: _BY_RAND,
    _T.log_normal_: "use torch.randn_like(x).exp()",
    _T.geometric_: _BY_RAND,
    F.fractional_max_pool2d: "use max_pool2d, or give it _random_samples made with torch.rand",
    F.fractional_max_pool3d: "use max_pool3d, or give it _random_samples made with torch.rand",
}
"""The random functions that are not, and what to use in their place."""


def draws_by_itself(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of an `UNKEYED` function draws: attention and recurrent layers do with a dropout only."""
    if func is F.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if func is F.multi_head_attention_forward:
        training = kwargs["training"] if "training" in kwargs else (args[13] if len(args) > 13 else True)
        return bool(training) and bool(args[10] if len(args) > 10 else kwargs["dropout_p"])
    if func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
        at = next(i for i, value in enumerate(args) if isinstance(value, float))
        return bool(args[at]) and bool(args[at + 1])
    if func in (F.rrelu, torch.rrelu):
        return bool(kwargs.get("training", args[3] if len(args) > 3 else False))
    if func in (F.fractional_max_pool2d, F.fractional_max_pool3d):
        return kwargs.get("_random_samples") is None
    return True
