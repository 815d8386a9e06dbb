"""What `shardwise train` goes on from, what it refuses to go on from, and which record of it stays, as it is typed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.cli.main import main
from shardwise.errors import CheckpointError, ExitCode, UsageError
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.kept.rundir import RunDir, check_not_lost, check_out, find_checkpoint
from tests.failure.as_rank import typed

TINY = ["--model", "tiny", "--layers", "1", "--dim", "32", "--heads", "2", "--ffn", "48", "--seq", "16", "--batch", "2",
        "--device", "cpu", "--plan", "dp1", "--schedule", "constant", "--eval-every", "0", "--no-sample",
        "--checkpoint-every", "1"]  # fmt: skip


Train = Callable[..., subprocess.CompletedProcess[str]]


def command(out: str, *words: str) -> list[str]:
    return ["train", "--data", "text.txt", "--out", out, *TINY, *words]


def started(folder: Path, out: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """From a shell: the command starts a rank of its own, and says what became of it."""
    python = [sys.executable, "-m", "shardwise", *command(out, *words)]
    return subprocess.run(python, capture_output=True, text=True, cwd=folder, env=os.environ | variables, timeout=300)


@pytest.fixture(scope="module")
def train(world: World) -> Train:
    """The same rules, where a launcher has started the rank."""

    def run(folder: Path, out: str, *words: str) -> subprocess.CompletedProcess[str]:
        return typed(world, folder, command(out, *words))

    return run


@pytest.fixture(scope="module")
def run_of_three(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a finished run `a` of three steps, whose checkpoints are of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    ran = train(folder, "a", "--steps", "3")
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.fixture
def here(run_of_three: Path, tmp_path: Path) -> Path:
    """The folder, to do with it what one likes."""
    return Path(shutil.copytree(run_of_three, tmp_path / "here"))


def record(run: Path) -> dict[str, bytes]:
    names = ("config.json", "config.toml", "plan.toml", "events.jsonl", "metrics.jsonl")
    return {name: (run / name).read_bytes() for name in names if (run / name).exists()}


def damage(checkpoint: Path) -> None:
    (checkpoint / "rank-00000.safetensors").write_bytes(b"")


def test_a_start_that_loads_nothing_leaves_the_record_as_it_was(train: Train, here: Path) -> None:
    run = here / "a"
    before = record(run)
    refused = train(here, "a", "--steps", "4", "--dim", "64", "--allow", "all")
    assert refused.returncode == ExitCode.CHANGED and "model.dim: 32 -> 64" in refused.stderr
    assert "--allow" not in refused.stderr and record(run) == before
    kept = {path: path.read_bytes() for path in run.glob("checkpoints/*/rank*")}
    for path in kept:
        damage(path.parent)
    refused = started(here, "a", "--steps", "4", "--lr", "0.5", "--seed", "3", "--allow", "all")
    assert refused.returncode == ExitCode.CHECKPOINT and "none of the 2 checkpoints is whole" in refused.stderr
    assert record(run) == before and not (run / "starting").exists()
    for path, data in kept.items():
        path.write_bytes(data)
    ran = train(here, "a", "--steps", "4", "--lr", "0.5", "--allow", "optimizer.lr")
    assert ran.returncode == 0, ran.stderr
    assert json.loads((run / "config.json").read_text())["settings"]["optimizer"]["lr"] == 0.5
    [event] = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert event["allowed"] == ["optimizer.lr"] and not (run / "starting").exists()


@pytest.mark.soak  # in every run: tests/failure/test_elastic.py records its changes
def test_an_elastic_start_records_its_plan_when_it_has_loaded(here: Path) -> None:
    run, words = here / "a", ("--steps", "4", "--plan", "dp1 / bf16", "--elastic", "1:1", "--allow", "plan.precision")
    before = record(run)
    kept = {path: path.read_bytes() for path in run.glob("checkpoints/*/rank*")}
    for path in kept:
        damage(path.parent)
    refused = started(here, "a", *words)
    assert refused.returncode == ExitCode.CHECKPOINT and "none of the 2 checkpoints is whole" in refused.stderr
    assert record(run) == before and not (run / "starting").exists()
    for path, data in kept.items():
        path.write_bytes(data)
    ran = started(here, "a", *words)
    assert ran.returncode == 0, ran.stderr
    assert Plan.load(run / "plan.toml").precision == "bf16"


@pytest.mark.parametrize("words", [["--resume", "a"], ["--checkpoints", "a/checkpoints"]])
def test_another_runs_checkpoint_is_gone_on_with_by_its_own_settings(
    train: Train, here: Path, words: list[str]
) -> None:
    refused = train(here, "new", "--steps", "4", "--lr", "0.5", *words)
    assert refused.returncode == ExitCode.CHANGED and "add --allow optimizer.lr" in refused.stderr
    assert not (here / "new" / "config.json").exists()
    ran = train(here, "new", "--steps", "4", "--lr", "0.5", *words, "--allow", "optimizer.lr")
    assert ran.returncode == 0, ran.stderr
    assert json.loads((here / "new" / "resumes.jsonl").read_text())["step"] == 3


def test_a_new_run_that_was_refused_at_the_load_binds_nobody(train: Train, here: Path) -> None:
    for checkpoint in (here / "a" / "checkpoints").glob("step-*"):
        damage(checkpoint)
    words = ("--steps", "4", "--resume", "a")
    assert train(here, "new", *words, "--lr", "0.5", "--allow", "all").returncode == ExitCode.CHECKPOINT
    assert train(here, "new", "--steps", "1").returncode == 0


def test_the_newest_whole_one_is_taken_and_the_others_are_said(train: Train, here: Path) -> None:
    """Of the run itself, where warnings are errors, and of another run."""
    damage(here / "a" / "checkpoints" / "step-00000003")
    careful = partial(started, PYTHONWARNINGS="error::UserWarning")
    for run, words in ((train, ["new", "--resume", "a"]), (careful, ["a"])):
        ran = run(here, *words, "--steps", "4")
        assert ran.returncode == 0, ran.stderr
        assert "skipped step-00000003: " in ran.stdout and "step 2: continuing from" in ran.stdout
        [resumed] = [json.loads(line) for line in (here / words[0] / "resumes.jsonl").read_text().splitlines()]
        assert resumed["skipped"][0].startswith("step-00000003: ")


def test_checkpoints_that_are_gone_are_no_fresh_start(train: Train, here: Path) -> None:
    run = here / "a"
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    ran = train(here, "a", "--steps", "4")
    assert ran.returncode == 0 and "latest names it, and it is not there" in ran.stdout
    shutil.rmtree(run / "checkpoints")
    before = record(run)
    refused = train(here, "a", "--steps", "4")
    assert refused.returncode == ExitCode.CHECKPOINT and "begin again" in refused.stderr
    assert "--resume never" in refused.stderr and record(run) == before
    ran = train(here, "a", "--steps", "1", "--resume", "never")
    assert ran.returncode == 0, ran.stderr


def test_another_text_under_the_same_name_needs_leave(train: Train, here: Path) -> None:
    text = here / "text.txt"
    words = text.read_text()
    text.write_text(words[:-2] + "L\n")  # not among the first rows
    refused = train(here, "a", "--steps", "4")
    assert refused.returncode == ExitCode.CHANGED and "add --allow data.content" in refused.stderr
    text.write_text("L" + words[1:])
    refused = train(here, "a", "--steps", "4")
    assert refused.returncode == ExitCode.CHANGED and "add --allow data.content" in refused.stderr
    ran = train(here, "a", "--steps", "4", "--allow", "data.content")
    assert ran.returncode == 0, ran.stderr
    assert "probe not compared: its rows are not those of the save" in ran.stdout


def test_a_cadence_that_cannot_be_read_is_refused_before_any_rank(train: Train, tmp_path: Path) -> None:
    refused = train(tmp_path, "a", "--checkpoint-every", "10x")
    assert refused.returncode == ExitCode.USAGE and "found '10x'" in refused.stderr and not list(tmp_path.iterdir())


def test_out_is_no_url() -> None:
    for url in ("s3://bucket/run", "file:///tmp/run"):
        with pytest.raises(UsageError, match=f"--out {url}: found a URL.*--checkpoints {url}"):
            check_out(RunDir(Path(url)), resume="auto")


def test_a_file_url_is_locked_as_the_path_it_is() -> None:
    run = RunDir(Path("a"))
    assert run.locks("file:///b/c") == run.locks("/b/c") == (Path("a/lock"), Path("/b/c/lock"))
    assert run.locks("s3://b/c") == (Path("a/lock"),)
    assert run.locks(None) == (Path("a/lock"), Path("a/checkpoints/lock"))


def test_a_config_that_is_empty_is_no_reason_to_remove_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match="put the file back.*--resume") as refused:
        RunDir(tmp_path).identity()
    assert "remove" not in str(refused.value)


def test_what_a_path_to_resume_means(here: Path) -> None:
    store = here / "a" / "checkpoints"
    assert find_checkpoint(here / "a") == find_checkpoint(store) == store
    assert find_checkpoint(store / "step-00000002") == store / "step-00000002"
    with pytest.raises(CheckpointError, match="no complete checkpoint lies there"):
        find_checkpoint(here)


def test_a_run_goes_on_where_its_record_lies(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Moved, copied, or from elsewhere; another `out` that somebody gives, or writes into the file, counts."""

    def out(file: Path | str, *words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["train", str(file), "--data", str(here / "text.txt"), *words, "--dry-run", "--json"])
        assert ended.value.code == 0
        return str(json.loads(capsys.readouterr().out)["out"])

    monkeypatch.chdir(here)
    assert out("a/config.toml") == "a"
    (here / "link").symlink_to("a")
    assert out("link/config.toml") == "a"
    shutil.copytree("a", "copy")
    (here / "a").rename("b")
    assert out("b/config.toml") == "b" and out("copy/config.toml") == "copy"
    assert out("b/config.toml", "--out", "c") == "c"
    assert out(shutil.copy("b/config.toml", "mine.toml")) == "a"
    monkeypatch.chdir("b")
    assert out("config.toml") == "." and out(here / "b" / "config.toml") == str(here / "b")
    text = Path("config.toml").read_text()
    Path("config.toml").write_text(text.replace('out = "a"', 'out = "new"'))
    assert out("config.toml") == "new"


def test_a_longer_schedule_needs_leave_and_is_said(train: Train, here: Path) -> None:
    words = ("--schedule", "linear", "--warmup", "0", "--steps")
    ran = train(here, "c", *words, "2")
    assert ran.returncode == 0 and "schedule: 0" not in ran.stdout
    refused = train(here, "c", *words, "4")
    assert refused.returncode == ExitCode.CHANGED and "add --allow train.steps" in refused.stderr
    ran = train(here, "c", *words, "4", "--allow", "train.steps")
    said = "step 2: the learning rate's schedule: 0.55 -> 0.775 at step 1\n"
    assert ran.returncode == 0 and said in ran.stdout


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    check_not_lost(run, None)
    with run.metrics.open("w") as file:
        for step in (1, 2, 3):
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
            file.write(json.dumps({"step": step, "save_stall_s": 0.1}) + "\n")
    check_not_lost(run, None)  # each was cut off, or the disk was full
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 3, "saved_s": 0.1}) + "\n")
    with pytest.raises(CheckpointError, match="found none in .*checkpoints; needed one"):
        check_not_lost(run, None)
    run.metrics.unlink()
    check_not_lost(run, "s3://bucket/run")
    run.add_event("stopped", step=1, code=143)
    with pytest.raises(CheckpointError, match="found none in s3://bucket/run"):
        check_not_lost(run, "s3://bucket/run")


def test_a_run_begins_with_the_weights_of_another(train: Train, here: Path) -> None:
    """Under another optimizer; its own checkpoints are what it goes on from, and weights alone are no whole state."""
    ran = train(here, "b", "--weights", "a", "--steps", "1", "--lr", "1e-9", "--optimizer", "sgd", "--seed", "7")
    assert ran.returncode == 0, ran.stderr
    said = re.search(r"beginning with the weights of \S*step-00000003\nresume proof: (\d+)/\1 tensors", ran.stdout)
    assert said, ran.stdout
    assert "continuing" not in ran.stdout
    before, after = (loaded_tensors(here / run) for run in ("a", "b"))
    assert before.keys() == after.keys() and all(torch.allclose(after[name], before[name]) for name in before)
    again = ("--steps", "2", "--lr", "1e-9", "--optimizer", "sgd", "--seed", "7")
    for words in (("--weights", "a"), ()):
        ran = train(here, "b", *words, *again)
        assert ran.returncode == 0, ran.stderr
        assert "continuing from" in ran.stdout and ("weights of" in ran.stdout) == bool(words)
    refused = train(here, "b", "--weights", "nowhere", *again)
    assert refused.returncode == ExitCode.CHANGED and "has begun with" in refused.stderr
    [event] = RunDir(here / "b").read_events("weights")
    assert event["checkpoint"].endswith("step-00000003") and event["asked"] == str(here / "a")
    moved = train(here, "d", "--resume", "b", *again)  # elsewhere: what it began with is in its checkpoints
    assert moved.returncode == 0, moved.stderr
    refused = train(here, "c", "--weights", "nowhere", "--steps", "1")
    assert refused.returncode == ExitCode.CHECKPOINT and not (here / "c").exists()
    assert f"--weights {here / 'nowhere'}: no such directory; needed: a run's directory" in refused.stderr
    heads = train(here, "c", "--weights", "a", "--steps", "1", "--heads", "4")  # no tensor shows them
    assert heads.returncode == ExitCode.CHANGED and "model.num_heads: 2 -> 4" in heads.stderr
    other = train(here, "c", "--weights", "a", "--steps", "1", "--dim", "64")
    assert other.returncode == ExitCode.CHANGED and "model.dim: 32 -> 64" in other.stderr


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(train: Train, here: Path) -> None:
    [newest] = here.glob("a/checkpoints/step-00000003")
    [part] = newest.glob("rank*")
    part.write_bytes(part.read_bytes()[:-1] + b"\1")
    ran = train(here, "e", "--weights", "a", "--steps", "1")
    assert ran.returncode == 0, ran.stderr
    assert "skipped step-00000003: " in ran.stdout and "UserWarning" not in ran.stderr
    assert "beginning with the weights of" in ran.stdout and "step-00000002" in ran.stdout


def loaded_tensors(run: Path) -> dict[str, torch.Tensor]:
    """The weights in a run's newest checkpoint."""
    target = run.with_suffix(".safetensors")
    subprocess.run([sys.executable, "-m", "shardwise", "ckpt", "export", str(run), str(target)], check=True)
    return load_file(target)


DROPS = """
from torch import nn

class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(256, 8), nn.Dropout(0.5), nn.Linear(8, 256)

    def forward(self, input_ids):
        return self.head(self.drop(self.embed(input_ids)))
"""


@pytest.mark.soak  # in every run: weights of one that draws nothing
def test_weights_of_a_model_that_drops_are_proven_by_the_draws_of_their_save(here: Path) -> None:
    """Another seed and step 0 draw others; the new run's own are as without `--weights`."""
    (here / "drops.py").write_text(DROPS)
    words = ["train", "--data", "text.txt", "--model", "drops:Drops", "--seq", "16", "--batch", "2", "--device", "cpu",
             "--plan", "dp1", "--no-sample", "--eval-every", "0", "--steps", "2"]  # fmt: skip
    for more in (["--out", "x"], ["--out", "y", "--weights", "x", "--seed", "5"]):
        python = [sys.executable, "-m", "shardwise", *words, *more]
        path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
        ran = subprocess.run(python, capture_output=True, text=True, cwd=here, env=os.environ | {"PYTHONPATH": path})
        assert ran.returncode == 0, ran.stderr
    assert re.search(r"probe loss (\S+) = \1", ran.stdout), ran.stdout
