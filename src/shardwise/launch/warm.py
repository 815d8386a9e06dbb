"""Which modules a fork server imports before it forks ranks, so that none of them does. No torch.

Only torch's modules and ours: others may start threads or open an accelerator when they are imported, and neither
survives a fork.
"""

from __future__ import annotations

import ast
from pathlib import Path

WARM = (
    *(f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "pipelining", "tensor.parallel")),
    *(f"shardwise.{name}" for name in ("checkpoint.store", "model.rules_file", "parallel.compose", "train.probe")),
    *(
        f"shardwise.train.{name}"
        for name in ("loop", "losses", "optimizers", "rehearsal", "updates.rounding", "updates.several")
    ),
    *(f"shardwise.models.{name}" for name in ("decoder", "gpt", "moe")),
)
"""What every process that trains with Shardwise needs."""
TRAINING = (
    *WARM,
    *(f"shardwise.{name}" for name in ("launch.rank.resuming", "parallel.pipeline", "parallel.tensor")),
    *(f"shardwise.train.{name}" for name in ("build", "metrics", "picture", "progress", "sampling")),
)
"""The same, with what `shardwise train` needs."""
_TORCH = ("torch.distributed.", "torch.nn.", "torch.optim.")


def modules_of(script: Path) -> tuple[str, ...]:
    """What the ranks of a script can share: all of `TRAINING` if it imports Shardwise, else torch's that it names.

    Nothing for a script that names neither, or cannot be parsed: what it imports itself is not looked into.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the rank says it, with its line
        return ()
    named: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.add(node.module)
    if any(name.split(".")[0] == "shardwise" for name in named):
        return TRAINING
    known = [name for name in named if f"{name}.".startswith(_TORCH)]
    return tuple(sorted({"torch", *known})) if any(name.split(".")[0] == "torch" for name in named) else ()
