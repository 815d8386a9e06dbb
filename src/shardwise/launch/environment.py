"""The only reader of launchers' variables: RANK, WORLD_SIZE, SLURM_*, OMPI_*, PMI_*, MASTER_*, SHARDWISE_INIT.

`read_environment` is a pure function of a mapping. It imports no torch and nothing of Shardwise but errors,
so every layer may call it (the shape test lists it as the one exception to `launch` being layer 5).

It never guesses a world of one: when any launcher's variable says that there are more processes, either all
the variables are there and agree, or `LaunchError` says which line to type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import LaunchError

Launcher = Literal["none", "torchrun", "slurm", "openmpi", "mpich"]
LOCAL_INIT = "local"
"""`Launch.init` of a world of one: no rendezvous is needed."""

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM numbers the batch script and interactive shells as steps from here on; they are not srun's tasks."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Who this process is, as its launcher says."""

    launcher: Launcher
    rank: int
    world: int
    local_rank: int
    """Index of this process among those of its node: the device index."""
    local_world: int
    init: str
    """How ranks find each other: `env://`, `tcp://host:port`, `file:///path`, or `local` for a world of one."""
    node: int | None = None
    """Index of the node; None when the launcher does not say."""


WITNESS = "SHARDWISE_WITNESS"
"""The directory where the ranks of a run that is verified leave what they did; set by `shardwise verify`."""


def witness_directory(env: Mapping[str, str]) -> str | None:
    """Where this process shall leave what its steps did; None: nobody verifies it, as nearly always.

    >>> witness_directory({}) is None
    True
    """
    return env.get(WITNESS) or None


BACKEND = "SHARDWISE_BACKEND"
"""The back-end of an `open_mesh` that names none; set by `shardwise verify` where ranks share a device."""
HOST = "host"
"""The back-end whose messages pass through the host's memory: ranks may share a device."""


def asked_backend(env: Mapping[str, str]) -> str | None:
    """The back-end that the environment asks for; None: the device's own.

    >>> asked_backend({"SHARDWISE_BACKEND": "host"}), asked_backend({})
    ('host', None)
    """
    return env.get(BACKEND) or None


RECOVER = "SHARDWISE_RECOVER"
"""Who a rank is to the supervisor that keeps copies of its state; set by `--recover`."""


def recovery_place(env: Mapping[str, str]) -> str | None:
    """What the supervisor says to this rank (see `shardwise.train.kept.outliving.Place`); None: there is none.

    >>> recovery_place({}) is None
    True
    """
    return env.get(RECOVER) or None


def recovering_job(env: Mapping[str, str]) -> str | None:
    """Id of the job that recovers, the same for all sets of processes that it starts: 32 hexadecimal digits.

    >>> recovering_job({"SHARDWISE_RECOVER": '{"job": "ab"}'}), recovering_job({})
    ('ab', None)
    """
    place = recovery_place(env)
    return str(json.loads(place)["job"]) if place else None


def read_environment(env: Mapping[str, str], *, command: str = "python train.py") -> Launch:
    """Who this process is, from the variables of torchrun, SLURM, Open MPI, MPICH, or none of them.

    Precedence: RANK (torchrun, Kubernetes, by hand), Open MPI, Hydra (MPICH, Intel MPI), srun, plain PMI, none:
    the innermost launcher wins, as torchrun and mpirun are themselves often started by srun.
    `SHARDWISE_INIT` replaces the rendezvous of any of them. Cost: microseconds; no network, no torch.

    Args:
        env: usually `os.environ`.
        command: what the corrected line in an error message starts.

    Raises:
        LaunchError: variables are missing, malformed, or disagree with each other.

    Example:
        >>> env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}
        >>> read_environment(env).init
        'env://'
    """
    read, why = _choose(env, command)
    launch = read(env, command)
    _check(launch, why, command)
    _check_declared_world(launch, env, command)
    return launch


def _choose(env: Mapping[str, str], command: str) -> tuple[Callable[[Mapping[str, str], str], Launch], str]:
    """The reader to use and the variable that decided."""
    if "RANK" in env:
        return _read_torchrun, "RANK"
    if "OMPI_COMM_WORLD_RANK" in env:
        return _read_openmpi, "OMPI_COMM_WORLD_RANK"
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:
        return _read_mpich, "PMI_RANK"
    if _is_srun_task(env):
        return _read_slurm, "SLURM_PROCID"
    if "PMI_RANK" in env:
        return _read_mpich, "PMI_RANK"
    _refuse_partial(env, command)
    alone = Launch(launcher="none", rank=0, world=1, local_rank=0, local_world=1, init=LOCAL_INIT, node=0)
    return (lambda _env, _command: alone), "no launcher"


def _is_srun_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process. A batch script's shell also has SLURM_PROCID=0, but no step of its own."""
    if "SLURM_PROCID" not in env:
        return False
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    if step is not None:
        return not (step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP)
    return env.get("ENVIRONMENT") != "BATCH" and not _is_batch_shell(env)


def _is_batch_shell(env: Mapping[str, str]) -> bool:
    """A batch shell lists one global task id on a node that was given several tasks."""
    ids, per_node = env.get("SLURM_GTIDS"), env.get("SLURM_TASKS_PER_NODE")
    return bool(ids and per_node) and len((ids or "").split(",")) == 1 and _tasks_on_node(per_node or "1", 0) > 1


def _refuse_partial(env: Mapping[str, str], command: str) -> None:
    """Variables that speak of a world, without the rank that would make this process part of it."""
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or env.get("SLURM_NPROCS")
    by_variable = {
        "WORLD_SIZE": f"torchrun --nproc-per-node={env.get('WORLD_SIZE')} {_script(command)}",
        "LOCAL_RANK": f"torchrun --nproc-per-node=2 {_script(command)}",
        "OMPI_COMM_WORLD_SIZE": f"mpirun -n {env.get('OMPI_COMM_WORLD_SIZE')} {command}",
        "PMI_SIZE": f"mpiexec -n {env.get('PMI_SIZE')} {command}",
    }
    for name, line in by_variable.items():
        if name in env and env[name] != ("1" if name != "LOCAL_RANK" else "0"):
            missing = {"OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK"}.get(name, "RANK")
            raise LaunchError(
                f"cannot tell which rank this process is: {name}={env[name]!r} is set but {missing} is not; "
                f"a launcher sets both; start with `{line}`, or unset {name} to run one process"
            )
    if tasks is not None and tasks != "1":
        raise LaunchError(
            f"this shell has a SLURM allocation of {tasks} tasks (SLURM_NTASKS={tasks}), but srun did not start this "
            f"process: it has no task number (SLURM_PROCID of a step); it would train alone, {tasks} times too small; "
            f"start with `srun --ntasks={tasks} {command}`, or `env -u SLURM_NTASKS {command}` for one process"
        )
    if "SHARDWISE_INIT" in env:
        raise LaunchError(
            f"cannot tell which rank this process is: SHARDWISE_INIT={env['SHARDWISE_INIT']!r} is set, RANK and "
            f"WORLD_SIZE are not; set `RANK=0 WORLD_SIZE=2 LOCAL_RANK=0` (and so on per process), or unset it"
        )


def _read_torchrun(env: Mapping[str, str], command: str) -> Launch:
    if "WORLD_SIZE" not in env:
        raise LaunchError(
            f"cannot tell how many ranks there are: RANK={env['RANK']!r} is set but WORLD_SIZE is not; "
            f"a launcher sets both; start with `torchrun --nproc-per-node=2 {_script(command)}`, or unset RANK"
        )
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_world = _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else None
    if "LOCAL_RANK" in env:
        local_rank = _number(env, "LOCAL_RANK")
    elif world == 1:
        local_rank = 0
    elif local_world:
        local_rank = rank % local_world
    else:
        raise LaunchError(
            f"rank {rank} of {world} does not know its device: RANK and WORLD_SIZE are set, LOCAL_RANK is not; "
            f"set LOCAL_RANK to this process's index on its node (`LOCAL_RANK={rank}` on a single node), or start "
            f"with `torchrun --nproc-per-node={world} {_script(command)}`"
        )
    node = _number(env, "GROUP_RANK") if "GROUP_RANK" in env else None
    init = _init(env, "env://", world)
    if init == "env://" and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env)
        raise LaunchError(
            f"rank {rank} of {world} cannot meet the others: {missing} not set; set `MASTER_ADDR=<host of rank 0> "
            f"MASTER_PORT=29500` on every rank, or start with `torchrun --nproc-per-node={world} {_script(command)}`"
        )
    return Launch(
        launcher="torchrun",
        rank=rank,
        world=world,
        local_rank=local_rank,
        # Without LOCAL_WORLD_SIZE (set by hand) nothing says more than that this rank exists on its node.
        local_world=(world if rank == local_rank else local_rank + 1) if local_world is None else local_world,
        init=init,
        node=node,
    )


def master_place(env: Mapping[str, str]) -> tuple[str, bool]:
    """`tcp://host:port` for `env://`, and whether an agent of torch elastic has opened a store there."""
    return f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}", env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _read_openmpi(env: Mapping[str, str], command: str) -> Launch:
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    _need(env, names, "OMPI_COMM_WORLD_RANK", f"mpirun -n 2 {command}")
    world, local_rank = (_number(env, name) for name in names)
    local_world = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE") if "OMPI_COMM_WORLD_LOCAL_SIZE" in env else world
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    return Launch(
        launcher="openmpi",
        rank=_number(env, "OMPI_COMM_WORLD_RANK"),
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        init=_init(env, lambda: _mpi_address(env, job, world == local_world, f"mpirun -n {world}", command), world),
    )


def _read_mpich(env: Mapping[str, str], command: str) -> Launch:
    _need(env, ("PMI_SIZE",), "PMI_RANK", f"mpiexec -n 2 {command}")
    rank, world = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    if world > 1 and "MPI_LOCALRANKID" not in env:
        raise LaunchError(
            f"rank {rank} of {world} does not know its device: PMI_RANK and PMI_SIZE are set, MPI_LOCALRANKID is not; "
            f"start with Hydra's `mpiexec -n {world} {command}`, or with `srun --ntasks={world} {command}`"
        )
    local_world = _number(env, "MPI_LOCALNRANKS") if "MPI_LOCALNRANKS" in env else world
    return Launch(
        launcher="mpich",
        rank=rank,
        world=world,
        local_rank=_number(env, "MPI_LOCALRANKID") if "MPI_LOCALRANKID" in env else 0,
        local_world=local_world,
        init=_init(env, lambda: _mpi_address(env, "", world == local_world, f"mpiexec -n {world}", command), world),
    )


def _read_slurm(env: Mapping[str, str], command: str) -> Launch:
    size = next((n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if n in env), "")
    if not size:
        raise LaunchError(
            f"cannot tell how many ranks there are: SLURM_PROCID={env['SLURM_PROCID']!r} is set but SLURM_NTASKS is "
            f"not; start with `srun --ntasks=2 {command}`"
        )
    _need(env, ("SLURM_LOCALID",), "SLURM_PROCID", f"srun --ntasks={env[size]} {command}")
    world = _number(env, size)
    node = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else None
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    local_rank = _number(env, "SLURM_LOCALID")
    local_world = _tasks_on_node(per_node, node or 0) if per_node else max(local_rank + 1, 1)
    return Launch(
        launcher="slurm",
        rank=_number(env, "SLURM_PROCID"),
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        init=_init(env, lambda: _slurm_address(env, command), world),
        node=node,
    )


def _init(env: Mapping[str, str], default: str | Callable[[], str], world: int) -> str:
    """SHARDWISE_INIT when set; else what the launcher gives. A world of one needs none but may have one."""
    chosen = env.get("SHARDWISE_INIT")
    if chosen is not None:
        if not re.match(r"(env://|tcp://.+:\d+|file://.+)", chosen):
            raise LaunchError(
                f"SHARDWISE_INIT={chosen!r} is not a rendezvous; use `env://`, `tcp://host:port` or `file:///path`"
            )
        return chosen
    if world == 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        return LOCAL_INIT
    return default if isinstance(default, str) else default()


def _slurm_address(env: Mapping[str, str], command: str) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    host = env.get("MASTER_ADDR") or (first_host(nodes) if nodes else None)
    if not host:
        raise LaunchError(
            f"rank {env['SLURM_PROCID']} cannot meet the others: neither SLURM_STEP_NODELIST, SLURM_JOB_NODELIST nor "
            f"MASTER_ADDR is set; start with `srun --ntasks={env.get('SLURM_NTASKS', 2)} {command}`, or export "
            f"MASTER_ADDR=<host of rank 0>"
        )
    job, step = (re.sub(r"\D", "", env.get(name, "")) or "0" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return f"tcp://{host}:{env.get('MASTER_PORT') or _port(int(job) * 7 + int(step))}"


def _mpi_address(env: Mapping[str, str], job: str, one_node: bool, start: str, command: str) -> str:
    nodes = env.get("SLURM_JOB_NODELIST")
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if one_node else first_host(nodes) if nodes else None)
    if not host:
        raise LaunchError(
            "this MPI job spans several nodes and MPI does not say where rank 0 is: MASTER_ADDR is not set; start with "
            f"`MASTER_ADDR=<host of rank 0> MASTER_PORT=29500 {start} -x MASTER_ADDR -x MASTER_PORT {command}`"
        )
    return f"tcp://{host}:{env.get('MASTER_PORT') or _port(sum(ord(c) * 31**i for i, c in enumerate(job)))}"


def _port(number: int) -> int:
    """The same port on every rank, different for jobs that share a host; below Linux's ephemeral range (32768)."""
    return 20_000 + number % 12_000


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list.

    Raises:
        LaunchError: brackets do not close.

    Example:
        >>> first_host("gpu[007-012,020],login1"), first_host("rack[1-2]n[3-4]-ib")
        ('gpu007', 'rack1n3-ib')
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes.strip())
    if not first or nodes.count("[") != nodes.count("]"):
        raise LaunchError(f"cannot read the node list {nodes!r}; export MASTER_ADDR=<host of rank 0>")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _tasks_on_node(text: str, node: int) -> int:
    """Tasks on one node from SLURM's run-length list: `4(x2),3` is 4, 4 and 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise LaunchError(f"cannot read SLURM_TASKS_PER_NODE={text!r}; expected for example `4(x2),3`")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else counts[-1]


def _need(env: Mapping[str, str], names: tuple[str, ...], because: str, line: str) -> None:
    missing = [name for name in names if name not in env]
    if missing:
        raise LaunchError(
            f"the launcher's variables are incomplete: {because}={env[because]!r} is set, {' and '.join(missing)} not; "
            f"the launcher sets all of them; start with `{line}`, or unset {because}"
        )


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise LaunchError(f"{name}={env[name]!r} is not a whole number; the launcher sets it: unset it") from None


def _check(launch: Launch, because: str, command: str) -> None:
    if not 0 <= launch.rank < launch.world:
        raise LaunchError(
            f"rank {launch.rank} is not in a world of {launch.world} (from {because}); ranks go from 0 to world - 1; "
            f"unset the variables and start with `torchrun --nproc-per-node={max(launch.world, 1)} {_script(command)}`"
        )
    if not 0 <= launch.local_rank < launch.local_world <= launch.world:
        raise LaunchError(
            f"rank {launch.rank}: local rank {launch.local_rank} of {launch.local_world} processes on this node does "
            f"not fit a world of {launch.world} (from {because}); needed: 0 <= local rank < processes on the node <= "
            f"world; unset the variables and let the launcher set them"
        )


def _check_declared_world(launch: Launch, env: Mapping[str, str], command: str) -> None:
    """WORLD_SIZE exported by hand beside another launcher (a common batch script) must agree with it."""
    declared = env.get("WORLD_SIZE")
    if launch.launcher not in ("none", "torchrun") and declared is not None and declared != str(launch.world):
        raise LaunchError(
            f"WORLD_SIZE={declared} but {launch.launcher} started {launch.world} processes; unset WORLD_SIZE, or start "
            f"{declared}: `{'srun --ntasks=' if launch.launcher == 'slurm' else 'mpirun -n '}{declared} {command}`"
        )


def _script(command: str) -> str:
    """What torchrun takes: the command without its interpreter."""
    return re.sub(r"^\S*python\S*\s+", "", command)
