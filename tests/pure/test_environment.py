"""Launchers' variables: each case as a launcher leaves it, and each way in which they can be partial or disagree."""

from __future__ import annotations

import pytest

from shardwise.errors import ExitCode, LaunchError
from shardwise.launch.environment import first_host, read_environment

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "gpu[007-008]", "SLURM_JOB_ID": "123",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prte-7@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ALLOCATION = {k: v for k, v in SRUN.items() if k in ("SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_JOB_ID")}
BATCH_SCRIPT = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "ENVIRONMENT": "BATCH"}
del BATCH_SCRIPT["SLURM_STEP_ID"]


@pytest.mark.parametrize(
    ("env", "launcher", "ranks", "init"),
    [
        ({}, "none", (0, 1, 0, 1, 0), "local"),
        (TORCHRUN, "torchrun", (5, 8, 1, 4, 1), "env://"),
        (TORCHRUN | {"SHARDWISE_INIT": "file:///x/y"}, "torchrun", (5, 8, 1, 4, 1), "file:///x/y"),
        (TORCHRUN | SRUN, "torchrun", (5, 8, 1, 4, 1), "env://"),  # torchrun under srun: the innermost wins
        ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", (0, 1, 0, 1, None), "local"),
        (SRUN, "slurm", (3, 4, 1, 2, 1), "tcp://gpu007:20861"),
        (SRUN | {"MASTER_ADDR": "h", "MASTER_PORT": "7"}, "slurm", (3, 4, 1, 2, 1), "tcp://h:7"),
        (SRUN | {"WORLD_SIZE": "4"}, "slurm", (3, 4, 1, 2, 1), "tcp://gpu007:20861"),
        (ALLOCATION | {"SLURM_NTASKS": "1"}, "none", (0, 1, 0, 1, 0), "local"),
        (MPIRUN | {"MASTER_PORT": "9"}, "openmpi", (1, 2, 1, 2, None), "tcp://127.0.0.1:9"),
        (MPIRUN | SRUN | {"MASTER_PORT": "9"}, "openmpi", (1, 2, 1, 2, None), "tcp://127.0.0.1:9"),
        (HYDRA | {"MASTER_PORT": "9"}, "mpich", (1, 2, 1, 2, None), "tcp://127.0.0.1:9"),
    ],
)
def test_launchers(env: dict[str, str], launcher: str, ranks: tuple[int | None, ...], init: str) -> None:
    found = read_environment(env)
    assert found.launcher == launcher
    assert (found.rank, found.world, found.local_rank, found.local_world, found.node) == ranks
    assert found.init == init


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "texts"),
    [
        (without(TORCHRUN, "RANK"), ["WORLD_SIZE='8'", "RANK is not", "torchrun --nproc-per-node=8 train.py"]),
        (without(TORCHRUN, "WORLD_SIZE"), ["RANK='5'", "WORLD_SIZE is not", "torchrun"]),
        (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ["LOCAL_RANK is not", "LOCAL_RANK=5"]),
        (without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT not set", "MASTER_PORT=29500"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK='1'", "torchrun"]),
        (TORCHRUN | {"RANK": "8"}, ["rank 8", "world of 8"]),
        (TORCHRUN | {"RANK": "two"}, ["RANK='two'", "whole number"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["local rank 4 of 4"]),
        (TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, ["local rank 0 of 0 processes on this node"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "-4"}, ["of -4 processes on this node"]),
        (TORCHRUN | {"SHARDWISE_INIT": "node0:29500"}, ["SHARDWISE_INIT", "tcp://host:port"]),
        ({"SHARDWISE_INIT": "file:///x"}, ["SHARDWISE_INIT", "RANK=0 WORLD_SIZE=2"]),
        (ALLOCATION, ["4 tasks", "SLURM_NTASKS=4", "srun --ntasks=4 python train.py"]),
        (BATCH_SCRIPT, ["srun --ntasks=4 python train.py"]),
        (SRUN | {"SLURM_STEP_ID": "4294967290"}, ["srun --ntasks=4"]),  # the shell of an interactive allocation
        (without(SRUN, "SLURM_STEP_ID") | {"SLURM_GTIDS": "0"}, ["srun --ntasks=4"]),
        (without(SRUN, "SLURM_LOCALID"), ["SLURM_LOCALID not", "srun --ntasks=4"]),
        (without(SRUN, "SLURM_NTASKS"), ["SLURM_NTASKS is not", "srun"]),
        (without(SRUN, "SLURM_JOB_NODELIST"), ["SLURM_JOB_NODELIST", "MASTER_ADDR"]),
        (SRUN | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "slurm started 4", "srun --ntasks=8"]),
        (SRUN | {"SLURM_TASKS_PER_NODE": "two"}, ["SLURM_TASKS_PER_NODE='two'"]),
        (without(MPIRUN, "OMPI_COMM_WORLD_RANK"), ["OMPI_COMM_WORLD_SIZE", "mpirun -n 2 python train.py"]),
        (without(MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK"), ["OMPI_COMM_WORLD_LOCAL_RANK not"]),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, ["several nodes", "-x MASTER_ADDR"]),
        (without(HYDRA, "PMI_RANK"), ["PMI_SIZE", "mpiexec -n 2"]),
        (without(HYDRA, "MPI_LOCALRANKID"), ["MPI_LOCALRANKID is not", "srun --ntasks=2"]),
    ],
)
def test_partial_or_contradicting(env: dict[str, str], texts: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        read_environment(env)
    assert [text for text in texts if text not in str(caught.value)] == [], str(caught.value)
    assert caught.value.exit_code == ExitCode.LAUNCH


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_negative_control_no_missing_variable_gives_a_world_of_one(name: str) -> None:
    env = without(TORCHRUN, name, "LOCAL_WORLD_SIZE")
    with pytest.raises(LaunchError):
        read_environment(env)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu[007-012,020],login1", "gpu007"),
        ("login1,gpu[007-012]", "login1"),
        ("rack[1-2]n[3-4]-ib", "rack1n3-ib"),
        ("n[5]", "n5"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_broken_node_list() -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        first_host("gpu[007-")


def test_the_command_is_the_users() -> None:
    with pytest.raises(LaunchError, match=r"srun --ntasks=4 shardwise train run\.toml"):
        read_environment(ALLOCATION, command="shardwise train run.toml")
