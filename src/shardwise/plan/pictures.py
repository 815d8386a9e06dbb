"""The pictures of a plan's page, as SVG text: memory, the step, the front, the mesh. No torch, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, log

from shardwise.hardware.cluster import Cluster
from shardwise.plan.band import likeness
from shardwise.plan.memory import Memory, RankMemory
from shardwise.plan.plan import AXES, Plan
from shardwise.plan.search import Candidate, Search
from shardwise.plan.spelled import seconds, spelled
from shardwise.plan.timeline import Timeline, timeline_of

COLOURS = (
    *("#3b7dd8", "#2aa198", "#7cb342", "#e0a526", "#d9633b", "#b34fa0", "#6a5acd", "#8d9aa8"),
    *("#8c5a2b", "#f2a0c4", "#b3123f", "#7fd3f0", "#2f6b3c", "#d7e04a"),
)
"""Any two are told apart, on a light page and on a dark one: at least 27 from each other in CIELAB."""
FORWARD, EXPOSED, OTHER, BUBBLE = "#3b7dd8", "#d9633b", "#8d9aa8", "rgba(140,154,168,.18)"
STEP = {
    "forward": (FORWARD, "forward"),
    "recompute": ("#b34fa0", "recompute"),
    "backward": ("#2aa198", "backward"),
    "weights": ("#7cb342", "backward: gradients of weights, within it"),
    "exposed": (EXPOSED, "exposed communication"),
    "hidden": ("#e8c39e", "hidden communication, behind compute"),
    "bubble": (BUBBLE, "idle: bubble and sends"),
    "optimizer": ("#e0a526", "optimizer"),
    "other": (OTHER, "other"),
}
"""Kind of a piece of the step -> colour and name."""
WIDTH = 960
MOST_RANKS = 16
MOST_DEVICES = 128
"""Of a node, that are drawn."""


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


def shown_of(memory: Memory) -> tuple[RankMemory, ...]:
    """The ranks of a pipeline that are drawn: all, or the first, the last, and the fullest ones."""
    ranks, ends = memory.stages, MOST_RANKS // 2 - 1
    if len(ranks) <= MOST_RANKS:
        return ranks
    fullest = sorted(ranks[ends:-ends], key=lambda rank: -rank.allocated)[:2]
    return (*ranks[:ends], *sorted(fullest, key=lambda rank: rank.rank), *ranks[-ends:])


def memory_picture(memory: Memory, names: Sequence[str]) -> str:
    """A stacked bar per pipeline rank, with the device's memory as a line."""
    shown = shown_of(memory)
    said = [f"{spelled(rank.allocated)}, {rank.phase}" for rank in shown]
    left, right = 90.0, WIDTH - 20.0 - 7 * max(map(len, said))
    top = max(memory.limit, max(rank.allocated for rank in shown)) * 1.02
    scale = (right - left) / top
    parts = []
    for row, rank in enumerate(shown):
        y, x = 10.0 + row * 30, left
        parts.append(_text(left - 10, y + 15, f"rank {rank.rank}", "end"))
        for index, name in enumerate(names):
            value = rank.terms.get(name, 0.0)
            if value:
                title = f"{name}: {spelled(value, 2)}"
                parts.append(_rect(x, y, value * scale, 22, COLOURS[index % len(COLOURS)], title))
            x += value * scale
        parts.append(_text(right + 10, y + 15, said[row]))
    height = 10.0 + len(shown) * 30
    if memory.limit:
        x = left + memory.limit * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height:.0f}" stroke="{EXPOSED}" stroke-width="2"/>')
        parts.append(_text(x, height + 14, spelled(memory.limit, 0), "middle", True))
    return _svg(height + 22, parts, "memory by term")


def step_picture(found: Search, chosen: Candidate) -> str:
    """Per rank a lane of compute and, where anything is sent, one of communication; then seconds by what they are."""
    step = timeline_of(found.space, chosen)
    plan, total = chosen.plan, len(step.lanes)
    lanes = step.lanes if total <= MOST_RANKS else (*step.lanes[:8], *step.lanes[-8:])
    tall, low = (30, 22) if plan.axes.pp == 1 else (14, 6)
    sends = any(lane.sent for lane in lanes)
    scale, y, parts = (WIDTH - 100.0) / step.end, 8.0, list[str]()
    for lane in lanes:
        parts.append(_text(80, y + tall / 2 + 4, f"rank {lane.rank}" if plan.axes.pp > 1 else "compute", "end"))
        rows = [(lane.compute, y, tall), (lane.sent, y + tall + 1, low)] if sends else [(lane.compute, y, tall)]
        if sends and plan.axes.pp == 1:
            parts.append(_text(80, y + tall + low / 2 + 5, "sent", "end", True))
        for pieces, top, height in rows:
            parts.append(_rect(90, top, step.end * scale, height, BUBBLE))
            for start, end, kind, what in pieces:
                width = max((end - start) * scale - 0.3, 0.0)
                parts.append(
                    _rect(90 + start * scale, top, width, height, STEP[kind][0], f"{what}: {seconds(end - start)}")
                )
        y += tall + (low + 1 if sends else 0) + 5
    parts.append(_text(90, y + 10, "0 s", soft=True))
    parts.append(_text(WIDTH - 10, y + 10, seconds(step.end), "end", True))
    parts.append(_text(WIDTH / 2, y + 10, _drawn(plan, step, chosen), "middle", True))
    return _svg(y + 20, parts, "timeline of one step") + _step_legend(step) + f"<p>{escape(_how_far(found, plan))}</p>"


def _drawn(plan: Plan, step: Timeline, chosen: Candidate) -> str:
    """What of the micro-batches is drawn, and how much of a pipeline's time is lost to waiting."""
    count, busy = plan.batch.micro_batches, chosen.time.stages
    if plan.axes.pp == 1:
        return "" if count == 1 else f"{count} micro-batches"
    whole = max(busy) + chosen.time.terms.get("pipeline", 0.0)
    waits = f"a rank waits {1 - sum(busy) / len(busy) / whole:.1%} of the pipeline's time on average"
    return f"{waits}; drawn with {step.drawn} of the {count} micro-batches" if step.drawn < count else waits


def _step_legend(step: Timeline) -> str:
    """Each colour with its seconds on the slowest rank, over all micro-batches."""
    keys = []
    for kind, (colour, name) in STEP.items():
        terms = {what: value for what, (of, value) in step.seconds.items() if of == kind}
        if kind == "weights" and any(p.kind == kind for lane in step.lanes for p in lane.compute):
            keys.append(f'<span class="key">{_square(colour)} {name}</span>')
        if terms or kind in ("exposed", "hidden", "bubble"):
            each = ", ".join(f"{what.split(',')[0]} {seconds(value)}" for what, value in terms.items())
            more = f" ({each})" if each and (len(terms) > 1 or kind in ("exposed", "hidden", "other")) else ""
            text = f"{name} {seconds(sum(terms.values()))}{more}"
            keys.append(f'<span class="key">{_square(colour)} {escape(text)}</span>')
    return f"<p>{' '.join(keys)}</p>"


def _how_far(found: Search, plan: Plan) -> str:
    return f"How far off such estimates were: {likeness(plan, found.space.profile)}."


def front_picture(found: Search) -> str:
    """Every plan that was estimated in full and fits; those that nothing beats in both are joined.

    By what they cannot do without: an allocator gives back the rest of what it holds before a device is full.
    """
    seen, front = found.seen, found.front
    if len(seen) < 2:
        return ""
    times = [each.time.total for each in seen]
    sizes = [each.needs for each in seen]
    right = min(max(times), 4 * min(times))
    low, high = log(min(times)), log(right)
    limit = found.space.cluster.device.memory
    most, least = max(*sizes, limit), 0.9 * min(sizes)

    def height(size: float) -> float:
        return 280 - (size - least) / (most - least) * 250

    def place(each: Candidate) -> tuple[float, float]:
        share = (log(each.time.total) - low) / max(high - low, 1e-9)
        return 70 + min(share, 1.0) * (WIDTH - 100), height(each.needs)

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
        title = escape(f"{each.plan}: {seconds(each.time.total)}, {spelled(each.needs)}")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{FORWARD}"><title>{title}</title></circle>')
    if found.best:
        x, y = place(found.best)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{EXPOSED}" stroke-width="2.5"/>')
        parts.append(_text(x + 2, y - 14, "chosen"))
    parts.append(_text(60, 300, seconds(min(times)), soft=True))
    slower = " or slower" if max(times) > right else ""
    parts.append(_text(950, 300, f"{seconds(right)} per step{slower} (log)", "end", True))
    parts.append(_text(56, 34, spelled(most, 0), "end", True))
    parts.append(_text(56, 284, spelled(least, 0), "end", True))
    line = f'x1="60" x2="950" y1="{height(limit):.1f}" y2="{height(limit):.1f}" stroke="{EXPOSED}"'
    parts.append(f'<line {line} stroke-dasharray="5 4"/>')
    parts.append(_text(950, height(limit) - 5, f"memory of the device, {spelled(limit, 0)}", "end", True))
    note = (
        "Joined: plans that no other beats in both; grey: the others that were estimated in full. Memory that a plan "
        "needs: what its allocator holds beyond that, and gives back, is not in it."
    )
    return _svg(308, parts, "memory against time") + f'<p class="dim">{note}</p>'


def mesh_on_nodes(plan: Plan, cluster: Cluster) -> str:
    """The first nodes with their devices; equal colours are one tensor-parallel group, the label tells the place."""
    per, every = cluster.per_node, -(-plan.world // cluster.per_node)
    nodes, drawn = min(every, 8), min(per, MOST_DEVICES)
    size, parts = min(56.0, (WIDTH - 110.0) / drawn), []
    step = ceil(8 * len(str(min(plan.world, nodes * per) - 1)) / size)  # of so many devices one has room for its number
    names = [axis for axis in AXES if getattr(plan.axes, axis) > 1]
    for node in range(nodes):
        y = 6.0 + node * 50
        parts.append(_text(80, y + 22, f"node {node}", "end"))
        parts.append(
            f'<rect class="rule" x="88" y="{y:.0f}" width="{drawn * size + 6:.0f}" height="42" rx="6" fill="none"/>'
        )
        if plan.axes.pp > 1:
            first, last = (_place(plan, rank)["pp"] for rank in (node * per, min((node + 1) * per, plan.world) - 1))
            shown = f"pp {first}" if first == last else f"pp {first} to {last}"
            parts.append(_text(80, y + 38, shown, "end", soft=True))
        for local in range(min(drawn, plan.world - node * per)):
            rank = node * per + local
            x, place = 91 + local * size, _place(plan, rank)
            group = rank // (plan.axes.tp * plan.axes.cp) if plan.axes.tp * plan.axes.cp > 1 else rank // per
            title = f"rank {rank}: " + ", ".join(f"{name} {place[name]}" for name in names)
            parts.append(_rect(x, y + 3, size * 0.96, 36, COLOURS[group % 8], title))
            if local % step == 0 and local + step <= drawn:
                middle = f'x="{x + size * step / 2 - 1:.1f}" y="{y + 25:.1f}" text-anchor="middle"'
                parts.append(f'<text {middle} style="fill:#fff">{rank}</text>')
    some = [f"{drawn} of the {per:,} devices of a node"] if drawn < per else []
    some += [f"{nodes} of the {every:,} nodes"] if nodes < every else []
    rest = f"Drawn are {' and '.join(some)}. " if some else ""
    meaning = "of one tensor and context group" if plan.axes.tp * plan.axes.cp > 1 else "on one node"
    axes = " x ".join(f"{name} {getattr(plan.axes, name)}" for name in names) or "none above 1"
    note = f"{rest}Axes, outermost first: {axes}. Neighbours of one colour are {meaning}."
    return _svg(6.0 + nodes * 50, parts, "mesh on nodes") + f'<p class="dim">{note}</p>'


def _place(plan: Plan, rank: int) -> dict[str, int]:
    """Coordinates of a rank."""
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(plan.axes, axis))
    return place
