"""What real libraries write: weights in one place only, parts that look whole, averages, sharded Lightning."""

from __future__ import annotations

import copy
import json
import warnings
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import shardwise as sw
from shardwise.checkpoint.compare import diff
from shardwise.checkpoint.foreign.convert import Options, convert
from shardwise.checkpoint.foreign.dcp_out import export_dcp
from shardwise.checkpoint.foreign.export import ExportOptions, export
from shardwise.errors import CheckpointError, UsageError
from tests.foreign import Truth, at_home, write_lightning, write_universal, write_zero3, write_zero12
from tests.parity.test_convert import ckpt, expected_of, held, pair, same, save_dcp, stepped, trained, under_model

# ---------------------------------------------------------------- DeepSpeed


def change(path: Path, **values: Any) -> None:
    """Other values in a file of model states, which names no class of DeepSpeed's."""
    torch.save(torch.load(path, weights_only=False) | values, path)


def module_of(truth: Truth, **more: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {n: w.half() for n, w in truth.weights.items()} | truth.buffers
    return found | {a: found[b] for a, b in truth.ties.items()} | more


def test_frozen_weights_that_stage_1_keeps_in_the_module_alone(tmp_path: Path) -> None:
    truth = Truth()
    frozen = {"frozen.weight": truth.frozen["frozen.weight"]}
    file = write_zero12(tmp_path / "ds", truth, 2, stage=1, bf16=True) / "global_step12" / "mp_rank_00_model_states.pt"
    for number, ties in enumerate((truth.ties, None)):  # files of old versions list no ties
        change(
            file, module=module_of(truth, **frozen), frozen_param_shapes=None, frozen_param_fragments=None,
            shared_params=ties,
        )  # fmt: skip
        done = convert(tmp_path / "ds", tmp_path / str(number), Options())
        same(held(done.path), truth.expected())
        assert done.notes == (
            "weights that were not trained, in the module's own type: frozen.weight",
            "tied parameters, kept under one name: head.weight = embed.weight",
        )


def test_weights_that_stage_3_names_and_has_not_are_said(tmp_path: Path) -> None:
    truth = Truth()
    truth.frozen = {}
    write_zero3(tmp_path / "ds", truth, 2)
    for file in (tmp_path / "ds" / "global_step12").glob("*model_states.pt"):
        empty = {name: torch.empty(0) for name in ("frozen.weight", *truth.weights, *truth.ties)}
        change(file, module=empty | truth.buffers)
    done = convert(tmp_path / "ds", tmp_path / "out", Options())
    same(held(done.path), truth.expected())
    assert done.notes[0] == "weights that the model names, and of which no rank has a part: frozen.weight"


def test_stage_0_is_the_one_file_that_latest_leads_to(tmp_path: Path) -> None:
    net, optimizer = trained()
    file = tmp_path / "ds" / "global_step7" / "mp_rank_00_model_states.pt"
    file.parent.mkdir(parents=True)
    (tmp_path / "ds" / "latest").write_text("global_step7")
    values = {"module": net.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 7, "param_shapes": None}
    torch.save(values, file)
    for number, (source, kind) in enumerate([(tmp_path / "ds", "auto"), (file.parent, "deepspeed"), (file, "auto")]):
        options: Any = {"kind": kind, "in_order": True}
        done = convert(source, tmp_path / str(number), Options(**options))
        same(held(done.path), expected_of(net, optimizer))
        assert done.step == 7 and done.kind == ("torch" if source == file else "deepspeed zero 0")
    torch.save(net.state_dict(), tmp_path / "ds" / "pytorch_model.bin")  # of a trainer: it is what is meant
    assert convert(tmp_path / "ds", tmp_path / "out", Options()).kind == "torch"


def test_the_deepspeed_strategy_of_lightning(tmp_path: Path) -> None:
    truth = Truth()
    own = {"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 12}
    inside = Truth()
    for field in ("weights", "mean", "square", "buffers", "frozen", "ties"):
        setattr(inside, field, {f"model.{name}": value for name, value in getattr(truth, field).items()})
    inside.ties = {name: f"model.{first}" for name, first in inside.ties.items()}
    inside.groups = [[f"model.{name}" for name in names] for names in truth.groups]
    source = write_zero12(tmp_path / "ds", inside, 2)
    (source / "latest").unlink()
    folder = (source / "global_step12").rename(source / "checkpoint")
    change(folder / "mp_rank_00_model_states.pt", **own)
    for kind in ("auto", "lightning"):
        options: Any = {"kind": kind}
        done = convert(source, tmp_path / kind, Options(**options))
        same(held(done.path), truth.expected())
        assert done.kind == "lightning, deepspeed zero 1 or 2"
        assert "names without the prefix 'model.', which all had" in done.notes


def test_stage_0_in_half_precision_has_fp32_weights_and_state_in_its_optimizer(tmp_path: Path) -> None:
    net, optimizer = trained()
    expected, state = expected_of(net, optimizer), optimizer.state_dict()
    masters = [p.detach().clone() for p in net.parameters()]
    module = copy.deepcopy(net).bfloat16().state_dict() | {"scale_of_mine": torch.ones(3)}
    values = {
        "module": module,
        "buffer_names": ["scale_of_mine"],
        "global_steps": 3,
        "param_shapes": None,
        "ds_config": {},
    }
    file = tmp_path / "mp_rank_00_model_states.pt"

    def save(groups: list[Tensor], key: str = "fp32_groups") -> None:
        torch.save(values | {"optimizer": {"cur_scale": 1.0, "optimizer_state_dict": state, key: [groups]}}, file)

    save(masters)
    done = convert(file, tmp_path / "a", Options(in_order=True))
    found = held(done.path)
    buffers = under_model({name: module[name] for name, _ in net.named_buffers() if name in module})
    same(found, expected | buffers | {"model.scale_of_mine": torch.ones(3)})
    for number, key in enumerate(("fp32_groups", "fp32_groups_flat")):  # without an order, or not by parameter
        save(masters, key)
        done = convert(file, tmp_path / f"b{number}", Options())
        assert done.num_parameters_with_state == 0
        assert any(note.startswith(f"the fp32 weights in {key}: whose they are is not known") for note in done.notes)
        assert any("its parameters are numbers" in note for note in done.notes)
    save([t + 1 for t in masters])
    with pytest.raises(
        CheckpointError, match=r"found fp32 weights of .* not the module's.*leave --params-in-order out"
    ):
        convert(file, tmp_path / "c", Options(in_order=True))
    save([masters[-1], *masters[1:]])
    with pytest.raises(CheckpointError, match=r"found fp32 weights of .* of shape .*, needed"):
        convert(file, tmp_path / "c", Options(in_order=True))


def test_model_states_of_zero_without_their_optimizer_states(tmp_path: Path) -> None:
    truth = Truth()
    for stage, write in {"2": write_zero12, "3": write_zero3}.items():
        folder = write(tmp_path / stage, truth, 1) / "global_step12"
        (file,), (part,) = folder.glob("*model_states.pt"), folder.glob("*optim_states.pt")
        if stage == "3":
            change(file, module={name: torch.empty(0) for name in (*truth.weights, *truth.ties)} | truth.buffers)
        part.unlink()
        for source in (tmp_path / stage, folder, file):
            with pytest.raises(CheckpointError, match=r"needed .*\*_optim_states.pt of every rank"):
                convert(source, tmp_path / "out", Options())
            if stage == "3":
                with pytest.raises(
                    CheckpointError, match=r"found embed.weight of shape \[0\], and \[7, 3\] in 'param_s"
                ):
                    convert(source, tmp_path / "out", Options(optimizer=False))
                continue
            done = convert(source, tmp_path / f"out {source.name}", Options(optimizer=False))
            expected = {n: t for n, t in module_of(truth).items() if n not in truth.ties}
            same(held(done.path), under_model(expected))
            assert done.notes[0].startswith("the fp32 weights and the optimizer's state: they are in files of ZeRO")


@pytest.mark.parametrize("stage3", [False, True])
def test_universal_checkpoints(stage3: bool, tmp_path: Path) -> None:
    truth = Truth()
    truth.frozen = {}
    source = write_universal(tmp_path / "ds", truth, stage3=stage3)
    folder = source / "global_step12_universal"
    for number, path in enumerate((source, folder)):
        done = convert(path, tmp_path / str(number), Options())
        same(held(done.path), truth.expected())
        assert done.kind == "deepspeed universal" and done.step == 12
    zero = folder / "zero"
    if not stage3:  # as its maker writes it of gradients in round-robin order
        torch.save({"param": truth.weights["up.weight"].flip(0)}, zero / "up.weight" / "fp32.pt")
        with pytest.raises(
            CheckpointError, match=r"zero/up.weight: found fp32 weights .* or convert the ZeRO directory"
        ):
            convert(source, tmp_path / "out", Options(optimizer=False))
    torch.save(torch.ones(4), zero / "up.weight" / "exp_avg.pt")
    with pytest.raises(CheckpointError, match=r"up.weight/exp_avg.pt: found \(4,\), needed a tensor of \(5, 3\)"):
        convert(source, tmp_path / "out", Options())
    (zero / "up.weight" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"zero: found no fp32.pt of up.weight, needed one in a directory"):
        convert(source, tmp_path / "out", Options())


# ---------------------------------------------------------------- safetensors that DCP wrote

PARTS = "found one rank's parts of the tensors, written by DCP's HuggingFaceStorageWriter; needed whole tensors"


def by_dcp(path: Path, tensors: dict[str, Tensor], row: int = 0) -> None:
    """A file as one rank writes it, that holds rows from `row` on."""
    path.parent.mkdir(exist_ok=True)
    offsets = {name: {"saved_offsets": [row] + [0] * (t.ndim - 1)} for name, t in tensors.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    save_file(tensors, path, metadata=metadata)


def test_parts_of_ranks_are_no_model(tmp_path: Path) -> None:
    first, second = {"w": torch.ones(4, 2), "b": torch.ones(4)}, {"w": torch.ones(3, 2), "b": torch.ones(3)}
    by_dcp(tmp_path / "one" / "shard-00001-model-00001-of-00001.safetensors", first)
    by_dcp(tmp_path / "two" / "shard-00001-model-00001-of-00001.safetensors", first)
    by_dcp(tmp_path / "two" / "shard-00002-model-00001-of-00001.safetensors", second, 4)
    by_dcp(tmp_path / "named" / "model.safetensors", first)
    for row, total in ((0, 80), (4, 48)):  # of two ranks that wrote one file: bytes of both, or a row of the second
        by_dcp(tmp_path / f"lost{row}" / "model-00001-of-00001.safetensors", first, row)
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict.fromkeys(first, "model-00001-of-00001.safetensors"),
        }
        (tmp_path / f"lost{row}" / "model.safetensors.index.json").write_text(json.dumps(index))
    sources = sorted(path for path in tmp_path.rglob("*") if path.is_dir() or path.suffix == ".safetensors")
    assert len(sources) == 11
    for source in sources:
        with pytest.raises(CheckpointError, match=PARTS):
            convert(source, tmp_path / "out", Options())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("files", [1, 2])
def test_what_one_rank_saved_whole_is_a_model(files: int, tmp_path: Path) -> None:
    weights = dict(trained()[0].state_dict())
    numbers = {name: 1 + i % files for i, name in enumerate(weights)}
    dcp.save(weights, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "hf"), numbers), no_dist=True)
    first = next((tmp_path / "hf").glob("model-00001-*"))
    with safe_open(first, "pt") as file:
        assert "DCP_SHARDING_INFO" in file.metadata()
    sources = [tmp_path / "hf"] + [first] * (files == 1)
    for number, source in enumerate(sources):
        done = convert(source, tmp_path / str(number), Options())
        same(held(done.path), under_model(weights))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_consolidated_is_a_model(tmp_path: Path) -> None:
    weights = {"w": torch.randn(4, 2), "b": torch.randn(4)}
    writer = HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=True, enable_consolidation=True)
    dcp.save(weights, storage_writer=writer, no_dist=True)
    same(held(convert(tmp_path / "hf", tmp_path / "out", Options()).path), under_model(weights))
    with pytest.raises(CheckpointError, match=PARTS):
        convert(tmp_path / "hf" / "sharded", tmp_path / "no", Options())


# ---------------------------------------------------------------- Lightning


def test_of_averaged_weights_the_trained_ones_are_taken(tmp_path: Path) -> None:
    net, optimizer = trained()
    file = write_lightning(tmp_path / "x.ckpt", net, optimizer)
    with at_home():
        found = torch.load(file, weights_only=False)
        found["current_model_state"] = found["state_dict"]
        found["state_dict"] = {name: t / 2 if t.is_floating_point() else t for name, t in found["state_dict"].items()}
        torch.save(found | {"averaging_state": {"n_averaged": torch.tensor(3)}}, file)
    done = convert(file, tmp_path / "out", Options(in_order=True))
    same(held(done.path), expected_of(net, optimizer))
    said = "the weights' average, in state_dict: those that were trained, in current_model_state, are taken"
    assert done.kind == "lightning" and said in done.notes
    assert not any(word in note for note in done.notes if note != said for word in (" state_dict", "current_model"))


def save_lightning(path: Path, meta: Any) -> tuple[Path, dict[str, Tensor]]:
    """As ModelParallelStrategy saves it; and what a conversion is to hold."""
    net, optimizer = trained()
    state: Any = get_optimizer_state_dict(net, optimizer)
    by_name = {f"model.{name}": keys for name, keys in state["state"].items()}
    groups = [group | {"params": [f"model.{n}" for n in group["params"]]} for group in state["param_groups"]]
    weights = {f"model.{name}": t for name, t in net.state_dict().items()}
    save_dcp(path, {"state_dict": weights, "optimizer_0": {"state": by_name, "param_groups": groups}})
    torch.save(meta, path / "meta.pt")
    return path, expected_of(net, optimizer)


META = {"epoch": 2, "global_step": 3, "pytorch-lightning_version": "2.6.6", "loops": {"fit_loop": {}}}


def test_a_sharded_directory_of_lightning_is_one_of_lightning(tmp_path: Path) -> None:
    source, expected = save_lightning(tmp_path / "lt", META)
    for kind in ("auto", "lightning", "dcp", "fsdp"):
        options: Any = {"kind": kind}
        done = convert(source, tmp_path / kind, Options(**options))
        same(held(done.path), expected)
        assert done.step == 3 and done.kind == "lightning"
        assert done.notes[0].endswith("has no use for: epoch, pytorch-lightning_version, loops")
    done = convert(source, tmp_path / "unsafe", Options(unsafe=True))
    assert done.step == 3
    torch.save(META | {"current_model_state": {"w": torch.ones(2)}}, source / "meta.pt")
    done = convert(source, tmp_path / "average", Options())
    assert not done.num_parameters_with_state and "those taken are their average" in done.notes[0]


class Runs:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_meta_file_is_read_by_the_restricted_reader(tmp_path: Path) -> None:
    source, _ = save_lightning(tmp_path / "lt", META | {"hyper_parameters": Runs(tmp_path / "ran")})
    done = convert(source, tmp_path / "a", Options())
    assert done.step == 0 and done.notes[0].startswith("what meta.pt says") and not (tmp_path / "ran").exists()
    torch.save({"other": 1}, source / "meta.pt")
    assert convert(source, tmp_path / "b", Options()).kind == "dcp"
    assert convert(source, tmp_path / "c", Options(kind="lightning")).kind == "lightning"
    (source / "meta.pt").unlink()
    with pytest.raises(UsageError, match="which needs no code"):
        convert(source, tmp_path / "d", Options(unsafe=True))


def test_the_step_of_megatrons_torch_dist_is_read_from_its_common_file_or_it_is_said(tmp_path: Path) -> None:
    source = tmp_path / "iter_0000500"
    save_dcp(source, {"decoder.weight": torch.ones(3, 2)})
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 500, "checkpoint_version": 3.0, "args": Namespace(seq_length=8)}, source / "common.pt")
    done = convert(source, tmp_path / "a", Options())
    assert done.step == 500 and done.notes == (
        "what a Shardwise run keeps elsewhere or has no use for: checkpoint_version, args",
    )
    torch.save({"iteration": 500, "args": Runs(tmp_path / "ran")}, source / "common.pt")
    done = convert(source, tmp_path / "b", Options())
    (note,) = done.notes
    assert done.step == 0 and note.startswith("what common.pt says, as the step, which is 0 here: ")
    assert not (tmp_path / "ran").exists()
    torch.save({"args": Namespace()}, source / "common.pt")
    assert "the step, which is 0 here: common.pt says none" in convert(source, tmp_path / "c", Options()).notes


# ---------------------------------------------------------------- what is said, and what comes back


def test_several_groups_need_names_and_no_advice_that_fails(tmp_path: Path) -> None:
    net = pair()
    optimizer = stepped(torch.optim.AdamW([{"params": [p]} for p in net.parameters()]))
    tree = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "x.pt")
    save_dcp(tmp_path / "x.dcp", tree)
    for name in ("x.pt", "x.dcp"):
        note = convert(tmp_path / name, tmp_path / f"{name}.out", Options()).notes[0]
        assert "--params-in-order" not in note and "2 groups" in note and "named_parameters" in note


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(10, 4)
        self.h = nn.Linear(4, 10, bias=False)
        self.h.weight = self.e.weight
        self.seen = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.h(self.e(x))

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def test_an_export_has_all_names_of_a_tied_weight(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(Tied, sw.Plan(), mesh, seed=0)
        sw.Store(tmp_path / "store").save(sw.TrainState(placed, sw.adamw(placed, lr=1e-3)))
    notes = {}
    for name, to in (("x.pt", "torch"), ("x.ckpt", "lightning"), ("x.safetensors", "safetensors")):
        notes[to] = export(tmp_path / "store", tmp_path / name, ExportOptions(to=to)).notes
    export_dcp(tmp_path / "store", tmp_path / "dcp", ExportOptions(to="dcp"))
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found.keys() == {"e.weight", "h.weight"} and found["e.weight"].data_ptr() == found["h.weight"].data_ptr()
    assert "model.h.weight" in torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    net = {"model": {name: torch.empty(10, 4) for name in found}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is one process
        dcp.load(net, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(tensor, found[name]) for name, tensor in net["model"].items())
    assert any("h.weight, which is e.weight" in note for note in notes["safetensors"])
    assert all(any("get_extra_state" in note for note in each) for each in notes.values())


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_converted_checkpoint_has_all_names_of_a_tied_weight_too(tmp_path: Path, prefix: str) -> None:
    weight = torch.randn(10, 4)
    named = {"e.weight": weight, "n.weight": torch.ones(4), "old.head.weight": weight}
    file = {
        "state_dict": {prefix + name: tensor for name, tensor in named.items()},
        "pytorch-lightning_version": "2.4.0",
    }
    torch.save(file if prefix else file["state_dict"], tmp_path / "in.ckpt")
    (tmp_path / "rules.toml").write_text('[rename]\n"old.*.weight" = "*.weight"\n')
    done = convert(tmp_path / "in.ckpt", tmp_path / "store", Options(rename=tmp_path / "rules.toml"))
    assert held(done.path).keys() == {"model.e.weight", "model.n.weight"}
    export(tmp_path / "store", tmp_path / "x.pt", ExportOptions(to="torch"))
    export(tmp_path / "store", tmp_path / "x.ckpt", ExportOptions(to="lightning"))
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found.keys() == {"e.weight", "n.weight", "head.weight"} and torch.equal(found["head.weight"], weight)
    assert "model.head.weight" in torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]


def test_an_export_as_safetensors_brings_its_step_back(tmp_path: Path) -> None:
    torch.save({"model": trained()[0].state_dict(), "step": 3}, tmp_path / "x.pt")
    store = convert(tmp_path / "x.pt", tmp_path / "store", Options()).path
    export(store, tmp_path / "one.safetensors", ExportOptions())
    export(store, tmp_path / "many", ExportOptions(max_shard=300))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    for name in ("one.safetensors", "many"):
        done = convert(tmp_path / name, tmp_path / f"{name}.back", Options())
        assert done.step == 3 and not diff(store, done.path)
    assert ckpt("export", tmp_path / "many.back", tmp_path / "again.safetensors") == 0
    assert load_file(tmp_path / "again.safetensors").keys() == trained()[0].state_dict().keys()
    for text in ("-1", "x", "9" * 30):
        save_file({"w": torch.ones(2)}, tmp_path / "odd.safetensors", metadata={"shardwise_step": text})
        assert convert(tmp_path / "odd.safetensors", tmp_path / f"odd{len(text)}{text[0]}", Options()).step == 0


# ---------------------------------------------------------------- what is missing, and programs


def test_several_models_are_named(tmp_path: Path) -> None:
    """Of a pipeline each in a directory; or in one file."""
    for name in ("unet", "vae"):
        (tmp_path / "pipe" / name).mkdir(parents=True)
        save_file({"w": torch.ones(2)}, tmp_path / "pipe" / name / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"checkpoint.*unet.*; give .*/pipe/unet"):
            convert(tmp_path / "pipe", tmp_path / "a", Options())
    one, optimizer = {"w": torch.ones(2)}, {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}
    for models in ({"actor": one, "critic": one}, {"model": {"actor": one, "critic": one}}, {"model": [one, one]}):
        torch.save(models | {"optimizer": optimizer}, tmp_path / "file.pt")
        with pytest.raises(CheckpointError, match=r"several models, (actor|model\.actor|model\.0), ") as told:
            convert(tmp_path / "file.pt", tmp_path / "a", Options())
        assert "optimizer" not in str(told.value)
    for models, place in (({"generator": one}, "generator"), ({"model": {"model": one}}, r"model\.model")):
        torch.save(models | {"epoch": 3}, tmp_path / "file.pt")
        with pytest.raises(CheckpointError, match=rf"found weights under {place}; needed one state_dict"):
            convert(tmp_path / "file.pt", tmp_path / "a", Options())


def test_files_that_are_missing_are_named_with_the_index(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(2)}, tmp_path / "hf" / "model-1.safetensors")
    said = r"model-2.safetensors: found nothing there, needed a file, which model.safetensors.index.json names .1 that"
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / "hf", tmp_path / "a", Options())
    save_dcp(tmp_path / "dcp", {"w": torch.ones(2)})
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    with pytest.raises(
        CheckpointError, match=r"__0_0.distcp: found nothing there, needed a file, which .metadata names"
    ):
        convert(tmp_path / "dcp", tmp_path / "a", Options())
    (tmp_path / "hf" / "model-2.safetensors").symlink_to("model-1.safetensors")
    with pytest.raises(CheckpointError, match="links are not followed"):
        convert(tmp_path / "hf", tmp_path / "a", Options())


def test_files_of_weights_that_are_not_read_are_told(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensor in zip(names, "ab", strict=True):
        save_file({tensor: torch.ones(2)}, tmp_path / name)
    save_file({"layers.a": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    done = convert(tmp_path, tmp_path.with_suffix(".out"), Options())
    assert done.num_weights == 2 and done.notes == (
        "other files of weights: consolidated.safetensors, pytorch_model.bin",
    )
    index.write_text(json.dumps({"weight_map": {"a": names[0]}}))
    said = r"index.json: lists 1 files, and not model-00002-of-00002.safetensors, by the name part of the same model"
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path, tmp_path.with_suffix(".half"), Options())


def test_torchscript_is_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:  # as torch.jit.save packs it
        for name in ("x/data.pkl", "x/code/__torch__.py", "x/constants.pkl"):
            file.writestr(name, b"N." * 99, zipfile.ZIP_DEFLATED)
    with pytest.raises(
        CheckpointError, match=r"found an archive of TorchScript.*needed a state_dict; torch.jit.load it"
    ):
        convert(tmp_path / "x.pt", tmp_path / "a", Options())


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"])
def test_a_part_of_a_model_without_an_index_is_not_the_model(tmp_path: Path, name: str) -> None:
    write = save_file if name.endswith(".safetensors") else torch.save
    write({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"found {name}, by the name part of a model, and no index"):
        convert(tmp_path, tmp_path.with_suffix(".out"), Options())
    assert convert(tmp_path / name, tmp_path.with_suffix(".out"), Options()).num_weights == 1  # named: it is meant
    (tmp_path / name).rename(tmp_path / name.replace("00002", "00001"))
    assert convert(tmp_path, tmp_path.with_suffix(".whole"), Options()).num_weights == 1


@pytest.mark.parametrize(
    ("name", "says", "said"),
    [
        (
            "model_optim_rng.pt",
            {"args": Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)},
            "args.tensor_model_parallel_size 2",
        ),
        ("model_optim_rng.pt", {"args": {"pipeline_model_parallel_size": 4}}, "args.pipeline_model_parallel_size 4"),
        ("mp_rank_00_model_states.pt", {"mp_world_size": 2}, "mp_world_size 2"),
        ("x.pt", {"mp_world_size": 1, "num_experts": [8]}, r"num_experts \[8\], which are in files of their own"),
    ],
)
def test_what_says_that_it_is_a_part_is_not_the_model(name: str, says: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00" / name
    path.parent.mkdir()
    torch.save({"model": {"w": torch.ones(2)}, **says}, path)
    for source in (path, path.parent):
        with pytest.raises(CheckpointError, match=rf"found a part of a model \({said}\); needed the whole model"):
            convert(source, tmp_path / "a", Options())
    whole = {key: 1 if key == "mp_world_size" else [] for key in says} | {"args": Namespace(lr=1, num_experts=8)}
    torch.save({"model": {"w": torch.ones(2)}, "num_experts": [], **whole}, path)
    assert convert(path, tmp_path / "a", Options()).num_weights == 1


def test_files_of_ranks_are_parts_by_their_names(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "consolidated.00.pth")
    assert convert(tmp_path, tmp_path.with_suffix(".one"), Options()).num_weights == 1
    torch.save({"w": torch.ones(2)}, tmp_path / "consolidated.01.pth")
    for source in (tmp_path, tmp_path / "consolidated.00.pth", tmp_path / "consolidated.01.pth"):
        with pytest.raises(CheckpointError, match=r"consolidated.00.pth, consolidated.01.pth, by the name parts of ra"):
            convert(source, tmp_path.with_suffix(".two"), Options())


@pytest.mark.parametrize(
    "name",
    [
        "layer_00-model_states.pt",
        "layer_01-model_00-model_states.pt",
        "layer_0_expert_2_mp_rank_00_model_states.pt",
        "expert_2_mp_rank_00_model_states.pt",
    ],
)
def test_files_of_layers_and_experts_are_parts_by_their_names(name: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(CheckpointError, match=rf"found {name}, by the name layers or experts of a model; needed"):
            convert(source, tmp_path.with_suffix(".out"), Options())
    (tmp_path / name).rename(tmp_path / "layer_00.pt")  # a name of somebody's own
    assert convert(tmp_path / "layer_00.pt", tmp_path.with_suffix(".own"), Options()).num_weights == 1


@pytest.mark.parametrize("names", [("mp_rank_00", "mp_rank_01"), ("tp_rank_00_pp_rank_000", "tp_rank_00_pp_rank_001")])
def test_directories_of_ranks_are_parts_by_their_names(names: tuple[str, ...], tmp_path: Path) -> None:
    root = tmp_path / "iter_0000003"
    first, file = root / names[0], root / names[0] / "model_optim_rng.pt"
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        torch.save({"model": {"w": torch.ones(2)}, "iteration": 3}, root / name / file.name)
        for source in (first, file):
            if number == 0:  # of one rank alone it is the model
                assert convert(source, tmp_path / source.name, Options()).step == 3
    for source in (root, first, file):
        with pytest.raises(CheckpointError, match=rf"iter_0000003: found {', '.join(names)}, by the name parts of ran"):
            convert(source, tmp_path / "b", Options())


@pytest.mark.parametrize("name", ["_fsdp_wrapped_module._flat_param", "layers.0.flat_param", "flat_param_0"])
def test_flat_parameters_are_refused_in_files_of_torch_too(name: str, tmp_path: Path) -> None:
    for value in ({name: torch.ones(9)}, {"model": {name: torch.ones(9), "w": torch.ones(2)}}):
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=rf"found {name}, in which FSDP1's LOCAL_STATE_DICT has parameters"):
            convert(tmp_path / "a.pt", tmp_path / "b", Options())


def test_what_zero_3_leaves_in_a_module_is_not_taken_for_weights(tmp_path: Path) -> None:
    folder = write_zero3(tmp_path / "checkpoint-12", Truth(), 2)
    save_file({"up.weight": torch.empty(0), "up.bias": torch.ones(5)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"found up.weight without elements, as ZeRO 3 leaves .* --from deepspe"):
        convert(folder, tmp_path / "a", Options())
    same(held(convert(folder, tmp_path / "a", Options(kind="deepspeed")).path), Truth().expected())
    done = convert(folder / "model.safetensors", tmp_path / "b", Options())
    assert done.notes[-1] == "elements of weights that have none here, as ZeRO 3 leaves a module: up.weight"


def test_what_torchtune_keeps_beside_weights_is_no_second_file_of_weights(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "meta_model_0.pt")
    torch.save({"optimizer": {"state": {}}, "seed": 1}, tmp_path / "recipe_state.pt")
    done = convert(tmp_path, tmp_path.with_suffix(".out"), Options())
    assert done.notes == ("what a trainer kept in files of its own: recipe_state.pt",)


def test_zero_with_older_names_of_files_and_one_that_says_it_is_a_part(tmp_path: Path) -> None:
    truth = Truth()
    folder = write_zero12(tmp_path / "a", truth, 2) / "global_step12"
    for path in folder.glob("*_optim_states.pt"):
        path.rename(folder / path.name.replace("_optim_states", "optim_states"))
    same(held(convert(tmp_path / "a", tmp_path / "out", Options()).path), truth.expected())
    change(folder / "mp_rank_00_model_states.pt", mp_world_size=2)
    with pytest.raises(CheckpointError, match=r"found a part of a model \(mp_world_size 2\)"):
        convert(tmp_path / "a", tmp_path / "b", Options())


@pytest.mark.parametrize("prefix", ["optimizer.state", "chained_0.optimizer.state"])
def test_an_optimizers_tensors_of_megatron_are_no_weights(prefix: str, tmp_path: Path) -> None:
    names = [f"{prefix}.{key}.decoder.w" for key in ("exp_avg", "fp32_param")]
    save_dcp(tmp_path / "a", {"decoder.w": torch.ones(2), **dict.fromkeys(names, torch.zeros(2))})
    done = convert(tmp_path / "a", tmp_path / "b", Options())
    assert held(done.path).keys() == {"model.decoder.w"}
    assert done.notes == (f"the optimizer's state: it has none by parameter, but {', '.join(names)}",)


def test_an_export_in_fp32_is_of_the_masters(tmp_path: Path) -> None:
    plan = sw.Plan.parse("dp1 / bf16-pure")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 4), plan, mesh, seed=1)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-3))
        sw.make_step(state, lambda y, x: sw.mean_over(y.float().square()))([torch.ones(2, 4)])
        saved = sw.Store(tmp_path / "a").save(state).path
        masters = {
            n.removeprefix("optim.").removesuffix(".master"): t for n, t in state.tensors().items() if "master" in n
        }
        weights = {name: tensor.detach() for name, tensor in placed.named_parameters().items()}
    assert any(not torch.equal(masters[name], weights[name].float()) for name in weights)
    expected = {"float32": masters, "float64": {n: t.double() for n, t in masters.items()}, "bfloat16": weights}
    for dtype, tensors in expected.items():
        export(saved, tmp_path / f"{dtype}.safetensors", ExportOptions(dtype=dtype))
        same(load_file(tmp_path / f"{dtype}.safetensors"), tensors)
    done = export(saved, tmp_path / "x.safetensors", ExportOptions())
    same(load_file(tmp_path / "x.safetensors"), weights)
    assert "the fp32 masters, of which these weights are the rounding: --dtype float32 writes them" in done.notes


def test_weights_in_float8_are_not_cast_and_that_is_said(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2).to(torch.float8_e4m3fn), "w_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "x.safetensors")
    done = convert(tmp_path / "x.safetensors", tmp_path / "a", Options(dtype="bfloat16"))
    same(held(done.path), {"model.w": tensors["w"], "model.w_scale": tensors["w_scale"].bfloat16()})
    assert done.notes == ("--dtype of float8, whose numbers mean nothing without their scales: w",)
    assert not convert(tmp_path / "x.safetensors", tmp_path / "b", Options()).notes


@pytest.mark.parametrize(
    "names",
    [("rank_0.pt", "rank_1.pt"), ("model-rank0.safetensors", "model-rank1.safetensors"), ("world_size_8_rank_3.pt",)],
)
def test_files_of_a_scripts_ranks_are_parts_by_their_names(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (save_file if name.endswith("safetensors") else torch.save)({"w": torch.ones(2, 4)}, tmp_path / name)
    for name in names:
        with pytest.raises(
            CheckpointError, match=rf"{name}: found {', '.join(names)}, by the name parts of ranks; need"
        ):
            convert(tmp_path / name, tmp_path / "out", Options())


def test_of_a_file_with_a_ranks_name_it_is_said_what_it_is_taken_for(tmp_path: Path) -> None:
    """Others are elsewhere, or there are none; of adapters a rank is another thing, and may be several."""
    for name in ("rank_1.pt", "lora_rank_8.pt", "lora_rank_16.pt", "frank_2.pt"):
        torch.save({"w": torch.ones(2, 4)}, tmp_path / name)
        notes = convert(tmp_path / name, tmp_path / f"{name}.out", Options()).notes
        told = f"other ranks' parts, if there are any: {name} has the name of a rank, and is taken for the whole model"
        assert notes == (() if name.startswith("frank") else (told,))


def test_a_file_of_dcp_is_one_ranks(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    with pytest.raises(
        CheckpointError, match=r"__0_0.distcp: found what one rank wrote of a directory of DCP, needed al"
    ):
        convert(tmp_path / "__0_0.distcp", tmp_path / "out", Options())


def test_norms_of_another_width_than_any_matrix_are_said_to_look_like_a_part(tmp_path: Path) -> None:
    """What FSDP leaves on one of two ranks, as plain tensors: the first dim of each is cut."""
    block = {"attn.weight": torch.ones(24, 8), "norm1.weight": torch.ones(8), "norm2.weight": torch.ones(8)}
    torch.save(block, tmp_path / "whole.pt")
    torch.save({name: tensor[: len(tensor) // 2].clone() for name, tensor in block.items()}, tmp_path / "part.pt")
    assert convert(tmp_path / "whole.pt", tmp_path / "a", Options()).notes == ()
    (note,) = convert(tmp_path / "part.pt", tmp_path / "b", Options()).notes
    assert note == (
        "perhaps other ranks' parts: norm1.weight, norm2.weight have 4 elements, and matrices are 8 wide, as where "
        "FSDP cut a model over 2 ranks; it is taken for the whole model"
    )


@pytest.mark.parametrize("says", [{"base_model_name_or_path": "hub/llama-8b"}, None])
def test_of_adapters_it_is_said_where_their_model_is(says: Any, tmp_path: Path) -> None:
    weights = {f"base_model.model.q.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    if says:
        (tmp_path / "adapter_config.json").write_text(json.dumps(says))
    told = "adapter_config.json says 'hub/llama-8b'" if says else "no adapter_config.json beside them says which"
    for source in (tmp_path, tmp_path / "adapter_model.safetensors"):
        (note,) = convert(source, tmp_path.with_suffix(source.suffix + ".out"), Options()).notes
        assert note.startswith(f"the base model, which these adapters of PEFT are trained beside: {told}; merge")


def test_a_compiled_ddp_inside_of_lightning_leaves_no_prefix(tmp_path: Path) -> None:
    weights = {f"model._orig_mod.module.{name}": torch.ones(2) for name in ("a.weight", "b.weight")}
    torch.save({"state_dict": weights, "pytorch-lightning_version": "2.6.6"}, tmp_path / "a.ckpt")
    done = convert(tmp_path / "a.ckpt", tmp_path / "out", Options())
    assert set(held(done.path)) == {"model.a.weight", "model.b.weight"}
    assert done.notes[-1] == "names without the prefix 'model.module.', which all had"
