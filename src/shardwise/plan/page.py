"""One self-contained page about a search: no scripts, nothing from the net, pictures as inline SVG. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from shardwise.plan.advice import Advice
from shardwise.plan.band import band
from shardwise.plan.pictures import front_picture, memory_picture, mesh_on_nodes, shown_of, step_picture, swatch
from shardwise.plan.reasons import binds, decisions, why_lost
from shardwise.plan.search import Candidate, Search
from shardwise.plan.spelled import seconds, spelled

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #66717f; --line: #dde3ea; --card: #ffffff; --page: #f4f6f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf1; --dim: #97a3b1; --line: #303a46; --card: #1a212a; --page: #11161c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0 0 12px; }
section { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 18px 20px; margin: 18px 0; overflow-x: auto; }
code { font: 14px ui-monospace, monospace; background: var(--page); padding: 2px 6px; border-radius: 5px; }
.dim { color: var(--dim); } .big { font-size: 19px; font-weight: 600; } .tight { white-space: nowrap; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin-top: 16px; }
.cards div { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
svg { width: 100%; height: auto; display: block; } section > svg { min-width: 700px; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--dim); } svg .rule { stroke: var(--line); }
.key { display: inline-block; margin-right: 16px; font-size: 13px; }
"""


def page(found: Search, assumed: Iterable[str] = (), advice: Sequence[Advice] = ()) -> str:
    """The page as HTML; every word of the user's is escaped.

    Args:
        found: the search.
        assumed: what nobody said, in words.
        advice: what would fit, where nothing does.

    Cost: milliseconds, and the simulation of a pipeline's schedule.
    """
    chosen = found.best or found.nearest
    assert chosen is not None
    space = found.space
    sections = [
        _head(found, chosen),
        _section("What would fit, each change alone", _advised(advice)),
        _section("Memory per pipeline rank at its peak, by term", _memory(chosen)),
        _section("One step", _step(found, chosen)),
        _section("Memory against time", front_picture(found)),
        _section("The mesh on the nodes", mesh_on_nodes(chosen.plan, space.cluster)),
        _section("Why", _decisions(found, chosen)),
        _section("Runners-up", _runners_up(found)),
        _section("What was assumed", _assumed(found, assumed)),
    ]
    title = escape(f"{space.profile.name} on {space.cluster.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _head(found: Search, chosen: Candidate) -> str:
    space, step, memory = found.space, chosen.time, chosen.memory
    workload = space.workload
    facts = [
        ("step", seconds(step.total)),
        ("tokens/s per device", f"{step.tokens_per_s:,.0f}"),
        ("MFU", f"{step.mfu:.1%}"),
        ("memory on the device", f"{spelled(memory.device)} of {spelled(space.cluster.device.memory)}"),
    ]
    if space.cluster.device.price:
        per = chosen.cost(space.cluster.device.price) / step.tokens * 1e9
        facts.append(("cost per billion tokens", f"{per:,.2f}"))
    cards = "".join(
        f'<div><span class="dim">{escape(n)}</span><br><span class="big">{escape(v)}</span></div>' for n, v in facts
    )
    verdict = "" if found.best else '<p class="big">Nothing fits; this plan needs the least memory.</p>'
    return (
        f"<h1>{escape(space.profile.name)} on {escape(space.cluster.name)}</h1>"
        f'<p class="dim">{space.profile.num_params:,} parameters, {workload.global_batch:,} samples of '
        f"{workload.seq_len:,} tokens per step, {escape(workload.optimizer)}; goal: {escape(found.goal)}</p>{verdict}"
        f"<p><code>{escape(str(chosen.plan))}</code></p><p>What binds: {escape(binds(chosen, space))}.</p>"
        f'<div class="cards">{cards}</div>'
    )  # fmt: skip


def _advised(advice: Sequence[Advice]) -> str:
    return _table(
        ("change", "a plan that fits then", "memory", "step"),
        [
            (
                f"<td>{escape(each.change)}</td><td><code>{escape(str(each.found.plan))}</code></td>"
                f'<td class="tight">{spelled(each.found.memory.device)}</td>'
                f'<td class="tight">{seconds(each.found.time.total)}</td>'
            )
            for each in advice
        ],
    )


def _table(columns: Sequence[str], rows: Sequence[str]) -> str:
    """Nothing where there are no rows; their cells are HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>" if rows else ""


def _memory(chosen: Candidate) -> str:
    names = list(dict.fromkeys(name for rank in chosen.memory.stages for name in rank.terms))
    memory = chosen.memory
    note = (
        f"Live tensors. With holes of the allocator, libraries and communicators the worst rank takes "
        f"{spelled(memory.device)} of the device."
    )
    if (drawn := len(shown_of(memory))) < len(memory.stages):
        note += f" Drawn are {drawn} of {len(memory.stages)} ranks: the first, the last, and the fullest between them."
    return memory_picture(memory, names) + _legend(names) + f'<p class="dim">{note}</p>'


def _step(found: Search, chosen: Candidate) -> str:
    rows = [
        f"<td>{escape(name)}</td><td>{seconds(value)}</td><td>{value / chosen.time.total:.1%}</td>"
        for name, value in sorted(chosen.time.terms.items(), key=lambda item: -item[1])
    ]
    return step_picture(found, chosen) + _table(("term", "seconds", "share"), rows)


def _legend(names: Sequence[str]) -> str:
    keys = "".join(f'<span class="key">{swatch(i)} {escape(name)}</span>' for i, name in enumerate(names))
    return f"<p>{keys}</p>"


def _decisions(found: Search, chosen: Candidate) -> str:
    rows = [
        f'<td>{escape(d.field)}</td><td class="tight">{escape(d.value)}</td><td>{escape(d.reason)}</td>'
        for d in decisions(chosen, found.space, found.goal)
    ]
    return _table(("decision", "value", "what its neighbours would do"), rows)


def _runners_up(found: Search) -> str:
    rows = [
        f'<td><code>{escape(str(other.plan))}</code></td><td class="tight">{seconds(other.time.total)}</td>'
        f'<td class="tight">{spelled(other.memory.device)}</td><td>{escape(why_lost(other, found))}</td>'
        for other in found.ranked[1:]
    ]
    return _table(("plan", "step", "memory", "why it lost"), rows)


def _assumed(found: Search, assumed: Iterable[str]) -> str:
    stack = found.space.stack
    notes = [
        f"software stack: {stack.name} ({stack.about})",
        *assumed,
        f"error of time estimates: {band('time', found.space.cluster.device.name)}",
        f"error of memory estimates: {band('memory', found.space.cluster.device.name)}",
    ]
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"
