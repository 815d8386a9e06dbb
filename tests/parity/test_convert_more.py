"""Optimizers in a place of their own, ranks' files with each other's name, formats by suffix, and Lightning's files."""

from __future__ import annotations

import functools
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import fsdp_utils
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import StateDictType, fully_shard

from shardwise.checkpoint.compare import diff
from shardwise.checkpoint.foreign.convert import Options, convert
from shardwise.checkpoint.foreign.export import ExportOptions, export
from shardwise.errors import CheckpointError, UsageError
from shardwise.parallel.mesh import open_mesh
from shardwise.testing.world import World
from tests.foreign import Truth, write_zero3, write_zero12
from tests.parity.placing import LAYOUTS, Net
from tests.parity.test_convert import (
    ZERO,
    Tensors,
    ckpt,
    expected_of,
    held,
    same,
    save_dcp,
    stepped,
    trained,
    under_model,
)

# ---------------------------------------------------------------- an optimizer in a place of its own


def save_with_accelerate(path: str) -> Tensors:
    """FSDP2 by Accelerate's own functions, sharded and full; the whole tensors of it."""
    quiet = patch.object(fsdp_utils, "logger")  # it asks for an Accelerator
    with open_mesh(LAYOUTS["fsdp2"]) as mesh, warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        net = Net()
        fully_shard(net, mesh=mesh.device_mesh["dp_shard"])
        optimizer = stepped(torch.optim.AdamW(net.parameters(), lr=1e-2))
        who: Any = SimpleNamespace(num_processes=2, process_index=mesh.rank, is_main_process=mesh.rank == 0)
        for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT):
            full = kind is StateDictType.FULL_STATE_DICT
            config = SimpleNamespace(offload_to_cpu=full, rank0_only=full)
            plugin: Any = SimpleNamespace(fsdp_version=2, state_dict_type=kind, state_dict_config=config)
            folder = f"{path}/{kind.name}"
            fsdp_utils.save_fsdp_model(plugin, who, net, folder)
            fsdp_utils.save_fsdp_optimizer(plugin, who, optimizer, net, folder)
        whole_ones = StateDictOptions(full_state_dict=True)
        model: Any = get_model_state_dict(net, options=whole_ones)
        state: Any = get_optimizer_state_dict(net, optimizer, options=whole_ones)["state"]
        return under_model(model) | {f"optim.{n}.{k}": v for n, keys in state.items() for k, v in keys.items()}


def test_what_accelerate_saves_of_fsdp_is_taken_over_with_its_state(world: World, tmp_path: Path) -> None:
    expected = world(2, save_with_accelerate, str(tmp_path))[0]
    sharded, full = tmp_path / "SHARDED_STATE_DICT", tmp_path / "FULL_STATE_DICT"
    assert sorted(p.name for p in sharded.iterdir()) == ["optimizer_0", "pytorch_model_fsdp_0"]
    assert sorted(p.name for p in full.iterdir()) == ["optimizer.bin", "pytorch_model_fsdp.bin"]
    for number, (source, kind) in enumerate([(sharded, "auto"), (sharded, "fsdp"), (sharded, "dcp"), (full, "auto")]):
        options: Any = {"kind": kind}
        done = convert(source, tmp_path / str(number), Options(**options))
        same(held(done.path), expected)
        assert not done.notes


def test_half_of_two_says_where_the_other_is(tmp_path: Path) -> None:
    net, optimizer = trained()
    save_dcp(tmp_path / "both" / "pytorch_model_fsdp_0", {"model": net.state_dict()})
    save_dcp(tmp_path / "both" / "optimizer_0", {"optimizer": get_optimizer_state_dict(net, optimizer)})
    done = convert(tmp_path / "both" / "pytorch_model_fsdp_0", tmp_path / "a", Options())
    assert not done.num_parameters_with_state and f"in optimizer_0; give {tmp_path / 'both'}" in done.notes[0]
    with pytest.raises(CheckpointError, match="an optimizer's state alone, .* give the directory above, .*both"):
        convert(tmp_path / "both" / "optimizer_0", tmp_path / "b", Options())
    done = convert(tmp_path / "both", tmp_path / "c", Options(optimizer=False))
    same(held(done.path), under_model(dict(net.state_dict())))
    assert done.notes == ("the optimizer's state in optimizer_0: as --no-optimizer says",)
    shutil.copytree(tmp_path / "both" / "optimizer_0", tmp_path / "both" / "optimizer_1")
    done = convert(tmp_path / "both", tmp_path / "d", Options())
    assert not done.num_parameters_with_state and "there are 2 (optimizer_0, optimizer_1)" in done.notes[0]
    shutil.copytree(tmp_path / "both" / "pytorch_model_fsdp_0", tmp_path / "both" / "pytorch_model_fsdp_1")
    with pytest.raises(CheckpointError, match="found 2 models, pytorch_model_fsdp_0, pytorch_model_fsdp_1; needed one"):
        convert(tmp_path / "both", tmp_path / "e", Options())


def save_replicated(path: str) -> Tensors:
    """What all ranks have, of which DCP lets each write a part."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        optimizer = stepped(torch.optim.AdamW(net.parameters()))
        for part, value in {"model": net.state_dict(), "optimizer": optimizer.state_dict()}.items():
            dcp.save({part: value}, checkpoint_id=f"{path}/{part}")
        return expected_of(net, optimizer) if mesh.rank == 0 else {}


def test_the_order_of_parameters_in_dcp_is_the_models_whoever_wrote_them(world: World, tmp_path: Path) -> None:
    expected = world(2, save_replicated, str(tmp_path / "both"))[0]
    assert not convert(tmp_path / "both", tmp_path / "a", Options()).num_parameters_with_state
    same(held(convert(tmp_path / "both", tmp_path / "b", Options(in_order=True)).path), expected)


def test_an_optimizer_file_is_taken_by_names_or_by_the_order_that_the_user_says(tmp_path: Path) -> None:
    net, optimizer = trained()
    for name in ("optimizer.bin", "optim.pt"):
        source = tmp_path / name / "source"
        source.mkdir(parents=True)
        torch.save(net.state_dict(), source / ("pytorch_model_fsdp.bin" if name.endswith("bin") else "model.pt"))
        torch.save(optimizer.state_dict(), source / name)
        done = convert(source, tmp_path / name / "a", Options())
        assert not done.num_parameters_with_state and "--params-in-order" in done.notes[0] and name in done.notes[0]
        same(held(convert(source, tmp_path / name / "b", Options(in_order=True)).path), expected_of(net, optimizer))
        with_names = torch.optim.AdamW(list(net.named_parameters()), lr=1e-2)
        with_names.load_state_dict(optimizer.state_dict())
        torch.save(with_names.state_dict(), source / name)
        same(held(convert(source, tmp_path / name / "c", Options()).path), expected_of(net, optimizer))
        (source / name).write_bytes(b"\x80\x02cbuiltins\neval\n.")
        with pytest.raises(CheckpointError, match=f"{name}: found .*--no-optimizer, which takes the weights alone"):
            convert(source, tmp_path / name / "d", Options())
        assert convert(source, tmp_path / name / "d", Options(optimizer=False)).num_weights == len(net.state_dict())


def test_a_trainers_optimizer_beside_safetensors_needs_names(tmp_path: Path) -> None:
    net, optimizer = trained()
    source = tmp_path / "checkpoint-3"
    source.mkdir()
    save_file(dict(net.state_dict()), source / "model.safetensors")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 3, "log_history": [{"loss": float("nan")}]}))
    for name in ("scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({}, source / name)
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    done = convert(source, tmp_path / "a", Options(in_order=True))
    same(held(done.path), under_model(dict(net.state_dict())))
    assert done.notes[0] == "what a trainer kept in files of its own: rng_state.pth, scheduler.pt, training_args.bin"
    assert "not even --params-in-order can say whose they are; needed names" in done.notes[1] and done.step == 3
    with_names = torch.optim.AdamW(list(net.named_parameters()), lr=1e-2)
    with_names.load_state_dict(optimizer.state_dict())
    torch.save(with_names.state_dict(), source / "optimizer.pt")
    done = convert(source, tmp_path / "b", Options())
    same(held(done.path), expected_of(net, optimizer))
    assert done.step == 3 and len(done.notes) == 1
    done = convert(source / "model.safetensors", tmp_path / "c", Options())
    assert done.notes == (f"the optimizer's state: it is in optimizer.pt; give {source}, which holds both",)


@pytest.mark.parametrize("said", ["NaN", '"3"', "null", "-1", "2.5", "1e400", "true", ""])
def test_a_trainers_step_that_is_no_number_is_said(tmp_path: Path, said: str) -> None:
    source = tmp_path / "checkpoint-3"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    (source / "trainer_state.json").write_text('{"log_history": []' + (f', "global_step": {said}}}' if said else "}"))
    done = convert(source, tmp_path / "a", Options())
    (note,) = done.notes
    assert done.step == 0 and note.startswith("the step, which is 0 here: trainer_state.json says ")
    torch.save({"model": {"w": torch.ones(2)}, "step": float("nan")}, tmp_path / "x.pt")
    done = convert(tmp_path / "x.pt", tmp_path / "b", Options())
    assert done.step == 0 and done.notes[0].endswith("x.pt says step nan, needed a whole number")


# ---------------------------------------------------------------- DeepSpeed's files under each other's name


def exchange(source: Path, first: int, second: int, what: str = "optim") -> None:
    a, b = (next(source.glob(f"global_step12/*rank_{rank}_mp*{what}_states.pt")) for rank in (first, second))
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)


FLAT = [kind for kind in ZERO if "stage 3" not in kind and "one rank" not in kind]


@pytest.mark.parametrize("kind", FLAT)
def test_exchanged_ranks_of_stages_1_and_2_are_refused(kind: str, tmp_path: Path) -> None:
    ZERO[kind](tmp_path / "ds", Truth())
    exchange(tmp_path / "ds", 0, 1)
    with pytest.raises(CheckpointError, match=r"rank_[01]_mp_rank_00.*: found .* in .*rank_[01]_mp_rank_00"):
        convert(tmp_path / "ds", tmp_path / "a", Options())


def test_ranks_inside_one_parameter_are_told_by_the_weights_of_the_module(tmp_path: Path) -> None:
    truth = Truth()
    draw = torch.Generator().manual_seed(3)
    truth.groups = [["embed.weight"]]
    truth.weights = truth.mean = truth.square = {"embed.weight": torch.randn(200, 3, generator=draw)}
    source = write_zero12(tmp_path / "ds", truth, 4)
    same(held(convert(source, tmp_path / "a", Options()).path), truth.expected())
    exchange(source, 1, 2)
    with pytest.raises(CheckpointError, match=r"rank_1.*no weights of embed.weight as the module has them.*rank_2"):
        convert(source, tmp_path / "b", Options())


def test_round_robin_slices_that_are_in_order_on_every_rank(tmp_path: Path) -> None:
    truth = Truth()
    truth.groups = [["embed.weight", "up.weight"]]  # a rank each
    draw = torch.Generator().manual_seed(4)
    truth.weights, truth.mean, truth.square = (
        {name: torch.randn(6, 3, generator=draw) for name in truth.groups[0]} for _ in range(3)
    )
    source = write_zero12(tmp_path / "ds", truth, 2, reverse=True, wrong=True)
    same(held(convert(source, tmp_path / "a", Options()).path), truth.expected())


def test_parts_that_are_nowhere_as_the_module_has_them_are_refused(tmp_path: Path) -> None:
    truth = Truth()
    source = write_zero12(tmp_path / "ds", truth, 2)
    file = source / "global_step12" / "mp_rank_00_model_states.pt"
    value = torch.load(file, weights_only=False)
    for number, (scale, fits) in enumerate({1 + 2.0**-10: True, 1.5: False}.items()):  # of its last bit; another
        module = {n: (t * scale).to(t.dtype) for n, t in value["module"].items()}
        torch.save(value | {"module": module | {n: t for n, t in value["module"].items() if n in truth.buffers}}, file)
        if fits:
            same(held(convert(source, tmp_path / str(number), Options()).path), truth.expected())
            continue
        with pytest.raises(
            CheckpointError, match=r"rank_0.*: found fp32 weights of .* that are not the module's, round"
        ):
            convert(source, tmp_path / str(number), Options())


def test_where_the_module_says_nothing_sizes_and_slices_tell_the_ranks(tmp_path: Path) -> None:
    truth = Truth()
    truth.weights = {n: torch.zeros_like(t) for n, t in truth.mean.items()}
    said = {
        False: r"rank_1.*: found \d+ elements, and fewer in .*rank_0",
        True: r"rank_1.*: found .* comes after it, in",
    }
    for slices, world in ((False, 2), (True, 3)):
        source = write_zero12(tmp_path / str(world), truth, world, slices=slices)
        assert convert(source, tmp_path / f"{world} out", Options()).num_parameters_with_state == 5
        exchange(source, 0, 1)
        with pytest.raises(CheckpointError, match=said[slices]):
            convert(source, tmp_path / "b", Options())


def on_devices(
    write: Callable[[Path], Path], numbers: Mapping[int, int], monkeypatch: pytest.MonkeyPatch, path: Path
) -> Path:
    """Each rank's files say the device that it had."""
    here: list[int] = []
    save, real = torch.save, torch.serialization.location_tag

    def save_as(value: Any, file: Path) -> None:
        words = file.name.split("_rank_")
        here[:] = [numbers[int(words[1].split("_")[0])]] if len(words) == 3 else []
        save(value, file)

    with monkeypatch.context() as changed:
        changed.setattr(torch, "save", save_as)
        changed.setattr(torch.serialization, "location_tag", lambda s: f"cuda:{here[0]}" if here else real(s))
        return write(path)


def test_devices_tell_the_ranks_of_stage_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Truth()
    write = functools.partial(write_zero3, truth=truth, world=4)
    for name, numbers in {"in turn": (0, 1, 0, 1), "a machine's first": (0, 0, 1, 1), "others": (2, 3, 2, 3)}.items():
        source = on_devices(write, dict(enumerate(numbers)), monkeypatch, tmp_path / name)
        same(held(convert(source, tmp_path / f"{name} out", Options()).path), truth.expected())
    for what in ("optim", "model"):
        source = on_devices(write, {0: 0, 1: 1, 2: 0, 3: 1}, monkeypatch, tmp_path / what)
        exchange(source, 0, 1, what)
        said = rf"rank_0.*{what}_states.pt: found tensors of device 1, and those of device 0 in .*rank_1"
        with pytest.raises(CheckpointError, match=said):
            convert(source, tmp_path / f"{what} out", Options())


def test_a_tag_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = write_zero12(tmp_path / "ds", Truth(), 2)
    (source / "latest").write_text("global_step99")
    for kind in ("auto", "deepspeed"):
        options: Any = {"kind": kind}
        with pytest.raises(CheckpointError, match=r"latest: found the tag 'global_step99', .*there are global_step12"):
            convert(source, tmp_path / "a", Options(**options))
    torch.save({"w": torch.ones(2)}, source / "x.pt")  # then `latest` may be of another tool
    assert convert(source, tmp_path / "a", Options()).kind == "torch"


# ---------------------------------------------------------------- out


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A converted model with its optimizer's state."""
    net, optimizer = trained()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "source.pt")
    return convert(tmp_path / "source.pt", tmp_path / "store", Options(in_order=True)).path


def test_the_suffix_says_the_format_and_may_not_contradict_it(store: Path, tmp_path: Path) -> None:
    for name in ("x.safetensors", "x.pt", "x.bin", "x.pth", "x.ckpt"):
        done = export(store, tmp_path / name, ExportOptions())
        assert done.path.is_file() and done.files == (name,)
        assert convert(done.path, tmp_path / f"{name}.back", Options()).kind == {
            "x.safetensors": "safetensors", "x.ckpt": "lightning"}.get(name, "torch")  # fmt: skip
    assert ckpt("export", store, tmp_path / "by-suffix.pt") == 0 and (tmp_path / "by-suffix.pt").is_file()
    before = sorted(tmp_path.iterdir())
    for words in (("y.safetensors", "--to", "torch"), ("y.pt", "--to", "dcp"),
                  ("y.pt", "--to", "lightning"), ("y", "--to", "lightning"), ("y.ckpt", "--to", "dcp")):  # fmt: skip
        assert ckpt("export", store, tmp_path / words[0], *words[1:]) == 2
    assert sorted(tmp_path.iterdir()) == before
    assert ckpt("export", store, tmp_path / "v1.5", "--max-shard-size", "300KB") == 0
    assert (tmp_path / "v1.5" / "model.safetensors").is_file()


def test_a_bound_that_nothing_keeps_is_refused(store: Path, tmp_path: Path) -> None:
    for words in (("y", "--to", "torch", "--optimizer"), ("y.pt", "--to", "torch"), ("y.safetensors",),
                  ("y", "--to", "dcp"), ("y.ckpt", "--to", "lightning")):  # fmt: skip
        assert ckpt("export", store, tmp_path / words[0], *words[1:], "--max-shard-size", "300KB") == 2
        assert not (tmp_path / words[0]).exists()
    with pytest.raises(UsageError, match="found --max-shard-size 300, .* one file with the optimizer's state in it"):
        export(store, tmp_path / "y", ExportOptions(to="torch", optimizer=True, max_shard=300))


def test_a_lightning_checkpoint_has_what_lightning_looks_for(store: Path, tmp_path: Path) -> None:
    net, optimizer = trained()
    assert ckpt("export", store, tmp_path / "x.ckpt", "--to", "lightning", "--optimizer") == 0
    found = torch.load(tmp_path / "x.ckpt", weights_only=True)
    keys = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "callbacks"}
    assert found.keys() == keys | {"optimizer_states", "lr_schedulers"} and found["global_step"] == 3
    module = nn.ModuleDict({"model": Net()})  # as a LightningModule with `self.model`
    module.load_state_dict(found["state_dict"])
    own = torch.optim.AdamW(module.parameters(), lr=1e-2)
    state = found["optimizer_states"][0]
    for group in state["param_groups"]:  # the dials are the script's own
        group |= {key: value for key, value in own.param_groups[0].items() if key != "params"}
    set_optimizer_state_dict(module, own, optim_state_dict=state)
    same(expected_of(module["model"], own), expected_of(net, optimizer))
    plain = torch.optim.AdamW(module.parameters())
    plain.load_state_dict(torch.load(tmp_path / "x.ckpt", weights_only=True)["optimizer_states"][0])
    with pytest.raises(KeyError):  # by position, which the file does not know, no state comes to a parameter unseen
        stepped(plain)
    done = convert(tmp_path / "x.ckpt", tmp_path / "back", Options())
    assert not diff(store, done.path) and done.step == 3 and done.kind == "lightning"
    export(store, tmp_path / "y.ckpt", ExportOptions(to="lightning"))
    assert torch.load(tmp_path / "y.ckpt", weights_only=True).keys() == keys


def test_names_that_all_begin_with_model_come_back_from_lightning(tmp_path: Path) -> None:
    weights = {"model.embed.weight": torch.randn(3, 2), "model.head.weight": torch.randn(2, 3)}
    torch.save(weights, tmp_path / "x.pt")
    store = convert(tmp_path / "x.pt", tmp_path / "a", Options()).path
    done = export(store, tmp_path / "x.ckpt", ExportOptions(optimizer=True))
    assert "the optimizer's state: the checkpoint has none" in done.notes
    assert not diff(store, convert(done.path, tmp_path / "b", Options()).path)


# ---------------------------------------------------------------- what holds no weights, or none that can be kept


def test_what_holds_no_weights_is_no_checkpoint(tmp_path: Path) -> None:
    save_file({}, tmp_path / "empty.safetensors")
    index = tmp_path / "index"
    index.mkdir()
    save_file({"a": torch.ones(2)}, index / "model.safetensors")
    (index / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for source in (tmp_path / "empty.safetensors", index):
        with pytest.raises(CheckpointError, match="found no weights"):
            convert(source, tmp_path / "out", Options())
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"w": torch.ones(2), "z": torch.ones(2, dtype=torch.complex128)}, "'z': found a tensor of complex128"),
        ({"w": torch.ones(2), "z": torch.ones(2, 2).to_sparse()}, "'z': found a tensor of float32, sparse_coo"),
        (nn.Linear(2, 2), "found a torch.nn.modules.linear.Linear, needed"),
        (torch.ones(2), "found a tensor, needed"),
    ],
    ids=["complex128", "sparse", "module", "tensor"],
)
def test_weights_that_cannot_be_kept_are_named(tmp_path: Path, value: Any, words: str) -> None:
    torch.save(value, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "file.pt", tmp_path / "out", Options(unsafe=True))
    assert not (tmp_path / "out").exists()


def test_a_step_may_be_a_whole_float(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "global_step": 9.0}, tmp_path / "file.pt")
    assert convert(tmp_path / "file.pt", tmp_path / "out", Options()).step == 9


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ({"step": -5}, "no use for: step"),
        ({"step": 5.5}, "no use for: step"),
        ({"global_step": 10**30, "epoch": 2}, "no use for: global_step, epoch"),
        ({"optimizer": {"state": {}}, "optim": {"state": {0: {"momentum": 1.0}}}}, "no use for: optim"),
    ],
    ids=["negative", "fraction", "huge", "second optimizer"],
)
def test_a_step_that_is_none_and_a_second_optimizer_are_said_to_be_left_out(
    tmp_path: Path, rest: dict[str, Any], words: str
) -> None:
    torch.save({"model": {"w": torch.ones(2)}, **rest}, tmp_path / "file.pt")
    done = convert(tmp_path / "file.pt", tmp_path / "out", Options())
    assert done.step == 0
    assert [note for note in done.notes if note.endswith(words)]


def test_a_name_that_cannot_be_stored_is_what_a_rule_renames(tmp_path: Path) -> None:
    torch.save({"a b/c": torch.ones(2)}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="--rename, as 'a b/c' ="):
        convert(tmp_path / "file.pt", tmp_path / "out", Options())
    (tmp_path / "rules.toml").write_text('[rename]\n"a b/c" = "a.c"\n')
    assert convert(tmp_path / "file.pt", tmp_path / "out", Options(rename=tmp_path / "rules.toml")).num_weights == 1


@pytest.mark.parametrize("key", ["opt", "my_adam"])
def test_an_optimizers_state_is_known_by_what_it_holds(tmp_path: Path, key: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    value = {"net": model.state_dict(), key: optimizer.state_dict(), "step": torch.tensor(3.0)}
    torch.save(value, tmp_path / "file.pt")
    done = convert(tmp_path / "file.pt", tmp_path / "out", Options())
    assert done.step == 3 and done.num_parameters_with_state == 2 and not done.notes


def test_a_kind_of_tensor_that_nobody_reads_is_no_reason_to_run_code(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "file.pt")
    with pytest.raises(
        CheckpointError, match="a tensor of a kind that is not read .*; save it in another type"
    ) as told:
        convert(tmp_path / "file.pt", tmp_path / "out", Options())
    assert "--unsafe-pickle" not in str(told.value)
    torch.save({"w": PartOfOne()}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"one rank's part of it \(DTensor\), or quantized; needed whole") as told:
        convert(tmp_path / "file.pt", tmp_path / "out", Options())
    assert "--unsafe-pickle" not in str(told.value)


class PartOfOne:
    """Asks for what a DTensor asks for."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_wrapper_subclass, (1,)


def test_names_too_long_to_be_told_are_refused_and_not_taken_for_one(tmp_path: Path) -> None:
    torch.save({letter * 70_000: torch.ones(2) for letter in "ab"}, tmp_path / "file.pt")
    with pytest.raises(
        CheckpointError, match="file.pt: found a name of 70000 characters in a dict; needed at most 65536"
    ):
        convert(tmp_path / "file.pt", tmp_path / "out", Options())
