"""Draw the pictures of the pages: a plan, a pipeline schedule, and the loss of the run that `make demo` makes.

`python tools/images.py` takes as long as `make demo`; `python tools/images.py plan schedule` some seconds.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from html import escape, unescape
from pathlib import Path

from shardwise.cli.options.planning import question
from shardwise.plan.memory import estimate_memory
from shardwise.plan.pictures import COLOURS, STEP, memory_picture, mesh_on_nodes, step_picture
from shardwise.plan.plan import Plan
from shardwise.plan.search import Candidate, Search, find_plan
from shardwise.plan.searching.space import Space
from shardwise.plan.spelled import seconds, spelled
from shardwise.plan.timing import estimate_time

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SHARDWISE = Path(sys.executable).with_name("shardwise")


ASKED = ("llama-70b", "h100:8x4", 4096, "4M")
"""What README.md asks: model, cluster, `--seq`, `--tokens`."""
STYLE = """svg{--ink:#1d2733;--dim:#66717f;--line:#c9d1da}
@media(prefers-color-scheme:dark){svg{--ink:#e6ebf1;--dim:#97a3b1;--line:#46525f}}
text{fill:var(--ink);font:13px system-ui,sans-serif}.soft{fill:var(--dim)}.rule{stroke:var(--line)}
.head{font-weight:600;font-size:15px}"""


def space_asked() -> Space:
    """The question of the README."""
    model, cluster, seq, tokens = ASKED
    asked = question(model, cluster, seq=seq, batch=None, tokens=tokens)
    return Space(asked.profile, asked.limits, asked.cluster, asked.workload, asked.stack(""))


def draw_plan() -> None:
    """The best plan, by a search."""
    space = space_asked()
    found = find_plan(space.profile, space.spec, space.cluster, space.workload, stack=space.stack, top=1)
    assert found.best is not None
    (IMAGES / "plan.svg").write_text(plan_picture(space, found.best.plan), encoding="utf-8")


def plan_picture(space: Space, plan: Plan) -> str:
    """The ranks on their nodes, memory and step of a plan: the pictures of `shardwise plan --html` on one sheet."""
    memory = estimate_memory(space.profile, plan, space.workload, stack=space.stack, device=space.cluster.device)
    step = estimate_time(space.profile, space.cluster, plan, space.workload, stack=space.stack)
    chosen = Candidate(plan=plan, memory=memory, time=step)
    found = Search(goal="time", space=space, ranked=(chosen,), met=(chosen,), nearest=None, limit=memory.limit)
    names = sorted({name for rank in memory.stages for name in rank.terms if rank.terms[name]})
    kinds = [STEP[kind] for kind in STEP if kind != "weights"]
    sheet, y = [], 24
    title = (
        f"{space.profile.name} on {space.cluster.name}: {seconds(step.total)} a step, {step.tokens_per_s:,.0f} tokens/s"
    )
    title += f" per device, MFU {step.mfu:.1%}, {chosen.needs / memory.limit:.0%} of {spelled(memory.limit)} needed"
    sheet.append(_words(8, y, title, "head") + _words(8, y + 22, str(plan), "soft"))
    for head, drawn, keys in (
        ("The mesh on the nodes", mesh_on_nodes(plan, space.cluster), []),
        (
            "Memory per pipeline rank at its peak",
            memory_picture(memory, names),
            list(zip(COLOURS, names, strict=False)),
        ),
        ("One step", step_picture(found, chosen), kinds),
    ):
        drawn, _, note = drawn.partition("</svg>")
        drawn = re.sub("<title>.*?</title>", "", drawn) + "</svg>"  # of an image nobody sees them
        height = int(drawn.split('viewBox="0 0 960 ')[1].split('"')[0])
        y += 46
        sheet.append(_words(8, y, head, "head"))
        for at, (colour, name) in enumerate(keys):
            x = 8 + 135 * (at % 7)
            y += 22 if at % 7 == 0 else 0
            sheet.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" fill="{colour}"/>')
            sheet.append(
                _words(x + 16, y, name.partition(":")[0].partition(",")[0].replace("communication", "sends"), "soft")
            )
        sheet.append(drawn.replace("<svg ", f'<svg x="0" y="{y + 12}" width="960" height="{height}" ', 1))
        y += height
        if head.startswith("The mesh"):  # what its colours mean
            y += 22
            sheet.append(_words(8, y, unescape(re.sub("<.*?>", "", note)), "soft"))
    size = f'viewBox="0 0 960 {y + 12}" width="960" height="{y + 12}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>{plan}</title><style>{STYLE}</style>'
    return f"{head}{''.join(sheet)}</svg>\n"


def _words(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


def draw_schedule() -> None:
    subprocess.run([SHARDWISE, "schedule", "pp4 interleaved mb4", "--png", IMAGES / "schedule.png"], check=True)


def draw_loss() -> None:
    """The picture that `shardwise train` without arguments leaves in its run directory."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        subprocess.run([SHARDWISE, "train", "--no-sample", "--out", out], check=True)
        shutil.copyfile(out / "loss.png", IMAGES / "loss.png")


DRAW = {"plan": draw_plan, "schedule": draw_schedule, "loss": draw_loss}

if __name__ == "__main__":
    for name in sys.argv[1:] or DRAW:
        DRAW[name]()
