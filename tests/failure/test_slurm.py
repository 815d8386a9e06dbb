"""Under a real SLURM: two nodes of a cluster of its own on this machine, as a user of it without rights."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shardwise.errors import ExitCode
from shardwise.testing.killer import processes_below
from tests.failure.test_launchers import BARE, SCRIPT, free_port, ranks_said
from tests.failure.test_recovery import SCRIPT as RECOVERING
from tests.failure.test_recovery import log_of

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""
SIZES = "--model tiny --layers 2 --dim 32 --heads 2 --ffn 48 --seq 32 --batch 4 --device cpu"
STEPS = 500
"""More than are made while the signal is on its way."""
PAGE = Path(__file__).parents[2] / "docs" / "launch.md"
NEEDS = ("slurmctld", "slurmd", "srun", "sbatch")
pytestmark = [
    pytest.mark.slow,
    # programs of the system, which pip cannot bring; .ci/run installs them
    pytest.mark.skipif(
        any(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None for name in NEEDS),
        reason="needs SLURM: apt-get install slurm-wlm",
    ),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of who submits to it. Names of its nodes have no address: `MASTER_ADDR` says where they are.

    `cred_expire` is for how long a job that was requeued waits.
    """
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    ports = [free_port() for _ in range(3)]
    conf.write_text(CONF.format(host=socket.gethostname(), user=getpass.getuser(), folder=folder, ports=ports))
    env = BARE | {"SLURM_CONF": str(conf), "MASTER_ADDR": "127.0.0.1", "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    commands = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemons = [subprocess.Popen(command, env=env, **quiet) for command in commands]
    try:
        wait(lambda: "idle 2" in of(env, "sinfo", "-h", "-o", "%T %D"), "two idle nodes", 60)
        yield env
        of(env, "scancel", "--user", getpass.getuser())
        wait(lambda: not of(env, "squeue", "-h"), "no job", 60)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def of(env: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout.strip()


def wait(until: Callable[[], bool], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def ranks_of_job(out: Path) -> list[psutil.Process]:
    """SLURM's own daemons start the supervisors: they are no children of this process."""
    said = [(p, p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    supervisors = [p for p, words in said if words[1:4] == ["-m", "shardwise", "run"] and str(out) in words]
    return [rank for supervisor in supervisors for _, rank in processes_below(supervisor.pid, "rank ")]


def test_srun_starts_the_ranks(slurm: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, str(script), "fsdp2 tp2", "60"]
    text = of(slurm, *command)
    assert ranks_said(text) == [f"total 1111 rank {rank} of 4" for rank in range(4)], text


@pytest.mark.soak  # in every run: supervisors of two hosts, and srun with ranks
def test_srun_starts_supervisors_that_recover(slurm: dict[str, str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "shardwise", "run", "--recover", "--events", str(tmp_path / "events")]
    words += [str(RECOVERING), "fsdp4", "--", str(tmp_path), "1000000"]
    command = ["srun", "-N2", "--ntasks-per-node=1", *words]
    job = subprocess.Popen(command, env=slurm | {"PACE_S": "0.05"}, stderr=subprocess.PIPE, text=True)
    wait(lambda: len(lines_of(tmp_path / "log")) > 2, "two steps", 120)
    for number, rank in enumerate((3, 0), 1):  # one of each node
        next(found for found in ranks_of_job(tmp_path) if found.name() == f"rank {rank}").kill()
        wait(lambda number=number: len(lines_of(tmp_path / "events")) >= number, f"recovery {number}", 60)
    of(slurm, "scancel", "--signal=TERM", of(slurm, "squeue", "-h", "-o", "%i"))
    _, err = job.communicate(timeout=60)
    assert f"Exited with exit code {ExitCode.TERMINATED.value}" in err, err
    assert "recovery 1: rank 3: the process was killed by SIGKILL" in err, err
    events = [json.loads(line) for line in lines_of(tmp_path / "events")]
    assert [(e["event"], e["rank"]) for e in events] == [("recovery", 3), ("recovery", 0)]
    steps = [int(line.split()[0]) for line in log_of(tmp_path)]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))


def test_a_batch_job_is_warned_requeued_and_goes_on(slurm: dict[str, str], tmp_path: Path) -> None:
    """What docs/launch.md shows: SIGUSR1 ends in a checkpoint and 138, upon which the script asks to be run again."""
    out, script = tmp_path / "run", tmp_path / "job.sh"
    (shown,) = re.findall(r"```text\n(#!/bin/bash\n#SBATCH.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    train = f"{sys.executable} -m shardwise train --steps {STEPS} --eval-every {STEPS} --no-sample {SIZES}"
    train += f" --data {tmp_path / 'text.txt'}"
    script.write_text(shown.replace("shardwise train", train).replace("/shared/runs/a", str(out)))
    job = of(slurm, "sbatch", "--parsable", "-o", str(tmp_path / "log"), str(script))
    wait(lambda: len(lines_of(out / "metrics.jsonl")) > 3, "some steps", 120)
    of(slurm, "scancel", "--signal=USR1", job)
    said = tmp_path / "log"
    wait(lambda: "asked to stop; saved to" in said.read_text(), "the checkpoint", 60)
    wait(lambda: "PENDING" in of(slurm, "squeue", "-h", "-j", job, "-o", "%T"), "the job in the queue", 60)
    wait(lambda: not of(slurm, "squeue", "-h", "-j", job), "the end", 120)
    assert "ExitCode=0:0" in of(slurm, "scontrol", "show", "job", job)
    assert "resume proof: " in said.read_text()
    records = [json.loads(line) for line in lines_of(out / "metrics.jsonl")]
    assert [record["step"] for record in records if "loss" in record] == list(range(1, STEPS + 1))
