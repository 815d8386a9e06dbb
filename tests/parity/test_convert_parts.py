"""What tells that a file of plain tensors is one rank's part of a model: what lies around it, and its shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.checkpoint.foreign.convert import Options, convert
from shardwise.errors import CheckpointError

CONFIG = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 4}


def llama(*, vocab: int = 32, width: int = 8, layers: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Tensor]:
    found = {"model.embed_tokens.weight": torch.ones(vocab, 8)}
    for layer in layers:
        found |= {
            f"model.layers.{layer}.self_attn.q_norm.weight": torch.ones(2),
            f"model.layers.{layer}.self_attn.q_proj.weight": torch.ones(8, 8),
            f"model.layers.{layer}.input_layernorm.weight": torch.ones(width),
        }
    return found


def notes_of(path: Path) -> tuple[str, ...]:
    return convert(path, path.parent.parent / "out", Options(overwrite=True)).notes


def written(path: Path, weights: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (save_file if path.suffix == ".safetensors" else torch.save)(weights, path)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "weights.pt"])
@pytest.mark.parametrize("config", [CONFIG, {"text_config": CONFIG}])
def test_a_part_of_the_vocabulary_or_of_the_width_that_config_json_says(
    config: dict[str, Any], name: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "a" / name, llama(), config)
    assert notes_of(path) == notes_of(path.parent) == ()
    for part, said in (
        (
            llama(vocab=16),
            r"embed_tokens.weight with 16 of the 32 that vocab_size of config.json says, as where 2 ranks",
        ),
        (
            llama(vocab=10),
            r"with 10 of the 32 that vocab_size of config.json says, as where 4 ranks",
        ),  # the last: 11, 11
        (llama(width=4), r"input_layernorm.weight with 4 of the 8 that hidden_size of config.json says, as where 2 r"),
    ):
        written(path, part)
        for source in (path, path.parent):
            with pytest.raises(CheckpointError, match=said):
                convert(source, tmp_path / "part", Options())
    written(path, llama(vocab=31) | {"norm.weight": torch.ones(4)})
    assert notes_of(path) == ()  # a row that was taken out; norms of heads beside those of the width


def test_layers_that_are_not_here_are_said(tmp_path: Path) -> None:
    path = written(tmp_path / "a" / "model.pt", llama(layers=(0, 1)), CONFIG)
    said = "perhaps other ranks' parts: of model.layers there are 2, and num_hidden_layers of config.json is 4; it is"
    assert notes_of(path)[-1].startswith(said)
    path = written(tmp_path / "b" / "model.pt", llama(layers=(2, 3)))
    said = "perhaps other ranks' parts: of model.layers the first is 2, and none before it is here; it is taken for the"
    assert notes_of(path)[-1].startswith(said)
    behind_a_relu = {"net.1.weight": torch.ones(4, 8), "net.2.norm.weight": torch.ones(4)}
    assert notes_of(written(tmp_path / "c" / "model.pt", behind_a_relu)) == ()


@pytest.mark.parametrize("name", ["model.safetensors", "weights.pt"])
def test_directories_of_ranks(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        written(tmp_path / "in" / f"rank_{rank}" / name, {"w": torch.ones(2, 4)})
    for source in (tmp_path / "in" / "rank_1" / name, tmp_path / "in" / "rank_0"):
        with pytest.raises(CheckpointError, match=r"found rank_0, rank_1, by the name directories of ranks with files"):
            convert(source, tmp_path / "out", Options())
    (tmp_path / "in" / "rank_0" / name).rename(tmp_path / "in" / "rank_0" / f"other{Path(name).suffix}")
    assert notes_of(tmp_path / "in" / "rank_1" / name) == ()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_files_that_differ_in_a_number_with_other_rows_or_layers(suffix: str, tmp_path: Path) -> None:
    names = [f"shard_{rank}.{suffix}" for rank in range(2)]
    for number, (parts, said) in enumerate(
        (
            (
                [{"a": torch.ones(3, 4), "b": torch.ones(2)}, {"a": torch.ones(2, 4), "b": torch.ones(2)}],
                "a of other siz",
            ),
            ([llama(layers=(0, 1)), llama(layers=(2, 3))], "other layers of model.layers: parts of ranks"),
        )
    ):
        paths = [written(tmp_path / str(number) / name, part) for name, part in zip(names, parts, strict=True)]
        for path, other in zip(paths, reversed(names), strict=True):
            with pytest.raises(CheckpointError, match=f"{path.name}: found beside it {other} with {said}"):
                convert(path, tmp_path / "out", Options())
    for name in names:
        path = written(tmp_path / "a" / name, {"w": torch.ones(2, 4)})
    assert notes_of(path) == (
        f"perhaps other ranks' parts: {', '.join(names)} lie together; {path.name} is taken for the whole model",
    )
    path.rename(path.with_name(f"shard_7.{suffix}"))  # an epoch, or a step
    assert notes_of(path.with_name(f"shard_7.{suffix}")) == ()


def test_matrices_that_do_not_fit_behind_each_other_are_said(tmp_path: Path) -> None:
    whole = {"0.weight": torch.ones(16, 8), "2.weight": torch.ones(32, 16), "4.weight": torch.ones(12, 32)}
    assert notes_of(written(tmp_path / "a" / "whole.pt", whole)) == ()
    part = {name: tensor[: len(tensor) // 4].clone() for name, tensor in whole.items()}
    (note,) = notes_of(written(tmp_path / "a" / "part.pt", part))
    assert note == (
        "perhaps other ranks' parts: each matrix takes 4 times what the one before it gives, as where FSDP cut a model "
        "over 4 ranks; it is taken for the whole model"
    )


class Runs:
    """Code in a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, (f"open({str(self.path)!r}, 'w')",)


def test_leave_to_run_code_is_not_for_files_beside(tmp_path: Path) -> None:
    for rank, more in enumerate(({}, {"code": Runs(tmp_path / "ran")})):
        torch.save({"w": torch.ones(2, 4), **more}, tmp_path / f"shard_{rank}.pt")
    notes = convert(tmp_path / "shard_0.pt", tmp_path / "out", Options(unsafe=True)).notes
    assert any("shard_0.pt, shard_1.pt lie together" in note for note in notes) and not (tmp_path / "ran").exists()
