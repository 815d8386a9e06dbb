"""`estimate --trace` counts what gloo takes where the cluster's devices are CPUs, and there alone."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from shardwise.cli.estimate import estimate

LARGE_BLOCKS = """
name = "large-blocks"
kind = "llama"
num_layers = 6
dim = 1024
num_heads = 16
ffn_dim = 4096
vocab_size = 512
max_seq_len = 64
"""


def peaks(spec: Path, cluster: str) -> tuple[float, float]:
    """Bytes of the closed form, and of the trace."""
    app = Typer()
    app.command()(estimate)
    words = ["fsdp8 / bf16 / recompute=blocks", "--model", str(spec), "--cluster", cluster, "--seq", "16"]
    result = CliRunner().invoke(app, [*words, "--global-batch", "8", "--trace", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    return answer["memory"]["allocated"], answer["trace"][0]["peak_bytes"]


def test_a_gpu_has_no_copy_of_what_is_reduced(tmp_path: Path) -> None:
    spec = tmp_path / "large.toml"
    spec.write_text(LARGE_BLOCKS)
    found = {cluster: peaks(spec, cluster) for cluster in ("cpu:8", "h100:8")}
    for closed, traced in found.values():
        assert closed == pytest.approx(traced, rel=0.03)
    assert found["h100:8"][1] < 0.97 * found["cpu:8"][1]
