"""Commands on the pages are typed, and print what stands below them; tables of numbers are computed again."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardwise as sw
from pages import ROOT, Block, all_blocks
from shardwise.testing.world import World
from tests.parity import grid, test_grid
from tests.parity.test_docs_collectives import EARLIER

PAGES = {
    "README.md",
    *(f"docs/{n}.md" for n in ["quickstart", "data-parallel", "recompute", "precision", "step", "mesh", "parity"]),
}
BLOCKS = [block for block in all_blocks() if block.page in PAGES and block.language == "console"]
SOAK = ("shardwise verify", "torchrun")
"""Of several starts each; tests of these verbs run at every change."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
BIN = Path(sys.executable).parent


def commands(text: str) -> list[tuple[str, int, str]]:
    """(command, exit code, what it prints) for every `$` of a block."""
    found = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        line, _, comment = line.partition("  #")
        code = re.search(r"exit (\d+)", comment)
        found.append((line.strip(), int(code[1]) if code else 0, output.strip()))
    return found


def is_printed(expected: str, printed: str) -> bool:
    """Same text, `...` standing for anything, and numbers equal to 2 %."""
    pattern = (
        re.escape(NUMBER.sub("\0", expected)).replace(re.escape("..."), ".*?").replace("\0", f"({NUMBER.pattern})")
    )
    match = re.search(f"^{pattern}$", printed, re.MULTILINE | re.DOTALL)
    numbers = [float(n) for n in NUMBER.findall(expected)]
    return match is not None and [float(n) for n in match.groups()] == pytest.approx(numbers, rel=0.02)


def typed(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line)
    if words[0] == "make":  # what it does is another test's business; that it exists is this one's
        return subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    if words[:2] == ["shardwise", "train"]:
        words += ["--dry-run"] if "--dry-run" not in words else []
    environment = os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment, timeout=240)


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=pytest.mark.soak if any(word in b.text for word in SOAK) else ()) for b in BLOCKS],
    ids=str,
)
def test_commands_print_what_the_page_says(block: Block, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for line, code, output in commands(block.text):
        ran = typed(line, tmp_path)
        assert ran.returncode == code, f"{line}\n{ran.stdout}\n{ran.stderr}"
        assert is_printed(output, ran.stdout.strip()) or not output, f"{line}\n{ran.stdout}"


@pytest.mark.parametrize("printed", ["step 20  loss 1.9236", "step 20  lost 1.8236", "step 20  loss nan", ""])
def test_negative_control_other_output_is_seen(printed: str) -> None:
    assert is_printed("...\nstep 20  loss 1.8236", "begin\nstep 20  loss 1.8237\nend")
    assert not is_printed("step 20  loss 1.8236", printed)


def table(page: str, head: str) -> list[list[str]]:
    """The rows of the table that begins with a heading row."""
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = text[text.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]


def train_gpt(plan: str, folder: str) -> str:
    """What the first 20 steps of the example print on rank 0."""
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = ["train_gpt.py", plan, folder, "20"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / "examples" / "train_gpt.py"), run_name="__main__")
    return out.getvalue()


@pytest.mark.share(2)
@pytest.mark.parametrize("row", table("docs/quickstart.md", "plan | processes | loss"), ids=lambda row: row[0])
def test_quickstart_prints_the_same_under_every_plan(world: World, row: list[str], tmp_path: Path) -> None:
    plan, processes, *numbers = row
    assert sw.Plan.parse(plan).world == int(processes)
    printed = world(int(processes), train_gpt, plan, str(tmp_path))[0]
    loss, norm, held_out, _ = (float(n) for n in NUMBER.findall(printed)[1:])
    assert [loss, norm, held_out] == pytest.approx([float(n) for n in numbers], rel=1e-3)


def _counting(counted: dict[str, int], name: str, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    counted[name] += 1
    return call(*args, **keywords)


def collectives(text: str) -> list[int]:
    """All-gathers, reduce-scatters and all-reduces of the second step on this rank."""
    plan, counted = sw.Plan.parse(text), {}
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(grid.MODELS["decoder"], plan, mesh)
        data = sw.loader(grid.Rows(), plan.batch, mesh, global_size=16)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1), data), grid.loss_fn)
        step(next(data))
        for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
            name = name if hasattr(dist, name) else EARLIER[name]
            counted[name] = 0
            setattr(dist, name, functools.partial(_counting, counted, name, getattr(dist, name)))
        step(next(data))
    return list(counted.values())


COUNTED = [row for row in table("docs/data-parallel.md", "plan | all-gathers") if row[0] != "dp2 / mb4"]


@pytest.mark.parametrize("row", COUNTED, ids=lambda row: row[0])
def test_collectives_are_those_of_the_table(world: World, row: list[str]) -> None:
    plan, *numbers = row
    gathers, scatters, reduces = map(int, numbers)
    assert world(sw.Plan.parse(plan).world, collectives, plan)[0] == [gathers, scatters, reduces + 1]


def test_readme_has_the_numbers_of_the_quickstart() -> None:
    head = "plan | processes | loss"
    assert table("README.md", head) == table("docs/quickstart.md", head)


@pytest.mark.parametrize(("page", "text"), [("docs/parity.md", "each of {} plans"), ("README.md", "under {} plans")])
def test_pages_say_how_many_plans_there_are(page: str, text: str) -> None:
    words = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert text.format(len(test_grid.PLANS)) in words
