"""Checkpoints of other libraries, written by them or in their layouts: every bit arrives, under the right name."""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard

from shardwise.checkpoint.compare import diff, find
from shardwise.checkpoint.files import LocalFiles
from shardwise.checkpoint.foreign import convert as convert_module
from shardwise.checkpoint.foreign import sandbox
from shardwise.checkpoint.foreign.convert import Options, convert
from shardwise.checkpoint.foreign.dcp_out import export_dcp
from shardwise.checkpoint.foreign.dtypes import cast_bytes
from shardwise.checkpoint.foreign.export import MAX_SHARD, ExportOptions, export
from shardwise.checkpoint.foreign.unsafe import answer_to
from shardwise.checkpoint.format import whole
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.store import Store
from shardwise.cli.main import main
from shardwise.errors import CheckpointError, ConfigError, UsageError
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.ema import Ema
from shardwise.train.optimizers import adamw
from shardwise.train.state import TrainState
from tests.checkpoints import content, write_checkpoint
from tests.foreign import Truth, at_home, write_lightning, write_zero3, write_zero12
from tests.parity.placing import LAYOUTS, Net, State, place

Tensors = dict[str, Tensor]


def held(path: Path) -> Tensors:
    """Every tensor of a checkpoint of ours."""
    found: Tensors = {}
    with Reader(find(path).path) as reader:
        reader.verify()
        for name, entry in reader.manifest.tensors.items():
            dtype = getattr(torch, entry.dtype)
            target = torch.empty(entry.shape, dtype=dtype)
            words = np.empty(entry.shape, dtype=f"u{target.element_size()}")
            reader.read(name, whole(entry.shape), words)
            found[name] = torch.from_numpy(words.reshape(-1).view(np.uint8)).view(dtype).reshape(entry.shape)
    return found


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        ours, theirs = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(ours, theirs), name


def under_model(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def everything() -> Tensors:
    """Every type, and tensors that do not lie in order."""
    draw = torch.Generator().manual_seed(1)
    base = torch.randn(6, 4, generator=draw)
    found = {
        str(t).removeprefix("torch."): base.to(t) for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    found |= {str(t): (base * 9).to(t) for t in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)}
    found = {name.replace("torch.", ""): tensor for name, tensor in found.items()}
    found |= {"flags": base > 0, "wide": torch.arange(5).to(torch.uint16), "eighth": base.to(torch.float8_e4m3fn)}
    found |= {
        "turned": base.T,
        "column": base[:, 1],
        "part": torch.arange(20.0)[5:9],
        "cube": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    }
    return found | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "complex": torch.arange(3).to(torch.complex64),
    }


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    return net, optimizer


def expected_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    found = under_model(dict(net.state_dict()))
    for name, parameter in net.named_parameters():
        found |= {f"optim.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return found


# ---------------------------------------------------------------- in


def test_a_file_without_crcs_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3), "b": torch.arange(5)}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    convert(tmp_path / "x.pt", tmp_path / "a", Options())
    same(held(tmp_path / "a"), under_model(tensors))


def test_torch_files(tmp_path: Path) -> None:
    tensors = everything()
    for name, options in (("zip.pt", {}), ("old.bin", {"_use_new_zipfile_serialization": False})):
        torch.save(tensors, tmp_path / name, **options)
        done = convert(tmp_path / name, tmp_path / f"{name}.out", Options())
        same(held(done.path), under_model(tensors))
        assert done.kind == "torch" and not done.notes and done.step == 0


def test_safetensors_and_shards(tmp_path: Path) -> None:
    tensors = {name: t.contiguous() for name, t in everything().items() if not t.is_complex()}
    save_file(tensors, tmp_path / "one.safetensors")
    same(held(convert(tmp_path / "one.safetensors", tmp_path / "a", Options()).path), under_model(tensors))
    store = tmp_path / "a"
    export(store, tmp_path / "shards", ExportOptions(max_shard=200))
    names = sorted(p.name for p in (tmp_path / "shards").iterdir())
    assert len(names) > 3 and "model.safetensors.index.json" in names
    theirs: Tensors = {}
    for name in names[:-1]:
        theirs |= load_file(tmp_path / "shards" / name)
    same(under_model(theirs), under_model(tensors))
    assert not diff(store, convert(tmp_path / "shards", tmp_path / "b", Options()).path)


def test_a_model_beside_its_optimizer(tmp_path: Path) -> None:
    net, optimizer = trained()
    plain = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "args": {"lr": 1e-2}}
    torch.save(plain, tmp_path / "numbers.pt")
    done = convert(tmp_path / "numbers.pt", tmp_path / "a", Options())
    same(held(done.path), under_model(dict(net.state_dict())))
    assert done.step == 3 and any("--params-in-order" in note for note in done.notes)
    done = convert(tmp_path / "numbers.pt", tmp_path / "b", Options(in_order=True))
    same(held(done.path), expected_of(net, optimizer))
    with_names = torch.optim.AdamW(list(net.named_parameters()), lr=1e-2)
    with_names.load_state_dict(optimizer.state_dict())
    torch.save(plain | {"optimizer": with_names.state_dict()}, tmp_path / "names.pt")
    done = convert(tmp_path / "names.pt", tmp_path / "c", Options())
    same(held(done.path), expected_of(net, optimizer))
    assert not convert(tmp_path / "names.pt", tmp_path / "d", Options(optimizer=False)).num_parameters_with_state


def test_an_order_that_cannot_be_is_left_out_and_said(tmp_path: Path) -> None:
    net, _ = trained()
    optimizer = torch.optim.AdamW(list(reversed(list(net.parameters()))))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    done = convert(tmp_path / "x.pt", tmp_path / "a", Options(in_order=True))
    assert done.num_parameters_with_state == 0 and "has shape" in done.notes[0]


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """With a state that tells the parameters apart."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(params):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))


class Older(dcp.DefaultSavePlanner):
    """Of torch before 2.3: a list without tensors stays in one piece."""

    def set_up_planner(self, state_dict: Any, *args: Any, **options: Any) -> None:
        flat = {f"model.{n}": t for n, t in state_dict["model"].items()}
        keys = {n: ("model", n.removeprefix("model.")) for n in flat}
        for number, state in state_dict["optimizer"]["state"].items():
            flat |= {f"o.{number}.{k}": t for k, t in state.items()}
            keys |= {f"o.{number}.{k}": ("optimizer", "state", str(number), k) for k in state}
        flat["groups"] = state_dict["optimizer"]["param_groups"]
        keys["groups"] = ("optimizer", "param_groups")
        self.flatten_state_dict = False
        super().set_up_planner(flat, *args, **options)
        self.flatten_state_dict, self.mappings = True, keys


def test_an_order_over_several_groups_is_not_the_models(tmp_path: Path) -> None:
    net = pair()
    for count in (1, 2):
        groups = [{"params": [p]} for p in reversed(list(net.parameters()))] if count == 2 else net.parameters()
        optimizer = stepped(torch.optim.AdamW(groups, lr=1e-2))
        tree = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(tree, tmp_path / f"{count}.pt")
        save_dcp(tmp_path / f"{count}.dcp", tree)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(tree, checkpoint_id=tmp_path / f"{count}.older", no_dist=True, planner=Older())
        for name in (f"{count}.pt", f"{count}.dcp", f"{count}.older"):
            done = convert(tmp_path / name, tmp_path / f"{name}.out", Options(in_order=True))
            assert done.num_parameters_with_state == (2 if count == 1 else 0), name
            if count == 1:
                same(held(done.path), expected_of(net, optimizer))
            else:
                assert "2 groups" in done.notes[0] and "named_parameters" in done.notes[0], name
    named_ones = stepped(torch.optim.AdamW([{"params": [item]} for item in reversed(list(net.named_parameters()))]))
    torch.save({"model": net.state_dict(), "optimizer": named_ones.state_dict()}, tmp_path / "names.pt")
    same(held(convert(tmp_path / "names.pt", tmp_path / "n", Options()).path), expected_of(net, named_ones))


@pytest.mark.parametrize("outside", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_optimizers_made_inside_and_outside_of_wrappers(outside: str, tmp_path: Path) -> None:
    net = pair()
    prefix = "model." if outside == "model." else ""  # which only a Lightning file loses
    expected: Tensors = {}
    for made, saved in (("", outside), (outside, ""), (outside, outside)):
        named_ones = [(made + name, parameter) for name, parameter in net.named_parameters()]
        optimizer = stepped(torch.optim.AdamW(named_ones))
        weights = {saved + name: t for name, t in net.state_dict().items()}
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
        done = convert(tmp_path / "x.pt", tmp_path / "a", Options(overwrite=True))
        expected = {
            f"{kind}.{prefix if saved else ''}{name}": tensor
            for key, tensor in expected_of(net, optimizer).items()
            for kind, _, name in (key.partition("."),)
        }
        same(held(done.path), expected)


def test_tied_parameters_are_one_in_the_order(tmp_path: Path) -> None:
    net = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "norm": nn.BatchNorm1d(3), "head": nn.Linear(3, 3)})
    net["head"].weight = net["embed"].weight
    optimizer = stepped(torch.optim.AdamW(net.parameters()))
    weights = {f"module.{name}": t for name, t in net.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    done = convert(tmp_path / "x.pt", tmp_path / "a", Options(in_order=True))
    expected = expected_of(net, optimizer)
    del expected["model.head.weight"]
    same(held(done.path), expected)


def test_steps_in_tensors_are_steps(tmp_path: Path) -> None:
    for dtype in (torch.int64, torch.int32):  # torchtitan's
        step = {"step": torch.tensor(1234, dtype=dtype), "ntokens_seen": torch.tensor(5)}
        source = save_dcp(tmp_path / str(dtype), {"model": {"w": torch.ones(2)}, "train_state": step})
        assert convert(source, tmp_path / f"{dtype}.out", Options()).step == 1234
    torch.save({"model": {"w": torch.ones(2)}, "step": torch.tensor(77)}, tmp_path / "x.pt")
    assert convert(tmp_path / "x.pt", tmp_path / "x", Options()).step == 77
    buffers = {"model": {"w": torch.ones(2), "step": torch.tensor(9)}}  # a model's own is its own
    assert convert(save_dcp(tmp_path / "own", buffers), tmp_path / "own.out", Options()).step == 0


def test_lightning(tmp_path: Path) -> None:
    net, optimizer = trained()
    write_lightning(tmp_path / "last.ckpt", net, optimizer)
    done = convert(tmp_path / "last.ckpt", tmp_path / "a", Options(in_order=True))
    same(held(done.path), expected_of(net, optimizer))
    assert done.kind == "lightning" and done.step == 12


def test_what_is_left_out_is_said_with_what_it_holds(tmp_path: Path) -> None:
    extra = {"averages": {"0": {"w": torch.ones(2)}}, "kept": [torch.ones(1)], "epoch": 3, "hyper": {"lr": 0.1}}
    torch.save({"w": torch.zeros(2), **extra}, tmp_path / "x.pt")
    done = convert(tmp_path / "x.pt", tmp_path / "a", Options())
    assert sorted(held(done.path)) == ["model.w"]
    assert done.notes == (
        "entries that are no tensors: epoch, hyper",
        "entries that hold tensors under names of their own: averages, kept",
    )


def test_ties_are_kept_once(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    torch.save({"embed.weight": weight, "head.weight": weight, "other": weight.clone()}, tmp_path / "x.pt")
    done = convert(tmp_path / "x.pt", tmp_path / "a", Options())
    assert sorted(held(done.path)) == ["model.embed.weight", "model.other"]
    assert "head.weight = embed.weight" in done.notes[0]
    square = torch.randn(3, 3)  # the same bytes in another order are other elements
    torch.save({"a": square, "b": square.T, "c": square[:, :1], "d": square.T[:1]}, tmp_path / "y.pt")
    done = convert(tmp_path / "y.pt", tmp_path / "b", Options())
    same(held(done.path), under_model({"a": square, "b": square.T, "c": square[:, :1], "d": square.T[:1]}))
    assert not done.notes


def test_a_tied_weight_whose_first_name_is_left_out_has_the_next(tmp_path: Path) -> None:
    net = nn.ModuleDict({"head": nn.Linear(3, 3, bias=False), "embed": nn.Linear(3, 3, bias=False)})
    net["embed"].weight = net["head"].weight
    optimizer = stepped(torch.optim.AdamW(net.named_parameters()))
    weights = {**net.state_dict(), "third.weight": net["head"].weight.detach()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    (tmp_path / "r.toml").write_text('[rename]\n"head.weight" = ""\n"embed.**" = "tokens.**"\n')
    done = convert(tmp_path / "x.pt", tmp_path / "a", Options(rename=tmp_path / "r.toml"))
    found = {key.replace("tokens", "head"): value for key, value in held(done.path).items()}
    same(found, {key: value for key, value in expected_of(net, optimizer).items() if "embed" not in key})
    assert Manifest.read(next(done.path.glob("step-*"))).scalars["ties"] == {"third.weight": "tokens.weight"}


ZERO: dict[str, Callable[[Path, Truth], Path]] = {
    "stage 1": functools.partial(write_zero12, world=3, stage=1),
    "stage 2, older, without slices": functools.partial(write_zero12, world=2, slices=False),
    "stage 2, more ranks than elements": functools.partial(write_zero12, world=7),
    "stage 2, elastic, in another order": functools.partial(write_zero12, world=2, elastic=True, reverse=True),
    "stage 2, aligned parameters": functools.partial(write_zero12, world=3, gaps=4),
    "stage 1, round robin": functools.partial(write_zero12, world=2, stage=1, reverse=True, wrong=True),
    "stage 2, round robin": functools.partial(write_zero12, world=3, reverse=True, wrong=True),
    "stage 2, round robin, aligned": functools.partial(write_zero12, world=2, gaps=4, reverse=True, wrong=True),
    "stage 1, bf16": functools.partial(write_zero12, world=2, stage=1, bf16=True),
    "stage 2, one rank": functools.partial(write_zero12, world=1),
    "stage 3": functools.partial(write_zero3, world=3),
    "stage 3, one group": functools.partial(write_zero3, world=2, merged=True),
    "stage 3, more ranks than elements": functools.partial(write_zero3, world=8),
}


@pytest.mark.parametrize("kind", ZERO)
def test_deepspeed(kind: str, tmp_path: Path) -> None:
    truth = Truth()
    ZERO[kind](tmp_path / "ds", truth)
    done = convert(tmp_path / "ds", tmp_path / "a", Options())
    same(held(done.path), truth.expected())
    assert done.step == 12 and done.kind.startswith("deepspeed zero " + kind[6 : 7 if "3" in kind else 6])
    assert any("head.weight = embed.weight" in note for note in done.notes)


def _drop_a_rank(folder: Path) -> None:
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def _tensor_parallel(folder: Path) -> None:
    (folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"x")


def _pipeline(folder: Path) -> None:
    (folder / "layer_00-model_states.pt").write_bytes(b"x")


def _another_save(folder: Path) -> None:
    other = write_zero12(folder.parent / "other", Truth(), 4) / "global_step12"
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    (folder / name).write_bytes((other / name).read_bytes())


@pytest.mark.parametrize(
    ("harm", "said"),
    [(_drop_a_rank, "rank 1 is missing|of 2 ranks"), (_tensor_parallel, "model parallelism"), (_pipeline, "pipeline"),
     (_another_save, "ranks, needed|elements")],
)  # fmt: skip
def test_deepspeed_parts_that_do_not_fit(harm: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    write_zero12(tmp_path / "ds", Truth(), 3)
    harm(tmp_path / "ds" / "global_step12")
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / "ds", tmp_path / "a", Options())
    assert not (tmp_path / "a").exists()


_STATE = ("optimizer_state_dict", "base_optimizer_state")
_FROZEN, _SHAPES = "frozen_param_fragments", "param_shapes"
ODD_VALUES: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("zero_pp_rank_1", (*_STATE, "state", 1), [1], "it is not there for every group"),
    ("zero_pp_rank_1", (*_STATE, "state"), "x", "it is not there for every group"),
    ("zero_pp_rank_0", (*_STATE, "param_groups", 1, "params"), -1, ""),
    ("zero_pp_rank_0", (*_STATE, "param_groups"), torch.ones(3), ""),
    ("zero_pp_rank_0", (*_STATE, "state", 0, "step"), None, "it counts the steps of some groups only"),
    ("zero_pp_rank_0", (*_STATE, "state", 0, "step"), math.nan, "it counts the steps of some groups only"),
    ("zero_pp_rank_1", (*_STATE, "state", 1, "exp_avg"), torch.ones(2, 2), r"exp_avg of group 1: found \(2, 2\)"),
    ("mp_rank_00", (_FROZEN,), torch.ones(3), "frozen.weight: its frozen parts are not there"),
    ("mp_rank_00", ("frozen_param_shapes",), math.nan, "found float, needed names and shapes"),
    ("mp_rank_00", ("frozen_param_shapes", "frozen.weight"), ["x"], "found no shape"),
    ("mp_rank_00", ("buffer_names",), True, ""),
    ("mp_rank_00", ("buffer_names",), [[], "rope.gone"], r"buffers that are listed, and are not there: \[\], rope"),
    ("mp_rank_00", ("module",), None, "buffers that are listed, and are not there: rope.inv_freq"),
    ("mp_rank_00", (_SHAPES,), [], "found no parameters in 'param_shapes'"),
    ("mp_rank_00", (_SHAPES, 1), 3, "found int, needed names and shapes"),
    ("mp_rank_00", (_SHAPES, 1), {}, "a part of up.bias, norm.weight, of which the model states say no shape"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "at", "value", "said"), ODD_VALUES, ids=lambda item: str(item)[-40:])
def test_deepspeed_with_a_value_that_is_none(file: str, at: Any, value: Any, said: str, tmp_path: Path) -> None:
    """It is refused, or what is left out is said; never is something missing in silence."""
    truth = Truth()
    write_zero12(tmp_path / "ds", truth, 2)
    path = next((tmp_path / "ds" / "global_step12").glob(f"{file}*.pt"))
    with at_home():
        content = torch.load(path, weights_only=False)
        inner = functools.reduce(lambda found, key: found[key], at[:-1], content)
        inner[at[-1]] = value
        torch.save(content, path)
    try:
        done = convert(tmp_path / "ds", tmp_path / "a", Options())
    except CheckpointError as error:
        assert said and re.search(said, str(error)), error
        return
    assert not said or re.search(said, "\n".join(done.notes)), done.notes
    found, needed = held(done.path), truth.expected()
    same(found, {name: tensor for name, tensor in needed.items() if name in found})
    lacking = {name.partition(".")[0] for name in needed.keys() - found.keys()} - {"optim"}
    assert not lacking or "buffer" in str(at) or at == ("module",)


@pytest.mark.parametrize("unsafe", [False, True])
def test_more_dims_than_a_checkpoint_takes(unsafe: bool, tmp_path: Path) -> None:
    torch.save({"w": torch.ones([1] * 15 + [4])}, tmp_path / "x.pt")
    same(held(convert(tmp_path / "x.pt", tmp_path / "a", Options()).path), {"model.w": torch.ones([1] * 15 + [4])})
    torch.save({"w": torch.ones([1] * 19 + [4])}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="found a tensor of 20 dims; needed at most 16; reshape it"):
        convert(tmp_path / "x.pt", tmp_path / "b", Options(unsafe=unsafe))


def test_deepspeed_files_of_two_saves(tmp_path: Path) -> None:
    """They fit, and count other steps."""
    stages = {2: write_zero12, 3: write_zero3}
    for stage, write in stages.items():
        write(tmp_path / f"old{stage}", Truth(1, step=12, done=12), 2)
        write(tmp_path / f"new{stage}", Truth(2, step=20, done=20), 2)
    mixtures = [
        (2, "zero_pp_rank_1*optim*", r"rank_1.*: found the optimizer's step .group 0. 20, and 12 in .*_0_mp"),
        (2, "zero*optim*", "found step 20 of the optimizer, and 12 global_steps .0 of them skipped. in mp_rank"),
        (2, "mp_rank*", "found step 12 of the optimizer, and 20 global_steps"),
        (3, "zero_pp_rank_1*optim*", r"rank_1.*optim_states\.pt: found the optimizer's step .group 0. 20, and 12"),
        (3, "zero_pp_rank_1*model*", r"rank_1.*model_states\.pt: found global_steps 20, and 12 in zero_pp_rank_0"),
    ]  # fmt: skip
    for number, (stage, pattern, said) in enumerate(mixtures):
        mixed = shutil.copytree(tmp_path / f"old{stage}", tmp_path / str(number))
        for path in (tmp_path / f"new{stage}" / "global_step12").glob(pattern):
            shutil.copy(path, mixed / "global_step12")
        with pytest.raises(CheckpointError, match=said):
            convert(mixed, tmp_path / "a", Options())
    for number, (step, fits) in enumerate({13: True, 12: True, 14: False, 3: False}.items()):  # 13: made by a step
        source = write_zero12(tmp_path / f"s{number}", Truth(step=step), 2)
        if not fits:
            with pytest.raises(CheckpointError, match="--no-optimizer"):
                convert(source, tmp_path / "a", Options())
        done = convert(source, tmp_path / f"s{number}.out", Options(optimizer=fits))
        assert done.num_parameters_with_state == (5 if fits else 0)


def save_sharded(path: str) -> Tensors:
    """FSDP2's sharded state through DCP, as its users save it; the whole tensors of it."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        net = Net()
        fully_shard(net, mesh=mesh.device_mesh["dp_shard"])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for parameter in net.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()
        model, state = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": state, "step": 3}, checkpoint_id=f"{path}/nested")
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        dcp.save(
            {"optim": get_optimizer_state_dict(net, optimizer, options=flat)} | model, checkpoint_id=f"{path}/flat"
        )
        whole_ones = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full_model = get_model_state_dict(net, options=whole_ones)
        full_state = get_optimizer_state_dict(net, optimizer, options=whole_ones)
        if mesh.rank == 0:
            torch.save({"model": full_model, "optim_state_dict": full_state, "step": 3}, f"{path}/full.pt")
        keyed = full_state["state"] if mesh.rank == 0 else {}
        return under_model(full_model) | {f"optim.{n}.{k}": v for n, keys in keyed.items() for k, v in keys.items()}


def test_fsdp_sharded_and_full(world: World, tmp_path: Path) -> None:
    expected = world(2, save_sharded, str(tmp_path))[0]
    assert len(list((tmp_path / "nested").glob("*.distcp"))) == 2
    for name, step in (("nested", 3), ("flat", 0), ("full.pt", 3)):
        done = convert(tmp_path / name, tmp_path / f"{name}.out", Options(kind="fsdp"))
        same(held(done.path), expected)
        assert done.step == step


class Walks(Net):
    """The model with a forward in which every parameter has a part."""

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.norm(self.down(self.up(self.embed(tokens)))) * self.cube.sum()
        return out


def save_fsdp1(path: str) -> None:
    """FSDP1, as Accelerate and Lightning save it: sharded through DCP, full through torch.save."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        shards = mesh.device_mesh["dp_shard"]
        net = FSDP(Walks(), device_mesh=shards, use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        net(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        optimizer.step()
        with FSDP.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
            sharded = {"model": net.state_dict(), "optimizer": FSDP.optim_state_dict(net, optimizer)}
            dcp.save(sharded, checkpoint_id=f"{path}/sharded")
        local = FSDP(Walks(), process_group=shards.get_group(), device_id=torch.device("cpu"))
        with FSDP.state_dict_type(local, StateDictType.LOCAL_STATE_DICT):
            dcp.save({"model": local.state_dict()}, checkpoint_id=f"{path}/local")
        with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT):
            model, state = net.state_dict(), FSDP.optim_state_dict(net, optimizer)
        if mesh.rank == 0:
            torch.save({"state_dict": model, "optimizer": state, "global_step": 5}, f"{path}/full.ckpt")


def named(model: Any, state: Any) -> Tensors:
    return under_model(dict(model)) | {f"optim.{n}.{k}": v for n, keys in state.items() for k, v in keys.items()}


def test_fsdp1_sharded_and_full(world: World, tmp_path: Path) -> None:
    world(2, save_fsdp1, str(tmp_path))
    with pytest.raises(CheckpointError, match="model._flat_param, in which FSDP1's LOCAL_STATE_DICT"):
        convert(tmp_path / "local", tmp_path / "x", Options())
    full = torch.load(tmp_path / "full.ckpt", weights_only=True)
    done = convert(tmp_path / "full.ckpt", tmp_path / "a", Options())
    same(held(done.path), named(full["state_dict"], full["optimizer"]["state"]))
    assert done.step == 5 and done.num_parameters_with_state == 8
    loaded = {  # what torch's own loader reads
        "model": {name: torch.empty_like(t) for name, t in full["state_dict"].items()},
        "optimizer": {"state": {
            n: {k: torch.empty_like(t) for k, t in s.items()} for n, s in full["optimizer"]["state"].items()
        }},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=tmp_path / "sharded", no_dist=True)
    done = convert(tmp_path / "sharded", tmp_path / "b", Options())
    same(held(done.path), named(loaded["model"], loaded["optimizer"]["state"]))


def save_dcp(path: Path, tree: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=path, no_dist=True)
    return path


def test_dcp_that_a_planner_has_not_flattened(tmp_path: Path) -> None:
    """`flatten_state_dict=False`: the model is one object; what lay beside it passed for the weights."""
    weights = {"a": torch.ones(2), "b": torch.arange(3.0)}
    states = {name: {"exp_avg": t * 2, "step": torch.tensor(3.0)} for name, t in weights.items()}
    tree = {"model": weights, "optim": {"state": states, "param_groups": []}, "step": 7, "rng": torch.zeros(4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(tree, checkpoint_id=tmp_path / "whole", no_dist=True, planner=planner)
    done = convert(tmp_path / "whole", tmp_path / "out", Options())
    same(held(done.path), named(weights, states))
    assert done.step == 7 and any("no use for: rng" in note for note in done.notes)


def test_dcp_of_several_models(tmp_path: Path) -> None:
    one, other = torch.ones(2), torch.zeros(2)
    for second in ("w", "v"):  # of one name, and of two that would make up one model
        gan = {"generator": {"model": {"w": one}}, "discriminator": {"model": {second: other}}}
        with pytest.raises(
            CheckpointError, match=rf"several models: generator\.model\.w, discriminator\.model\.{second}"
        ):
            convert(save_dcp(tmp_path / second, gan), tmp_path / "a", Options())
    with pytest.raises(CheckpointError, match="several models: actor, critic; needed those of one"):
        convert(save_dcp(tmp_path / "two", {"actor": {"w": one}, "critic": {"v": other}}), tmp_path / "a", Options())
    tree = {"model": {"w": one}, "ema": {"model": {"w": other}}, "generator": other}
    done = convert(save_dcp(tmp_path / "ema", tree), tmp_path / "a", Options())
    same(held(done.path), {"model.w": one})
    assert "ema.model.w" in done.notes[0] and "generator" in done.notes[0]


def test_dcp_of_several_optimizers(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    states = {name: {"exp_avg": t * 2, "step": torch.tensor(3.0)} for name, t in weights.items()}
    both = {"model": weights, "optim_0": {"state": {"a": states["a"]}}, "optim_1": {"state": {"b": states["b"]}}}
    numbers = both | {"optim_0": {"state": {0: states["a"]}}, "optim_1": {"state": {0: states["b"]}}}
    for name, tree in (("names", both), ("numbers", numbers)):
        done = convert(save_dcp(tmp_path / name, tree), tmp_path / f"{name}.out", Options(in_order=True))
        same(held(done.path), under_model(weights))
        assert "2 optimizers (optim_0, optim_1), one can be taken over" in done.notes[0]
    flat = {f"state.{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    top = weights | flat | {"param_groups.a.lr": 0.1}  # flattened, beside the weights
    same(held(convert(save_dcp(tmp_path / "top", top), tmp_path / "top.out", Options()).path), named(weights, states))
    strange = {"model": weights, "adam": {"state": {"a": states["a"]}}}
    assert convert(save_dcp(tmp_path / "adam", strange), tmp_path / "adam.out", Options()).step == 0
    one = {"model": weights, "optim_0": {"state": states}, "optim_1": {"param_groups": [{"lr": 0.1}]}}
    same(held(convert(save_dcp(tmp_path / "one", one), tmp_path / "one.out", Options()).path), named(weights, states))


# ---------------------------------------------------------------- names and types


def test_rules_wrappers_and_a_like(tmp_path: Path) -> None:
    layers = {f"module._orig_mod.h.{i}.attn.q.weight": torch.randn(2, 2) for i in range(2)}
    torch.save(layers | {"module.wte.weight": torch.randn(3, 2), "module.mask": torch.ones(2)}, tmp_path / "x.pt")
    rules = tmp_path / "rules.toml"
    rules.write_text('[rename]\n"h.*.attn.**" = "blocks.*.attention.**"\n"wte.weight" = "embed.weight"\nmask = ""\n')
    done = convert(tmp_path / "x.pt", tmp_path / "a", Options(rename=rules, dtype="bfloat16"))
    names = ["model.blocks.0.attention.q.weight", "model.blocks.1.attention.q.weight", "model.embed.weight"]
    assert sorted(held(done.path)) == names
    assert held(done.path)[names[0]].equal(next(iter(layers.values())).bfloat16())
    like = done
    done = convert(tmp_path / "x.pt", tmp_path / "c", Options(rename=rules, like=like.path))
    assert {t.dtype for t in held(done.path).values()} == {torch.bfloat16}
    with pytest.raises(CheckpointError, match=r"3 weights of .* are not in the source"):
        convert(tmp_path / "x.pt", tmp_path / "d", Options(like=like.path))
    for bad, said in (
        ('[rename]\n"nothing.*" = "x.*"\n', "no tensor that it"),
        ('[rename]\n"h.**" = "x.*"\n', "same stars"),
        ('[rename]\n"**.weight" = "**.w"\n"mask" = "mask"\n"h.*" = "y.*"\n', "no tensor that it"),
        ("[other]\n", r"one table \[rename\]"),
        ('[rename]\n"mask" = "wte.weight"\n', "both become"),
    ):
        rules.write_text(bad)
        with pytest.raises(ConfigError, match=said):
            convert(tmp_path / "x.pt", tmp_path / "d", Options(rename=rules))


def test_wrappers_go_by_whole_parts(tmp_path: Path) -> None:
    weights = {"_forward_module.w": torch.ones(1), "my_forward_module.w": torch.zeros(1), "a_orig_mod.b": torch.ones(2)}
    torch.save(weights, tmp_path / "x.pt")
    expected = {
        "model.w": torch.ones(1),
        "model.my_forward_module.w": torch.zeros(1),
        "model.a_orig_mod.b": torch.ones(2),
    }
    same(held(convert(tmp_path / "x.pt", tmp_path / "a", Options()).path), expected)


@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["float64", "float32", "float16", "bfloat16"])
def test_types_are_rounded_as_torch_rounds(source: str, target: str, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    values = torch.randn(4000, generator=draw, dtype=torch.float64) * torch.logspace(-9, 9, 4000, dtype=torch.float64)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.0, 65520.0, 3.4e38, 1e-45, 1.00390625])
    tensor = torch.cat([values, odd.double(), 1.00390625 + torch.tensor([1e-12, -1e-12]).double()]).to(
        getattr(torch, source)
    )
    save_file({"w": tensor}, tmp_path / "x.safetensors")
    done = convert(tmp_path / "x.safetensors", tmp_path / "a", Options(dtype=target))
    found, expected = held(done.path)["model.w"], tensor.to(getattr(torch, target))
    once = tensor.double().numpy()
    if source == "float64" and target in ("float16", "bfloat16"):  # torch goes through float32 and rounds twice
        ours, theirs = found.double().numpy(), expected.double().numpy()
        fine = np.isfinite(ours) & np.isfinite(theirs)
        assert (abs(ours[fine] - once[fine]) <= abs(theirs[fine] - once[fine])).all() and (
            fine == np.isfinite(theirs)
        ).all()
    else:
        assert torch.equal(torch.nan_to_num(found, nan=7.0), torch.nan_to_num(expected, nan=7.0))
        assert torch.equal(found.isnan(), expected.isnan())
    lost = int((tensor.isfinite() & ~found.isfinite()).sum())
    assert [note for note in done.notes if f"{lost} elements too large for {target}" in note] == list(done.notes)
    assert bool(done.notes) == bool(lost)


INTEGERS = [
    ("int64", "bfloat16", 256, 257), ("int64", "float16", 65504, 65505), ("int32", "float16", -65504, 70000),
    ("int32", "float32", 2**24, 2**24 + 1), ("int64", "float64", -(2**63), 2**53 + 1),
    ("int64", "float64", 2**62, 2**63 - 1), ("uint8", "bfloat16", 254, None), ("int8", "float16", -128, None),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "fits", "not_"), INTEGERS)
def test_integers_keep_their_value_or_are_refused(source: str, target: str, fits: int, not_: int | None) -> None:
    def cast(value: int) -> Tensor:
        data = torch.tensor([1, value], dtype=getattr(torch, source)).view(torch.uint8).numpy()
        return torch.from_numpy(cast_bytes(data, source, target, "w")).view(getattr(torch, target))

    assert cast(fits).tolist() == [1, fits]
    if not_ is not None:
        with pytest.raises(CheckpointError, match=f"w: found an integer of {source} that {target} cannot hold"):
            cast(not_)


def test_values_that_become_infinite_are_said(tmp_path: Path) -> None:
    weights = {"a": torch.tensor([1.0, 1e6, -7e4, torch.inf, torch.nan]), "b": torch.ones(3), "c": torch.tensor([3e38])}
    save_file(weights, tmp_path / "x.safetensors")
    said = "the values of 3 elements too large for float16, infinite now: in model.a, model.c"
    done = convert(tmp_path / "x.safetensors", tmp_path / "a", Options(dtype="float16"))
    assert done.notes == (said,)
    same(held(done.path), under_model({name: t.half() for name, t in weights.items()}))
    store = convert(tmp_path / "x.safetensors", tmp_path / "b", Options()).path
    for act, to in ((export, "safetensors"), (export, "torch"), (export_dcp, "dcp")):
        options = ExportOptions(to=to, dtype="float16")
        assert act(store, tmp_path / to, options).notes == (said,)
    assert export(store, tmp_path / "c", ExportOptions(dtype="bfloat16")).notes == ()


# ---------------------------------------------------------------- out and back


def saved_by_two(path: str) -> int:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        placed = place("fsdp2", mesh)
        state = State(placed, adamw(placed, 0.01))
        state.run(3)
        Store(f"{path}/checkpoints").save(state)
        return state.step


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory, saved by two ranks."""
    path = tmp_path_factory.mktemp("run")
    world(2, saved_by_two, str(path))
    return path


TARGETS = [
    ("safetensors", "x", False), ("safetensors", "x.safetensors", False), ("torch", "x.pt", False),
    ("torch", "x", False), ("torch", "x.ckpt", True), ("torch", "x", True), ("dcp", "x", False), ("dcp", "x", True),
    ("lightning", "x.ckpt", False), ("lightning", "x.ckpt", True),
]  # fmt: skip


@pytest.mark.parametrize(("to", "name", "optimizer"), TARGETS)
def test_out_and_back_is_the_same(run: Path, to: Any, name: str, optimizer: bool, tmp_path: Path) -> None:
    bounded = to != "dcp" and name == "x" and not optimizer
    options = ExportOptions(to=to, optimizer=optimizer, max_shard=150 if bounded else MAX_SHARD)
    done = (export_dcp if to == "dcp" else export)(run, tmp_path / name, options)
    back = convert(tmp_path / name, tmp_path / "back", Options())
    differ = [item.name for item in diff(run, back.path)]
    assert done.step == 3 and all(name.startswith("optim.") for name in differ) and bool(differ) != optimizer
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "back"])
    expected = {n.removeprefix("model."): t for n, t in held(run).items() if n.startswith("model.")}
    if to == "torch" and name.startswith("x."):
        for mapped in (False, True):
            loaded = torch.load(tmp_path / name, weights_only=True, mmap=mapped)
            same(dict(loaded["model"] if optimizer else loaded), expected)
    if to == "dcp":
        empty = {"model": {name: torch.empty_like(t) for name, t in expected.items()}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(empty, checkpoint_id=tmp_path / name, no_dist=True)
        same(empty["model"], expected)


def test_torch_takes_the_state_by_names(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "x.pt", ExportOptions(to="torch", optimizer=True))
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    net = Net()
    net.load_state_dict(loaded["model"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    for group in loaded["optimizer"]["param_groups"]:  # the dials are the script's own
        group |= {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    set_optimizer_state_dict(net, optimizer, optim_state_dict=loaded["optimizer"])
    same(expected_of(net, optimizer), held(run))


def test_names_that_look_like_containers(tmp_path: Path) -> None:
    """Hugging Face's modules have a child `model`; others have worse."""
    names = ["model.embed.weight", "model.layers.0.q.weight", "lm_head.weight", "state.x.weight", "optimizer.w"]
    weights = {name: torch.randn(2, 3) for name in names}
    state = {name: {"exp_avg": torch.randn(2, 3), "step": torch.tensor(4.0)} for name in names}
    optimizer = {"state": state, "param_groups": [{"params": names}]}
    torch.save({"model": weights, "optimizer": optimizer, "step": 4}, tmp_path / "x.pt")
    store = convert(tmp_path / "x.pt", tmp_path / "a", Options()).path
    same(held(store), named(weights, state))
    for to, act in (("torch", export), ("dcp", export_dcp)):
        act(store, tmp_path / to, ExportOptions(to=to, optimizer=True))
        assert not diff(store, convert(tmp_path / to, tmp_path / f"{to}.back", Options()).path)


def test_every_type_out_and_back(tmp_path: Path) -> None:
    torch.save(everything(), tmp_path / "x.pt")
    store = convert(tmp_path / "x.pt", tmp_path / "a", Options()).path
    export(store, tmp_path / "y.pt", ExportOptions(to="torch"))
    same(dict(torch.load(tmp_path / "y.pt", weights_only=True)), everything())
    assert not diff(store, convert(tmp_path / "y.pt", tmp_path / "b", Options()).path)
    half = export(store, tmp_path / "h", ExportOptions(dtype="float16"))
    assert load_file(half.path / "model.safetensors")["float64"].equal(everything()["float64"].half())


def test_records_are_aligned_where_zip_changes_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zipfile leaves room for long sizes from a little below its limit on."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 4000)
    weights = {f"w{count}": torch.arange(count, dtype=torch.float32) for count in (900, 951, 960, 990, 1001)}
    torch.save(weights, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "a", Options())
    export(tmp_path / "a", tmp_path / "y.pt", ExportOptions(to="torch"))
    data = (tmp_path / "y.pt").read_bytes()
    for tensor in weights.values():
        at = data.index(tensor.numpy().tobytes() + b"PK")
        assert at % 64 == 0, len(tensor)


# ---------------------------------------------------------------- into a live state


def test_a_tied_weight_that_came_twice_is_told_how_to_leave_one_out(tmp_path: Path) -> None:
    weights = {name: torch.ones(4, 3) for name in ("0.weight", "1.weight")}
    done = convert(save_dcp(tmp_path / "dcp", {"model": weights}), tmp_path / "store", Options())
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    with open_mesh(Plan()) as mesh:
        placed = apply(model, Plan(), mesh)
        state = TrainState(placed, adamw(placed, lr=1e-2))
        with pytest.raises(CheckpointError, match=r"1 of its tensors .*'model.1.weight'.*convert --rename` leaves out"):
            Store(tmp_path / "runs").load(state, done.path, weights_only=True)


def begin_with(layout: str, path: str, dtype: torch.dtype) -> tuple[int, str, Tensors]:
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh, dtype)
        with torch.no_grad():
            for parameter in placed.parameters():
                parameter.zero_()
        state = TrainState(placed, adamw(placed, lr=1e-2), ema=Ema(placed, 0.9))
        store = Store(f"{path}.runs")
        with pytest.raises(CheckpointError, match="weights_only=True"):
            store.load(state, find(Path(path)).path)
        loaded = store.load(state, find(Path(path)).path, weights_only=True)
        found = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.tensors().items()}
        return state.step, loaded.proof.line, {name: t.detach().clone() for name, t in found.items()}


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("one", torch.float32), ("fsdp2", torch.float32), ("tp2", torch.float32), ("fsdp2", torch.bfloat16)],
)  # fmt: skip
def test_converted_weights_begin_a_run(world: World, layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    net = trained()[0].to(dtype)
    save_file({n: t for n, t in net.state_dict().items()}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "a", Options())
    expected = under_model(dict(net.state_dict()))
    followers = {f"ema.{n}": t.float() for n, t in net.named_parameters()}
    if dtype != torch.float32:
        followers |= {f"optim.{n}.master": t.float() for n, t in net.named_parameters()}
    for step, line, found in world(LAYOUTS[layout].world, begin_with, layout, str(tmp_path / "a"), dtype):
        assert step == 0 and line == f"resume proof: {len(expected)}/{len(expected)} tensors, checksums ok"
        same(found, expected | followers)


def test_a_run_with_masters_gets_them_from_the_weights(tmp_path: Path) -> None:
    shapes = {"model.w": "bfloat16", "optim.w.master": "float32", "optim.w.exp_avg": "float32"}
    tensors = {name: content(name, (2, 3), dtype) for name, dtype in shapes.items()}
    parts = {name: [(0, whole((2, 3)))] for name in shapes}
    like = write_checkpoint(tmp_path, tensors, parts, shapes)
    weight, mean = torch.randn(2, 3), torch.randn(2, 3)
    state = {"state": {"w": {"exp_avg": mean}}, "param_groups": [{"params": ["w"]}]}
    torch.save({"model": {"w": weight}, "optimizer": state}, tmp_path / "x.pt")
    done = convert(tmp_path / "x.pt", tmp_path / "a", Options(like=like))
    same(held(done.path), {"model.w": weight.bfloat16(), "optim.w.master": weight, "optim.w.exp_avg": mean})
    state["state"]["w"]["exp_avg_sq"] = mean
    torch.save({"model": {"w": weight}, "optimizer": state}, tmp_path / "y.pt")
    done = convert(tmp_path / "y.pt", tmp_path / "b", Options(like=like))
    same(held(done.path), {"model.w": weight.bfloat16(), "optim.w.master": weight})  # weights_only takes it
    assert "optim.w.exp_avg_sq" in done.notes[-1] and not done.num_parameters_with_state


def go_on_from(layout: str, path: str) -> Tensors:
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh)
        state = TrainState(placed, adamw(placed, lr=1e-2, weight_decay=0.01), seed=77)
        loaded = Store(path).load_latest(state)
        assert loaded is not None and state.step == 3 and state.seed == 77
        grads = {name: p.detach() * 0.25 for name, p in placed.named_parameters().items()}
        state.optimizer.take_grads(grads)
        state.optimizer.step()
        found = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.tensors().items()}
        return {name: t.detach().clone() for name, t in found.items()}


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_a_converted_run_goes_on_as_torch_would(world: World, layout: str, tmp_path: Path) -> None:
    net, optimizer = trained()
    saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "global_step": 3}
    torch.save(saved, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "a", Options(in_order=True))
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.01
    for parameter in net.parameters():
        parameter.grad = parameter.detach() * 0.25
    optimizer.step()
    expected = expected_of(net, optimizer)
    for found in world(2, go_on_from, layout, str(tmp_path / "a")):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- memory, disks, targets


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    tensors = {"w": torch.arange(2**23, dtype=torch.float32).view(2**12, -1), "turned": torch.zeros(2**10, 2**11).T}
    torch.save(tensors, path / "x.pt")
    convert(path / "x.pt", path / "store", Options())
    return path


def peak_of(act: Callable[[], Any]) -> int:
    tracemalloc.start()
    act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_is_that_of_a_few_slabs(large: Path, tmp_path: Path) -> None:
    """40 MiB, 32 of them one tensor, go in and out through less than 16."""
    assert peak_of(lambda: convert(large / "x.pt", tmp_path / "a", Options(dtype="bfloat16"))) < 16 * 2**20
    for to, name in (("safetensors", "b"), ("torch", "c.pt")):
        options = ExportOptions(to=to, dtype="float16")
        assert peak_of(functools.partial(export, large / "store", tmp_path / name, options)) < 16 * 2**20


def test_dcp_goes_out_a_tensor_at_a_time(tmp_path: Path) -> None:
    """80 MiB in tensors of 4 go out through less than 24."""
    torch.save({f"w{i}": torch.full((2**20,), float(i)) for i in range(20)}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "a", Options())
    options = ExportOptions(to="dcp")
    assert peak_of(lambda: export_dcp(tmp_path / "a", tmp_path / "b", options)) < 24 * 2**20


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"w{i}": torch.randn(3) for i in range(30)}
    torch.save(tensors, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "a", Options())
    export_dcp(tmp_path / "a", tmp_path / "b", ExportOptions(to="dcp"))
    assert len(list((tmp_path / "b").glob("*.distcp"))) == 30
    monkeypatch.setattr("shardwise.checkpoint.foreign.opened.MAX_OPEN", 8)
    monkeypatch.setattr("shardwise.checkpoint.foreign.sandbox.MAX_OPEN", 8)
    same(held(convert(tmp_path / "b", tmp_path / "c", Options()).path), under_model(tensors))


def failing(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    real, left = LocalFiles.call, [number]

    def call(self: LocalFiles, name: str, path: Path, act: Callable[[], Any]) -> Any:
        if name in ("mkdir", "makedirs", "create", "write", "fsync", "close", "rename", "fsync directory"):
            left[0] -= 1
            if left[0] == 0:
                raise error
        return real(self, name, path, act)

    monkeypatch.setattr(LocalFiles, "call", call)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "disk"), KeyboardInterrupt()], ids=type)
def test_a_failure_at_any_call_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(3, 2)}, tmp_path / "x.safetensors")
    target, failed = tmp_path / "out" / "a", 0
    for number in range(1, 60):
        with monkeypatch.context() as patch:
            failing(patch, number, error)
            try:
                convert(tmp_path / "x.safetensors", target, Options())
                break
            except (CheckpointError, KeyboardInterrupt):
                failed += 1
        there = sorted(p.name for p in target.parent.iterdir()) if target.parent.exists() else []
        assert there in ([], ["a"]) and (not there or held(target))  # "a": complete, and only its flush failed
        if there:
            break
    assert failed > 10


def test_a_failure_while_replacing_leaves_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    save_file({"w": torch.zeros(3)}, tmp_path / "y.safetensors")
    target, error = tmp_path / "out" / "a", OSError(5, "Input/output error", "disk")
    convert(tmp_path / "x.safetensors", target, Options())
    for number in range(1, 60):
        with monkeypatch.context() as patch:
            failing(patch, number, error)
            try:
                convert(tmp_path / "y.safetensors", target, Options(overwrite=True))
                break
            except CheckpointError as failed:
                assert len(held(target)) == 1 and "nothing was left" not in str(failed)
    assert number > 10 and not held(target)["model.w"].any()


def test_a_full_disk_leaves_no_export(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    for to in ("safetensors", "torch", "dcp"):
        options = ExportOptions(to=to)
        with pytest.raises(CheckpointError, match="No space left"):
            (export_dcp if to == "dcp" else export)(large / "store", tmp_path / "x", options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_a_disk_that_is_full_in_the_middle_of_a_file_is_said(large: Path, tmp_path: Path, to: Any) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large.*make room"):
            (export_dcp if to == "dcp" else export)(large / "store", tmp_path / "x", ExportOptions(to=to))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_targets_are_not_lost(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    source, target = tmp_path / "x.safetensors", tmp_path / "a"
    first = convert(source, target, Options())
    with pytest.raises(UsageError, match="--overwrite"):
        convert(source, target, Options())
    save_file({"w": torch.zeros(2)}, source)
    assert not held(convert(source, target, Options(overwrite=True)).path)["model.w"].any() and first.num_weights == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for act in (convert, export):
        options: Any = (Options if act is convert else ExportOptions)(overwrite=True)
        with pytest.raises(UsageError, match=r"mine: found thesis\.txt in it"):
            act(target if act is export else source, tmp_path / "mine", options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "mine", "x.safetensors"]
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="link: found a link there, .*that to which it leads, nowhere"):
        convert(source, tmp_path / "link", Options(overwrite=True))
    with pytest.raises(UsageError, match="weights only"):
        export(target, tmp_path / "b", ExportOptions(optimizer=True))


def test_a_source_is_not_its_own_target(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    store = convert(tmp_path / "x.safetensors", tmp_path / "out" / "store", Options()).path
    export(store, tmp_path / "out" / "hf", ExportOptions())
    (tmp_path / "link").symlink_to(store)
    before = sorted(tmp_path.rglob("*"))
    for source in (store, tmp_path / "link"):
        for target in (store, store / "x", store / "step-00000000", tmp_path / "out"):
            for to, act in (("safetensors", export), ("torch", export), ("dcp", export_dcp)):
                with pytest.raises(UsageError, match="needed a place of its own"):
                    act(source, target, ExportOptions(to=to, overwrite=True))
    for target in (tmp_path / "out" / "hf", tmp_path / "out" / "hf" / "x", tmp_path / "out"):
        with pytest.raises(UsageError, match="needed a place of its own"):
            convert(tmp_path / "out" / "hf", target, Options(overwrite=True))
    assert sorted(tmp_path.rglob("*")) == before


def write_config(target: Path) -> str:
    (target / "config.json").write_text("{}")
    return "config.json"


def write_folder(target: Path) -> str:
    (target / "latest.d").mkdir()
    return "latest.d"


def write_weights(target: Path) -> str:
    (target / "mine.safetensors").write_bytes(b"mine")
    return "mine.safetensors"


def write_link(target: Path) -> str:
    (target / "model-00001-of-00002.safetensors").symlink_to(target.parent / "x.pt")
    return "model-00001-of-00002.safetensors"


def write_run(target: Path) -> str:
    """A checkpoint that a run saved: by its names it might be a conversion."""
    shapes = {"model.w": "float32"}
    tensors = {"model.w": content("model.w", (2, 3), "float32")}
    made = write_checkpoint(target.parent / "run", tensors, {"model.w": [(0, whole((2, 3)))]}, shapes)
    made.rename(target / "step-00000009")
    return "step-00000009"


def test_overwriting_removes_only_what_was_written(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(100.0), "v": torch.ones(100)}, tmp_path / "x.pt")
    store = convert(tmp_path / "x.pt", tmp_path / "store", Options()).path
    (tmp_path / "run").mkdir()
    acts: list[Callable[[Path], Any]] = [lambda target: convert(tmp_path / "x.pt", target, Options(overwrite=True))]
    kinds: Any = [("safetensors", 400, False), ("safetensors", 10**9, False), ("torch", 400, False),
                  ("torch", 10**9, False), ("torch", MAX_SHARD, True), ("dcp", MAX_SHARD, True)]  # fmt: skip
    for to, most, optimizer in kinds:
        options = ExportOptions(to=to, max_shard=most, optimizer=optimizer, overwrite=True)
        act = export_dcp if to == "dcp" else export
        acts.append(functools.partial(act, store, options=options))
    for act in [*acts, acts[0]]:  # each replaces what the one before wrote
        act(tmp_path / "a")
    for add in (write_config, write_folder, write_weights, write_link, write_run):
        target = shutil.copytree(tmp_path / "a", tmp_path / add.__name__)
        name = add(target)
        before = sorted(target.rglob("*"))
        for act in acts:
            with pytest.raises(UsageError, match=f"{add.__name__}: found {name} in it, which no conversion or export"):
                act(target)
        assert sorted(target.rglob("*")) == before


def test_a_file_and_a_directory_do_not_replace_each_other(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    store = convert(tmp_path / "x.safetensors", tmp_path / "a", Options()).path
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for to, act in (("safetensors", export), ("torch", export), ("dcp", export_dcp)):
        with pytest.raises(UsageError, match=r"notes\.txt: found something there that is not a directory"):
            act(store, notes, ExportOptions(to=to, overwrite=True))
    with pytest.raises(UsageError, match="not a directory"):
        convert(tmp_path / "x.safetensors", notes, Options(overwrite=True))
    assert notes.read_text() == "mine"
    (tmp_path / "y.pt").mkdir()
    with pytest.raises(UsageError, match=r"y\.pt: found something there that is not a file"):
        export(store, tmp_path / "y.pt", ExportOptions(to="torch", overwrite=True))
    for _ in range(2):
        export(store, tmp_path / "z.pt", ExportOptions(to="torch", overwrite=True))


def test_a_source_that_may_not_be_read_is_said_to_be_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"w": torch.ones(2)}, source / "x.pt")
    store, real = convert(source, tmp_path / "store", Options()).path, LocalFiles.call

    def call(self: LocalFiles, name: str, path: Path, act: Callable[[], Any]) -> Any:
        if name == "listdir" and path == source:
            raise PermissionError(13, "Permission denied", str(path))
        return real(self, name, path, act)

    def stat(self: Path, **options: Any) -> Any:
        if self == source:
            raise PermissionError(13, "Permission denied", str(self))
        return os.stat(self, **options)

    def fail(*words: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    def refuse(place: Any, name: str, fault: Any, said: str, **options: Any) -> None:
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=said):
            patch.setattr(place, name, fault)
            convert(source, tmp_path / "a", Options(**options))

    for kind in ("auto", "torch", "safetensors", "deepspeed", "fsdp"):
        refuse(LocalFiles, "call", call, "source: cannot be read .Permission", kind=kind)
    refuse(Path, "stat", stat, "source: cannot be read .Permission")
    refuse(convert_module, "find", fail, "store: cannot be read .Permission", like=store)
    refuse(subprocess, "Popen", fail, r"x\.pt: found no process")
    assert not (tmp_path / "a").exists()


def test_bytes_that_changed_are_named(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="CRC-32"):
        convert(tmp_path / "x.pt", tmp_path / "a", Options())


# ---------------------------------------------------------------- the other door, and the command


class Opens:
    """Runs code when it is loaded as a program, and is a tensor then."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return eval, (f"(open({str(self.marker)!r}, 'w').write(str(__import__('os').getpid())), print('hello'))[0]",)


def ckpt(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", *map(str, words)])
    return int(ended.value.code or 0)


def test_unsafe_pickle_says_what_it_means_and_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {"w": torch.randn(3, 2).T, "b": torch.randn(2).bfloat16()}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text("class Config: pass")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    monkeypatch.syspath_prepend(tmp_path / "own")
    own = importlib.import_module("mine").Config()
    torch.save({"state_dict": tensors, "config": Opens(tmp_path / "ran"), "own": own}, tmp_path / "x.pt")
    del sys.modules["mine"]
    assert ckpt("convert", tmp_path / "x.pt", tmp_path / "a") == 4
    said = capsys.readouterr().err
    assert "builtins.eval" in said and "--unsafe-pickle" in said and not (tmp_path / "ran").exists()
    assert ckpt("convert", tmp_path / "x.pt", tmp_path / "a", "--unsafe-pickle") == 0
    assert "may do whatever you may do" in capsys.readouterr().err
    same(held(tmp_path / "a"), under_model(tensors))
    assert int((tmp_path / "ran").read_text()) != os.getpid()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "own", "ran", "x.pt"]


def test_unsafe_pickle_keeps_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process (here this one) reads all of them, and memory that one file has left may be the next one's."""

    def ask(module: str, request: Any, descriptors: list[int], where: str) -> Any:
        assert module == "unsafe"
        return json.loads(json.dumps(answer_to(request["jobs"], request["scratch"])))

    monkeypatch.setattr(sandbox, "ask", ask)
    own = torch.arange(3).to(torch.complex64) * 1j
    shards: list[Tensors] = [{f"w{i}": torch.full((2**16,), float(i))} for i in range(4)]
    shards.append({"a": own, "b": own.conj(), "c": own})
    listed: dict[str, str] = {}
    source = tmp_path / "source"
    source.mkdir()
    for i, shard in enumerate(shards):
        torch.save(shard, source / f"pytorch_model-{i}.bin")
        listed |= dict.fromkeys(shard, f"pytorch_model-{i}.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": listed}))
    done = convert(source, tmp_path / "out", Options(unsafe=True))
    expected = {name: t.resolve_conj() for shard in shards for name, t in shard.items() if name != "c"}
    same(held(done.path), under_model(expected))
    truth = Truth()
    write_zero12(tmp_path / "ds", truth, 4, bf16=True, slices=False)
    same(held(convert(tmp_path / "ds", tmp_path / "b", Options(unsafe=True)).path), truth.expected())


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("export", run, tmp_path / "hf", "--max-shard-size", "150", "--dtype", "bfloat16") == 0
    assert "step 3, 9 tensors as safetensors" in capsys.readouterr().out
    assert ckpt("convert", tmp_path / "hf", tmp_path / "a", "--like", run, "--json") == 0
    assert '"kind": "safetensors"' in capsys.readouterr().out
    assert ckpt("verify", tmp_path / "a") == 0
    for words in (("convert", run), ("convert", run, tmp_path / "b", "--to", "torch"), ("verify", run, "--overwrite"),
                  ("export", run, tmp_path / "b", "--max-shard-size", "big")):  # fmt: skip
        assert ckpt(*words) == 2
    assert ckpt("convert", tmp_path / "nothing", tmp_path / "b") == 4
    assert ckpt("convert", run, tmp_path / "b") == 4
