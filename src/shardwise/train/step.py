"""`make_step`: one update from one global batch, the same under every plan.

Gradients of a step are those of the *sum* of the loss over the global batch; they are divided once, by the
weight of all of it. So ragged masks, any accumulation and uneven ranks change nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import NonFiniteError
from shardwise.parallel.data import gradient_divisor
from shardwise.parallel.engines.unused import Unused
from shardwise.parallel.inputs import Signature, distinct, model_inputs, num_rows, to_device
from shardwise.parallel.padding import paddings_of
from shardwise.parallel.placed import Moment, Part
from shardwise.parallel.refused.direct import watched_loss
from shardwise.parallel.refused.explained import explaining
from shardwise.train.data.windows import Window, micro_batches_of, window_of
from shardwise.train.guards.agreement import check_agreement, go_on
from shardwise.train.guards.halving import Halving, communicating, cut_rows, open_halving
from shardwise.train.guards.rates import Rates
from shardwise.train.guards.replicas import Replicas
from shardwise.train.guards.rows import check_rows, check_samples
from shardwise.train.guards.told import told
from shardwise.train.guards.trained import Trained
from shardwise.train.guards.witness import Witness, open_witness
from shardwise.train.kept.buffers import Buffers
from shardwise.train.kept.mirror import refuse_own_loop
from shardwise.train.loss import Loss, as_loss, differentiable, refuse_mean
from shardwise.train.losses import Losses, with_function
from shardwise.train.losses import Window as LossWindow
from shardwise.train.norm import is_counted_here, local_gradient, sum_of_squares
from shardwise.train.options import StepMetrics as StepMetrics
from shardwise.train.options import StepOptions as StepOptions
from shardwise.train.options import options_with as options_with
from shardwise.train.protect import Protection
from shardwise.train.signals import stop_name
from shardwise.train.state import TrainState, placed_of
from shardwise.train.sums import Own, Sums, WorldSums
from shardwise.train.torch_private import clamp_all, scale_all
from shardwise.train.untraced import settle
from shardwise.train.updates.joined import Joined, JoinedGradients

LossFn = Callable[[Any, Any], Any] | Losses
"""(model output, micro-batch) -> `Loss`, a (sum, weight) pair, or a scalar mean; or several by name."""


class TrainStep:
    """One update per call; made by `make_step`."""

    def __init__(self, state: TrainState, loss_fn: LossFn, options: StepOptions) -> None:
        """See `make_step`."""
        self.state, self.options, placed = state, options, placed_of(state)
        watch = partial(watched_loss, placed=placed)
        self.loss_fn = with_function(loss_fn, watch) if isinstance(loss_fn, Losses) else watch(told(loss_fn, placed))
        self._parameters = (trained := Trained(state)).parameters
        self._check_trained, self._between = trained.check, trained.between
        self._retry = open_halving(state) if options.on_oom == "halve" else None
        self._halving = self._retry if isinstance(self._retry, Halving) else None
        self._is_cut_equally = placed.mesh.batch.size > 1 and bool(communicating(placed))
        self._flushes, self._rates = 1, Rates(state)
        self._buffers, self._sums = Buffers(placed), WorldSums(placed, after=self._halving is not None)
        keeps = options.protect
        self._protection = None if keeps is None else Protection(state, keeps, is_norm_local=self._sums.overlaps)
        self._events: list[Mapping[str, Any]] = []
        self._replicas: Replicas | None = None
        counted = {n: self._sums.overlaps or self._counts(n, p) for n, p in self._parameters.items()}
        self._counted = None if all(counted.values()) else counted
        """Which gradients this rank adds to the sum of squares; None: all of them."""
        self._joined, self._unused = JoinedGradients(), Unused(placed, by_hand=self._halving is not None)
        self._signature = Signature.of(placed.parts[0].root)
        self._paddings = [padding for part in placed.parts for padding in paddings_of(part.root)]
        self._divisor = gradient_divisor(placed) if self._halving is None else 1
        self._needs_padding = placed.mesh.batch.size > 1 or placed.pipeline is not None
        self._window: LossWindow | None = None
        self._scalar_mean = False
        self._witness: Witness | None = None
        self.stop_requested = 0
        """A value of `signals.STOPS`: the loop ends after this step, on all ranks together."""

    def __call__(self, batch: Any) -> StepMetrics:
        """Train on this rank's share of one global batch.

        Args:
            batch: a `Window` of the loader, a list of micro-batches, or one batch of rows, which is cut into
                the plan's micro-batches: a tensor, a dict, a tuple, or a list of tensors `[x, y]`, as torch's
                `DataLoader` gives it.

        Raises:
            NonFiniteError: under `on_nonfinite="raise"`, on all ranks alike.
            SpikeError, OutOfMemoryError, ReplicaError: at the limits of the options' policies, on all ranks alike.
        """
        start, batch = time.perf_counter(), window_of(batch)
        if torch.is_autocast_enabled(self.state.mesh.device.type):
            torch.clear_autocast_cache()  # a script's context around its loop holds casts from before the update
        self._check_trained()
        if self._replicas is None:
            self._begin(batch)
        if self._protection is not None:
            self._protection.begin(batch)
        self._buffers.keep()
        if self._retry is not None:
            passes = self._retry.run(partial(self._prepared, batch), self._passes, self._forget, self.state.step + 1)
            self._events += self._retry.take_notes()
        else:
            passes = self._passes(self._prepared(batch))
        grads, joined, sums = self._reduced(*passes)
        self.state.trains(batch)
        with torch.no_grad():
            return self._between.begin(self._update(grads, joined, sums, start))

    def _forget(self) -> None:
        """Drop what the forward and backward passes of a step without an update have left."""
        self.state.optimizer.zero_grad()
        self._buffers.restore()

    def _begin(self, batch: Any) -> None:
        """Before the first step: of several trainers in one script the first that steps is the one verified."""
        self._events += go_on(self.state, self.options)
        self._replicas = Replicas(self.state)
        self._witness = open_witness(self.state)
        if self._witness is None:  # `verify` names what differs itself
            check_agreement(self.state, self.options, self.loss_fn)
            check_rows(batch, self.state.mesh)
            check_samples(self.state.batches, self.state.mesh)
            if self.state.step == 0:
                self._check_replicas()  # initial values that depend on the rank
        settle(self.state, partial(self.measure, batch))

    def measure(self, batch: Any) -> tuple[float, float]:
        """Mean loss, and norm of the mean gradient, of a batch at the state as it is; nothing is updated.

        What a forward pass changes is not put back: see `untraced`. Every rank calls it.

        Args:
            batch: as for a step.

        Cost: a step without its update.
        """
        _, _, sums = self._reduced(*self._passes(self._prepared(window_of(batch), is_step=False)))
        self.state.optimizer.zero_grad()
        scale = self.state.loss_scale.scale if self.state.loss_scale is not None else 1.0
        factor = self._divisor / (sums.weight * scale) if sums.weight else math.nan
        norm = math.sqrt(sums.squares) * factor if sums.squares >= 0 else math.nan
        return (sums.loss / sums.weight if sums.weight else math.nan), norm

    def _prepared(self, batch: Any, *, is_step: bool = True) -> tuple[list[Any], tuple[bool, ...]]:
        """The micro-batches, and which of them are padding; ranks may meet here, to number rows and to weigh losses."""
        micro, zero = self._micro_batches(batch)
        if is_step and self._witness is not None:
            micro, zero = self._witness.begin(micro, zero)
        if isinstance(self.loss_fn, Losses):
            self._window = self.loss_fn.begin(micro, zero, self.state.mesh)
        return micro, zero

    def _passes(self, window: tuple[list[Any], tuple[bool, ...]]) -> tuple[list[Any], tuple[bool, ...], list[Loss]]:
        """Forward and backward: the window, and its losses."""
        micro, zero = window
        for padding in self._paddings:
            padding.flags = zero
        self.state.optimizer.zero_grad()  # what a script's own backward passes since have left is of no step
        self._unused.begin()
        with (placed := self.state.placed).gathering():
            losses = self._pipelined(micro, zero) if placed.pipeline else self._accumulated(micro, zero)
        if self._witness is not None:
            self._witness.losses([loss.sum for loss in losses])
        return micro, zero, losses

    def _reduced(
        self, micro: list[Any], zero: tuple[bool, ...], losses: list[Loss]
    ) -> tuple[dict[str, torch.Tensor], Joined, Sums]:
        """The summed gradients of this rank, and what the world must know of them."""
        self._unused.check_reduced()
        with torch.no_grad():
            if self._halving is not None:
                self._halving.reduce(self._parameters)
            if (copies := self.state.placed.copies) is not None:
                copies.sum_gradients()
            grads = {n: g for n, p in self._parameters.items() if (g := local_gradient(p)) is not None}
            if not self._sums.is_started:
                self._sums.start(self._own(losses, micro, zero))
            joined = self._joined.of(grads)
            mine = joined if self._counted is None else Joined([], [g for n, g in grads.items() if self._counted[n]])
            sums = self._sums.finish(sum_of_squares(mine))
            if sums.has_unused or self._unused.lacks:  # which a trace, without values, cannot read off the sum
                joined = self._joined.of(grads := self._unused.drop(grads, self._parameters))
            if sums.rates:
                self._rates.check()
        return grads, joined, sums

    def _counts(self, name: str, parameter: torch.nn.Parameter) -> bool:
        placed = self.state.placed
        return is_counted_here(parameter, placed.mesh) and (placed.copies is None or placed.copies.counts_here(name))

    def _micro_batches(self, batch: Any) -> tuple[list[Any], tuple[bool, ...]]:
        micro, zero = micro_batches_of(batch, self.state.placed.plan.batch.micro_batches)
        if not self._needs_padding:  # nobody waits for this rank in a collective
            micro, zero = [m for m, z in zip(micro, zero, strict=True) if not z], (False,) * zero.count(False)
        micro = [to_device(m, self.state.mesh.device) for m in micro]
        whole = max(1, len(micro))
        micro, zero = cut_rows(micro, zero, 2**self.state.halvings, equally=self._is_cut_equally)
        self._flushes = len(micro) // whole  # under a pipeline all have the same rows, and so as many pieces
        if self._retry is not None:
            self._retry.largest = max(map(num_rows, micro), default=1)
        self._key_randomness(batch, micro, zero)
        return distinct([self.state.placed.share(m) for m in micro]), zero

    def _key_randomness(self, batch: Any, micro: list[Any], zero: tuple[bool, ...]) -> None:
        """Say which step it is, and which rows of it are here."""
        state, placed = self.state, self.state.placed
        if placed.randomness is not None:
            own: dict[str, Any] = {"rows": batch.positions, "samples": batch.rows} if isinstance(batch, Window) else {}
            moment = Moment(seed=state.seed, step=state.step, **own)
            placed.randomness.begin([part.root for part in placed.parts], moment, micro, zero)

    def _loss(self, output: Any, micro: Any, is_zero: bool) -> Loss:
        if self._window is not None:
            loss = self._window.loss(output, micro, is_zero)
        else:
            result = self.loss_fn(output, micro)
            self._scalar_mean = isinstance(result, torch.Tensor)
            if self.state.placed.context is not None:
                refuse_mean(result)
            loss = as_loss(result, num_rows(micro) if self._scalar_mean else 0)  # rows matter to a plain mean only
        return Loss(loss.sum * 0, loss.weight * 0) if is_zero else loss

    def _seeded(self, loss: Loss) -> torch.Tensor:
        scale = self.state.loss_scale
        return loss.sum * scale.scale if scale is not None else loss.sum

    def _accumulated(self, micro: list[Any], zero: tuple[bool, ...]) -> list[Loss]:
        part, signature = self.state.placed.parts[0], self._signature
        randomness = self.state.placed.randomness
        losses: list[Loss] = []
        for i, (batch, is_zero) in enumerate(zip(micro, zero, strict=True)):
            last = i == len(micro) - 1
            for padding in self._paddings:
                padding.now = is_zero
            with self._reduction(part, first=i == 0, last=last):
                args, kwargs = model_inputs(batch, signature)
                with randomness.at(i) if randomness is not None else nullcontext():
                    output = part.run(*args, **kwargs)
                loss = self._loss(output, batch, is_zero)
                losses.append(Loss(loss.sum.detach(), loss.weight))
                if last and self._sums.overlaps:
                    self._sums.start(self._own(losses, micro, zero))
                backward = self._sums.backward if last else torch.autograd.backward
                backward(self._seeded(differentiable(loss)))
        return losses

    def _reduction(self, part: Part, *, first: bool, last: bool) -> AbstractContextManager[Any]:
        """Tell the data-parallel engine which micro-batch closes the window."""
        if isinstance(part.run, DistributedDataParallel):
            return nullcontext() if last and self._halving is None else part.run.no_sync()
        if isinstance(part.run, FSDPModule) and not (first and last):
            zero = self.state.placed.plan.zero  # HSDP: replicas are summed once per window
            (part.run.set_requires_gradient_sync if zero < 2 else part.run.set_requires_all_reduce)(last)
            if zero < 3:
                part.run.set_reshard_after_backward(last)
            part.run.set_is_last_backward(last)
        return explaining(part.root) if isinstance(part.run, FSDPModule) else nullcontext()

    def _pipelined(self, micro: list[Any], zero: tuple[bool, ...]) -> list[Loss]:
        pipeline = self.state.placed.pipeline
        assert pipeline is not None
        flags = {id(m): z for m, z in zip(micro, zero, strict=True)}
        seen: dict[int, Loss] = {}

        def loss_fn(output: Any, batch: Any) -> torch.Tensor:
            loss = self._loss(output, batch, flags[id(batch)])
            seen[id(batch)] = Loss(loss.sum.detach(), loss.weight)  # a dict: a stage may run once more to learn shapes
            return self._seeded(loss)

        pipeline.run(micro, loss_fn, backward=True, flushes=self._flushes)
        return list(seen.values())

    def _own(self, losses: list[Loss], micro: list[Any], zero: tuple[bool, ...]) -> Own:
        rows = sum(num_rows(m) for m, z in zip(micro, zero, strict=True) if not z) if self._scalar_mean else 0
        return Own(losses, self.stop_requested, rows, self._rates.own(), self._unused.here())

    def _update(self, grads: dict[str, torch.Tensor], joined: Joined, sums: Sums, start: float) -> StepMetrics:
        state, weight = self.state, sums.weight
        scale = state.loss_scale.scale if state.loss_scale is not None else 1.0
        mean = sums.loss / weight if weight else math.nan
        factor = self._divisor / (weight * scale) if weight else 0.0
        norm = math.sqrt(sums.squares) * factor if sums.squares >= 0 else math.nan
        finite = math.isfinite(norm) and math.isfinite(sums.loss) and weight > 0
        lr = state.set_lr()
        state.step += 1
        state.weight += weight
        if self._witness is not None:
            self._witness.gradients(grads, factor)
        # too large a scale, or nothing that counts in the window, is no fault of the model or its data
        scaled = state.loss_scale is not None and state.loss_scale.may_be_at_fault
        excused = weight == 0 or (scaled and math.isfinite(sums.loss))
        cause = self._protection.judge(mean, norm, excused=excused and not finite) if self._protection else None
        makes_update = finite and cause is None
        if makes_update:
            self._apply(grads, joined, factor, norm)
            state.optimizer.zero_grad()
        else:
            state.skipped += 1
            self._forget()
        for follow in state.placed.after_step:
            follow(makes_update)
        if state.loss_scale is not None and weight:
            state.loss_scale.update(finite)
        stopping, number = stop_name(sums.stop), state.step
        if cause is not None and self._protection is not None:
            done = self._protection.act(cause)
            stopping, self._events = done.stopping or stopping, [*self._events, *done.events]
        state.unmade = 0 if finite or excused else state.unmade + 1
        if cause is None and state.unmade > (self.options.max_skips if self.options.on_nonfinite == "skip" else 0):
            stopping = self._nonfinite(mean, norm)
        if self.options.check_replicas and number % self.options.check_replicas == 0:
            self._check_replicas()
        events, self._events = tuple(self._events), []
        metrics = StepMetrics(
            step=number,
            loss=mean,
            weight=weight,
            grad_norm=norm,
            lr=lr,
            seconds=time.perf_counter() - start,
            losses=self._window.means(state.mesh) if self._window is not None else {},
            skipped=not makes_update,
            stopping=stopping,
            events=events,
        )
        if self._witness is not None:
            self._witness.finish(metrics)
        return metrics

    def _apply(self, grads: dict[str, torch.Tensor], joined: Joined, factor: float, norm: float) -> None:
        """Divide, clip and step: `factor` makes the summed gradient the mean one."""
        if self.options.clip_norm is not None:
            factor *= min(1.0, self.options.clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        values = [*joined.runs, *joined.alone]
        if factor != 1.0 and values:
            scale_all(values, factor)
        if self.options.clip_value is not None and values:
            clamp_all(values, self.options.clip_value)
        self.state.optimizer.take_grads(grads)
        self.state.optimizer.step()
        if (copies := self.state.placed.copies) is not None:
            copies.refresh()
        if self.state.ema is not None:
            self.state.ema.update()

    def _check_replicas(self) -> None:
        """Compare what ranks must hold alike; what was healed is an event of this step."""
        assert self._replicas is not None, "the first step makes it"
        self._events += self._replicas.check()

    def _nonfinite(self, loss: float, norm: float) -> str:
        text = (
            f"step {self.state.step}: loss {loss}, gradient norm {norm} over all {self.state.mesh.world} ranks; the "
            f"update was not made, {self.state.unmade} in a row; look for NaN in the data, lower the learning rate, or "
            "go on from an earlier checkpoint"
        )
        if self.options.on_nonfinite == "raise":
            raise NonFiniteError(text)
        return f"not finite: {text}"


def make_step(
    state: TrainState,
    loss_fn: LossFn,
    *,
    clip: float | None = None,
    options: StepOptions | None = None,
) -> TrainStep:
    """A function that trains on one global batch: forward, backward, norm, clip, update.

    Args:
        state: what is trained.
        loss_fn: (model output, micro-batch) -> `Loss(sum, weight)`; a scalar mean means equal weights per row.
        clip: largest gradient norm; short for `StepOptions(clip_norm=clip)`.
        options: clipping and what happens to values that are not finite.

    Raises:
        UsageError: under `--recover`, which needs `steps`.

    Cost beyond the model: an all-reduce of seven numbers (DDP on CPUs sends them along), a pass over the gradients.

    >>> step = make_step(state, loss_fn, clip=1.0)  # doctest: +SKIP
    >>> metrics = step(batch)  # this rank's rows  # doctest: +SKIP
    """
    refuse_own_loop()
    return TrainStep(state, loss_fn, options_with(clip, options))
