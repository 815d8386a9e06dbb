"""What a fork server imports for a script."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from shardwise.launch.forking.server import can_fork, server_for
from shardwise.launch.job import Job
from shardwise.launch.warm import TRAINING, modules_of


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import shardwise as sw", TRAINING),
        ("from shardwise.models.gpt import GPT", TRAINING),
        ("def main():\n    import torch.nn.functional as F", ("torch", "torch.nn.functional")),
        ("from torch.distributed.fsdp import fully_shard", ("torch", "torch.distributed.fsdp")),
        ("import torch.utils.tensorboard", ("torch",)),  # what it imports may start threads
        ("import torchvision, shardwise_more", ()),
        ("from .torch import x", ()),
        ("import os", ()),
        ("not python", ()),
    ],
)
def test_modules_of_a_script(tmp_path: Path, text: str, modules: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert modules_of(script) == modules


def test_what_is_shared_is_there() -> None:
    """A server passes over what it cannot import."""
    assert [name for name in TRAINING if importlib.util.find_spec(name) is None] == []


def test_a_script_that_cannot_be_read_shares_nothing(tmp_path: Path) -> None:
    (tmp_path / "zeros.py").write_bytes(b"\0\0")
    assert modules_of(tmp_path / "zeros.py") == modules_of(tmp_path / "none.py") == ()


@pytest.mark.skipif(not can_fork(), reason="ranks are forked on Linux 5.3 and newer")
def test_a_single_rank_is_forked_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch")
    with server_for(Job(target=str(tmp_path / "script.py"), nproc=1)) as server:
        assert server is not None


def test_where_the_kernel_refuses_ranks_start_as_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    (tmp_path / "script.py").write_text("import torch")
    monkeypatch.setattr("os.pidfd_open", refuse, raising=False)
    assert not can_fork()
    with server_for(Job(target=str(tmp_path / "script.py"), nproc=2)) as server:
        assert server is None
