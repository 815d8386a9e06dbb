"""Runs of sources outside the fit (but for the constants that docs/planner.md names), as that page has them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import median

import pytest

from published.rows import Row, read
from published.score import Result, memories, oom, predict_all, quantile, times

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> tuple[list[Row], list[Result]]:
    rows, skipped = read(ROOT / "tools/published/elsewhere.csv")
    results, refused = predict_all(rows)
    assert not refused and sum(skipped.values()) < 0.1 * (len(rows) + sum(skipped.values()))
    return rows, results


def test_most_of_what_nobody_fitted_is_as_far_off_as_the_page_says(found: tuple[list[Row], list[Result]]) -> None:
    rows, results = found
    text = " ".join((ROOT / "docs/planner.md").read_text(encoding="utf-8").split())
    assert f"Of {len(rows):,} runs of {len({row.group for row in rows})} other sources" in text
    errors = [abs(error) for error in times(results)]
    half, most, nine = (round(100 * quantile(errors, share)) for share in (0.5, 0.75, 0.9))
    assert f"of half is within {half} %, of three of four within {most} %, and of nine of ten within {nine} %" in text
    held = [abs(error) for error in memories(results)]
    half, nine = (round(100 * quantile(held, share)) for share in (0.5, 0.9))
    assert f"memory of half is within {half} % and of nine of ten within {nine} %" in text
    verdicts = oom(results)
    recall, alarms = (round(100 * verdicts[name]) for name in ("recall", "false_alarms"))
    out = sum(row.oom for row in rows)
    assert f"{recall} % of the {out} runs that ran out are foreseen, {alarms} % of the others called off" in text


@pytest.mark.parametrize(
    ("source", "within"),
    [
        ("libai", 0.08), ("yafsdp", 0.08), ("ibmblog", 0.1), ("paimoe", 0.08), ("nemo25", 0.1), ("easycontext", 0.08),
        ("lumimegds", 0.15), ("levanter", 0.05), ("hfv100", 0.08), ("jeanzay21", 0.15), ("nanogptissue", 0.15),
        ("habana", 0.09), ("megascale", 0.095),
        ("mosaicgpt", 0.07), ("sunspot2b", 0.06), ("nemotron4", 0.05), ("tf2bert", 0.1), ("hfsft", 0.12),
        ("dhelix", 0.03), ("dsmaster", 0.1),
        ("gb300node", 0.1), ("moefold", 0.1), ("primus", 0.12), ("geob300", 0.13), ("v5pds3", 0.15), ("automodel", 0.1),
        ("a10oke", 0.1), ("nvpaddlebert", 0.12), ("te5090", 0.1), ("mn5qwen", 0.26), ("b200ds3", 0.19),
        ("trillium", 0.14), ("gcpmaxtext", 0.13), ("maxtexttpu", 0.07), ("maxtextcp", 0.3), ("tpulong", 0.3),
        ("mlperfgpt3", 0.05), ("tgsweep", 0.13), ("tr3m", 0.1),
    ],
)  # fmt: skip
def test_networks_wires_and_experts_of_sources_that_nobody_fitted(
    found: tuple[list[Row], list[Result]], source: str, within: float
) -> None:
    """V100 without a switch; FSDP1 on fast and slow networks; experts that are reached once per node; long sequences on
    A100; MI250X; the host's step of JAX; fp32 and fp16 on V100; attention before torch 2.0; tp whose
    collectives few switches hide; A100 of 2022; tiles of Max 1550; TensorFlow in fp32 and fp16; adapters in fp32;
    what Megatron-Core hides of tp; what DeepSpeed gathers in a node; attention on GB300; experts that ranks share, that
    are cast one by one, that a token reaches once per rank, whose tiles lie across them;
    whole gradients that DeepSpeed adds up over TCP; samples in bins; 8 bits on GeForce; HBM2e; masks; what XLA runs
    again, windows, and attention kept, on TPU; interleaved stages that are sent behind those that are left; V100."""
    assert median(abs(error) for error in times(each for each in found[1] if each.row.group == source)) < within


def test_no_run_stands_there_twice(found: tuple[list[Row], list[Result]]) -> None:
    """Two sources, one measurement: a report that cites another, or a page that was read twice."""
    seen: dict[tuple[object, ...], list[Row]] = {}
    for row in found[0]:
        if row.step_time:
            job = (row.cluster.device, row.plan.axes, row.workload.seq_len, row.workload.global_batch)
            seen.setdefault(job, []).append(row)
    twice = [
        (one.id, other.id)
        for rows in seen.values()
        for one, other in combinations(rows, 2)
        if one.group != other.group and abs(one.step_time / other.step_time - 1) < 1e-4
    ]
    assert not twice
