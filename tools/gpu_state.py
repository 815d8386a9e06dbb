"""Of `make gpu`: a run's state, saved beside training and loaded bit for bit; and a device that is full."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch

import shardwise as sw
from gpu_predict import loss_fn
from shardwise.models.decoder import Decoder, DecoderConfig

ROWS = 8


def check_state(device: str, config: DecoderConfig) -> Iterator[str]:
    """The findings as lines."""
    torch.use_deterministic_algorithms(True)  # else attention's backward kernels add in no fixed order
    yield from _checkpoint(device, config)
    torch.use_deterministic_algorithms(False)
    if device == "cuda":
        yield _out_of_memory(config)


def _checkpoint(device: str, config: DecoderConfig) -> list[str]:
    plan = sw.Plan.parse("bf16")
    with sw.open_mesh(plan, device=device) as mesh, tempfile.TemporaryDirectory(prefix="shardwise-gpu-") as folder:
        state, step, batch = _ready(config, plan, mesh, seed=0)
        store = sw.Store(Path(folder), keep=2)
        size = sum(p.numel() for p in state.placed.parameters()) * 12  # weights and two moments, in fp32
        plain = [_timed(partial(step, batch)) for _ in range(6)]
        stalls = []
        for _ in range(3):
            stalls.append(_timed(partial(store.save_async, state)))
            stalls[-1] += max(0.0, _timed(partial(step, batch)) - median(plain))  # the step that waits for the copy
            store.wait()
        whole = _timed(partial(store.save, state))
        before = [step(batch).loss for _ in range(3)]
        other, again, _ = _ready(config, plan, mesh, seed=1)
        loading = _timed(partial(store.load_latest, other))
        after = [again(batch).loss for _ in range(3)]
    same = before == after
    rate = f"{size / 1e9:.2f} GB saved in {whole:.2f} s, loaded in {loading:.2f} s"
    return [
        f"{'ok  ' if same else 'FAIL'} checkpoint of {plan} on {device}: losses after a load are bit-equal: {same}"
        f"{'' if same else f', {before} and {after}'}",
        f"     {rate}; a step is held up by {median(stalls) * 1e3:.0f} ms in the middle of three asynchronous saves",
    ]


def _out_of_memory(config: DecoderConfig) -> str:
    """Less memory than a step needs: the same losses as with all of it, from a quarter of the rows at a time."""
    plan = sw.Plan()
    with sw.open_mesh(plan, device="cuda") as mesh:
        losses, peaks, events = [], [], []
        for limited in (False, True):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            options = sw.StepOptions(clip_norm=1.0, on_oom="halve")
            state, step, batch = _ready(config, plan, mesh, seed=0, options=options)
            if limited:
                states = torch.cuda.memory_allocated() * 4  # weights, gradients and two moments
                allowed = states + (peaks[0] - states) * 0.6
                torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
            metrics = [step(batch) for _ in range(3)]
            losses.append([m.loss for m in metrics])
            peaks.append(torch.cuda.max_memory_allocated())
            events.append(state.halvings)
            del state, step, batch
    torch.cuda.set_per_process_memory_fraction(1.0)
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    word = "ok  " if worst <= 1e-5 and events == [0, events[1]] and events[1] else "FAIL"
    return (
        f"{word} out of memory: {peaks[0] / 2**30:.1f} GiB needed, {peaks[1] / 2**30:.1f} taken after {events[1]} "
        f"halvings, losses {worst:.1e} apart, allowed 1e-05"
    )


def _ready(
    config: DecoderConfig, plan: sw.Plan, mesh: sw.Mesh, *, seed: int, options: sw.StepOptions | None = None
) -> tuple[sw.TrainState, sw.TrainStep, dict[str, torch.Tensor]]:
    placed = sw.apply(lambda: Decoder(config), plan, mesh, seed=seed)
    state = sw.TrainState(placed, sw.adamw(placed, lr=1e-4))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (ROWS, config.max_seq_len + 1), generator=draw).to(mesh.device)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    return state, sw.make_step(state, loss_fn, options=options or sw.StepOptions(clip_norm=1.0)), batch


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
