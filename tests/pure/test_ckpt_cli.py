"""`shardwise ckpt` and the checkpoints of older versions: whatever this version reads, the next ones read."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.compare import Found, diff, find, place_of, verify
from shardwise.checkpoint.format import Box, whole
from shardwise.checkpoint.reading import Reader
from shardwise.cli.main import main
from shardwise.errors import CheckpointError
from tests.checkpoints import SPLITS, content, write_checkpoint

KEPT = Path(__file__).parents[1] / "data" / "checkpoints"


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", *map(str, words)])
    return int(ended.value.code or 0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A run's directory with two checkpoints."""
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    (path / "store.json").write_text("{}")
    tensors, divided, dtypes = SPLITS
    write_checkpoint(path, tensors, divided, dtypes, step=7)
    other = tensors | {"model.w": tensors["model.w"] ^ 1}
    write_checkpoint(path, other, divided, dtypes, step=8)
    return path


def test_a_run_stands_for_its_newest_checkpoint(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (store.parent, store, store / "step-00000008"):
        assert run("verify", path, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step"] == 8 and found["whole"] and found["num_tensors"] == 5
    assert run("inspect", store.parent, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"]["model.w"]["shape"] == [6, 5] and found["bytes"] > 0
    assert run("inspect", store.parent) == 0
    assert "model.w" in capsys.readouterr().out
    assert run("verify", store.parent) == 0
    assert "step-00000008: whole: step 8, 5 tensors" in capsys.readouterr().out


def told(run: Path, checkpoints: object, out: object) -> Path:
    """A run's directory whose record says where its checkpoints are kept."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps({"settings": {"train": {"checkpoints": checkpoints, "out": out}}}))
    return run


def test_a_run_that_keeps_its_checkpoints_elsewhere_stands_for_them(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever directory this process is in, a relative place is one from where the run was started."""
    newest, elsewhere = store / "step-00000008", tmp_path / "start" / "kept"
    assert place_of(told(tmp_path / "absolute", str(store), "runs/a")) == store
    assert find(told(tmp_path / "url", f"file://{store}", "runs/a")).path == newest
    shutil.copytree(store, elsewhere)
    run = told(tmp_path / "start" / "runs" / "a", "kept", "runs/a")
    assert place_of(run) == elsewhere and verify(run).path == elsewhere / newest.name
    monkeypatch.chdir(tmp_path / "start")
    assert place_of(told(tmp_path / "moved", "kept", "runs/a")) == Path("kept")
    assert place_of(told(tmp_path / "moved", "kept", str(tmp_path / "moved"))) == Path("kept")
    assert place_of(Path("runs/a")) == elsewhere
    # what it names now comes before what lies in it: those are older
    assert place_of(told(store.parent, str(elsewhere), "run")) == elsewhere
    shutil.rmtree(elsewhere)
    assert place_of(store.parent) == store
    with pytest.raises(CheckpointError, match=r"nor a store at .*start/kept, which its config.json names; needed"):
        find(run)


def test_a_record_is_data_and_leads_to_a_store_alone(store: Path, tmp_path: Path) -> None:
    other = told(tmp_path / "other", str(store), "other")
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        place_of(told(tmp_path / "chain", str(other), "chain"))  # a run is no store
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        place_of(told(tmp_path / "one", str(store / "step-00000008"), "one"))
    link = tmp_path / "link"
    link.mkdir()
    (link / "config.json").symlink_to(other / "config.json")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "config.json")
    large = told(tmp_path / "large", str(store), "large")
    with (large / "config.json").open("a") as file:
        file.write(" " * 2**20)
    for run, text in (
        (tmp_path / "torn", '{"settings": '),
        (tmp_path / "list", "[]"),
        (tmp_path / "deep", "[" * 10**5),
    ):
        run.mkdir()
        (run / "config.json").write_text(text)
    told(tmp_path / "number", 7, "number")
    told(tmp_path / "control", f"{store}\0", "control")
    told(tmp_path / "no-out", str(store), None)
    for name in ("link", "fifo", "large", "torn", "list", "deep", "number", "control", "no-out"):
        with pytest.raises(CheckpointError, match="found no checkpoint"):
            place_of(tmp_path / name)
    for place in ("s3://me:secret@bucket/run", "x" * 4000, "nothing://a/b"):
        with pytest.raises(CheckpointError):
            place_of(told(tmp_path / "odd", place, "odd"))


def test_diff(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", store / "step-00000007", store.parent) == 1
    assert capsys.readouterr().out == "model.w: values: 30 of 30 elements\n"
    assert run("diff", store, store) == 0
    assert capsys.readouterr().out == "all tensors are equal, bit by bit\n"
    tensors, _, dtypes = SPLITS
    changed = {name: array for name, array in tensors.items() if name != "model.b"}
    changed |= {
        "model.w": tensors["model.w"].reshape(5, 6),
        "model.ids": tensors["model.ids"],
        "new": tensors["model.b"],
    }
    types = dtypes | {"model.ids": "float64", "new": "float16"}
    one_rank = {name: [(0, whole(array.shape))] for name, array in changed.items()}
    other = write_checkpoint(tmp_path, changed, one_rank, types)
    assert run("diff", store / "step-00000007", other, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    kinds = {item["name"]: item["kind"] for item in found["differences"]}
    assert kinds == {
        "model.b": "only in the first", "new": "only in the second", "model.w": "shape", "model.ids": "type",
    }  # fmt: skip


@pytest.mark.parametrize("words", [("inspect",), ("verify",), ("diff", "7"), ("export", "x.safetensors")])
@pytest.mark.parametrize("at", ["manifest", "data"])
def test_a_checkpoint_that_a_run_removes_meanwhile_is_not_called_damaged(
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: Any,
    at: str,
) -> None:
    """Its removal comes after it was found, or after its manifest was read."""
    newest, owner, name = store / "step-00000008", *((Found, "reader") if at == "manifest" else (Reader, "__enter__"))
    right = getattr(owner, name)

    def then(self: Any) -> Any:
        shutil.rmtree(newest, ignore_errors=True)
        return right(self)

    second = {"7": store / "step-00000007", "x.safetensors": tmp_path / "x.safetensors"}
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, then)
        code = run(words[0], store, *(second[word] for word in words[1:]))
    said = capsys.readouterr().err
    assert (code, said) == (0, "") if words == ("inspect",) and at == "data" else code == 4
    assert not said or f"{newest}: it was removed while it was read" in said


def test_refusals(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", tmp_path / "nothing") == 4
    assert run("diff", store) == 2
    assert run("inspect", store, store) == 2
    assert run("burn", store) == 2
    path = store / "step-00000008" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert run("verify", store.parent, "--json") == 4
    said = capsys.readouterr().out
    assert "step-00000008/rank-00000.safetensors" in said and "truncated" in said
    (store / "step-00000008" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="step-00000007 is whole"):
        verify(store)
    assert find(store).path.name == "step-00000007"


def test_a_file_of_zeros_names_its_rank(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = store / "step-00000008" / "rank-00001.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert run("verify", store) == 4
    assert "a header of 0 bytes at offset 0" in (said := capsys.readouterr().err) and "written by rank 1" in said


def test_verify_names_every_manifest_that_cannot_be_read_once(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (9, 10):
        shutil.copytree(store / "step-00000008", store / f"step-{step:08d}")
    assert run("verify", store) == 4
    said = capsys.readouterr().err
    for step in (9, 10):
        assert said.count(f"step-{step:08d}: holds step 8") == said.count(f"step-{step:08d}") == 1
    assert said.rstrip().endswith("step-00000008 is whole")


def test_memory_is_bounded(tmp_path: Path) -> None:
    array = content("w", (16, 2**20), "float32")  # 64 MiB
    halves = [(0, Box((0, 0), (16, 2**19))), (1, Box((0, 2**19), (16, 2**19)))]
    for name, parts in (("a", [(0, whole(array.shape))]), ("b", halves)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, {"w": array}, {"w": parts}, {"w": "float32"})
    del array
    tracemalloc.start()
    assert verify(tmp_path / "b" / "step-00000007").size_bytes > 2**26
    assert not diff(tmp_path / "a" / "step-00000007", tmp_path / "b" / "step-00000007")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**20


@pytest.mark.parametrize("path", sorted(KEPT.glob("schema-2/*/")), ids=lambda path: path.name)
def test_checkpoints_of_this_schema_are_read_for_ever(path: Path) -> None:
    expected = json.loads((path / "expected.json").read_text())
    found = verify(path / "checkpoints")
    assert (found.step, found.num_tensors) == (expected["step"], len(expected["sha256"]))


def test_there_are_kept_checkpoints(tmp_path: Path) -> None:
    assert len(list(KEPT.glob("schema-2/*/"))) >= 2
    old = tmp_path / "old"
    shutil.copytree(KEPT / "schema-1", old)
    with pytest.raises(CheckpointError, match="schema 1, .* never released"):
        verify(old)
