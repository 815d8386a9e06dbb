"""What models of `transformers` and modules without repeated blocks are fed and read as, for the planner."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer import Typer
from typer.testing import CliRunner

import shardwise as sw
from shardwise.cli.estimate import estimate
from shardwise.cli.options.hf import planned_hf, sizes_of
from shardwise.cli.options.made_for import question_of
from shardwise.cli.options.planning import Question, question
from shardwise.cli.plan import plan
from shardwise.diagnose import read_module as reading
from shardwise.diagnose.read_module import ONE_BLOCK, Planned, planned_module, read_planned
from shardwise.diagnose.tracing.module import estimate_module_by_trace
from shardwise.errors import ConfigError, ModelError, UsageError
from shardwise.model.hf_plan import caches_keys
from shardwise.model.stacks import block_pattern, find_blocks
from shardwise.models.hf import build, hf_config, hf_factory, model_class
from shardwise.models.hf_inputs import inputs_of
from shardwise.models.hf_sizes import shrunk_config
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.stack import stack_on
from shardwise.plan.workload import Workload
from shardwise.testing.fake import fake_world
from tests.modules import Layer

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
STACKS = {
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 64))},
    **{"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 64},
}
T5 = {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 64}
READ = {
    "vit": ({"model_type": "vit", **SMALL, "image_size": 32, "patch_size": 8}, "auto", 3),
    "bart": ({"model_type": "bart", **STACKS, "max_position_embeddings": 64}, "model.*.layers.*", 64),
    "t5": (T5, "*.block.*", 4096),
    "whisper": (
        {
            "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], **STACKS,
            "max_source_positions": 50, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 0,
            "eos_token_id": 0, "decoder_start_token_id": 0,
        },
        "model.*.layers.*", 32,
    ),
    "speecht5": (
        {
            "model_type": "speecht5", **STACKS, "hidden_size": 32, "max_text_positions": 48, "conv_dim": [8, 8],
            "conv_kernel": [10, 8], "conv_stride": [80, 4], "pad_token_id": 0,
        },
        "speecht5.*.*.layers.*", 48,
    ),
}  # fmt: skip


def written(folder: Path, keys: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(keys))
    return f"hf:{folder / 'config.json'}"


def asked_of(model: str, **options: Any) -> Question:
    return question(model, "h100:8", seq=options.pop("seq", None), batch=8, tokens=None, **options)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", READ)
def test_what_is_no_token_ids_alone_is_fed_and_read(tmp_path: Path, name: str) -> None:
    keys, blocks, length = READ[name]
    model = written(tmp_path, keys)
    asked = asked_of(model)
    with torch.device("meta"):
        made = hf_factory(hf_config(model))()
    assert asked.profile.num_params == sum(p.numel() for p in made.parameters())
    assert len(asked.profile.blocks) == (2 if name == "vit" else 4)
    assert (asked.blocks, asked.workload.seq_len) == (blocks, length)
    assert any(note.startswith("a sample is") for note in asked.assumed) and "cp" in asked.refused
    if name == "vit":
        with pytest.raises(UsageError, match="counts as 3 tokens, always; leave --seq out"):
            asked_of(model, seq=8)


@pytest.mark.parametrize(
    ("name", "blocks", "length"), [("vit", "auto", 3), pytest.param("t5", "*.block.*", 16, marks=pytest.mark.soak)]
)
def test_the_step_of_pictures_and_of_two_texts_is_traced(tmp_path: Path, name: str, blocks: str, length: int) -> None:
    planned = planned_hf(written(tmp_path, READ[name][0]))
    layout, work = Plan.parse("dp2").with_(blocks=blocks), Workload(seq_len=length, global_batch=8)
    traced = estimate_module_by_trace(planned.made(length), layout, work)
    closed = estimate_memory(read_planned(name, planned, length, "meta")[0], layout, work, stack=stack_on("cpu"))
    assert closed.allocated == pytest.approx(traced.peak, rel=0.1)


def test_what_a_sample_is() -> None:
    shapes = {
        "vit": {"pixel_values": [1, 3, 224, 224]},
        "resnet": {"pixel_values": [1, 3, 224, 224]},
        "t5": {"input_ids": [1, 8], "decoder_input_ids": [1, 8]},
        "WhisperForConditionalGeneration": {"decoder_input_ids": [1, 8], "input_features": [1, 80, 3000]},
        "wav2vec2": {"input_values": [1, 8]},
        "audio-spectrogram-transformer": {"input_values": [1, 1024, 128]},
        "CLIPModel": {"input_ids": [1, 8], "pixel_values": [1, 3, 224, 224]},
        "siglip2": {"input_ids": [1, 8], "pixel_values": [1, 256, 768], "pixel_attention_mask": [1, 256],
                    "spatial_shapes": [1, 2]},
        "idefics": {"input_ids": [1, 8], "pixel_values": [1, 1, 3, 224, 224], "image_attention_mask": [1, 8, 1]},
        "speecht5": {"decoder_input_ids": [1, 8], "input_values": [1, 160_000]},
    }  # fmt: skip
    for name, needed in shapes.items():
        inputs = inputs_of(hf_config(name))
        assert inputs is not None and {key: list(t.shape) for key, t in inputs.sample(8).items()} == needed, name
    assert all(inputs_of(hf_config(name)) is None for name in ("llama", "bert", "mamba"))
    with pytest.raises(ModelError, match=r"ClapModel takes .*write a function that builds ClapModel .*package.module"):
        inputs_of(hf_config("clap"))


def test_texts_with_pictures_of_other_kinds_are_read(tmp_path: Path) -> None:
    """Pictures as patches with their sides, whose values are asked for; and a picture that each token looks at."""
    part = {**SMALL, "num_patches": 16, "patch_size": 4, "projection_size": 32, "max_position_embeddings": 8}
    patches = {"model_type": "siglip2", "text_config": {**part, "vocab_size": 64}, "vision_config": part}
    asked = asked_of(written(tmp_path, patches), trace_on="cpu")
    assert len(asked.profile.blocks) == 4 and asked.workload.seq_len == 8
    seen = {
        "model_type": "idefics", **SMALL, "vocab_size": 64, "max_position_embeddings": 16, "cross_layer_interval": 1,
        "vision_config": {**SMALL, "embed_dim": 32, "image_size": 16, "patch_size": 8}, "use_resampler": False,
        "additional_vocab_size": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    asked = asked_of(written(tmp_path, seen))
    assert len(asked.profile.blocks) == 2 and any("picture of shape [3, 16, 16]" in note for note in asked.assumed)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dbrx", "mend attn_config.rope_theta, which its family's default lacks too: say it in a config.json"),
        ("cohere_compass", "mend rope_parameters, which has none of layers of 'full_attention': say them in a config"),
    ],
)
def test_a_key_that_a_familys_default_lacks_is_named(name: str, said: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=re.escape(said)):
        build(hf_config(name))


def test_a_library_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError("\nTimmBackbone requires the timm library")

    config = hf_config("vit")
    monkeypatch.setattr(model_class(config), "_from_config", missing)
    with pytest.raises(ConfigError, match=r"needs a library that is not installed \(TimmBackbone requires"):
        build(config)


def test_a_draw_that_a_forward_turns_on_is_taken_as_off() -> None:
    planned = planned_hf("hf:wav2vec2")
    assert any(note.startswith("layerdrop and apply_spec_augment are taken as off") for note in planned.notes)
    assert hf_config("wav2vec2").layerdrop > 0  # the configuration itself is left as it is


def test_blocks_of_several_stacks_and_of_unlike_layers() -> None:
    class Other(Layer):
        """Another kind."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(2))})
            self.decoder = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Other(), Layer()])})

    class Unlike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Other()])

    deeper = nn.ModuleDict(
        {"conv": nn.ModuleDict({"inner": nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})})}
    )
    deeper["one"], deeper["two"] = (nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])}) for _ in range(2))
    assert block_pattern(deeper) == "*.layers.*"  # those at one depth that hold the most
    assert block_pattern(Two()) == "*.layers.*" and block_pattern(Unlike()) == "layers.*"
    assert block_pattern(nn.Linear(2, 2)) == ""


# ---------------------------------------------------------------- modules without repeated blocks, and slow ones


class Shared(nn.Module):
    """One block, called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(64, 64), Layer(), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class Loops(Shared):
    """Goes through the tokens, four by four."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(torch.cat([self.block.up(part).relu() for part in x.split(4, 1)], 1)[..., :64])


class Squares(Shared):
    """Keeps more per token the more there are."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(torch.softmax(x @ x.mT, -1) @ x)


NAME = f"{__name__}:Shared"


def test_a_module_without_repeated_blocks_is_one_block() -> None:
    asked = asked_of(NAME, seq=64)
    assert set(ONE_BLOCK) <= set(asked.refused) and asked.blocks == "" and len(asked.profile.blocks) == 1
    assert [note for note in asked.assumed if "it is planned as one block" in note]
    layout, work = Plan.parse("dp2"), Workload(seq_len=64, global_batch=16)
    traced = estimate_module_by_trace(Shared, layout, work)
    closed = estimate_memory(asked.profile, layout, work, stack=stack_on("cpu"))
    assert closed.allocated == pytest.approx(traced.peak, rel=0.08)


class Recurrent(nn.Module):
    """An LSTM, which keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells, self.head = (
            nn.Embedding(64, 32),
            nn.LSTM(32, 32, 2, batch_first=True),
            nn.Linear(32, 64),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.embed(ids))[0])


@pytest.mark.parametrize("plan", ["dp2", "fsdp2 / bf16"])
def test_the_step_of_an_lstm_is_traced(plan: str) -> None:
    work = Workload(seq_len=16, global_batch=4)
    traced = estimate_module_by_trace(Recurrent, Plan.parse(plan), work)
    assert traced.num_params == sum(p.numel() for p in Recurrent().parameters()) and traced.layers == 0


def test_blocks_are_named() -> None:
    asked = asked_of(NAME, seq=64, blocks="block")
    assert asked.blocks == "block" and "recompute" not in asked.refused
    assert not [note for note in asked.assumed if "one block" in note]
    said = Plan.parse("dp1 blocks=block")  # as `estimate` reads the blocks of a plan
    again, _ = question_of("estimate", str(said), said, model=NAME, cluster="h100:8", seq=64, global_batch=8)
    assert reading._per_token(again.profile) == pytest.approx(reading._per_token(asked.profile))
    assert again.blocks == "block" and not [note for note in again.assumed if "one block" in note]
    assert again.left_out == asked.left_out
    with pytest.raises(ModelError, match="blocks=blok matches no module"):
        asked_of(NAME, seq=64, blocks="blok")
    with pytest.raises(UsageError, match="--blocks layers: llama-8b is a preset"):
        asked_of("llama-8b", seq=64, blocks="layers")


def test_a_written_plan_names_the_blocks(tmp_path: Path) -> None:
    found, apps = tmp_path / "plan.toml", {name: Typer() for name in ("plan", "estimate")}
    apps["plan"].command()(plan)
    apps["estimate"].command()(estimate)
    words = [NAME, "h100:2", "--seq", "64", "--blocks", "block", "--out", str(found), "--json"]
    result = CliRunner().invoke(apps["plan"], words)
    assert result.exit_code == 0, result.output
    assert Plan.load(found).blocks == "block"
    words = ["dp2", "--model", NAME, "--cluster", "cpu:2", "--seq", "64", "--global-batch", "4", "--json"]
    for more, blocks in (([], "auto"), (["--blocks", "block"], "block")):
        answer = json.loads(CliRunner().invoke(apps["estimate"], [*words, *more]).stdout)
        assert Plan.parse(answer["plan"]["shorthand"]).blocks == blocks
        assert any("one block" in note for note in answer["assumed"]) == (blocks == "auto")


def test_a_forward_that_takes_long_is_read_at_fewer_tokens_where_it_is_per_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "PATIENCE_S", 1e6)  # processor time passes faster where others work beside it
    whole, notes = read_planned("loops", _planned(Loops), 192, "meta")
    assert notes == ()
    for changes in ({"LOOP": 0.2, "MANY": 1}, {"PATIENCE_S": 0.0}):  # it makes a call for each four tokens
        for name, value in changes.items():
            monkeypatch.setattr(reading, name, value)
        profile, notes = read_planned("loops", _planned(Loops), 192, "meta")
        assert profile.num_params == whole.num_params
        assert reading._per_token(profile) == pytest.approx(reading._per_token(whole), rel=0.03)
        assert "is the same per token at 32 and 96" in notes[0]
        monkeypatch.undo()
    monkeypatch.setattr(reading, "PATIENCE_S", 0.0)
    with pytest.warns(UserWarning, match="not the same per token at fewer; a shorter --seq"):
        squares, notes = read_planned("squares", _planned(Squares), 192, "meta")
    assert notes == () and reading._per_token(squares) != reading._per_token(profile)


class Scan(nn.Linear):
    """Goes through the tokens, four by four."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(Scan, self).forward(part).relu() for part in x.split(4, 1)], 1)


class Mix(nn.Linear):
    """Keeps more per token the more there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.softmax(x @ x.mT, -1) @ x)


class Deep(nn.Module):
    """Nine blocks, and an output layer beside which three are little."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 16), nn.Linear(16, 4096)
        self.layers = nn.ModuleList(kind(16, 16) for _ in range(9))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(("kind", "lengths"), [(Scan, [3, 3, 9]), (Mix, [3, 3, 9])])
def test_whether_lengths_are_alike_is_told_by_few_blocks(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Linear], lengths: list[int]
) -> None:
    """Of 64 layers of Mamba each length took ten seconds."""
    seen: list[int] = []
    known = reading._described

    def described(*args: Any, **options: Any) -> Any:
        profile = known(*args, **options)
        seen.append(len(profile.blocks))
        return profile

    monkeypatch.setattr(reading, "PATIENCE_S", 0.0)
    monkeypatch.setattr(reading, "_described", described)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_planned("deep", Planned(made=lambda _: partial(Deep, kind)), 192, "meta", blocks="layers.*")
    assert seen == lengths
    assert any("is read at 192 tokens" in str(each.message) for each in caught) == (kind is Mix)


class Chunks(Loops):
    """A scan in chunks of 128 tokens, whose last is filled up."""

    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(nn.functional.pad(ids, (0, -ids.shape[1] % 128)))


def test_a_scan_in_chunks_is_read_at_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PATIENCE_S", 0.0)
    monkeypatch.setattr(reading, "LENGTHS", ((8, 24), (128, 256)))
    profile, notes = read_planned("chunks", _planned(Chunks), 512, "meta")
    assert "is the same per token at 128 and 256" in notes[0]
    assert profile.blocks[0].courses, "what a step holds is seen at the length that is taken"


SIZES = {**SMALL, "vocab_size": 64, "num_key_value_heads": 4, "max_position_embeddings": 64}
ZAMBA2 = {
    "model_type": "zamba2", **SIZES, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3], "chunk_size": 8,
    "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 1, "mamba_d_state": 8,
    "n_mamba_heads": 4, "mamba_headdim": 16, "adapter_rank": 4, "pad_token_id": 0,
}  # fmt: skip


def test_adapters_within_unlike_layers_are_no_blocks(tmp_path: Path) -> None:
    """They are the one list of equal modules, with 1 % of the parameters; the layers are of two classes."""
    path = written(tmp_path, ZAMBA2)
    with torch.device("meta"):
        model = hf_factory(hf_config(path))()
    assert find_blocks(model, planned_hf(path).blocks) == tuple(f"model.layers.{i}" for i in range(4))


def test_what_is_left_out_of_a_configuration_is_said(tmp_path: Path) -> None:
    more = {"quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoModelForCausalLM": "own.Own"}}
    notes = planned_hf(written(tmp_path, {"model_type": "llama", **SIZES, **more})).notes
    assert any("quantization_config is left out" in note for note in notes)
    assert any("auto_map) is not run: LlamaForCausalLM" in note for note in notes)


@pytest.mark.parametrize("kind", ["whisper", "clip"])
def test_a_configuration_without_a_class_is_read_whole_and_the_class_is_said(tmp_path: Path, kind: str) -> None:
    """Not whisper's decoder alone, nor clip's tower of pictures alone."""
    notes = planned_hf(written(tmp_path, {"model_type": kind})).notes
    meant = {"whisper": "WhisperForConditionalGeneration", "clip": "CLIPModel"}[kind]
    assert any(f"names no class (`architectures`): {meant} is read" in note for note in notes)


def test_a_model_of_pictures_and_text_keeps_no_keys_in_training() -> None:
    """Its configuration says `use_cache` of its text alone; a recomputed block would add its keys twice."""
    text = {"model_type": "llama", **SIZES}
    vision = {"model_type": "clip_vision_model", **SMALL, "image_size": 16, "patch_size": 8}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    plan = Plan.parse("dp1 / recompute=blocks")
    with fake_world(1, 0), open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(hf_factory(config), plan, mesh)
        output = placed.parts[0].run(torch.zeros(1, 8, dtype=torch.long))
    assert output.past_key_values is None
    assert not caches_keys(nn.Linear(1, 1))


def test_the_class_of_a_text_part_is_made_of_that_part(tmp_path: Path) -> None:
    """Llama 4: its usual class is that of its text, and takes no configuration of both, as `transformers` knows."""
    text = {**SIZES, "model_type": "llama4_text", "intermediate_size_mlp": 64, "num_local_experts": 2}
    text |= {"head_dim": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    planned = planned_hf(written(tmp_path, {"model_type": "llama4", "text_config": text}))
    made = planned.made(8)()
    assert type(made).__name__ == "Llama4ForCausalLM" and made.config.hidden_size == 32
    assert not any("mend one" in note for note in planned.notes)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nougat", "cannot make its default configuration .*subconfig: donut_swin.; .* give its config.json"),
        ("gemma4_assistant", "cannot make its default configuration .*hidden_size_per_layer_input must be 0, got 256"),
        ("rag", "has several classes for it; name .*: hf:RagModel or hf:RagSequenceForGeneration or hf:RagToken"),
        ("sam_prompt_encoder", "exports no model class that is made of it alone; name the model that it is a part of"),
    ],
)
def test_a_type_without_a_model_of_its_own_is_refused(name: str, said: str) -> None:
    """The first two were tracebacks."""
    with pytest.raises(ConfigError, match=f"model hf:{name}: transformers .*{said}"):
        hf_config(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("siglip_text_model", "SiglipTextModel"), ("depth_anything", "DepthAnythingForDepthEstimation")],
)
def test_a_class_beside_the_usual_ones_is_found(name: str, meant: str) -> None:
    """It was said that `transformers` has none."""
    assert hf_config(name).architectures == [meant]


def test_what_is_only_warned_of_needs_no_values(tmp_path: Path) -> None:
    """DeBERTa and some thirty families ask their token ids for padding; no pipeline could be cut for that either."""
    keys = {"model_type": "deberta", **SIZES, "architectures": ["DebertaForMaskedLM"]}
    asked = asked_of(written(tmp_path, keys), seq=16)
    assert asked.profile.num_params == sum(p.numel() for p in asked.factory().parameters())
    assert "pp" not in asked.refused


@pytest.mark.parametrize(
    ("kind", "meant"),
    [("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"), ("llava", "LlavaForConditionalGeneration")],
)
def test_a_model_of_pictures_and_text_has_its_output_layer(kind: str, meant: str) -> None:
    assert hf_config(kind).architectures == [meant]


def test_a_size_that_is_said_per_layer_is_divided_in_each(tmp_path: Path) -> None:
    keys = {"model_type": "gemma3n_text", **SIZES, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    keys |= {"activation_sparsity_pattern": [0.0, 0.0], "num_kv_shared_layers": 0}
    limits = planned_hf(written(tmp_path, {**keys, "intermediate_size": [96, 64]})).limits
    assert limits is not None and limits.ffn_dim == 32


def _planned(factory: type[nn.Module]) -> Planned:
    return planned_module(f"{__name__}:{factory.__name__}")


def test_layers_that_say_sizes_of_their_own():
    """`transformers` refuses to be asked for what they differ in: as it did, with a traceback."""
    config = hf_config("gemma4_text")
    assert sizes_of(config).head_dim == 256  # of 256 and 512: what an axis divides
    small = shrunk_config(config)
    assert [layer.head_dim for layer in small.per_layer_config] == [8, 16] * 2  # sliding, full
    assert sum(p.numel() for p in hf_factory(small)().parameters()) < 100_000


def test_layers_that_take_the_keys_of_others_are_kept_when_shrunk():
    small = shrunk_config(hf_config("gemma3n_text"))
    assert (small.num_kv_shared_layers, small.layer_types) == (2, ["sliding_attention", "full_attention"] * 2)
    assert sum(p.numel() for p in hf_factory(small)().parameters()) < 200_000


def test_stacks_of_one_pattern_are_not_mixed_with_a_towers() -> None:
    """Florence-2: its tower's lists lie as deep as those of encoder and decoder, and its third one was taken."""

    class Part(nn.Module):
        def __init__(self, **lists: nn.Module) -> None:
            super().__init__()
            for name, each in lists.items():
                self.add_module(name, each)

    def layers(count: int) -> Part:
        return Part(layers=nn.ModuleList(Layer() for _ in range(count)))

    towers = nn.ModuleList(nn.ModuleList(Layer() for _ in range(count)) for count in (1, 1, 9, 1))
    model = Part(tower=Part(blocks=towers), text=Part(encoder=layers(6), decoder=layers(6)))
    assert block_pattern(model) == "text.*.layers.*"
