"""Every legal plan of a world, verified one after the other, and the picture of which are proven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from PIL import Image, ImageDraw, ImageFont

from shardwise.diagnose.verify import Report
from shardwise.findings import errors_in
from shardwise.model.spec import ModelSpec
from shardwise.plan.constraints import check
from shardwise.plan.plan import LOOPED, Axes, Batch, Plan, Recompute, Schedule, ScheduleKind, Tensor

_CELL, _LEFT, _MARGIN = 26, 190, 20
_COLOURS = {"proven": (34, 139, 84), "different": (200, 40, 40), "refused": (170, 174, 182)}
_INK, _PAPER, _GRID = (40, 44, 52), (255, 255, 255), (228, 231, 236)


ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class Cell:
    """A plan's place in the matrix."""

    layout: str
    """Its axes: the row."""
    variant: str
    """The rest: the column."""
    plan: Plan


def legal_plans(world: int, base: Plan, spec: ModelSpec | None = None) -> list[Cell]:
    """Every legal plan of a systematic list, those with the fewest options first.

    The list: all ways to write `world` as pp x dp x fsdp x cp x tp, times zero 1 to 3 where there is fsdp, the
    schedules where there is pp, sequence shards and a sharded loss where there is tp, ep where there are experts, and
    blocks recomputed or not.

    Args:
        world: ranks.
        base: gives what is not varied: the global batch, the blocks' names.
        spec: of the model, where it is known.

    >>> [str(cell.plan) for cell in legal_plans(1, Plan())]
    ['dp1 / fp32', 'dp1 / fp32 / recompute=blocks']
    """
    found: list[tuple[int, Cell]] = []
    for axes in _factorisations(world):
        layout = _spell(axes)
        experts = spec.num_experts if spec is not None else 0
        for count, names, plan in _variants(axes, base, experts):
            if not errors_in(check(plan, spec=spec, world=world, device="cpu")):
                found.append((count, Cell(layout, " ".join(names) or "plain", plan)))
    found.sort(key=lambda pair: pair[0])  # stable: layouts keep their order
    return [cell for _, cell in found]


def _factorisations(world: int) -> Iterator[Axes]:
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    for pp, dp, fsdp, cp in product(divisors, repeat=4):
        if world % (pp * dp * fsdp * cp) == 0:
            yield Axes(pp=pp, dp_replicate=dp, dp_shard=fsdp, cp=cp, tp=world // (pp * dp * fsdp * cp))


def _spell(axes: Axes) -> str:
    return str(Plan(axes=axes, zero=3 if axes.dp_shard > 1 else 0)).split(" / ")[0]


def _variants(axes: Axes, base: Plan, experts: int) -> Iterator[tuple[int, list[str], Plan]]:
    """(options taken, their names, plan)."""
    zeros: tuple[ZeroStage, ...] = (3, 1, 2) if axes.dp_shard > 1 else (0,)
    kinds: tuple[ScheduleKind, ...] = (
        ("1f1b", *(kind for kind in get_args(ScheduleKind) if kind != "1f1b")) if axes.pp > 1 else ("1f1b",)
    )
    sequences, losses = ((False, True), (False, True)) if axes.tp > 1 else ((False,), (False,))
    ranks = axes.dp_shard * axes.cp * axes.tp
    eps = [ep for ep in range(1, ranks + 1) if ep == 1 or (experts and ranks % ep == 0)]
    options = product(eps, zeros, kinds, sequences, losses, (False, True))
    for ep, zero, kind, sequence, loss, recompute in options:
        names = [
            *([f"ep{ep}"] if ep > 1 else []),
            *([f"zero{zero}"] if zero != zeros[0] else []),
            *([kind] if kind != "1f1b" else []),
            *(["seq"] if sequence else []),
            *(["loss-parallel"] if loss else []),
            *(["recompute"] if recompute else []),
        ]
        micro = 2 * axes.pp if axes.pp > 1 else base.batch.micro_batches
        if kind in LOOPED:
            micro = 2 * micro
        yield (
            len(names),
            names,
            replace(
                base,
                axes=replace(axes, ep=ep),
                zero=zero,
                batch=Batch(global_size=base.batch.global_size, micro_batches=micro),
                schedule=Schedule(kind=kind) if axes.pp > 1 else Schedule(),
                tensor=Tensor(sequence=sequence, loss=loss, recipe=base.tensor.recipe),
                recompute=Recompute(mode="blocks" if recompute else "none"),
            ),
        )


def grid_of(cells: Sequence[Cell]) -> tuple[list[str], list[str]]:
    """Rows and columns: layouts, and variants in the order in which they appear."""
    return list(dict.fromkeys(c.layout for c in cells)), list(dict.fromkeys(c.variant for c in cells))


def draw_matrix(cells: Sequence[Cell], reports: Sequence[Report], path: Path, title: str) -> None:
    """Write the matrix as a PNG: green proven, red different, grey refused, white not run or not legal."""
    layouts, variants = grid_of(cells)
    verdicts = {(c.layout, c.variant): r.verdict for c, r in zip(cells, reports, strict=False)}
    font = ImageFont.load_default(14)
    head = 24 + max(int(font.getlength(name)) for name in variants)
    width = max(_LEFT + _CELL * len(variants) + _MARGIN, int(font.getlength(title)) + 2 * _MARGIN, 420)
    image = Image.new("RGB", (width, 40 + head + _CELL * len(layouts) + 56), _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN, 12), title, font=font, fill=_INK)
    for column, name in enumerate(variants):
        label = Image.new("L", (head, _CELL), 255)
        ImageDraw.Draw(label).text((4, _CELL / 2), name, font=font, fill=40, anchor="lm")
        image.paste(label.rotate(90, expand=True).convert("RGB"), (_LEFT + column * _CELL, 40))
    for row, layout in enumerate(layouts):
        top = 40 + head + row * _CELL
        draw.text((_MARGIN, top + _CELL / 2), layout, font=font, fill=_INK, anchor="lm")
        for column, variant in enumerate(variants):
            left = _LEFT + column * _CELL
            verdict = verdicts.get((layout, variant))
            box = (left, top, left + _CELL - 2, top + _CELL - 2)
            draw.rectangle(box, fill=_COLOURS[verdict] if verdict else _PAPER, outline=_GRID)
    _legend(draw, 40 + head + _CELL * len(layouts) + 20, reports)
    image.save(path, format="PNG", optimize=True)


def _legend(draw: ImageDraw.ImageDraw, top: int, reports: Sequence[Report]) -> None:
    font, left = ImageFont.load_default(14), _MARGIN
    for verdict, colour in _COLOURS.items():
        count = sum(report.verdict == verdict for report in reports)
        draw.rectangle((left, top, left + 14, top + 14), fill=colour)
        draw.text((left + 22, top + 7), f"{verdict}: {count}", font=font, fill=_INK, anchor="lm")
        left += 130
