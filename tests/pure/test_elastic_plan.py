"""Slots, the file that lists them, and the plan for another number of processes. No torch, no ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.errors import ExitCode, UsageError
from shardwise.hardware.cluster import load_cluster
from shardwise.launch.elastic.plan import Known, has_same_maths, plan_for, rows_of
from shardwise.launch.elastic.slots import APART, Elastic, Fleet, Team, parse_slots, parse_span, spell_slots
from shardwise.launch.job import Job
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.constraints import check
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.train.kept.rundir import RunDir, check_out

OWN = (
    "dp4 / gbs8",
    "dp4 static-graph / gbs8",
    "fsdp4 / gbs10 bf16",
    "dp2 fsdp2 zero1 / gbs8",
    "tp4 / gbs8",
    "fsdp2 tp2 / gbs8 bf16 / recompute=blocks",
    "pp4 / 1f1b mb4 gbs8",
    "pp2 fsdp2 / 1f1b mb2 gbs8",
    "fsdp2 cp2 / gbs6",
    "cp4 / gbs8",
    "cp4 / gbs1",
    "cp4",
    "fsdp4 ep4 / gbs8",
    "fsdp4",
)


def share_of(plan: Plan) -> float:
    """The most of a micro-batch that a rank has, in samples, of which `cp` has parts."""
    return rows_of(plan) / plan.axes.cp


@pytest.mark.parametrize("text", OWN)
def test_a_plan_for_every_number_of_processes_is_legal_and_the_same_maths(text: str) -> None:
    own = Plan.parse(text)
    for world in range(1, 9):
        plan = plan_for(own, world, Known())
        if world > (own.batch.global_size or world):
            assert plan is None or plan.axes.data <= 6, "more ranks than samples"
            continue
        assert plan is not None and plan.world == world, world
        assert has_same_maths(plan, own) and plan.batch.global_size == own.batch.global_size
        least = 1 / plan.axes.cp if own.batch.global_size else 0.0  # a micro-batch has a whole sample
        assert share_of(plan) <= max(share_of(own), least) * (1 + 1e-9), (
            f"{plan}: larger micro-batches need more memory"
        )
        assert not [finding for finding in check(plan, world=world) if finding.severity == "error"], plan
    assert plan_for(own, 4, Known()) is own


def test_accumulation_is_recomputed_and_uneven_windows_are_used() -> None:
    own = Plan.parse("dp4 mb2 / gbs16")  # micro-batches of 2 samples
    found = {world: str(plan_for(own, world, Known())) for world in (1, 2, 3, 8)}
    assert found == {
        1: "dp1 / mb8 gbs16 / fp32",
        2: "dp2 / mb4 gbs16 / fp32",
        3: "dp3 / mb3 gbs16 / fp32",  # of 6, 5 and 5 samples, in parts of at most 2
        8: "dp8 / gbs16 / fp32",
    }


def test_what_was_sharded_is_not_copied_where_memory_is_not_known() -> None:
    assert str(plan_for(Plan.parse("tp4 / gbs8"), 3, Known())) == "fsdp3 / gbs8 / fp32"
    assert str(plan_for(Plan.parse("pp4 / 1f1b mb4 gbs8"), 3, Known())) == "fsdp3 / mb2 gbs8 / fp32"


def test_parts_of_samples_and_shards_of_cp_count() -> None:
    own = Plan.parse("cp4 / gbs8")  # a rank has 8 quarters of a sample
    assert [str(plan_for(own, world, Known())) for world in (1, 2, 3)] == [
        "dp1 / mb4 gbs8 / fp32",
        "cp2 / mb2 gbs8 / fp32",
        "dp3 / mb2 gbs8 / fp32",
    ]
    assert str(plan_for(Plan.parse("cp4"), 1, Known())) == "dp1 / mb4 / fp32"
    assert str(plan_for(Plan.parse("cp4 / gbs1"), 2, Known())) == "cp2 / gbs1 / fp32", "no part of a sample is less"
    own = Plan.parse("dp2 fsdp3 cp2 / mb2 gbs24")  # sharded in 6: no thirds
    assert str(plan_for(own, 9, Known())) == "fsdp9 / mb3 gbs24 / fp32"


def test_degrees_that_a_model_may_not_divide_are_not_taken() -> None:
    plan = plan_for(Plan.parse("fsdp4 ep4 / gbs8"), 3, Known())
    assert plan is not None and plan.axes.ep == 1
    plan = plan_for(Plan.parse("fsdp3 tp2 / gbs12"), 4, Known())
    assert plan is not None and plan.axes.tp in (1, 2)


def test_slots_may_be_listed_before_the_first_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.devices.write_text("0-1")
    check_out(run, resume="auto")


def test_a_batch_smaller_than_the_ranks_has_no_plan() -> None:
    assert plan_for(Plan.parse("dp4 / gbs4"), 5, Known()) is None


def test_memory_is_respected() -> None:
    spec, cluster = preset("llama-8b"), load_cluster("h100:8")
    workload = Workload(seq_len=8192, global_batch=64)
    known = Known(spec=spec, cluster=cluster, workload=workload, device="cuda")
    own = Plan.parse("fsdp8 mb8 / gbs64 bf16")
    for world in (6, 4, 2, 1):
        plan = plan_for(own, world, known)
        assert plan is not None and has_same_maths(plan, own)
        unit = plan.axes.data * plan.batch.micro_batches
        rows = replace(workload, global_batch=-(-64 // unit) * unit)
        assert estimate_memory(profile_of(spec), plan, rows, device=cluster.device).fits, plan
    bare = estimate_memory(profile_of(spec), Plan.parse("dp1 zero3 mb64 / gbs64 bf16"), workload, device=cluster.device)
    assert not bare.fits  # the plan for one process differs from that
    none = replace(known, spec=preset("llama-70b"))
    assert plan_for(Plan.parse("fsdp8 mb8 / gbs64 bf16"), 1, none) is None


def test_the_planner_is_asked_where_it_chose_and_its_maths_stay() -> None:
    workload, cluster = Workload(seq_len=64, global_batch=8), load_cluster("cpu")
    known = Known(spec=preset("tiny"), cluster=cluster, workload=workload, device="cpu", planned=True)
    own = Plan.parse("dp4 / gbs8 fp32")
    for world in (1, 2, 3):
        plan = plan_for(own, world, known)
        assert plan is not None and plan.world == world and has_same_maths(plan, own)
    small = Plan.parse("dp4 mb2 / gbs8 fp32")  # micro-batches of one sample: the planner does not need them so small
    assert str(plan_for(small, 2, known)) == "dp2 / gbs8 / fp32"
    assert str(plan_for(small, 2, replace(known, planned=False))) == "dp2 / mb4 gbs8 / fp32"
    double = plan_for(Plan.parse("dp4 / gbs8 fp64"), 2, known)  # the planner knows no fp64: the nearest plan
    assert double is not None and double.precision == "fp64"


@pytest.mark.parametrize("text", ["", "4", "0:3", "3:2", "a:b", "2:4:6", "-1:2"])
def test_a_span_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="needed MIN:MAX processes"):
        parse_span(text)


@pytest.mark.parametrize("text", ["", " ", "x", "0-", "1.5", "0 x", "99999", "3-1"])
def test_what_is_no_list_of_slots(text: str) -> None:
    assert parse_slots(text) is None


def test_slots_are_spelt_as_they_are_read() -> None:
    for slots in ({0}, {0, 1, 2}, {0, 2, 3, 9}):
        assert parse_slots(spell_slots(slots)) == frozenset(slots)


def fleet(
    devices: Path | None, *, own: str = "dp3 / gbs6", span: str = "2:4", given: str = "4,5,6,7", **more: Any
) -> Fleet:
    """Slots of a host where CUDA_VISIBLE_DEVICES is `given`."""
    least, most = parse_span(span)
    plan = Plan.parse(own)
    elastic = Elastic(least=least, most=most, own=plan, arguments=lambda p: (str(p), "x"), devices=devices, **more)
    return Fleet(Job(target=__file__, args=(own, "x"), nproc=plan.world), elastic, {"CUDA_VISIBLE_DEVICES": given})


def team(fleet: Fleet) -> Team:
    found = fleet.team()
    assert found is not None
    return found


def test_a_job_that_is_not_elastic_has_one_team() -> None:
    here = Fleet(Job(target=__file__, nproc=3))
    assert here.fail(1, "tide", 5) is False
    assert team(here).slots == (0, 1, 2) and team(here).job is here.job and here.most == 3


def test_the_file_says_which_slots_there_are(tmp_path: Path) -> None:
    path = tmp_path / "devices"
    here = fleet(path)
    assert team(here).slots == (0, 1, 2)  # nothing is said: as many as the plan needs
    path.write_text("0 2-9")
    assert team(here).slots == (0, 2, 3) and here.most == 4  # four devices were given: there is no slot 4
    assert team(here).job.args == ("dp3 / gbs6 / fp32", "x") and team(here).job.nproc == 3
    assert team(here).job.environment == {"CUDA_VISIBLE_DEVICES": "4,6,7"}
    path.write_text("3")
    assert here.team() is None
    path.write_text("")  # as while it is being written
    assert here.team() is None
    path.write_text("0-1")
    assert team(here).slots == (0, 1) and team(here).job.environment == {}
    path.unlink()
    assert team(here).slots == (0, 1)


@pytest.mark.parametrize(
    ("given", "device", "slots", "visible"),
    [
        ("4,5,6,7", "cuda", (0, 2, 3), "4,6,7"),
        ("4,5", "cuda", (0,), None),
        ("GPU-a,GPU-b,GPU-c", None, (0, 2), "GPU-a,GPU-c"),
        ("", "cuda", (0, 2, 3, 4), "0,2,3,4"),
        ("4,5", "cpu", (0, 2, 3, 4), "0,2,3,4"),
    ],
)
def test_no_two_slots_have_one_device(
    tmp_path: Path, given: str, device: str | None, slots: tuple[int, ...], visible: str | None
) -> None:
    path, said = tmp_path / "devices", list[str]()
    path.write_text("0 2-4")
    here = fleet(path, span="1:4", given=given, known=Known(device=device), note=said.append)
    assert team(here).slots == slots
    assert team(here).job.environment.get("CUDA_VISIBLE_DEVICES") == visible
    beyond = {"4,5,6,7": "4", "4,5": "2-4", "GPU-a,GPU-b,GPU-c": "3-4"}.get(given) if device != "cpu" else None
    assert [f"found slots {beyond}, which have no device" in text for text in said] == ([True] if beyond else [])


def test_on_rocm_the_name_that_it_reads_first_is_used() -> None:
    least, most = parse_span("1:2")
    elastic = Elastic(least=least, most=most, own=Plan.parse("dp2 / gbs4"), arguments=lambda p: (str(p),))
    here = Fleet(Job(target=__file__, nproc=2), elastic, {"HIP_VISIBLE_DEVICES": "5,6", "CUDA_VISIBLE_DEVICES": "0,1"})
    here.left_out[0] = "it died"
    assert here.usable == [1] and team(here).job.environment == {"HIP_VISIBLE_DEVICES": "6"}


def test_more_ranks_than_devices_start_as_those_that_there_are() -> None:
    here = fleet(None, own="dp4 / gbs8", given="4,5")
    assert here.usable == [0, 1] and team(here).job.environment == {}


def test_a_slot_that_fails_again_soon_is_left_out_until_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "devices"
    path.write_text("0-2")
    here = fleet(path)
    assert team(here).slots == (0, 1, 2)
    assert not here.fail(1, "tide", 5)
    assert not here.fail(1, "tide", 5 + APART)  # long ago
    assert here.fail(1, "ebb", 6 + APART)
    assert team(here).slots == (0, 2) and here.left_out == {1: "ebb"}
    assert here.fail(2, "x", 6) is False and here.fail(2, "x", 6) is True
    assert here.team() is None
    os.utime(path, ns=(1, 1))  # written again
    assert team(here).slots == (0, 1, 2) and not here.left_out


def test_who_stands_by_is_who_would_train_after_the_next_failure(tmp_path: Path) -> None:
    often, once = fleet(tmp_path / "devices"), fleet(tmp_path / "devices", failures=1)
    for here, size in ((often, 3), (once, 2)):
        found = here.next_team(team(here))
        assert found is not None and found.size == size
    two = fleet(tmp_path / "devices", failures=1, own="dp2 / gbs6")
    assert two.next_team(team(two)) == team(two)  # below the minimum nobody would
    (tmp_path / "devices").write_text("0-3")
    assert once.next_team(Team((0, 1, 2), once.job)) == team(once) and team(once).size == 4


def test_the_largest_number_with_a_plan_is_used() -> None:
    """A pipeline of 4 has no plan for 3 where 3 ranks of data do not fit: 2 are used, and one waits."""
    here = fleet(None, own="pp4 / 1f1b mb2 gbs2")
    here.fail(3, "x", 1)
    here.fail(3, "x", 1)
    assert here.usable == [0, 1, 2]
    assert team(here).slots == (0, 1) and str(team(here).plan) == "pp2 / 1f1b mb2 gbs2 / fp32"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--elastic", "2:4", __file__), "found no plan"),
        (("run", "--elastic", "2:4", __file__, "dp8"), "found 8 processes to start with"),
        (("train", "--elastic", "4", "--dry-run", "--device", "cpu"), "needed MIN:MAX"),
        (("train", "--elastic", "3:4", "--plan", "dp2", "--device", "cpu"), "found 2 processes to start with"),
        (("run", "--devices", "d", __file__, "dp2"), "--devices: found no --elastic, needed --elastic MIN:MAX"),
        (("run", "--slot-failures", "3", __file__, "dp2"), "--slot-failures: found no --elastic"),
        (
            ("train", "--elastic-wait", "0", "--slot-failures", "3"),
            "--slot-failures, --elastic-wait: found no --elastic",
        ),
        (("run", "--elastic", "1:2", "--elastic-wait", "9", __file__, "dp2"), "--elastic-wait: found no --devices"),
    ],
)
def test_what_the_command_line_refuses(
    words: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == ExitCode.USAGE and said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
