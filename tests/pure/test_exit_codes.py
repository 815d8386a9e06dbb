"""Every exit code is in the table, and reached by a test: through a command, or by its error in a rank."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import errors
from shardwise.errors import ExitCode, ShardwiseError
from shardwise.launch.entry import main

ROOT = Path(__file__).parents[2]

REACHED = {
    ExitCode.OK: "tests/failure/test_cli_train.py::test_what_a_run_leaves",
    ExitCode.REFUSED: "tests/failure/test_run_verb.py::test_a_plan_that_does_not_fit_starts_nothing",
    ExitCode.USAGE: "tests/failure/test_cli_train.py::test_bad_data_is_one_message_with_file_and_line",
    ExitCode.LAUNCH: "tests/failure/test_run_verb.py::test_a_port_in_use",
    ExitCode.CHECKPOINT: "tests/pure/test_cli.py::test_refused_before_anything_starts",
    ExitCode.NON_FINITE: "tests/parity/test_nonfinite.py::test_stop",
    ExitCode.RANK_FAILED: "tests/failure/test_run_verb.py::test_a_rank_that_dies_in_silence_is_named",
    ExitCode.LOCKED: "tests/failure/test_lock.py::test_train_refuses_a_directory_in_use",
    ExitCode.CHANGED: "tests/failure/test_cli_train.py::test_a_changed_rate_needs_leave_and_a_changed_layout_does_not",
    ExitCode.SPIKE: "tests/parity/test_protect.py::test_stop_exits_9_and_a_limit_is_an_error",
    ExitCode.OUT_OF_MEMORY: "tests/pure/test_exit_codes.py::test_the_error_of_a_rank_gives_its_code",
    ExitCode.REPLICAS_DIFFER: "tests/pure/test_exit_codes.py::test_the_error_of_a_rank_gives_its_code",
    ExitCode.INTERNAL: "tests/pure/test_cli.py::test_an_unexpected_error_leaves_its_traceback_in_a_file",
    ExitCode.INTERRUPTED: "tests/failure/test_run_verb.py::test_a_signal_lets_ranks_save",
    ExitCode.KILLED: "tests/failure/test_run_verb.py::test_a_second_signal_ends_at_once",
    ExitCode.PREEMPTED: "tests/failure/test_run_verb.py::test_a_signal_lets_ranks_save",
    ExitCode.TERMINATED: "tests/failure/test_cli_train.py::test_sigterm_saves_and_the_run_continues",
}


def test_every_code_is_documented_and_reached_by_a_test_that_is_there() -> None:
    table = dict(re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE))
    assert table == {str(int(code)): code.name for code in ExitCode}
    assert len(ExitCode) >= 15 and set(REACHED) == set(ExitCode)
    for code, place in REACHED.items():
        file, _, test = place.partition("::")
        body = (ROOT / file).read_text().partition(f"def {test}")[2]
        assert body, f"{place} is not there, and {code.name} is reached by nothing"


@pytest.mark.parametrize(
    "name", [n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, ShardwiseError)]
)
def test_the_error_of_a_rank_gives_its_code(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank's process as a launcher starts it: `python -m shardwise.launch.entry --script FILE`."""
    (tmp_path / "script.py").write_text(f"from shardwise.errors import {name}\nraise {name}('the message')\n")
    code = main(["--script", str(tmp_path / "script.py")])
    assert code == getattr(errors, name).exit_code and code in set(ExitCode)
    assert capsys.readouterr().err == f"{name}: the message\n"


def test_ctrl_c_while_a_rank_reports_its_error_is_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    (tmp_path / "script.py").write_text("raise RuntimeError('lost the others')\n")
    script = ["--script", str(tmp_path / "script.py")]
    assert main(script) == ExitCode.RANK_FAILED
    told = capsys.readouterr().err
    assert told.endswith("RuntimeError: lost the others\n") and "entry.py" not in told  # from the script's own frame on
    monkeypatch.setattr("traceback.format_exception", interrupted)
    assert main(script) == ExitCode.INTERRUPTED and not capsys.readouterr().err


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback(tmp_path: Path) -> None:
    at_once = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    (tmp_path / "typer.py").write_text(at_once)
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a job behind a shell has none
    )
    script += "import sys; sys.path.insert(0, sys.argv.pop()); from shardwise.__main__ import main; main()"
    command = [sys.executable, "-c", script, "train", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")
