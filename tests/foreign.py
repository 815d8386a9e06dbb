"""Checkpoints in the layouts of DeepSpeed and Lightning, written here: the libraries themselves are not needed."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class LossScaler:
    """Stands for DeepSpeed's class of the name."""

    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


class ZeroStageEnum(IntEnum):
    optimizer_states = 1
    gradients = 2
    weights = 3


class fragment_address:  # noqa: N801 - the name in the files
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class AttributeDict(dict[str, Any]):
    """Stands for Lightning's class of the name."""


HOMES = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    fragment_address: "deepspeed.utils.tensor_fragment",
    AttributeDict: "lightning_fabric.utilities.data",
}


@contextmanager
def at_home() -> Iterator[None]:
    """Pickles written inside name these classes as the libraries' own, which the reader has never seen."""
    before = {kind: kind.__module__ for kind in HOMES}
    made = {".".join(home.split(".")[:i]) for home in HOMES.values() for i in range(1, len(home.split(".")) + 1)}
    assert not made & set(sys.modules)
    sys.modules |= {home: ModuleType(home) for home in made}
    for kind, home in HOMES.items():
        setattr(sys.modules[home], kind.__name__, kind)
        kind.__module__ = home
    try:
        yield
    finally:
        for kind, home in before.items():
            kind.__module__ = home
        for home in made:
            del sys.modules[home]


class Truth:
    """Parameters in two groups, their Adam averages, a buffer, a frozen parameter and a tie."""

    def __init__(self, seed: int = 0, *, step: int = 12, done: int = 12) -> None:
        self.step, self.done = step, done  # of the optimizer, and the model's global_steps
        draw = torch.Generator().manual_seed(seed)
        shapes = {"embed.weight": (7, 3), "up.weight": (5, 3), "up.bias": (5,), "norm.weight": (1,), "cube": (2, 3, 2)}
        make = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        self.weights: Tensors = make
        self.groups = [["embed.weight", "up.weight", "cube"], ["up.bias", "norm.weight"]]
        self.mean = {name: torch.randn(w.shape, generator=draw) for name, w in make.items()}
        self.square = {name: torch.rand(w.shape, generator=draw) for name, w in make.items()}
        self.buffers = {"rope.inv_freq": torch.randn(4, generator=draw)}
        self.frozen = {"frozen.weight": torch.randn(3, 3, generator=draw).bfloat16()}
        self.ties = {"head.weight": "embed.weight"}

    def expected(self) -> Tensors:
        """What a converted checkpoint holds."""
        model = {f"model.{n}": t for n, t in (self.weights | self.buffers | self.frozen).items()}
        state = {f"optim.{n}.exp_avg": t for n, t in self.mean.items()}
        state |= {f"optim.{n}.exp_avg_sq": t for n, t in self.square.items()}
        return model | state | {f"optim.{n}.step": torch.tensor(float(self.step)) for n in self.weights}

    def model_states(self, shapes: list[Any], frozen: Tensors) -> dict[str, Any]:
        module = {n: w.half() for n, w in self.weights.items()} | self.buffers
        module |= {a: module[b] for a, b in self.ties.items()}
        return {
            "module": OrderedDict(module), "buffer_names": list(self.buffers), "optimizer": None,
            "param_shapes": shapes, "frozen_param_shapes": {n: t.shape for n, t in self.frozen.items()},
            "frozen_param_fragments": frozen, "shared_params": self.ties, "lr_scheduler": {"last_batch_iteration": 12},
            "global_steps": self.done, "global_samples": 96, "skipped_steps": 0, "ds_version": "0.16.4",
            "ds_config": {"train_batch_size": 8}, "sparse_tensor_module_names": set(),
        }  # fmt: skip


def flat_group(tensors: Tensors, names: Sequence[str], gaps: int = 1) -> tuple[Tensor, dict[str, int]]:
    """A group's parameters one after the other, each at a multiple of `gaps`; and where each starts."""
    parts, starts, at = [], {}, 0
    for name in names:
        parts.append(torch.full((-at % gaps,), math.nan))
        at += -at % gaps
        starts[name] = at
        parts.append(tensors[name].reshape(-1))
        at += tensors[name].numel()
    return torch.cat(parts), starts


def padded(flat: Tensor, multiple: int) -> Tensor:
    return torch.cat([flat, torch.full((-flat.numel() % multiple,), math.nan, dtype=flat.dtype)])


def write_zero12(
    path: Path, truth: Truth, world: int, *, stage: int = 2, elastic: bool = False, slices: bool = True, gaps: int = 1,
    reverse: bool = False, bf16: bool = False, wrong: bool = False,
) -> Path:  # fmt: skip
    """Stages 1 and 2: `reverse` orders parameters as round-robin gradients might, `gaps` aligns them.

    With `wrong` slices are counted in the model's order for all that, as DeepSpeed does; not where there are gaps.
    """
    folder = path / "global_step12"
    folder.mkdir(parents=True)
    (path / "latest").write_text("global_step12")
    groups = [list(reversed(names)) if reverse else names for names in truth.groups]
    ranks: list[dict[str, Any]] = [{"fp32": [], "state": {}, "pads": [], "slices": []} for _ in range(world)]
    for number, names in enumerate(groups):
        flats = [flat_group(t, names, gaps) for t in (truth.weights, truth.mean, truth.square)]
        lean, starts = flats[0][0].numel(), flats[0][1]
        cut = [padded(flat, 2 * world).chunk(world) for flat, _ in flats]
        size = cut[0][0].numel()
        for rank, held in enumerate(ranks):
            pad = min(size, max(0, (rank + 1) * size - lean))
            held["pads"].append(pad)
            held["fp32"].append(cut[0][rank].clone() if bf16 else cut[0][rank][: size - pad].clone())
            keep = size - pad if elastic else size
            held["state"][number] = {
                "step": torch.tensor(float(truth.step)), "exp_avg": cut[1][rank][:keep].clone(),
                "exp_avg_sq": cut[2][rank][:keep].clone(),
            }  # fmt: skip
            if wrong and not lean - sum(truth.weights[name].numel() for name in names):
                names, starts = truth.groups[number], flat_group(truth.weights, truth.groups[number])[1]
            held["slices"].append(_slices(truth, names, starts, rank * size, size))
    with at_home():
        shapes = [OrderedDict((n, truth.weights[n].shape) for n in names) for names in groups]
        how = {"ds_config": {"zero_optimization": {"stage": stage, "round_robin_gradients": wrong}}}
        torch.save(truth.model_states(shapes, truth.frozen) | how, folder / "mp_rank_00_model_states.pt")
        for rank, held in enumerate(ranks):
            rigid = {"state": held["state"], "param_groups": [{"lr": 1e-3, "params": [i]} for i in range(len(groups))]}
            inner = {
                "clip_grad": 1.0, "group_paddings": held["pads"], "partition_count": [world] * len(groups),
                "base_optimizer_state": list(held["state"].values()) if elastic else rigid,
                "single_partition_of_fp32_groups": held["fp32"], "ds_version": "0.16.4",
            } | ({"param_slice_mappings": held["slices"]} if slices else {})  # fmt: skip
            if gaps > 1:
                inner["param_alignment_paddings"] = [
                    [-truth.weights[n].numel() % gaps for n in names] for names in groups
                ]
            if not bf16:
                inner |= {
                    "loss_scaler": LossScaler(),
                    "dynamic_loss_scale": False,
                    "overflow": False,
                    "zero_stage": ZeroStageEnum(stage),
                }
            name = f"{'bf16_' * bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.16.4"}, folder / name)
    return path


def _slices(truth: Truth, names: Sequence[str], starts: Mapping[str, int], first: int, size: int) -> Any:
    found = OrderedDict()
    for name in names:
        start = max(starts[name], first)
        stop = min(starts[name] + truth.weights[name].numel(), first + size)
        if start < stop:
            found[name] = fragment_address(numel=stop - start, start=start - first)
    return found


def write_zero3(path: Path, truth: Truth, world: int, *, merged: bool = False) -> Path:
    """Stage 3: a sub-group for each group of parameters, or one for all."""
    folder = path / "global_step12"
    folder.mkdir(parents=True)
    (path / "latest").write_text("global_step12\n")
    groups = [[name for names in truth.groups for name in names]] if merged else truth.groups
    with at_home():
        for rank in range(world):
            flats = [
                [torch.cat([_part(t[n], rank, world) for n in names]) for names in groups]
                for t in (truth.weights, truth.mean, truth.square)
            ]
            state = {
                i: {"step": truth.step, "exp_avg": flats[1][i], "exp_avg_sq": flats[2][i]} for i in range(len(groups))
            }
            inner = {
                "zero_stage": ZeroStageEnum.weights, "loss_scaler": LossScaler(), "dynamic_loss_scale": False,
                "overflow": False, "partition_count": world, "fp32_flat_groups": flats[0],
                "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]},
            }  # fmt: skip
            name = f"zero_pp_rank_{rank}_mp_rank_00"
            torch.save({"optimizer_state_dict": inner, "ds_config": {}}, folder / f"{name}_optim_states.pt")
            shapes = [OrderedDict((n, truth.weights[n].shape) for n in names) for names in groups]
            frozen = {n: _part(t, rank, world) for n, t in truth.frozen.items()}
            torch.save(truth.model_states(shapes, frozen), folder / f"{name}_model_states.pt")
    return path


def write_universal(path: Path, truth: Truth, *, stage3: bool = False) -> Path:
    """What DeepSpeed's `ds_to_universal` makes of a ZeRO directory: of stage 3 tensors are bare, and flat."""
    folder = path / "global_step12_universal"
    (path / "latest_universal").parent.mkdir(parents=True)
    (path / "latest_universal").write_text(folder.name)
    tensors = {"fp32": truth.weights, "exp_avg": truth.mean, "exp_avg_sq": truth.square}
    for name in truth.weights:
        (folder / "zero" / name).mkdir(parents=True)
        for key, held in tensors.items():
            value: Any = held[name].reshape(-1) if stage3 else {"cat_dim": 0, "param": held[name]}
            torch.save(value, folder / "zero" / name / f"{key}.pt")
        if not stage3:
            torch.save(torch.tensor(float(truth.step)), folder / "zero" / name / "step.pt")
    with at_home():
        state = {0: {"step": truth.step, "exp_avg": torch.ones(3)}}
        common = {"loss_scaler": LossScaler()} | ({"optimizer_state_dict": {"state": state}} if stage3 else {})
        torch.save(common, folder / "zero" / "optimizer_state.pt")
    shapes = [OrderedDict((n, truth.weights[n].shape) for n in names) for names in truth.groups]
    whole = truth.model_states(shapes, truth.frozen)
    if stage3:
        whole["module"] |= {name: torch.empty(0) for name in (*truth.weights, *truth.ties)}
    torch.save(whole, folder / f"{'zero_pp_rank_0_' * stage3}mp_rank_00_model_states.pt")
    return path


def _part(tensor: Tensor, rank: int, world: int) -> Tensor:
    size = math.ceil(tensor.numel() / world)
    return padded(tensor.reshape(-1), world * size if size else 1)[rank * size : (rank + 1) * size].clone()


def write_lightning(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """A `.ckpt` of a LightningModule that keeps its model as `self.model`."""
    with at_home():
        torch.save({
            "epoch": 1, "global_step": 12, "pytorch-lightning_version": "2.5.1",
            "state_dict": OrderedDict((f"model.{n}", t) for n, t in model.state_dict().items()),
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 2}}}},
            "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(1.5), "dirpath": Path("ckpts")}},
            "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [{"last_epoch": 12}],
            "hparams_name": "kwargs", "hyper_parameters": AttributeDict(lr=1e-3, layers=2),
        }, path)  # fmt: skip
    return path
