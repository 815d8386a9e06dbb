"""`open_mesh` as launchers start it: torchrun, mpirun, srun's variables, by hand; and what it says when that fails."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import ExitCode, LaunchError
from shardwise.launch.environment import read_environment
from shardwise.parallel import mesh as mesh_module
from shardwise.testing import World

SCRIPT = """
import sys
import torch
import shardwise as sw
from shardwise.errors import ShardwiseError
try:
    with sw.open_mesh(sw.Plan.parse(sys.argv[1]), device="cpu", timeout_s=float(sys.argv[2])) as mesh:
        total = mesh.all_reduce_sum(torch.tensor([10.0 ** mesh.rank]))
        sys.stdout.write("total %d rank %d of %d\\n" % (total, mesh.rank, mesh.world))  # ranks share it: one write
        sys.stdout.flush()
    assert not torch.distributed.is_initialized()
    assert not {"torch.distributed.fsdp", "torch.distributed.pipelining"} & set(sys.modules)  # half of an import
except ShardwiseError as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(error.exit_code)
"""
LAUNCHERS = re.compile(r"(RANK|WORLD_SIZE|LOCAL_|GROUP_RANK|MASTER_|SLURM_|OMPI_|PMI|PMIX|TORCHELASTIC|SHARDWISE_)")
BARE = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "script.py"
    path.write_text(SCRIPT)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str | Path], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(list(map(str, command)), text=True, env=BARE | (env or {}), **both)


def finish(*processes: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Exit codes, and everything that was printed."""
    try:
        text = "".join(process.communicate(timeout=120)[0] for process in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return [process.returncode for process in processes], text


def python(script: Path, plan: str, timeout_s: float = 60) -> list[str | Path]:
    return [sys.executable, script, plan, str(timeout_s)]


def ranks_said(text: str) -> list[str]:
    return sorted(re.findall(r"total \d+ rank \d of \d", text))


BOTH = ["total 11 rank 0 of 2", "total 11 rank 1 of 2"]


def test_torchrun(script: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    codes, text = finish(start([*torchrun, script, "dp2", "60"]))
    assert (codes, ranks_said(text)) == ([0], BOTH), text


def test_torchrun_with_a_world_that_does_not_match(script: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    codes, text = finish(start([*torchrun, script, "fsdp2 tp2", "60"]))
    assert codes != [0]
    said = "LaunchError open_mesh: the plan `fsdp2 tp2 / fp32` needs 4 processes, found 2 (launcher: torchrun); start 4"
    assert said in text and "nearest plan that works: `tp2 zero3 / fp32`" in text, text


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin")
def test_mpirun(script: Path) -> None:
    mpirun = ["mpirun", "-np", "2", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    codes, text = finish(start([*mpirun, *python(script, "dp2")], {"MASTER_PORT": str(free_port())}))
    assert (codes, ranks_said(text)) == ([0], BOTH), text


@pytest.mark.soak  # in every run: mpirun with one
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin")
def test_mpirun_without_a_port_given(script: Path) -> None:
    mpirun = ["mpirun", "-np", "2", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    codes, text = finish(start([*mpirun, *python(script, "tp2")]))
    assert (codes, ranks_said(text)) == ([0], BOTH), text


def srun(rank: int, port: int) -> dict[str, str]:
    """What srun sets for a step of two tasks on this machine."""
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip


@pytest.mark.soak  # in every run: srun itself, where there is SLURM
def test_the_variables_of_srun(script: Path) -> None:
    port = free_port()
    codes, text = finish(*(start(python(script, "dp2"), srun(rank, port)) for rank in (0, 1)))
    assert (codes, ranks_said(text)) == ([0, 0], BOTH), text


def by_hand(rank: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), **more}


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", ["env", "tcp", "file"])
def test_variables_set_by_hand(script: Path, tmp_path: Path, kind: str) -> None:
    port = str(free_port())
    more = {
        "env": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        "tcp": {"SHARDWISE_INIT": f"tcp://127.0.0.1:{port}"},
        "file": {"SHARDWISE_INIT": f"file://{tmp_path}/rendezvous"},
    }[kind]
    codes, text = finish(*(start(python(script, "dp2"), by_hand(rank, **more)) for rank in (0, 1)))
    assert (codes, ranks_said(text)) == ([0, 0], BOTH), text


def test_no_launcher_is_one_process(script: Path) -> None:
    codes, text = finish(start(python(script, "dp1")))
    assert (codes, ranks_said(text)) == ([0], ["total 1 rank 0 of 1"]), text


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE='2' is set but RANK is not", "torchrun --nproc-per-node=2"]),
        (by_hand(0), ["MASTER_ADDR and MASTER_PORT not set", "MASTER_PORT=29500"]),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}, ["SLURM_NTASKS=2", "srun --ntasks=2"]),
        ({}, ["needs 2 processes, found 1 (launcher: none)", "nearest plan that works: `dp1 / fp32`"]),
    ],
)
def test_a_partial_environment_never_trains_alone(script: Path, env: dict[str, str], words: list[str]) -> None:
    codes, text = finish(start(python(script, "dp2"), env))
    assert codes == [ExitCode.LAUNCH] and "LaunchError" in text
    assert [word for word in words if word not in text] == [], text


@pytest.mark.soak  # in every run: the same of `shardwise run`, tests/failure/test_run_verb.py
def test_a_port_in_use(script: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        env = by_hand(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(other.getsockname()[1]))
        codes, text = finish(start(python(script, "dp2", 5), env))
    assert codes == [ExitCode.LAUNCH], text
    said = text[text.index("LaunchError") :]
    assert "rank 0 of 2 could not join" in said and "EADDRINUSE" in said, text
    assert "no other job uses the port" in said


def test_a_rank_that_never_comes(script: Path) -> None:
    env = by_hand(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    codes, text = finish(start(python(script, "dp2", 2), env))
    assert codes == [ExitCode.LAUNCH], text
    assert "rank 0 of 2 could not join" in text and "check that every rank was started" in text, text


@pytest.mark.soak  # in every run: another rank that never comes
def test_rank_zero_that_never_comes(script: Path) -> None:
    env = by_hand(1, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    codes, text = finish(start(python(script, "dp2", 2), env))
    assert codes == [ExitCode.LAUNCH], text
    assert "rank 1 of 2 could not join" in text and "can reach the address of rank 0" in text, text


def test_a_host_without_an_address(script: Path) -> None:
    env = by_hand(1, MASTER_ADDR="rank0.invalid", MASTER_PORT=str(free_port()))
    codes, text = finish(start(python(script, "dp2", 2), env))
    assert codes == [ExitCode.LAUNCH], text
    assert "(rank0.invalid: Name or service not known; export MASTER_ADDR=<an address of rank 0's host>)" in text, text


def joined(kind: str, address: str) -> tuple[float, bool]:
    """Rendezvous given in the call; SHARDWISE_INIT of the pool would lead elsewhere."""
    launch = read_environment(os.environ)
    init: object = address
    if kind == "store":
        host, port = address.removeprefix("tcp://").split(":")
        init = dist.TCPStore(host, int(port), launch.world, launch.rank == 0, timeout=timedelta(seconds=30))
    elif kind == "hash":
        init = dist.HashStore()
    with sw.open_mesh(sw.Plan.parse(f"dp{launch.world}"), device="cpu", init=init) as mesh:  # type: ignore[arg-type]
        total = mesh.all_reduce_sum(torch.tensor([10.0**mesh.rank])).item()
        mesh.barrier()
    return total, dist.is_initialized()


@pytest.mark.parametrize("kind", ["tcp", "file", "store"])
def test_init_given_in_the_call(world: World, tmp_path: Path, kind: str) -> None:
    address = f"file://{tmp_path}/meet" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    assert world(2, joined, kind, address) == [(11.0, False)] * 2


def test_a_store_in_memory_for_one_process(world: World) -> None:
    assert world(1, joined, "hash", "") == [(1.0, False)]


def inside_a_group_of_its_own() -> tuple[str, float, bool]:
    """A process group that the user made is used, and left alone."""
    launch = read_environment(os.environ)
    dist.init_process_group("gloo", init_method=launch.init, rank=launch.rank, world_size=launch.world)
    try:
        with sw.open_mesh(sw.Plan.parse("dp4"), device="cpu"):
            pass
    except LaunchError as error:
        said = str(error)
    with sw.open_mesh(sw.Plan.parse("dp2"), device="cpu") as mesh:
        total = mesh.all_reduce_sum(torch.tensor([10.0**mesh.rank])).item()
    return said, total, dist.is_initialized()


def test_a_process_group_that_is_there_already(world: World) -> None:
    for said, total, still_there in world(2, inside_a_group_of_its_own):
        assert "needs 4 processes, found 2 (an initialised process group)" in said
        assert (total, still_there) == (11.0, True)


def gloo_threads(patched: bool) -> tuple[int, int]:
    """Threads of process groups inside and after a mesh that is kept; each may abort a process that ends at once."""
    if patched:
        mesh_module.release_groups = lambda mesh: None
    with sw.open_mesh(sw.Plan.parse("dp2 tp2"), device="cpu") as mesh:
        mesh.barrier()
        inside = num_threads()
    assert mesh.rank >= 0  # still held
    return inside, num_threads()


def num_threads() -> int:
    return sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())


def test_no_thread_outlives_the_mesh(world: World) -> None:
    for inside, after in world(4, gloo_threads, False):
        assert inside > 0 and after == 0


def test_negative_control_torch_keeps_the_threads_of_a_mesh_that_is_held(world: World) -> None:
    for inside, after in world(4, gloo_threads, True):
        assert 0 < after <= inside


def waits_for_the_other() -> tuple[str, float]:
    """Rank 1 stays away from a collective: rank 0 is not left waiting."""
    with sw.open_mesh(sw.Plan.parse("dp2"), device="cpu", timeout_s=2) as mesh:
        began = time.monotonic()
        try:
            if mesh.is_first:
                mesh.barrier()
            else:
                time.sleep(5)
        except RuntimeError as error:
            return str(error), time.monotonic() - began
        return "", time.monotonic() - began


def test_timeout_of_a_collective(world: World) -> None:
    said, waited = world(2, waits_for_the_other)[0]
    assert said and waited < 5, (said, waited)


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(sw.errors.ShardwiseError) as caught:
        yield
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cudaa"}, ["device='cudaa'", "no device of torch", "leave device= out"]),
        ({"device": "xpu:7"}, ["no device xpu:7", "this machine shows 0", "pass device='cpu'"]),
        ({"backend": "glooo"}, ["no back-end 'glooo'", "did you mean 'gloo'"]),
        ({"backend": "fake"}, ["no back-end 'fake'"]),
        ({"timeout_s": 0}, ["timeout_s: found 0", "seconds above 0"]),
        ({"timeout_s": float("inf")}, ["timeout_s: found inf"]),
        ({"init": "htp://x"}, ["could not join", "htp://x", "tcp://host:port"]),
        ({"init": "file:///no/such/folder/meet"}, ["could not join", "/no/such/folder is no folder", "file:///path"]),
    ],
)
def test_bad_options(options: dict[str, object], words: list[str]) -> None:
    with refused(*words), sw.open_mesh(sw.Plan(), **{"device": "cpu", **options}):  # type: ignore[arg-type]
        pass
    assert not dist.is_initialized()


def test_a_shorthand_in_place_of_a_plan() -> None:
    with refused("found 'dp2' of type str", "Plan.parse"), sw.open_mesh("dp2"):  # type: ignore[arg-type]
        pass
