from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.plan.plan import (
    PRECISIONS,
    SCHEDULES,
    Axes,
    Batch,
    Communication,
    Float8,
    Offload,
    Plan,
    Recompute,
    Schedule,
    Tensor,
)

DEGREE = st.integers(1, 64)
NAME = st.from_regex(r"[a-z_]{1,8}(\.[a-z0-9*]{1,4}){0,2}", fullmatch=True)
RECOMPUTE = st.one_of(
    st.builds(Recompute, mode=st.sampled_from(["none", "blocks", "ops"])),
    st.builds(Recompute, mode=st.just("every"), every=st.integers(0, 9)),
    st.builds(Recompute, mode=st.just("ratio"), ratio=st.floats(-2, 2)),
)
PLANS = st.builds(
    Plan,
    axes=st.builds(Axes, **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), DEGREE)),
    zero=st.integers(0, 3),
    batch=st.builds(Batch, global_size=st.none() | st.integers(1, 10**6), micro_batches=DEGREE),
    schedule=st.builds(
        Schedule,
        kind=st.sampled_from(SCHEDULES),
        stages_per_rank=st.none() | DEGREE,
        boundaries=st.lists(NAME, max_size=3).map(tuple),
    ),
    precision=st.sampled_from(PRECISIONS),
    tf32=st.booleans(),
    float8=st.one_of(
        st.just(Float8()),
        st.builds(
            Float8,
            recipe=st.sampled_from(["tensorwise", "rowwise", "rowwise-hp"]),
            all_gather=st.booleans(),
            emulate=st.booleans(),
        ),
    ),
    precision_rules=st.lists(
        st.builds("{}:{}".format, NAME, st.sampled_from(["fp32", "bf16", "fp8"])),
        max_size=3,
        unique_by=lambda rule: rule.split(":")[0],
    ).map(tuple),
    recompute=RECOMPUTE,
    offload=st.builds(Offload, state=st.booleans(), activations=st.booleans()),
    communication=st.builds(
        Communication,
        bucket_mb=st.floats(0, 1e6, exclude_min=True),
        static_graph=st.booleans(),
        find_unused=st.booleans(),
        bucket_view=st.booleans(),
        reshard_after_forward=st.none() | st.booleans() | st.integers(2, 64),
        prefetch=DEGREE,
        reduce_dtype=st.sampled_from([None, "fp32", "bf16", "fp16"]),
    ),
    tensor=st.builds(Tensor, sequence=st.booleans(), loss=st.booleans(), recipe=NAME),
    compile=st.booleans(),
    blocks=NAME,
    wrap_min_params=st.integers(0, 10**9),
)


@settings(deadline=None, max_examples=60)
@given(PLANS)
def test_every_plan_survives_its_spelling(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@settings(deadline=None, max_examples=60)
@given(PLANS, st.randoms())
def test_order_and_slashes_mean_nothing(plan: Plan, random: object) -> None:
    tokens = str(plan).replace("/", " ").split()
    random.shuffle(tokens)  # type: ignore[attr-defined]
    assert Plan.parse(" ".join(tokens)) == Plan.parse(" / ".join(tokens)) == plan


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("recompute=blocks bf16 mb8 tp2 fsdp4 dp2 pp2", "pp2 dp2 fsdp4 tp2 / 1f1b mb8 / bf16 / recompute=blocks"),
        ("dp1", "dp1 / fp32"),
        ("pp1 fsdp1", "dp1 / fp32"),
        ("fsdp4", "fsdp4 / fp32"),
        ("fsdp4 zero3", "fsdp4 / fp32"),
        ("fsdp4 zero2", "fsdp4 zero2 / fp32"),
        ("dp_shard4 dp_replicate2", "dp2 fsdp4 / fp32"),
        ("hsdp2x4", "dp2 fsdp4 / fp32"),
        ("pp2 interleaved:3", "pp2 / interleaved vs3 / fp32"),
        ("pp2 Zbv".lower(), "pp2 / zero-bubble-v / fp32"),
        ("pp2 dualpipev mb4 gbs64", "pp2 / dualpipe-v mb4 gbs64 / fp32"),
        ("pp2 loopedbfs split=h.1,h.2,h.3", "pp2 / looped-bfs split=h.1,h.2,h.3 / fp32"),
        ("tp2 seq loss-parallel recipe=gpt", "tp2 / fp32 / seq loss-parallel recipe=gpt"),
        ("dp2 recompute=50%", "dp2 / fp32 / recompute=50%"),
        ("dp2 recompute=0.5", "dp2 / fp32 / recompute=50%"),
        ("dp2 recompute=every2 tf32", "dp2 / fp32 tf32 / recompute=every2"),
        ("fsdp8 reshard=4 reduce=bf16 prefetch=2", "fsdp8 / fp32 / reshard=4 reduce=bf16 prefetch=2"),
        ("dp2 bucket=25 wrap=0 blocks=auto", "dp2 / fp32"),
        ("fsdp2 offload=activations+state", "fsdp2 / fp32 / offload=state+activations"),
        ("dp1 fp8", "dp1 / bf16 fp8=tensorwise"),
        ("fp8=emulate+rowwise fp32", "dp1 / fp32 fp8=rowwise+emulate"),
        ("fsdp2 fp8=gather precision=head:fp8", "fsdp2 / bf16 fp8=tensorwise+gather precision=head:fp8"),
    ],
)
def test_canonical_spelling(text: str, canonical: str) -> None:
    assert str(Plan.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no token"),
        (" / ", "no token"),
        ("dp2 fspd4", r"'fspd4' at character 5.*did you mean 'fsdp'"),
        ("tp0", "at character 1: found 0, needed at least 1"),
        ("dp2 tp-2", "at character 5: found -2"),
        ("tp", "needed an integer"),
        ("tp2.5", "needed an integer"),
        ("tp٣", "unknown token|needed an integer"),
        ("tp99999999999999999999", "needed an integer"),
        ("dp2 dp4", "already set by 'dp2' at character 1"),
        ("dp2 hsdp2x4", "dp_replicate is already set"),
        ("1f1b gpipe", "schedule.kind is already set"),
        ("interleaved:2 vs2", "stages_per_rank is already set"),
        ("bf16 fp32", "precision is already set"),
        ("fp8 fp8=rowwise", "already set by 'fp8'"),
        ("fp8=rowwise+tensorwise", "needed one of tensorwise"),
        ("precision=layers.*:fp4", "needed PATTERN:TYPE"),
        ("hsdp2", "hsdpAxB"),
        ("zero4", "zero0, zero1, zero2 or zero3"),
        ("mb0", "found 0"),
        ("reshard=1", "found 1, needed at least 2"),
        ("reshard=yes", "needed an integer"),
        ("reduce=fp8", "needed fp32, bf16 or fp16"),
        ("bucket=0", "above 0"),
        ("bucket=nan", "above 0"),
        ("recompute=sometimes", "needed none, blocks, ops"),
        ("offload=disk", "needed state, activations"),
        ("offload=state+state", "needed state, activations"),
        ("split=a,,b", "needed a name"),
        ("compiel", "did you mean 'compile'"),
        ("reduse=bf16", "did you mean 'reduce='"),
        ("dp2; import os", "'dp2;'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){says}"):
        Plan.parse(text)


def test_the_caret_stands_under_the_token() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse("dp2 / fp23")
    _, line, caret = str(caught.value).splitlines()
    assert line[caret.index("^") :] == "fp23"


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=30))
def test_any_text_parses_or_is_a_plan_error(text: str) -> None:
    try:
        plan = Plan.parse(text)
    except PlanError:
        return
    assert Plan.parse(str(plan)) == plan
