"""The pictures of a plan's page show its numbers, and stay inside of their frames."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

import images
from shardwise.hardware.cluster import load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.memory import estimate_memory
from shardwise.plan.pictures import front_picture, memory_picture, mesh_on_nodes
from shardwise.plan.plan import Plan
from shardwise.plan.search import find_plan
from shardwise.plan.stack import load_stack
from shardwise.plan.workload import Workload

LETTER = 6.5
"""Width of a letter, on average."""


def picture(text: str) -> ElementTree.Element:
    """The one picture in it, all of whose parts are inside of its frame."""
    [svg] = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    root = ElementTree.fromstring(svg)
    wide, tall = map(float, root.attrib["viewBox"].split()[2:])
    for part in root.iter("rect"):
        left, width = float(part.attrib["x"]), float(part.attrib["width"])
        assert left >= 0 and width > 0 and left + width <= wide + 0.1
    for part in root.iter("text"):
        x, length = float(part.attrib["x"]), LETTER * len(part.text or "")
        left = x - length * {"start": 0, "middle": 0.5, "end": 1}[part.attrib["text-anchor"]]
        assert left >= -10 and left + length <= wide + 10 and float(part.attrib["y"]) <= tall, part.text
    return root


@pytest.mark.parametrize(
    ("where", "text", "says"),
    [
        ("h100:1", "dp1", "none above 1"),
        ("h100:8x2", "dp3", "dp_replicate 3"),
        ("gb200:72", "pp2 fsdp4 tp9", "one tensor and context group"),
        ("h100:16x2", "pp8 fsdp4", "pp 8 x dp_shard 4"),
        ("h100:8x2048", "pp16 dp2 fsdp64 tp8", "Drawn are 8 of the 2,048 nodes."),
        ("h100:16384", "pp16 fsdp128 tp8", "Drawn are 128 of the 16,384 devices of a node."),
    ],
)
def test_a_mesh_of_any_size_stays_in_its_frame_and_no_numbers_overlap(where: str, text: str, says: str) -> None:
    found = mesh_on_nodes(Plan.parse(text), load_cluster(where))
    assert says in found and len(found) < 20_000
    rows: dict[str, list[tuple[float, str]]] = {}
    for part in picture(found).iter("text"):
        if "style" in part.attrib:
            rows.setdefault(part.attrib["y"], []).append((float(part.attrib["x"]), part.text or ""))
    assert rows
    for row in rows.values():
        for (x, one), (after, other) in pairwise(row):
            assert after - x >= LETTER * (len(one) + len(other)) / 2


def test_the_front_falls_with_time_as_its_plans_do() -> None:
    """By what plans cannot do without: what allocators hold and give back makes a zigzag of it."""
    sizes, cluster = preset("llama-1b"), load_cluster("h100:2")
    found = find_plan(profile_of(sizes), sizes, cluster, Workload(seq_len=4096, global_batch=16), top=1)
    [line] = picture(front_picture(found)).iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == len(found.front) > 5
    assert all(x >= x2 and y >= y2 for (x, y), (x2, y2) in pairwise(points))
    words = [part.text or "" for part in picture(front_picture(found)).iter("text")]
    slowest = max(each.time.total for each in found.seen) / min(each.time.total for each in found.seen)
    assert any("per step or slower" in each for each in words) == (slowest > 4), "what lies on the edge may be slower"


def test_a_long_name_of_a_moment_has_room() -> None:
    sizes, cluster = preset("tiny"), load_cluster("cpu:4")
    work = Workload(seq_len=64, global_batch=8)
    memory = estimate_memory(
        profile_of(sizes), Plan.parse("pp2 dp2 / mb4"), work, stack=load_stack("shardwise-cpu"), device=cluster.device
    )
    [rank, *_] = memory.stages
    assert len(rank.phase) > 8
    root = picture(memory_picture(memory, list(rank.terms)))
    assert any("MiB, " in (part.text or "") for part in root.iter("text"))


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def test_the_picture_of_the_readme_is_that_of_its_plan() -> None:
    """The plan in it is the best one: README.md shows the command, and what it prints is compared with the page."""
    drawn = (images.IMAGES / "plan.svg").read_text(encoding="utf-8")
    plan = ElementTree.fromstring(drawn)[0].text or ""
    again = images.plan_picture(images.space_asked(), Plan.parse(plan))
    assert NUMBER.sub("#", drawn) == NUMBER.sub("#", again), "the planner says something else now: make docs"
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (drawn, again)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.1), "the planner says something else now: make docs"
    readme = (images.IMAGES.parents[1] / "README.md").read_text(encoding="utf-8")
    model, cluster, seq, tokens = images.ASKED
    assert f"$ shardwise plan {model} {cluster} --seq {seq} --tokens {tokens}\nplan: {plan.split(' / ')[0]}" in readme
