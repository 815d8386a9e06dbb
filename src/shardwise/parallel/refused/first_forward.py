"""A look at the first forward of training: what it does that parts of a batch would each do in their own way.

Recurrent layers and attention of torch take their rows along dim 1 unless they are told otherwise (`batch_first`), and
one that is given them along dim 0 takes each row for a token: all rows are computed from each other. Python's and
NumPy's generators are a process's own: what a forward draws from them differs by rank and micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError
from shardwise.parallel.history import tensors_in
from shardwise.parallel.inputs import num_rows
from shardwise.parallel.layers.tensor_hooks import wrap_forward
from shardwise.parallel.placed import Placed
from shardwise.parallel.randomness.generators import states
from shardwise.parallel.refused.apart import Rows
from shardwise.parallel.stages.stage import PassThrough, StageDone

_DRAWN = {"python": "Python's `random`", "numpy": "NumPy's"}


def look_at_first_forward(placed: Placed) -> None:
    """Warn, once, of what the first forward of training shows; nothing is looked at after it.

    Cost: a copy of two generators' states; a hook on each recurrent layer and attention in that forward.
    """
    plan = placed.plan
    divided = placed.mesh.batch.size * plan.batch.micro_batches
    if placed.mesh.world * plan.batch.micro_batches == 1 and plan.recompute.mode == "none":
        return
    for part in placed.parts:
        is_shared = placed.pipeline is not None or any(isinstance(module, FSDPModule) for module in part.run.modules())
        look = _Look(part.root, str(plan), divided, says=placed.mesh.tells)
        if is_shared or plan.axes.tp > 1:
            look.wrap(follows=divided > 1 and not plan.compile and (placed.pipeline is not None or placed.mesh.tells))
        else:
            look.hook()


class _Look:
    """Of one part of a model; it takes itself away."""

    def __init__(self, root: nn.Module, plan: str, divided: int, *, says: bool) -> None:
        self.root, self.plan, self.says, self.divided = root, plan, says, divided
        self.rows, self.before, self.mixing, self.is_over = 0, dict[str, bytes](), list[str](), False
        self.handles: list[RemovableHandle] = []
        for name, module in root.named_modules() if divided > 1 and says else ():
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                look = partial(self.rows_of, name)
                self.handles.append(module.register_forward_pre_hook(look, with_kwargs=True))

    def hook(self) -> None:
        """Of a module whose forward stays its own, so that it can be copied."""
        self.handles.append(self.root.register_forward_pre_hook(self.begin, with_kwargs=True))
        self.handles.append(self.root.register_forward_hook(self.end))

    def wrap(self, *, follows: bool) -> None:
        """Of one that no rank can call alone: its operations are followed. A stage's forward ends by an exception."""

        def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.begin(self.root, args, kwargs)
            if self.is_over or not self.before:
                return forward(*args, **kwargs)
            stage = next((module for module in self.root.modules() if isinstance(module, PassThrough)), None)
            received = stage.wiring.received if stage is not None else ()
            rows = Rows(self.rows, (*tensors_in((args, kwargs)), *received))
            output: Any = None
            try:
                with rows if follows else nullcontext():
                    output = forward(*args, **kwargs)
            except StageDone:
                self.end(self.root)
                raise
            finally:
                self._say_of(rows.learned(output) or rows.learned(self._kept(), "keeps, and a loss function may take"))
            self.end(self.root)
            return output

        wrap_forward(self.root, run)

    def _kept(self) -> list[Any]:
        """Tensors that modules hold as plain attributes: what a loss function reads there beside the output."""
        plain = (value for module in self.root.modules() for value in vars(module).values())
        return [value for value in plain if isinstance(value, torch.Tensor)]

    def _say_of(self, met: str) -> None:
        if met:
            _warn(
                f"forward makes something of all rows that it is given: {met}; `{self.plan}` divides a batch into "
                f"{self.divided} parts, each with its own, which is another training than that of one process; "
                "needed: each row from itself, numbers that are sums over rows, torch's BatchNorm, which apply sums "
                "over ranks, or one data rank and mb1 (docs/loss.md)"
            )

    def begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The forward of a micro-batch; one that is compiled whole is not looked at."""
        if _trains(root) and not self.is_over and not torch.compiler.is_compiling():
            with suppress(ModelError):  # of what has no rows
                self.rows = num_rows((*args, *kwargs.values()))
            self.before = states(torch.device("cpu"))

    def rows_of(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """What such a module is given; of as many tokens as rows nobody can tell which are which."""
        if torch.compiler.is_compiling():
            return
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if not self.rows or given is None or given.is_meta or given.shape[0] != self.rows or self.rows < 2:
            return
        is_alone = given.dim() == 2
        if is_alone or (given.dim() == 3 and not getattr(module, "batch_first", True) and given.shape[1] != self.rows):
            takes = "one sequence, without rows" if is_alone else "its rows along dim 1 (batch_first=False)"
            kind, shape = type(module).__name__, tuple(given.shape)
            self.mixing.append(f"{name or 'the model'} ({kind}) takes {takes}, and was given {shape}")

    def end(self, root: nn.Module, *_: object) -> None:
        """It is over: say what it drew."""
        if not _trains(root) or not self.before:
            return
        if self.mixing:
            more = f", and {len(self.mixing) - 1} more are as it" if len(self.mixing) > 1 else ""
            _warn(
                f"{self.mixing[0]}, whose dim 0 has the {self.rows} rows of the micro-batch{more}: each row is taken "
                f"for a token, and computed from the other rows; `{self.plan}` divides a batch into {self.divided} "
                "parts, which is another training than that of one process; needed: (rows, tokens, features) and "
                "batch_first=True, or the input transposed to (tokens, rows, features)"
            )
        now = states(torch.device("cpu"))
        if self.says and (drawn := [what for kind, what in _DRAWN.items() if now.get(kind) != self.before.get(kind)]):
            _warn(
                f"forward draws from {' and '.join(drawn)} generator, which each process has for itself: under "
                f"`{self.plan}` ranks, micro-batches and recomputed blocks draw other numbers than one process, and "
                "other layers where they decide which are used; needed: torch.rand, randn and the like, which are "
                "keyed by place (docs/randomness.md), or what the data set draws"
            )
        self.is_over = True
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def _trains(root: nn.Module) -> bool:
    return root.training and torch.is_grad_enabled()


def _warn(text: str) -> None:
    with suppress(Warning):  # `-W error` does not end a run that may be meant so
        warnings.warn(text, stacklevel=2)
