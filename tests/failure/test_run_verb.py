"""`shardwise run`: what reaches the script, and what happens when a rank dies or somebody presses Ctrl-C.

The scripts import no torch: a rank starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cli.run import THRONG, check_crowd
from shardwise.cli.run import start as start_job
from shardwise.errors import ExitCode
from shardwise.launch.job import Job
from shardwise.launch.local import Outcome

HELLO = "import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])"
ONE_DIES = """
import os, time
if os.environ["RANK"] == "1":
    {death}
time.sleep(60)
"""
PATIENT = """
import os, signal, sys, time
from pathlib import Path
asked = []
def ask(number, frame):
    asked.append(number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, ask)
Path(sys.argv[1], "ready" + os.environ["RANK"]).write_text(str(os.getpid()))
while not asked or {stubborn}:
    time.sleep(0.01)
Path(sys.argv[1], "saved" + os.environ["RANK"]).touch()
sys.exit(128 + asked[0])
"""


def start(folder: Path, script: str, *words: str, **env: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "shardwise", "run", str(folder / "script.py"), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env})


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run whose ranks are waiting for a signal, and their process ids."""
    yield from waiting(tmp_path, stubborn=False)


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The same, whose ranks do not end when asked to."""
    yield from waiting(tmp_path, stubborn=True)


def waiting(folder: Path, *, stubborn: bool) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    process = start(folder, PATIENT.format(stubborn=stubborn), "--nproc", "2", "--", str(folder))
    end = time.monotonic() + 60
    while not (folder / "ready0").exists() or not (folder / "ready1").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.1)
    yield process, [int((folder / f"ready{rank}").read_text()) for rank in (0, 1)]
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_plan_and_words_reach_every_rank(tmp_path: Path) -> None:
    code, out, err = finish(start(tmp_path, HELLO, "dp2", "--", "--fast", "--nproc"))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"rank {rank} of 2 ['dp2', '--fast', '--nproc']" for rank in (0, 1)]


@pytest.mark.parametrize("words", [("--plan", ""), ("",)])
def test_an_empty_plan_is_not_none(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A variable of the shell that is not set: the script would have begun without its plan, as one process."""
    code, out, err = finish(start(tmp_path, HELLO, *words))
    assert code == ExitCode.REFUSED and not out
    assert "plan shorthand: found no token" in err


def test_a_rank_that_raises_ends_all_and_its_message_is_printed_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    code, _, err = finish(start(tmp_path, ONE_DIES.format(death="raise ValueError('bad tide')"), "--nproc", "3"))
    assert code == ExitCode.RANK_FAILED
    assert err.count("ValueError: bad tide") == 2  # the traceback's last line, and the sentence
    assert err.splitlines()[-1] == "rank 1 failed: ValueError: bad tide"
    assert "script.py" in err and "runpy" not in err
    assert time.monotonic() - begun < 45  # the others would sleep for 60


def test_a_script_that_does_not_compile_shows_its_line_and_none_of_ours(tmp_path: Path) -> None:
    code, _, err = finish(start(tmp_path, "print('high tide'\n", "--nproc", "2"))
    assert code == ExitCode.RANK_FAILED
    assert 'script.py", line 1' in err and "'(' was never closed" in err
    assert "entry.py" not in err and "runpy" not in err


def test_a_script_that_is_no_text_is_named(tmp_path: Path) -> None:
    code, _, err = finish(start(tmp_path, "\0", "--nproc", "1"))
    assert code == ExitCode.RANK_FAILED and "null bytes (" in err and "script.py)" in err


def test_an_error_of_ours_keeps_its_exit_code_and_has_no_traceback(tmp_path: Path) -> None:
    death = "from shardwise.errors import DataError; raise DataError('data file x: empty')"
    code, _, err = finish(start(tmp_path, ONE_DIES.format(death=death), "--nproc", "2"))
    assert code == ExitCode.USAGE
    assert err.strip() == "shardwise: rank 1 failed: data file x: empty"


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("death", "text"),
    [("os.kill(os.getpid(), 9)", "killed by SIGKILL"), ("raise SystemExit(7)", "ended with status 7")],
)
def test_a_rank_that_dies_in_silence_is_named(tmp_path: Path, death: str, text: str) -> None:
    code, _, err = finish(start(tmp_path, ONE_DIES.format(death=death), "--nproc", "2"))
    assert code == ExitCode.RANK_FAILED
    assert "rank 1" in err and text in err


def test_the_first_failure_is_reported_and_not_its_echo(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, time
there = pathlib.Path({str(tmp_path / "there")!r})
if os.environ["RANK"] == "0":
    while not there.exists():  # the other one may start late
        time.sleep(0.001)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
there.touch()
time.sleep(0.02)
raise ValueError("the cause")
"""
    code, _, err = finish(start(tmp_path, script, "--nproc", "2"))
    assert code == ExitCode.RANK_FAILED
    assert err.splitlines()[-1] == "rank 1 failed: ValueError: the cause"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED),
        (signal.SIGTERM, ExitCode.TERMINATED),
        (signal.SIGUSR1, ExitCode.PREEMPTED),
    ],
)
def test_a_signal_lets_ranks_save(
    patient: tuple[subprocess.Popen[str], list[int]], tmp_path: Path, number: signal.Signals, code: ExitCode
) -> None:
    process, _ = patient
    process.send_signal(number)
    found, _, err = finish(process)
    assert found == code and err.startswith(f"shardwise: ended by {number.name} ({code:d}); a loop of steps() finishes")
    assert err.count("\n") == 1
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


def test_a_signal_that_comes_twice_at_once_is_one(
    patient: tuple[subprocess.Popen[str], list[int]], tmp_path: Path
) -> None:
    """As `scancel --signal=TERM` does: SLURM signals what it has started, and srun passes its own signal on."""
    process, ranks = patient
    for pid in (process.pid, *ranks, process.pid):
        os.kill(pid, signal.SIGTERM)
    found, _, err = finish(process)
    assert found == ExitCode.TERMINATED and err.startswith("shardwise: ended by SIGTERM (143)")
    assert err.count("\n") == 1
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


def test_a_signal_that_comes_again_while_the_launcher_ends_changes_no_exit_code(
    patient: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, _ = patient
    process.send_signal(signal.SIGUSR1)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("shardwise: ended by SIGUSR1")
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[0] == ExitCode.PREEMPTED


def test_a_second_signal_ends_at_once(stubborn: tuple[subprocess.Popen[str], list[int]], tmp_path: Path) -> None:
    process, _ = stubborn
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # the first one waits for the ranks
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == ExitCode.KILLED and err.startswith("shardwise: ended at once by a second signal, or")
    assert time.monotonic() - begun < 10
    assert not (tmp_path / "saved0").exists()


def test_when_the_grace_period_is_over_ranks_are_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PATIENT.format(stubborn=True))
    job = f"Job(target={str(tmp_path / 'script.py')!r}, args=({str(tmp_path)!r},), nproc=2, signal_grace_s=1.0)"
    code = "import sys; from shardwise.launch.job import Job; from shardwise.launch.programs import run_programs; "
    process = subprocess.Popen([sys.executable, "-c", code + f"sys.exit(run_programs({job}).exit_code)"])
    end = time.monotonic() + 60
    while not (tmp_path / "ready1").exists() or not (tmp_path / "ready0").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    begun = time.monotonic()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=30) == ExitCode.KILLED
    assert 1 <= time.monotonic() - begun < 10
    assert not any(alive(int((tmp_path / f"ready{rank}").read_text())) for rank in (0, 1))


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(") ")[2][0] != "Z"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells a process that its parent died")
def test_ranks_do_not_outlive_a_killed_launcher(patient: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = patient
    process.kill()
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, out, err = finish(start(tmp_path, HELLO, "--nproc", "2", "--port", port))
    assert code == ExitCode.LAUNCH
    assert f"127.0.0.1:{port}" in err and "in use" in err
    assert out == ""


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["dp2 tp2", "--nproc", "2"], ExitCode.REFUSED, "world.size"),
        (["dpp2"], ExitCode.REFUSED, "stand after `--`"),
        (["none.toml"], ExitCode.USAGE, "none.toml"),
        (["train.py"], ExitCode.REFUSED, "the script is first: shardwise run train.py dp2"),
    ],
)
def test_a_plan_that_does_not_fit_starts_nothing(tmp_path: Path, words: list[str], code: ExitCode, text: str) -> None:
    found, out, err = finish(start(tmp_path, HELLO, *words))
    assert (found, out) == (code, "")
    assert text in err


@pytest.mark.parametrize(("ranks", "remarks"), [(300, 1), (9, 1), (8, 0)])
def test_many_ranks_on_few_cores_are_remarked_upon(
    ranks: int, remarks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` and `train` both start through here; nothing is refused."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("shardwise.cli.run._run_once", lambda *_: Outcome(exit_code=ExitCode.OK))
    (tmp_path / "script.py").touch()
    assert start_job(Job(target=str(tmp_path / "script.py"), nproc=ranks)) == ExitCode.OK
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == remarks and all(line.startswith(f"shardwise: {ranks} ranks on 2 cores: ") for line in lines)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise", "run", str(tmp_path / "none.py")], capture_output=True, text=True
    )
    assert ran.returncode == ExitCode.USAGE
    assert "does not exist" in ran.stderr


def test_under_a_launcher_this_process_is_the_rank(tmp_path: Path) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    code, out, err = finish(start(tmp_path, HELLO, "dp2", **env))
    assert (code, out.strip()) == (0, "rank 1 of 2 ['dp2']"), err


def test_an_allocation_without_srun_is_told_the_line(tmp_path: Path) -> None:
    code, _, err = finish(start(tmp_path, HELLO, "dp4", SLURM_NTASKS="4", SLURM_JOB_NODELIST="n[1-2]"))
    assert code == ExitCode.LAUNCH
    assert "srun --ntasks=4 shardwise run" in err


def test_dry_run_and_json(tmp_path: Path) -> None:
    code, out, err = finish(start(tmp_path, HELLO, "dp2", "--dry-run", "--json"))
    assert code == 0, err
    answer = json.loads(out)
    assert (answer["world"], answer["plan"]["shorthand"]) == (2, "dp2 / fp32")
    assert "script.py" in answer["command"]


def test_a_plan_for_a_cluster_is_not_started_on_a_laptop_unless_it_is_said_twice(tmp_path: Path) -> None:
    most = THRONG * len(os.sched_getaffinity(0))
    code, out, err = finish(start(tmp_path, HELLO, f"dp{most + 1}"))
    assert code == ExitCode.USAGE and not out
    assert f"{most + 1} processes are to be started here: found " in err and f"or say --nproc {most + 1} too" in err
    check_crowd(most, said=False)
    check_crowd(most + 1, said=True)
