"""What torch's errors in a forward mean where ranks have parts of the weights: in which module, and what to do.

A weight that `tp` places is a DTensor, which the forward of its own module alone sees as a plain tensor; what ranks
exchange there, no transform of `torch.func` can take; and what an engine's own functions give, nobody may write to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.layers.tensor_hooks import wrap_forward


class _Meaning(NamedTuple):
    row: str
    text: str


_TRANSFORMED = _Meaning(
    row="module.transformed",
    text="a transform of torch.func (vmap, jacrev, jvp) is around layers that tp places, and takes nothing that ranks "
    "exchange; needed: a transform around what has no such layers, or a plan without tp",
)
_WRITTEN = _Meaning(
    row="module.writes-input",
    text="it writes in place into what an engine (fully_shard, a layer that tp places) has given it, or into a weight "
    "of such a layer, where autograd cannot follow; needed: a new tensor (x = x + y in place of x += y), weights that "
    "are written after the step, or a plan of `dp` alone",
)
_MEANINGS = {
    "mixed torch.Tensor and DTensor": _Meaning(
        row="module.weight-elsewhere",
        text="a weight that tp places is used outside of the forward of the module that holds it: in a forward hook "
        "(the old torch.nn.utils.weight_norm and spectral_norm, prune), or in the code of another module "
        "(nn.MultiheadAttention, F.linear(x, embed.weight)); needed: the rule "
        "'replicate' for all that the module whose code reads it holds, torch.nn.utils.parametrizations, a call of the "
        "module that holds the weight, or a plan without tp",
    ),
    "are out of bounds for storage of size 0": _Meaning(
        row="module.writes-input",
        text="its backward pass needs weights that fully_shard has not gathered again, as of a sharded block that "
        "returned a view, into which forward then wrote in place; needed: a new tensor (x = x + y in place of x += y)",
    ),
    "functorch transforms": _TRANSFORMED,
    "Batching rule not implemented": _TRANSFORMED,
    "RegisterPostBackwardFunction is a view and is being modified inplace": _WRITTEN,
    "_ToTorchTensor is a view and is being modified inplace": _WRITTEN,
    "_ToTorchTensor is a view and its base or another view of its base has been modified inplace": _WRITTEN,
}
"""Part of torch's words -> what it means, and the row that it is."""


def explain_errors(root: nn.Module) -> None:
    """Let the forward of a model of which ranks have parts say what torch's errors mean.

    Raises:
        ModelError: within forward, on each rank that meets one.
    """

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with explaining(root):
            return forward(*args, **kwargs)

    wrap_forward(root, run)


@contextmanager
def explaining(root: nn.Module) -> Iterator[None]:
    """The same of a forward and backward pass within it."""
    try:
        yield
    except RuntimeError as error:
        said = next((said for words, said in _MEANINGS.items() if words in str(error)), None)
        if said is None:
            raise
        line = str(error).splitlines()[0].partition(". ")[0]
        raise ModelError(f"{_innermost(root, error)}: {said.text} (torch: {line})", row=said.row) from error


def _innermost(root: nn.Module, error: BaseException) -> str:
    """The module of the model whose call was the last to begin before an error."""
    names, found, trace = {id(module): name for name, module in root.named_modules()}, "", error.__traceback__
    while trace is not None:
        code, values = trace.tb_frame.f_code, trace.tb_frame.f_locals
        first = values.get(code.co_varnames[0]) if code.co_varnames else None
        found, trace = names.get(id(first), found), trace.tb_next
    kind = type(root.get_submodule(found)).__name__
    return f"{found} ({kind})" if found else f"the model ({kind})"
