"""The command line itself: what it imports, what it costs, how it fails."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import VERBS, main
from shardwise.cli.options.config import read_clip, read_count
from shardwise.cli.output import print_json
from shardwise.errors import ConfigError, ExitCode
from shardwise.version import __version__

CODE = """
import sys
from shardwise.cli.main import main
try:
    main({words!r})
finally:
    print('torch' in sys.modules)
"""


def call(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shardwise", *words], capture_output=True, text=True, cwd=cwd)


def code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], *[[verb, "--help"] for verb in VERBS], ["train", "--dry-run", "--device", "cpu"]],
)
def test_imports_no_torch(words: list[str], tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", CODE.format(words=words)], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.splitlines()[-1] == "False", ran.stderr
    assert not list(tmp_path.iterdir())


def cpu_s(*command: str) -> float:
    """Processor time: what other programs do meanwhile does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_help_takes_less_than_half_a_second() -> None:
    assert min(cpu_s("-m", "shardwise", "--help") for _ in range(3)) < 0.5


def test_negative_control_importing_torch_takes_longer() -> None:
    assert cpu_s("-c", "import torch") > 0.5


def test_version() -> None:
    ran = call("--version")
    assert (ran.returncode, ran.stdout.strip()) == (0, f"shardwise {__version__}")


def test_unknown_verb_names_the_nearest() -> None:
    ran = call("trian")
    assert ran.returncode == ExitCode.USAGE
    assert "train" in ran.stderr


def test_unknown_flag_is_a_usage_error() -> None:
    assert code_of("train", "--sead", "3") == ExitCode.USAGE


def test_a_word_too_many_is_told_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("verify", "train.py", "fsdp2", "--json") == ExitCode.USAGE
    said = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "extra argument(s) (fsdp2); needed: subject, and options, as --plan" in said


def test_an_error_is_one_message_without_a_traceback() -> None:
    ran = call("train", "--set", "train.sead=3", "--dry-run")
    assert ran.returncode == ExitCode.USAGE
    assert "did you mean 'seed'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_error_is_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("train", "--set", "train.sead=3", "--dry-run", "--json") == ExitCode.USAGE
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "ConfigError"
    assert error["exit_code"] == ExitCode.USAGE


class NoException(BaseException):
    """As what pytest's `skip` raises."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, NoException])
def test_an_unexpected_error_leaves_its_traceback_in_a_file(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise kind("planted")

    monkeypatch.setattr("shardwise.cli.train.read_configuration", fail)
    assert code_of("train", "--dry-run") == ExitCode.INTERNAL
    message = capsys.readouterr().err
    path = Path(message.split("traceback is in ")[1].split(";")[0])
    assert "planted" in path.read_text()
    path.unlink()


def test_dry_run_prints_every_setting_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.cli.train.start", lambda job: pytest.fail("started"))
    assert code_of("train", "--dry-run", "--device", "cpu", "--seed", "5", "--clip", "value:0.5", "--tokens", "1M") == 0
    text = capsys.readouterr().out
    for word in ("train.seed", "flag --seed", "derived:", "optimizer.lr", "dp2", "1954", "axes.dp_replicate"):
        assert word in text, word
    assert not list(tmp_path.iterdir())


def test_dry_run_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("train", "--dry-run", "--json", "--device", "cpu", "--no-sample", "--data", "a", "--data", "b") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"]["world"] == 2
    assert answer["settings"]["train"]["sample"] is False
    assert answer["settings"]["data"]["sources"] == ["a", "b"]
    assert answer["origins"]["train.sample"] == "flag --no-sample"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--plan", "dp2 tp2", "--nproc", "3"), ExitCode.REFUSED, "world.size"),
        (("--plan", "tp4"), ExitCode.REFUSED, "tp.heads"),
        (("--plan", "nonsense"), ExitCode.REFUSED, "nonsense"),
        (("--plan", "none.toml"), ExitCode.USAGE, "none.toml"),
        (("--clip", "zero"), ExitCode.USAGE, "--clip"),
        (("--tokens", "many"), ExitCode.USAGE, "--tokens"),
        (("--resume", "nowhere"), ExitCode.CHECKPOINT, "nowhere"),
        (("--checkpoint-every", ""), ExitCode.USAGE, "checkpoint_every: found ''"),
        (("--checkpoint-every", "9" * 400 + "h"), ExitCode.USAGE, "checkpoint_every: found '999999"),
        (("--checkpoint-every", "9" * 5000), ExitCode.USAGE, "checkpoint_every: found '999999"),
        (("--checkpoint-every", "10m", "--set", "train.keep_every=5"), ExitCode.USAGE, "needed a number of steps"),
        (("--eval-every", "0", "--set", "train.keep_best=1"), ExitCode.USAGE, "needed evaluations during the run"),
        (("--out", "/proc/run"), ExitCode.USAGE, "cannot write"),
        (("missing.toml",), ExitCode.USAGE, "missing.toml"),
    ],
)
def test_refused_before_anything_starts(
    words: tuple[str, ...], code: ExitCode, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("train", "--device", "cpu", "--dry-run", *words) == code
    assert text in capsys.readouterr().err


def test_out_that_is_a_file_or_holds_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("")
    for name, text in (("file", "is a file"), ("file/run", "is a file"), ("folder", "no run")):
        assert code_of("train", "--device", "cpu", "--dry-run", "--out", str(tmp_path / name)) == ExitCode.USAGE
        assert text in capsys.readouterr().err
    assert (tmp_path / "folder" / "thesis.tex").exists()


def test_clip_and_tokens() -> None:
    assert read_clip("1.5") == read_clip("norm:1.5") == {"train.clip_norm": 1.5}
    assert read_clip("value:0.5") == {"train.clip_value": 0.5}
    assert read_clip("none") == {"train.clip_norm": 0.0}
    assert [read_count(text) for text in ("300", "4M", "1.5B", "2k")] == [300, 4_000_000, 1_500_000_000, 2000]
    for text in ("-1", "size:3", ""):
        with pytest.raises(ConfigError):
            read_clip(text)
    for text in ("0", "4X", "9" * 400, "1e300", "nan"):
        with pytest.raises(ConfigError):
            read_count(text)


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "groups": [{"clip": float("inf"), "betas": (0.9, 0.95)}]})
    answer = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert answer == {"loss": "nan", "groups": [{"clip": "inf", "betas": [0.9, 0.95]}]}
