"""`shardwise rules`: tensor-parallel rules of a model that has none, from its forward; compared with one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from shardwise.cli.options.subjects import named_spec
from shardwise.cli.output import console, print_json
from shardwise.errors import ConfigError, ExitCode, UsageError
from shardwise.extras import optional_module
from shardwise.model.rules_file import Rules, load_rules
from shardwise.plan.plan import Plan
from shardwise.plan.shrink import shrink

if TYPE_CHECKING:
    from shardwise.diagnose.rules import Worst

_SAMPLE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
_TYPES = ("int64", "float32")


def rules(
    model: Annotated[
        str, typer.Argument(help="pkg.module:factory, a preset (llama-8b), a .toml of sizes, or hf:NAME.")
    ],
    sample: Annotated[str | None, typer.Option(help="Shape of the input: 2x16 tokens, or 2x3x32x32:float32.")] = None,
    degree: Annotated[int, typer.Option(min=2, help="Least degree of tp that the rules must allow.")] = 2,
    file: Annotated[Path | None, typer.Option("--rules", help="Take the rules of this file, do not infer.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rules to this file (.toml).")] = None,
    verify: Annotated[str | None, typer.Option(help="Plan to compare with one process: 'tp2', 'tp2 / seq'.")] = None,
    unverified: Annotated[bool, typer.Option("--unverified", help="Write rules that nobody compared.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Infer tensor-parallel rules: exit 0 written or shown, 1 different from one process, 2 on a usage error."""
    if out is not None and verify is None and not unverified:
        raise UsageError(
            f"rules --out {out}: nobody has compared these rules with one process; add --verify tp{degree}, or "
            "--unverified to write a file that apply refuses until it is verified"
        )
    plan = _trial_plan(verify, degree)
    full, small = _factories(model, plan or Plan.parse(f"tp{degree}"))
    table = load_rules(file, unverified=True) if file else _infer(full, model, sample, degree)
    worst = None
    if plan is not None:
        table.check(tp=plan.axes.tp, sequence=plan.tensor.sequence)
        worst = _compare(small, sample, table, plan)
        table = table.with_verified(f"tp{plan.axes.tp}{' seq' if plan.tensor.sequence else ''}" if worst.equal else "")
    target = out or (file if plan is not None else None)
    if target is not None and (worst is None or worst.equal):
        table.save(target)
    _show(table, worst, target, json=json)
    if worst is not None and not worst.equal:
        raise typer.Exit(ExitCode.REFUSED)


def _trial_plan(text: str | None, degree: int) -> Plan | None:
    """The plan of --verify, in fp64."""
    if text is None:
        return None
    plan = Plan.parse(text)
    if plan.axes.tp == 1 or plan.world != plan.axes.tp:
        raise UsageError(
            f"rules --verify {text!r}: rules speak of the tp axis, found `{plan}` of {plan.world} ranks; "
            f"give tp ranks alone, as tp{degree} or 'tp{degree} / seq'"
        )
    return plan.with_(precision="fp64")


def _factories(model: str, plan: Plan) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The model's factory, and one of the same names that is small enough to run."""
    if model.startswith("hf:"):
        optional_module("transformers", extra="hf", need=f"model {model}")
        from shardwise.models.hf import hf_config, hf_factory
        from shardwise.models.hf_sizes import shrunk_config

        config = hf_config(model)
        return hf_factory(config), hf_factory(shrunk_config(config))
    if ":" in model:
        from shardwise.diagnose.read_module import module_factory

        factory = module_factory(model)
        return factory, factory
    from shardwise.models.presets import build

    spec = named_spec(f"rules {model}: no preset or file of sizes, nor pkg.module:factory or hf:NAME", model)
    return build(spec), build(shrink(spec, plan))


def _infer(factory: Callable[[], Any], model: str, sample: str | None, degree: int) -> Rules:
    from shardwise.model.infer import infer_rules

    found = infer_rules(factory, None if sample is None else [_tensor(sample)], degree=degree)
    return Rules(
        styles=found.rules,
        reasons={row.pattern: row.reason for row in found.rows},
        model=model,
        tp_divides=found.tp_divides,
        no_sequence=found.no_sequence,
    )


def _compare(factory: Callable[[], Any], sample: str | None, table: Rules, plan: Plan) -> Worst:
    """The small model under the rules against itself in one process."""
    import torch

    from shardwise.diagnose.rules import Trial, check_rules
    from shardwise.launch.forked import World
    from shardwise.model.infer import default_sample

    if sample is None:
        with torch.device("meta"):
            tensor = default_sample(factory())[0]
    else:
        tensor = _tensor(sample)
    dtype = "float64" if tensor.is_floating_point() else "int64"
    processes = World(plan.world)
    try:
        return check_rules(Trial(factory=factory, shape=tuple(tensor.shape), dtype=dtype), table, plan, processes)
    finally:
        processes.close()


def _tensor(sample: str) -> Any:
    """A tensor of the shape and type that a sample names, without data."""
    import torch

    found = _SAMPLE.fullmatch(sample)
    kind = (found[2] or "int64") if found else ""
    if not found or kind not in _TYPES:
        raise ConfigError(
            f"--sample {sample!r}: found no shape; needed sizes joined by x, then :{' or :'.join(_TYPES)} "
            "(int64 without): 2x16, or 2x3x32x32:float32"
        )
    shape = tuple(int(size) for size in found[1].split("x"))
    return torch.zeros(shape, dtype=getattr(torch, kind), device="meta")


def _show(table: Rules, worst: Any, target: Path | None, *, json: bool) -> None:
    compared = None if worst is None else {"loss": worst.loss, "norm": worst.norm, "parameters": worst.move}
    if json:
        print_json(
            {
                "model": table.model,
                "rules": [{"pattern": p, "style": s, "reason": table.reasons.get(p, "")} for p, s in table.items()],
                "tp_divides": table.tp_divides,
                "no_sequence": table.no_sequence or None,
                "verified": table.verified or None,
                "differences": compared,
                "file": str(target) if target is not None and (worst is None or worst.equal) else None,
            }
        )
        return
    out = console()
    shown = Table(title=f"rules: {table.model}", title_justify="left")
    for column in ("pattern", "style", "reason"):
        shown.add_column(column, overflow="fold")
    for pattern, style in table.items():
        shown.add_row(Text(pattern or '""'), style, Text(table.reasons.get(pattern, "")))
    out.print(shown)
    if table.tp_divides:
        out.print(f"tp must divide {table.tp_divides}", highlight=False)
    if table.no_sequence:
        out.print(Text(f"seq is refused: {table.no_sequence}"), soft_wrap=True)
    if worst is not None:
        what = f"loss {worst.loss:.1e}, gradient norm {worst.norm:.1e}, parameters {worst.move:.1e} ({worst.parameter})"
        verdict = "equal to one process" if worst.equal else "DIFFERENT from one process"
        out.print(Text(f"{verdict}: {what}", "green" if worst.equal else "red"), soft_wrap=True)
    else:
        out.print(Text("not compared with one process: add --verify tp2", "yellow"))
    if target is not None and (worst is None or worst.equal):
        out.print(Text(f"written: {target}"), soft_wrap=True)
