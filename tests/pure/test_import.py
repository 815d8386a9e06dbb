"""What `import shardwise` offers, what it costs, and what it does not import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

PUBLIC = """
__version__ errors Plan Axes Batch Schedule Recompute Offload Communication Tensor check Finding
ModelSpec preset presets Mesh open_mesh apply Placed init_model ColumnParallelLinear RowParallelLinear Loss
token_cross_entropy mean_over loader eval_batches adamw sgd lion adafactor muon lamb constant
warmup_cosine warmup_linear warmup_stable_decay TrainState make_step Protect StepOptions StepMetrics steps
evaluate predict generate Store Retention Probe Losses MoEDecoder MoEConfig MoEOutput
stochastic_adamw Ema several Context Float8 verify Decoder DecoderConfig GPT GPTConfig infer_rules load_rules
hf_config hf_factory shrunk_config load_hf export_hf
""".split()  # noqa: SIM905


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_public_names() -> None:
    assert sorted(shardwise.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", shardwise.__all__)
def test_name_is_there(name: str) -> None:
    assert getattr(shardwise, name) is not None
    assert name in dir(shardwise)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(shardwise.__file__).read_text(encoding="utf-8"))
    (guard,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.asname for node in guard.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen | {"__version__"} == set(shardwise.__all__)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Plam'.*Plan"):
        shardwise.Plam  # noqa: B018


def test_import_takes_no_torch() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'rich', 'typer', 'PIL'}"
    assert run(f"import sys, shardwise; print({heavy} & set(sys.modules))").strip() == "set()"


def test_a_plan_takes_no_torch() -> None:
    assert run("import sys, shardwise; shardwise.Plan(); print('torch' in sys.modules)").strip() == "False"


def test_the_planner_takes_nothing_that_only_training_needs() -> None:
    heavy = "{'torch', 'tomlkit', 'psutil', 'shardwise.train.settings', 'shardwise.cli.options.derive'}"
    assert run(f"import sys, shardwise.cli.plan; print({heavy} & set(sys.modules))").strip() == "set()"


@pytest.mark.parametrize("launcher", ["cli.run", "cli.train", "launch.local", "launch.recovering"])
def test_a_launcher_takes_no_torch(launcher: str) -> None:
    """The server that it starts imports it once, for all ranks."""
    assert run(f"import sys, shardwise.{launcher}; print('torch' in sys.modules)").strip() == "False"


def test_negative_control_torch_is_seen_when_a_name_needs_it() -> None:
    assert run("import sys, shardwise; shardwise.Mesh; print('torch' in sys.modules)").strip() == "True"


def cheapest_s(code: str) -> float:
    """Processor time of a statement in fresh interpreters, the least of eight: free of the machine's other work."""
    timed = f"import time; start = time.process_time(); {code}; print(time.process_time() - start)"
    return min(float(run(timed)) for _ in range(8))


def test_import_costs_less_than_50_ms() -> None:
    assert cheapest_s("import shardwise") < 0.050


def test_negative_control_a_slow_import_is_measured() -> None:
    assert cheapest_s("sum(range(10_000_000))") > 0.050
