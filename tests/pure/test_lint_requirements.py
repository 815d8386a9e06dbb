"""`lint` on the snippets of the requirement documents: an alarm only where a snippet really is wrong.

The documents are no part of the repository; they lie beside it, in `shared/seeds`, where it is developed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import ROOT, blocks_of
from shardwise.diagnose.lint import lint_text
from shardwise.errors import DataError

SEEDS = ROOT.parent / "shared" / "seeds"
WRONG = {
    ("000", 2, 31, "sync.item"): "`loss.item()` on every micro-batch of a loop that accumulates gradients",
    ("000", 8, 42, "rank.save"): "the state of an FSDP model is gathered by all ranks, and rank 0 alone asks for it",
    ("000", 8, 42, "save.sharded"): "the same line writes what an FSDP module holds with torch.save",
}
"""Document, Python block (from 0), line and rule -> what the snippet does wrong."""
REMARKED = {
    ("000", 1, 15, "ddp.device-ids"): "the global rank as a device: right on one node, and the text starts two",
    ("000", 2, 21, "accumulate.division"): "a mean of means: right for equal and complete groups of micro-batches",
    ("003", 23, 6, "accumulate.division"): "the same, in one line",
}
"""Notes, which are no alarms."""


def scripts(path: Path) -> list[str]:
    blocks = blocks_of(path.name, path.read_text(encoding="utf-8"))
    return [block.text for block in blocks if block.language == "python"]


@pytest.fixture(scope="module")
def documents() -> list[Path]:
    found = sorted(path for path in SEEDS.glob("*") if path.is_file()) if SEEDS.is_dir() else []
    if not found:
        pytest.skip("the requirement documents are not beside this repository (../shared/seeds)")
    return found


def test_alarms_are_given_where_a_snippet_is_wrong_and_nowhere_else(documents: list[Path]) -> None:
    found: dict[str, set[tuple[str, int, int, str]]] = {"alarm": set(), "note": set()}
    checked = 0
    for path in documents:
        for number, text in enumerate(scripts(path)):
            try:
                located = lint_text(text)
            except DataError:
                # a signature without a body, as references print it, is no script
                assert text.lstrip().startswith(("def ", "class ")), f"{path.name}, block {number}"
                continue
            checked += 1
            for each in located:
                kind = "note" if each.finding.severity == "note" else "alarm"
                found[kind].add((path.name[:3], number, each.line, each.finding.id))
    assert checked > 60
    assert found == {"alarm": set(WRONG), "note": set(REMARKED)}
