"""Weights of transformers: read into shards, written back; and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

import shardwise as sw
from shardwise.checkpoint import hf_weights
from shardwise.checkpoint.hf_export import export_hf
from shardwise.checkpoint.hf_weights import has_weights, load_hf
from shardwise.errors import DataError, UsageError
from shardwise.models.hf import build, hf_config, hf_factory
from shardwise.testing.world import World
from tests.parity import hf_models
from tests.parity.grid import whole

CLASSES = {"bert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}
FAMILIES = ("llama", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "bert", "vit")


def saved(directory: Path, family: str, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """A model of random weights as transformers writes it."""
    torch.manual_seed(3)
    module = build(hf_models.config(family, **changes))
    module.save_pretrained(directory / family, max_shard_size=max_shard_size)
    return directory / family


def logits_of(directory: Path, family: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    loaded = CLASSES.get(family, AutoModelForCausalLM).from_pretrained(directory, local_files_only=True)
    with torch.no_grad():
        return loaded.eval()(**inputs).logits


def inputs_for(family: str) -> dict[str, torch.Tensor]:
    rows = hf_models.samples(hf_models.config(family)).rows(list(range(4)))
    rows.pop("labels")
    return {key: value.float() if value.is_floating_point() else value for key, value in rows.items()}


def load_and_export(text: str, source: str, target: str, families: tuple[str, ...]) -> dict[str, Any]:
    """Every family under a plan: load, compare what this rank holds with the files, write back."""
    plan = sw.Plan.parse(text)
    found = {}
    with sw.open_mesh(plan) as mesh:
        for family in families:
            directory = Path(source) / family
            placed = sw.apply(hf_factory(hf_config(directory)), plan, mesh, seed=1)
            load_hf(placed, directory)
            found[family] = {n: whole(p) for n, p in placed.named_parameters().items()}
            export_hf(placed, Path(target) / family, max_bytes=20_000)
    return found


@pytest.mark.share(2)
@pytest.mark.parametrize("text", ["fsdp2", "pp2 tp2 / 1f1b mb2"])
def test_what_transformers_wrote_is_read_into_shards_and_written_back(world: World, tmp_path: Path, text: str) -> None:
    families = FAMILIES if text == "fsdp2" else ("llama", "gpt2", "mixtral")
    for family in families:
        saved(tmp_path / "in", family)
    ranks = world(
        sw.Plan.parse(text).world, load_and_export, text, str(tmp_path / "in"), str(tmp_path / "out"), families
    )
    for family in families:
        truth = dict(build(hf_config(tmp_path / "in" / family)).named_parameters())
        original = CLASSES.get(family, AutoModelForCausalLM).from_pretrained(tmp_path / "in" / family)
        truth = dict(original.named_parameters(remove_duplicate=False))
        held = {name: tensor for rank in ranks for name, tensor in rank[family].items()}
        assert set(dict(original.named_parameters())) <= set(held)
        for name, tensor in held.items():
            assert torch.equal(tensor, truth[name]), f"{family}: {name}"
        inputs = inputs_for(family)
        written = tmp_path / "out" / family
        assert torch.equal(logits_of(written, family, inputs), logits_of(tmp_path / "in" / family, family, inputs))
        assert len(list(written.glob("*.safetensors"))) > 1


class Counted:
    """An open safetensors file that adds up the bytes of what is asked of it."""

    def __init__(self, opened: Any, read: dict[str, int]) -> None:
        self.opened, self.read = opened, read

    def __enter__(self) -> Counted:
        return Counted(self.opened.__enter__(), self.read)

    def __exit__(self, *raised: Any) -> None:
        self.opened.__exit__(*raised)

    def count(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        self.read[key] = self.read.get(key, 0) + tensor.nbytes
        return tensor

    def get_tensor(self, key: str) -> torch.Tensor:
        return self.count(key, self.opened.get_tensor(key))

    def get_slice(self, key: str) -> Any:
        part = self.opened.get_slice(key)
        return type("Part", (), {"__getitem__": lambda _, at: self.count(key, part[at])})()


def bytes_read(text: str, source: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes per key of the files, bytes that this rank holds per parameter, and what `read` gave besides."""
    plan, read = sw.Plan.parse(text), dict[str, int]()
    open_file = hf_weights.safe_open
    hf_weights.safe_open = lambda *args, **options: Counted(open_file(*args, **options), read)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(hf_factory(hf_config(source)), plan, mesh, seed=1)
        before = by_read_calls()
        load_hf(placed, source)
        besides = by_read_calls() - before
        held = {n: getattr(p, "to_local", lambda p=p: p)().nbytes for n, p in placed.named_parameters().items()}
    return read, held, besides


def by_read_calls() -> int:
    """Bytes that this process got by `read` and its like so far; not those of a mapped file."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count the bytes of a process")
def test_a_rank_reads_its_own_bytes_and_the_headers(world: World, tmp_path: Path) -> None:
    directory = saved(tmp_path, "llama", max_shard_size="200KB", vocab_size=4096)
    whole_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    header_bytes = sum(int.from_bytes(file.read_bytes()[:8], "little") for file in directory.glob("*.safetensors"))
    assert whole_bytes > 1_000_000
    for read, held, besides in world(4, bytes_read, "fsdp2 tp2", str(directory)):
        assert read == held  # of each parameter this rank's part, once
        assert sum(read.values()) < 0.26 * whole_bytes
        assert besides < 4 * header_bytes + 100_000


def test_of_stacked_experts_a_rank_reads_its_own(world: World, tmp_path: Path) -> None:
    directory = saved(tmp_path, "mixtral")
    num_experts = hf_models.config("mixtral").num_local_experts
    for read, held, _ in world(2, bytes_read, "fsdp2 ep2", str(directory)):
        experts = {key for key in read if ".experts." in key}
        assert len({key.split(".experts.")[1].split(".")[0] for key in experts}) == num_experts // 2
        assert sum(read[key] for key in experts) == sum(b for n, b in held.items() if ".experts." in n)


def try_to_load(source: str) -> str:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(hf_factory(hf_models.config("llama")), sw.Plan(), mesh, seed=1)
        before = {n: p.detach().clone() for n, p in placed.named_parameters().items()}
        try:
            load_hf(placed, source)
        except DataError as error:
            assert all(torch.equal(before[n], p) for n, p in placed.named_parameters().items()), "half loaded"
            return str(error)
    return "loaded"


def test_keys_that_lack_or_exceed_or_differ_are_all_listed(tmp_path: Path) -> None:
    directory = saved(tmp_path, "llama")
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.norm.weight")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.layers.7.extra.weight"] = torch.zeros(2)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:10].clone()
    save_file(tensors, directory / "model.safetensors")
    text = try_to_load(str(directory))
    assert "4 problem(s)" in text and "nothing was loaded" in text
    for said in (
        "missing: model.norm.weight",
        "missing: model.layers.1.mlp.up_proj.weight",
        "unexpected: model.layers.7.extra.weight",
        "shape of lm_head.weight: found [10, 32], needed [64, 32]",
    ):
        assert said in text


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_file_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    directory = saved(tmp_path, "llama")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    text = try_to_load(str(directory))
    assert "model.safetensors: not a whole safetensors file" in text and "copy or download it again" in text


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = saved(tmp_path, "llama", max_shard_size="20KB")
    shards = sorted(directory.glob("*.safetensors"))
    shards[1].unlink()
    assert f"{shards[1].name}: no such file" in try_to_load(str(directory))


def test_a_directory_without_weights(tmp_path: Path) -> None:
    hf_models.config("llama").save_pretrained(tmp_path)
    assert not has_weights(tmp_path)
    assert "found config.json; needed model.safetensors" in try_to_load(str(tmp_path))


def test_an_export_does_not_mix_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(hf_factory(hf_models.config("llama")), sw.Plan(), mesh, seed=1)
        with pytest.raises(UsageError, match="is not empty"):
            export_hf(placed, tmp_path)
        export_hf(placed, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not list(tmp_path.glob("*.partial-*"))


INDEXES = [
    b"[]", b'{"weight_map":[]}', b'{"weight_map":null}', b'{"weight_map":{"a":1}}', b'{"weight_map":{"a":["x"]}}',
    b'{"weight_map":{"a":"../x"}}', b"[" * 100_000, b"\xff", b'{"weight_map":{"a":"x\\u0000"}}',
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=range(len(INDEXES)))
def test_an_index_that_is_none(index: bytes, tmp_path: Path) -> None:
    (tmp_path / hf_weights.INDEX).write_bytes(index)
    with pytest.raises(DataError, match="no index of safetensors|not a whole safetensors file"):
        hf_weights.read_headers(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [1, [], {"shape": 4}, {"shape": ["x"]}, {"shape": [-4]}, {"shape": [True]}, {"data_offsets": [0]},
     {"data_offsets": ["x", "y"]}, {"dtype": ["F32"]}],
)  # fmt: skip
def test_a_header_that_is_none(entry: Any, tmp_path: Path) -> None:
    whole = {"dtype": "F32", "shape": [4], "data_offsets": [0, 0]}
    text = json.dumps({"a": whole | entry if isinstance(entry, dict) else entry}).encode()
    for header in (text, b"[" * 100_000):
        (tmp_path / hf_weights.SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(DataError, match="not a whole safetensors file"):
            hf_weights.read_headers(tmp_path)


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    for name, said in (("a" * 300, "File name too long"), ("a\0b", "null byte"), ("nowhere", "No such file")):
        assert not has_weights(tmp_path / name)
        with pytest.raises(DataError, match=f"found .*{said}.*; needed"):
            hf_weights.read_headers(tmp_path / name)
