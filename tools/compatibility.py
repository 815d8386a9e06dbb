"""`make docs`: writes docs/compatibility.md from the plans that the parity tests run and the table of constraints."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from shardwise.plan.plan import Plan
from tests.parity import hf_families, pairs, test_context, test_grid, test_typed

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
CELLS = (
    ("test_grid::test_decoder_fp64", test_grid.PLANS),
    ("test_grid::test_compiled", test_grid.COMPILED),
    ("test_context::test_every_plan_trains_as_one_process_does", test_context.PLANS),
    ("test_pairs::test_pairs", pairs.PLANS),
    ("test_pairs::test_compiled_pairs", pairs.COMPILED),
    ("test_typed::test_float8", test_typed.FP8_PLANS),
    ("test_typed::test_float8_beside_experts", test_typed.EXPERTS),
    ("test_typed::test_float8_compiled", test_typed.COMPILED),
)
HEAD = """# Compatibility

Every pair of techniques is proven by a test that trains under a plan with both as one process does (loss, gradient
norm, every gradient, every parameter after two steps, relative difference at most 1e-11 in fp64), or is refused by a
[constraint](constraints.md) before anything starts. There is no third state: a test fails where one appears. Written
by `make docs`.

Float8 cells (`test_typed`) are held to 1e-6 of torchao in one process, with products that are emulated:
[precision](precision.md#float8).

Of `test_grid` and `test_context` every fourth cell runs at every change, of `test_float8` every eighth, of `test_pairs`
every tenth, and of the families of Hugging Face a plan trains every fourth; all run in `make soak`.
Cells of `test_compiled_pairs` and `test_float8_compiled` compile for minutes each, so `make soak` runs them; so it does
most of eight processes in `test_grid`, `test_pairs` and `test_context`, some of four in `test_grid`, and of
`test_float8` most schedules and three with shards. All have passed.

Precision, tied weights, keyed randomness, parameter groups and moving averages have grids of their own:
[precision](precision.md), [ties](ties.md), [randomness](randomness.md), [optimizers](optimizers.md).
"""
FAMILIES = """## Families of Hugging Face

Each family of `transformers`, unmodified, on a shrunken random configuration, trains under each axis as a plain loop
does in one process (`+`; `test_hf::test_families_train_as_one_process_does`, to the same 1e-11), or is refused by the
limit that stands there, before anything starts ([Modules](constraints.md#modules)).
"""


def cells() -> dict[pairs.Pair, str]:
    """Pair -> the first test that proves it."""
    found: dict[pairs.Pair, str] = {}
    for test, plans in CELLS:
        for text in plans:
            name = f"{test}[{text}]"
            for pair in pairs.pairs_in(Plan.parse(text)):
                found.setdefault(pair, name)
    return found


def text() -> str:
    """The page."""
    proven = cells()
    names = [technique.name for technique in pairs.TECHNIQUES]
    lines = [HEAD, "## At a glance", "", "`+` proven, `x` refused, `.` one of a kind.", ""]
    lines += ["| | " + " | ".join(map(str, range(1, len(names) + 1))) + " |", "|---" * (len(names) + 1) + "|"]
    states, rows = {}, []
    for a, b in combinations(pairs.TECHNIQUES, 2):
        refused = pairs.refusal(a, b)
        cell = proven.get((a.name, b.name))
        states[a.name, b.name] = "." if refused == ("one of a kind",) else "x" if refused else "+" if cell else "?"
        if refused != ("one of a kind",):
            shown = ", ".join(f"`{row}`" for row in refused) if refused else f"`{cell}`"
            rows.append(f"| {a.name} | {b.name} | {'refused by' if refused else 'proven by'} {shown} |")
    for i, name in enumerate(names):
        marks = [states.get((names[min(i, j)], names[max(i, j)]), "") if i != j else "" for j in range(len(names))]
        lines.append(f"| {i + 1} {name} | " + " | ".join(marks) + " |")
    lines += ["", "## Pair by pair", "", "Tests are in `tests/parity/`.", "", "| | | |", "|---|---|---|", *rows]
    return "\n".join([*lines, "", *_families()]) + "\n"


def _families() -> list[str]:
    """Family by axis, and the plans of several axes."""
    lines = [FAMILIES, "| family | " + " | ".join(hf_families.AXES) + " |", "|---" * (len(hf_families.AXES) + 1) + "|"]
    for family in hf_families.FAMILIES:
        marks = []
        for plan in hf_families.AXES.values():
            refused = hf_families.REFUSED.get(plan, {}).get(family)
            marks.append(f"`{refused[0]}`" if refused else "+" if family in hf_families.PLANS[plan] else "?")
        lines.append(f"| {family} | " + " | ".join(marks) + " |")
    lines += ["", "Several axes at once, proven in the same way:", "", "| plan | families |", "|---|---|"]
    lines += [
        f"| `{plan}`{' (`make soak`)' if plan in hf_families.SOAK else ''} | {', '.join(families)} |"
        for plan, families in hf_families.TOGETHER.items()
    ]
    return lines


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
