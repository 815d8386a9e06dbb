"""What this machine offers to a run, without importing torch where the answer is plain."""

from __future__ import annotations

import shutil
import subprocess
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwise.cli.options.derive import Surroundings
from shardwise.hardware.cluster import Cluster, load_cluster
from shardwise.launch.environment import Launch, read_environment
from shardwise.launch.variables import variables

_ACCELERATOR_FILES = ("nvidia[0-9]*", "kfd", "dri/renderD*", "accel*", "davinci*", "habanalabs*")
"""In /dev: CUDA, ROCm, Intel and other GPUs, TPUs and their like. Without any of them Linux has no accelerator."""


def local_devices() -> tuple[str, int, str]:
    """Type and number of the devices that torch would use, and why.

    Cost: nothing on Linux without device files; else `import torch`.

    >>> local_devices()  # doctest: +SKIP
    ('cpu', 0, 'no accelerator in /dev')
    """
    if sys.platform.startswith("linux") and not any(
        match for pattern in _ACCELERATOR_FILES for match in Path("/dev").glob(pattern)
    ):
        return "cpu", 0, "this machine has no accelerator"
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "cpu", 0, f"torch {torch.__version__} sees no accelerator"
    count = torch.accelerator.device_count()
    return accelerator.type, count, f"torch sees {count} {accelerator.type} device{'s' if count != 1 else ''}"


def launched(*, nproc_given: bool, command: str) -> Launch | None:
    """Who this process is to torchrun, srun or mpirun; None when the ranks are still to be started, here.

    Args:
        nproc_given: the user says how many processes to start here: then a SLURM allocation around does not matter.
        command: for the corrected line of an error.

    Raises:
        LaunchError: the launcher's variables are partial or disagree.
    """
    environment = variables()
    inside = any(name in environment for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    if nproc_given and not inside and "SLURM_STEP_ID" not in environment:
        return None
    launch = read_environment(environment, command=command)
    # a world of one under torchrun may be what is left of a larger one: it must not start ranks of its own
    alone = launch.world == 1 and "TORCHELASTIC_RUN_ID" not in environment
    return None if launch.launcher == "none" or alone else launch


def surroundings(device: str | None, launch: Launch | None) -> Surroundings:
    """Facts for `derive`.

    Args:
        device: the type that the user asks for; None: what is found.
        launch: from `launched`.
    """
    kind, count, reason = local_devices() if device != "cpu" else ("cpu", 0, "asked for")
    return Surroundings(
        device=device or kind,
        cluster=_named_devices() if kind != "cpu" else None,
        num_devices=count,
        device_reason=reason,
        compiles=kind != "cpu" and _can_compile(),
        now=datetime.now(),
        launched_world=launch.world if launch else None,
    )


def _can_compile() -> bool:
    """Whether `torch.compile` finds what it needs for an accelerator: Triton, and a C compiler."""
    compilers = (variables().get("CC") or "cc", "gcc", "clang")
    return find_spec("triton") is not None and any(shutil.which(name) for name in compilers)


def _named_devices() -> Cluster | None:
    """The devices of this machine as a cluster; None where they have no known name.

    Asked in a process of its own: reading their properties starts the driver, and no worker could be forked after it.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        ask = f"from shardwise.hardware.local import discover; discover().save({str(file)!r})"
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, timeout=120, check=False)
        return load_cluster(file) if done.returncode == 0 else None
