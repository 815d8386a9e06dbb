"""The pictures of a plan's page, as SVG text: memory, the step, the front, the mesh. No torch, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log

from shardwise.hardware.cluster import GIB, Cluster
from shardwise.plan.memory import Memory
from shardwise.plan.plan import AXES, ZERO_BUBBLE, Plan
from shardwise.plan.repair import change
from shardwise.plan.schedule import table_of
from shardwise.plan.search import Candidate, Search
from shardwise.plan.simulate import Costs, simulate

COLOURS = ("#3b7dd8", "#2aa198", "#7cb342", "#e0a526", "#d9633b", "#b34fa0", "#6a5acd", "#8d9aa8", "#c0392b", "#16a085")
FORWARD, BACKWARD, SPLIT = "#3b7dd8", "#2aa198", "#7cb342"
EXPOSED, HIDDEN, OTHER = "#d9633b", "#e8c39e", "#8d9aa8"
WIDTH = 960
MOST_RANKS = 16


def swatch(index: int) -> str:
    """A coloured square."""
    return _square(COLOURS[index % len(COLOURS)])


def _square(colour: str) -> str:
    box = f'<rect width="12" height="12" rx="2" fill="{colour}"/>'
    return f'<svg style="width:12px;height:12px;display:inline" viewBox="0 0 12 12">{box}</svg>'


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{max(width, 0.3):.2f}" height="{height:.2f}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} fill="{fill}">{inner}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "start", soft: bool = False) -> str:
    style = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def memory_picture(memory: Memory, names: Sequence[str]) -> str:
    """A stacked bar per pipeline rank, with the device's memory as a line."""
    shown = memory.stages if len(memory.stages) <= MOST_RANKS else (*memory.stages[:8], *memory.stages[-8:])
    left, right = 90.0, WIDTH - 150.0
    top = max(memory.limit, max(rank.allocated for rank in shown)) * 1.02
    scale = (right - left) / top
    parts = []
    for row, rank in enumerate(shown):
        y, x = 10.0 + row * 30, left
        parts.append(_text(left - 10, y + 15, f"rank {rank.rank}", "end"))
        for index, name in enumerate(names):
            value = rank.terms.get(name, 0.0)
            if value:
                title = f"{name}: {value / GIB:.2f} GiB"
                parts.append(_rect(x, y, value * scale, 22, COLOURS[index % len(COLOURS)], title))
            x += value * scale
        parts.append(_text(right + 10, y + 15, f"{rank.allocated / GIB:.1f} GiB, {rank.phase}"))
    height = 10.0 + len(shown) * 30
    if memory.limit:
        x = left + memory.limit * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height:.0f}" stroke="{EXPOSED}" stroke-width="2"/>')
        parts.append(_text(x, height + 14, f"{memory.limit / GIB:.0f} GiB", "middle", True))
    return _svg(height + 22, parts, "memory by term")


def step_picture(found: Search, chosen: Candidate) -> str:
    """The pipeline's schedule where there is one, and below it the step by what is exposed and what is hidden."""
    parts: list[str] = []
    keys = [(FORWARD, "compute, forward"), (BACKWARD, "compute, backward"), (EXPOSED, "exposed communication"),
            (HIDDEN, "hidden communication"), (OTHER, "bubble, optimizer, other")]  # fmt: skip
    y = 8.0
    if chosen.plan.axes.pp > 1:
        y = _pipeline(parts, chosen, y)
        if chosen.plan.schedule.kind in ZERO_BUBBLE:
            keys.insert(2, (SPLIT, "compute, gradients of weights"))
    y = _step_bar(parts, chosen, y + 8)
    legend = "".join(f'<span class="key">{_square(colour)} {escape(name)}</span>' for colour, name in keys)
    return _svg(y + 10, parts, "timeline of one step") + f"<p>{legend}</p>"


def _pipeline(parts: list[str], chosen: Candidate, y: float) -> float:
    """Every action of some ranks, to the scale of the simulated schedule; idle time is the bubble."""
    plan, step = chosen.plan, chosen.time
    busy = [seconds / max(plan.batch.micro_batches, 1) / plan.schedule.stages for seconds in step.stages]
    stages = plan.axes.pp * plan.schedule.stages
    one = [busy[stage % plan.axes.pp] if len(busy) == plan.axes.pp else 1.0 for stage in range(stages)]
    costs = Costs.of_stages([t / 3 for t in one], [t / 3 for t in one], [t / 3 for t in one])
    count, most = plan.batch.micro_batches, 4 * plan.axes.pp  # a multiple of pp suits every schedule
    bubble = simulate(table_of(plan), costs).bubble
    drawn = change(plan, batch__micro_batches=most) if count > most else plan
    timeline = simulate(table_of(drawn), costs)
    ranks = timeline.ranks if len(timeline.ranks) <= MOST_RANKS else (*timeline.ranks[:8], *timeline.ranks[-8:])
    scale = (WIDTH - 100.0) / timeline.total
    for row, spans in enumerate(ranks):
        top = y + row * 20
        place = row if len(timeline.ranks) <= MOST_RANKS or row < 8 else len(timeline.ranks) - 16 + row
        parts.append(_text(80, top + 12, f"rank {place}", "end"))
        parts.append(_rect(90, top, timeline.total * scale, 16, "rgba(140,154,168,.18)"))
        for action, start, end in spans:
            colour = {"F": FORWARD, "W": SPLIT}.get(action.work, BACKWARD)
            parts.append(_rect(90 + start * scale, top, (end - start) * scale - 0.4, 16, colour, str(action)))
    shown = f"drawn with {most} of the {count} micro-batches; " if drawn is not plan else ""
    text = f"{shown}with all of them a rank waits {bubble:.1%} of the time on average (the bubble)"
    parts.append(_text(90, y + len(ranks) * 20 + 12, text, soft=True))
    return y + len(ranks) * 20 + 20


def _step_bar(parts: list[str], chosen: Candidate, y: float) -> float:
    """The slowest rank's step: each term where it adds to the step, hidden communication in a lane below."""
    step = chosen.time
    scale, x = (WIDTH - 100.0) / step.total, 90.0
    parts.append(_text(80, y + 15, "step", "end"))
    kinds = {"compute": FORWARD, "recompute": BACKWARD}
    sent = ("tensor", "context", "expert", "data", "stall")
    for name, seconds in step.terms.items():
        colour = kinds.get(name, EXPOSED if name in sent else OTHER)
        pieces = [(FORWARD, seconds / 3), (BACKWARD, seconds * 2 / 3)] if name == "compute" else [(colour, seconds)]
        for fill, value in pieces:
            parts.append(_rect(x, y, value * scale - 0.6, 22, fill, f"{name}: {seconds:.4g} s"))
            x += value * scale
    parts.append(_text(80, y + 41, "hidden", "end"))
    x = 90.0
    for name, seconds in step.hidden.items():
        if seconds > 0:
            width = min(seconds * scale, WIDTH - 10 - x)
            parts.append(_rect(x, y + 28, width, 16, HIDDEN, f"{name}: {seconds:.4g} s behind compute"))
            x += width
    parts.append(_text(90, y + 60, "0 s", soft=True))
    parts.append(_text(WIDTH - 10, y + 60, f"{step.total:.3g} s", "end", True))
    return y + 66


def front_picture(found: Search) -> str:
    """Every plan that was estimated in full and fits; those that nothing beats in both are joined."""
    seen, front = found.seen, found.front
    if len(seen) < 2:
        return ""
    times = [each.time.total for each in seen]
    sizes = [each.memory.device for each in seen]
    low, high = log(min(times)), log(min(max(times), 4 * min(times)))
    limit = found.space.cluster.device.memory
    most, least = max(*sizes, limit), 0.9 * min(sizes)

    def height(size: float) -> float:
        return 280 - (size - least) / (most - least) * 250

    def place(each: Candidate) -> tuple[float, float]:
        share = (log(each.time.total) - low) / max(high - low, 1e-9)
        return 70 + min(share, 1.0) * (WIDTH - 100), height(each.memory.device)

    parts = [
        '<line class="rule" x1="60" x2="950" y1="280" y2="280"/><line class="rule" x1="60" x2="60" y1="20" y2="280"/>'
    ]
    for each in seen[:: max(1, len(seen) // 1500)]:
        x, y = place(each)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{OTHER}" fill-opacity=".45"/>')
    line = " ".join("{:.1f},{:.1f}".format(*place(each)) for each in front)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{FORWARD}" stroke-width="1.5"/>')
    for each in front:
        x, y = place(each)
        title = escape(f"{each.plan}: {each.time.total:.3g} s, {each.memory.device / GIB:.1f} GiB")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{FORWARD}"><title>{title}</title></circle>')
    if found.best:
        x, y = place(found.best)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{EXPOSED}" stroke-width="2.5"/>')
        parts.append(_text(x + 2, y - 14, "chosen"))
    parts.append(_text(60, 300, f"{min(times):.3g} s", soft=True))
    parts.append(_text(950, 300, f"{min(max(times), 4 * min(times)):.3g} s per step (log)", "end", True))
    parts.append(_text(56, 34, f"{most / GIB:.0f} GiB", "end", True))
    parts.append(_text(56, 284, f"{least / GIB:.0f} GiB", "end", True))
    line = f'x1="60" x2="950" y1="{height(limit):.1f}" y2="{height(limit):.1f}" stroke="{EXPOSED}"'
    parts.append(f'<line {line} stroke-dasharray="5 4"/>')
    parts.append(_text(950, height(limit) - 5, f"memory of the device, {limit / GIB:.0f} GiB", "end", True))
    return _svg(308, parts, "memory against time")


def mesh_on_nodes(plan: Plan, cluster: Cluster) -> str:
    """The first nodes with their devices; equal colours are one tensor-parallel group, the label tells the place."""
    per, nodes = cluster.per_node, min(-(-plan.world // cluster.per_node), 8)
    size, parts = min(56.0, (WIDTH - 110.0) / per), []
    names = [axis for axis in AXES if getattr(plan.axes, axis) > 1]
    for node in range(nodes):
        y = 6.0 + node * 50
        parts.append(_text(80, y + 24, f"node {node}", "end"))
        parts.append(
            f'<rect class="rule" x="88" y="{y:.0f}" width="{per * size + 6:.0f}" height="42" rx="6" fill="none"/>'
        )
        ranks = sorted({_place(plan, rank)["pp"] for rank in range(node * per, min((node + 1) * per, plan.world))})
        if plan.axes.pp > 1:
            shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            parts.append(_text(100 + per * size, y + 24, f"pipeline {shown}", soft=True))
        for local in range(min(per, plan.world - node * per)):
            rank = node * per + local
            x, place = 91 + local * size, _place(plan, rank)
            group = rank // (plan.axes.tp * plan.axes.cp) if plan.axes.tp * plan.axes.cp > 1 else rank // per
            title = f"rank {rank}: " + ", ".join(f"{name} {place[name]}" for name in names)
            parts.append(_rect(x, y + 3, size - 2, 36, COLOURS[group % 8], title))
            middle = f'x="{x + size / 2 - 1:.1f}" y="{y + 25:.1f}" text-anchor="middle"'
            parts.append(f'<text {middle} style="fill:#fff">{rank}</text>')
    y = 6.0 + nodes * 50
    more = -(-plan.world // per) - nodes
    rest = f"and {more:,} more nodes. " if more > 0 else ""
    meaning = "of one tensor and context group" if plan.axes.tp * plan.axes.cp > 1 else "on one node"
    axes = " x ".join(f"{name} {getattr(plan.axes, name)}" for name in names) or "none above 1"
    parts.append(
        _text(88, y + 12, f"{rest}Axes, outermost first: {axes}. Neighbours of one colour are {meaning}.", soft=True)
    )
    return _svg(y + 20, parts, "mesh on nodes")


def _place(plan: Plan, rank: int) -> dict[str, int]:
    """Coordinates of a rank."""
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(plan.axes, axis))
    return place
