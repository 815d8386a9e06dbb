"""A placed module whose tensors have shapes and no values, and operations that want values all the same.

Two kinds of numbers are made up: a scalar that is read (a loss, a norm) is one, and tokens that are counted by
expert are spread evenly over the experts. Everything else that needs values is refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.diagnose.tracing.ledger import Ledger, tensors_in
from shardwise.diagnose.tracing.torch_private import (
    AWAIT,
    NEEDS_VALUES,
    READ_NUMBER,
    REDUCE_SCATTER,
    GradBucket,
    fake_tensors,
    is_fake,
    real_tensors,
    rebuild_buckets,
    shards_known_by_storage,
    storage_key,
    work_that_holds,
)
from shardwise.errors import ModelError
from shardwise.model.seen import as_with_values, without_tracebacks
from shardwise.parallel.compose import place
from shardwise.parallel.data import replicate_data
from shardwise.parallel.engines.scalars import bind_scalars
from shardwise.parallel.engines.unused import Unused
from shardwise.parallel.init import allocate, blueprint_for
from shardwise.parallel.mesh import GRADIENT_AXES, Mesh
from shardwise.parallel.placed import Batch, Placed
from shardwise.parallel.refused.written import watch_weights
from shardwise.parallel.ties import bind_stages
from shardwise.parallel.torch_private import resync_fully_sharded
from shardwise.plan.constraints import check, refuse
from shardwise.plan.plan import Plan
from shardwise.train.loss import token_cross_entropy
from shardwise.train.optimizers import adamw
from shardwise.train.step import LossFn
from shardwise.train.updates.optim import NamedOptimizer


def token_loss(output: Any, batch: Batch) -> Any:
    """Cross-entropy of logits against `batch["labels"]`."""
    return token_cross_entropy(output, batch["labels"])


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, whatever the plan."""

    model: Callable[[], nn.Module]
    """A factory, built on meta."""
    batch: Callable[[Mesh], Any]
    """One step's batch of this rank, as `make_step` takes it; tensors made with torch's own functions."""
    loss: LossFn = token_loss
    optimizer: Callable[[Placed], NamedOptimizer] = partial(adamw, lr=1e-4)
    clip: float | None = 1.0
    sample: Batch | None = None
    """For pipelines, see `apply`."""
    rules: Mapping[str, str] | None = None
    """See `apply`."""


MAKES = (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default)
"""How DDP makes tensors of its own."""
GROUPED = "aten._grouped_mm.default"
"""Products of rows and matrices by group, as experts have them."""


class Pretending(Ledger):  # type: ignore[no-untyped-call]  # torch has no types here
    """A ledger that answers for values that are not there. Entered inside `fake_tensors`."""

    def __init__(self, axis_of: Callable[[dist.ProcessGroup], str]) -> None:
        super().__init__(axis_of)
        self.replicas: list[DistributedDataParallel] = []
        self.num_experts: frozenset[int] = frozenset()
        """Numbers of experts that the model's modules have."""
        self.is_cpu = True
        """Ranks are joined by gloo, which sums in a copy of what it is given, and holds what it sends until that is
        waited for; NCCL has no copy, and lets go of what has gone."""
        self._lists_integers = False

    def begin(self) -> None:
        """A step starts. DDP orders its buckets first."""
        with self.lists_of_integers():
            for module in self.replicas:
                rebuild_buckets(module)
        super().begin()

    @contextmanager
    def lists_of_integers(self) -> Iterator[None]:
        """Within it DDP's lists of integers have values: the order of its buckets, and which parameters were used."""
        self._lists_integers = True
        try:
            yield
        finally:
            self._lists_integers = False

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on shapes alone; on values, where all that it takes has them."""
        given = list(tensors_in((args, kwargs)))
        if given and not any(map(is_fake, given)):
            if func is torch.ops.c10d.alltoall_base_.default and not any(args[3:5]):
                args[0].copy_(args[1])  # counts of tokens: every rank sends what this one does
            with real_tensors():
                return func(*args, **kwargs)
        if self._lists_integers and func in MAKES and kwargs.get("dtype") is torch.int32:
            with real_tensors():
                return func(*args, **kwargs)
        if func is REDUCE_SCATTER and self.is_cpu:  # gloo sums in a copy of what it is given
            copied = self._of_shapes(torch.ops.aten.clone.default, args[1:2], {}, given)
            self.count(torch.ops.aten.clone.default, args[1:2], {}, copied)
            del copied
        if func is torch.ops.c10d.send.default:
            return work_that_holds(list(args[0]) if self.is_cpu else [])
        if func is AWAIT:
            return args[0]  # as it does on memory; on shapes torch makes another tensor
        if func is READ_NUMBER:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten.bincount.default:
            return self._spread_evenly(args[0].numel(), kwargs.get("minlength", args[2] if len(args) > 2 else 0))
        if str(func) == GROUPED:
            return grouped(*args)
        if func is torch.ops.aten.native_batch_norm.default:
            return normed(self._of_shapes(func, args, kwargs, given), given)
        return self._of_shapes(func, args, kwargs, given)

    def _of_shapes(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """What torch says of the shapes of an operation's results.

        Raises:
            ModelError: they depend on values, or torch does not know them.
        """
        try:
            return func(*args, **kwargs)
        except NEEDS_VALUES as error:
            raise ModelError(
                f"trace_step: {func} gives what depends on the values of its input {tuple(given[0].shape)}, and a "
                "trace has shapes only; needed operations whose shapes follow from those of the batch: write the "
                "forward without it (masks in place of selections), or measure real processes"
            ) from error
        # Whatever a kernel on shapes raises about what it is given; the module's own code does not run in here.
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            found = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in given)
            raise ModelError(
                f"trace_step: {func} of {found or 'no tensors'} failed on shapes alone ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}); needed operations of which torch knows what they give: run the "
                "module's forward on real tensors of these shapes; if that fails too, mend it, else write it with "
                "other operations, leave out --trace, or measure real processes"
            ) from error

    def _spread_evenly(self, count: int, num_bins: int) -> torch.Tensor:
        """Tokens by expert. One bin more than there are experts is for dropped tokens, and stays empty."""
        used = num_bins - 1 if num_bins - 1 in self.num_experts and num_bins not in self.num_experts else num_bins
        share, rest = divmod(count, max(used, 1))
        counts = [share + (i < rest) for i in range(used)]
        with real_tensors():
            return torch.tensor(counts + [0] * (num_bins - used), dtype=torch.int64)


def grouped(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """What products by group give. On shapes torch knows those in bf16 only; on memory those in fp32 run as well.

    Rows are padded to 16 bytes, as the real kernel's are.
    """
    rows, columns = left.shape[-2], right.shape[-1]
    padded = -(-columns * left.element_size() // 16) * 16 // left.element_size()
    if left.dim() != right.dim():  # each group of rows, or of columns, with a matrix of its own
        return left.new_empty_strided((rows, columns), (padded, 1))
    groups = left.shape[0] if left.dim() == 3 or ends is None else ends.shape[0]
    return left.new_empty_strided((groups, rows, columns), (rows * padded, padded, 1))


def normed(result: tuple[torch.Tensor, ...], given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a batch norm gives. Shapes have its mean and deviation in the type of its input.

    On memory they are in that of its running sums, or weights, which is wider where these stay in fp32.
    """
    output, *moments = result
    wide = max((tensor.dtype for tensor in given), key=lambda dtype: dtype.itemsize)
    return (output, *(moment.new_empty(moment.shape, dtype=wide) for moment in moments))


@contextmanager
def without_values(training: Training, plan: Plan, mesh: Mesh, ledger: Pretending) -> Iterator[Placed]:
    """Within it, `apply` of a factory without initial weights, and the ledger entered.

    Raises:
        PlanError: the constraints refuse the plan.
        ModelError: see `apply`.
    """
    refuse(check(plan, world=mesh.world, device=mesh.device.type))
    blueprint = blueprint_for(training.model, None, mesh)
    counts = (getattr(module, "num_experts", None) for module in blueprint.module.modules())
    ledger.num_experts = frozenset(count for count in counts if isinstance(count, int))
    placed = place(blueprint, plan, mesh, sample=training.sample, rules=training.rules)  # on meta, as `apply` does
    with ledger_of_shapes(ledger):
        ledger.mark("rest", blueprint.constants.values())  # values that a constructor was given, which are kept
        device = mesh.device
        for part in placed.parts:
            allocate(part.root, device, torch.device("cpu") if plan.offload.state else device)
            if part.run is not part.root:
                resync_fully_sharded(part.run)
            if not plan.compile:
                watch_weights(part.run)  # its sums are held for a moment, in a real step's first forward
            _allocate_attributes(part.root, blueprint.attributes, device)
        with ledger.lists_of_integers():
            placed = replicate_data(bind_scalars(bind_stages(placed)), plan, mesh)
        ledger.replicas = [part.run for part in placed.parts if isinstance(part.run, DistributedDataParallel)]
        for module in ledger.replicas:
            group = mesh.group(*GRADIENT_AXES)
            module.register_comm_hook(group, lambda group, bucket: _reduced_at_once(group, bucket))
        yield placed


def _reduced_at_once(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does by itself; but the work of the pretended group has no result to wait for."""
    dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextmanager
def ledger_of_shapes(ledger: Pretending) -> Iterator[None]:
    """Tensors without memory, counted."""
    swap = patch.object(torch.utils, "swap_tensors", partial(_swap, torch.utils.swap_tensors))
    quiet, known, alike = without_tracebacks(), shards_known_by_storage(), patch.object(Unused, "most", _as_here)
    with warnings.catch_warnings(), quiet, swap, known, alike, fake_tensors(), as_with_values(), ledger:
        # the step looks at addresses, to find gradients that lie side by side; here none do
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings(
            "ignore", message="FSDP2-wrapped module"
        )  # of outputs that are views: a real run says it
        yield


def _as_here(unused: Unused, numbers: list[int], *, agree: Callable[..., object] = Unused.most) -> list[int]:
    """Every rank uses what this one does; ranks are asked all the same."""
    agree(unused, numbers)
    return numbers


def _swap(exchange: Callable[[torch.Tensor, torch.Tensor], None], one: torch.Tensor, other: torch.Tensor) -> None:
    """Two that are one storage stay: an LSTM looks up its weights by it, and torch refuses where others know them."""
    if storage_key(one.untyped_storage()) != storage_key(other.untyped_storage()):
        exchange(one, other)


def _allocate_attributes(root: nn.Module, names: tuple[str, ...], device: torch.device) -> None:
    modules = dict(root.named_modules())
    for name in names:
        path, _, key = name.rpartition(".")
        held = vars(modules[path]).get(key) if path in modules else None
        if isinstance(held, torch.Tensor) and held.is_meta:
            setattr(modules[path], key, torch.empty_like(held, device=device))
