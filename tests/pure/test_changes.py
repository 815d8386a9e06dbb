"""What changed since the last start: which settings change the maths, what is allowed, and what it says."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ChangedError, CheckpointError, UsageError
from shardwise.launch.elastic.plan import has_same_maths
from shardwise.model.spec import spec_from_dict
from shardwise.plan.plan import MATHS, Plan
from shardwise.train.kept.changes import (
    Before,
    Change,
    changed_now,
    check_allowed,
    check_content,
    find_changes,
    leave_of,
    may_convert,
)
from shardwise.train.kept.rundir import RunDir
from shardwise.train.settings import KEYS, RunSettings


def config(*, spec: Any = None, origins: Any = None, **sections: dict[str, Any]) -> dict[str, Any]:
    settings = RunSettings.model_validate(sections).model_dump(mode="json")
    return {"settings": settings, "spec": spec, "origins": origins or {}, "identity": {}}


def changes(folder: Path, before: dict[str, Any], now: dict[str, Any], plans: tuple[str, str] = ("dp2", "dp2")) -> Any:
    run = RunDir(folder)
    run.config_json.write_text(json.dumps(before))
    Plan.parse(plans[0]).save(run.plan)
    run.metrics.touch()
    return find_changes(Before.of_run(run), now, Plan.parse(plans[1]))


def test_a_record_that_is_damaged_is_named_with_what_to_do(tmp_path: Path) -> None:
    changes(tmp_path, config(), config())
    run = RunDir(tmp_path)
    run.plan.write_text(run.plan.read_text()[:-9])
    with pytest.raises(CheckpointError, match=r"plan.toml, line .*; the record is damaged.*put the file back"):
        Before.of_run(run)
    run.config_json.write_text('{"identity": {}}')
    with pytest.raises(CheckpointError, match=r"config.json is damaged .'settings'.*--out NEW"):
        Before.of_run(run)


def test_nothing_changed_and_a_new_directory(tmp_path: Path) -> None:
    assert find_changes(Before.of_run(RunDir(tmp_path)), config(), Plan()) == []
    assert changes(tmp_path, config(), config(train={"out": "elsewhere", "resume": "auto"})) == []


@pytest.mark.parametrize(
    ("section", "key", "value", "kind"),
    [
        ("train", "seed", 1, "maths"),
        ("train", "global_batch", 8, "maths"),
        ("train", "clip_norm", 2.0, "maths"),
        ("optimizer", "lr", 0.5, "maths"),
        ("schedule", "warmup", 7, "maths"),
        ("data", "sources", ["a.txt"], "maths"),
        ("model", "factory", "a:b", "maths"),
        ("data", "num_workers", 2, "other"),
        ("train", "steps", 9, "other"),
        ("train", "micro_batches", 2, "layout"),
        ("train", "weights", "runs/base", "maths"),
        ("train", "nproc", 4, "layout"),
        ("plan", "shorthand", "fsdp2", "layout"),
    ],
)
def test_kinds(tmp_path: Path, section: str, key: str, value: Any, kind: str) -> None:
    [change] = changes(tmp_path, config(), config(**{section: {key: value}}))
    assert (change.key, change.now, change.kind) == (f"{section}.{key}", value, kind)


def test_every_setting_has_a_kind_that_somebody_chose() -> None:
    """A new setting of the train table is `other` by default: look here whether it changes the maths."""
    known = {
        "steps", "tokens", "global_batch", "micro_batches", "clip_norm", "clip_value", "nonfinite", "spike", "on_oom",
        "check_replicas", "seed", "deterministic", "eval_every", "checkpoint_every", "keep", "keep_every", "keep_best",
        "checkpoints", "grace_s", "resume", "out", "name", "nproc", "port", "device", "sample", "tensorboard",
        "weights",
    }  # fmt: skip
    assert {key.partition(".")[2] for key in KEYS if key.startswith("train.")} - known == set()


def test_model_sizes_and_precision(tmp_path: Path) -> None:
    before, now = config(spec={"name": "tiny", "dim": 32}), config(spec={"name": "small", "dim": 64})
    found = changes(tmp_path, before, now, ("dp2", "fsdp2 / bf16"))
    assert [str(change) for change in found] == [
        "model.dim: 32 -> 64 (maths)",
        "plan.precision: 'fp32' -> 'bf16' (maths)",
        "model.name: 'tiny' -> 'small' (other)",
    ]


OTHER_MATHS = {
    "precision": ("dp2 bf16", "precision"),
    "tf32": ("dp2 tf32", "tf32"),
    "float8": ("dp2 fp32 fp8=rowwise", "float8.recipe"),
    "precision_rules": ("dp2 precision=layers.*:fp32", "precision_rules"),
    "communication.reduce_dtype": ("dp2 / reduce=bf16", "communication.reduce_dtype"),
}
"""Field of `MATHS` -> a plan that differs from dp2 in it, and the name of what differs."""


@pytest.mark.parametrize("field", OTHER_MATHS)
def test_a_plan_of_other_maths_is_refused_at_resume_until_it_is_allowed(tmp_path: Path, field: str) -> None:
    text, name = OTHER_MATHS[field]
    found = changes(tmp_path, config(), config(plan={"shorthand": text}), ("dp2", text))
    assert [(change.key, change.kind) for change in found] == [(f"plan.{name}", "maths"), ("plan.shorthand", "layout")]
    with pytest.raises(ChangedError, match=f"plan.{name}: .*add --allow plan.{name}"):
        check_allowed(RunDir(tmp_path), found, ())
    check_allowed(RunDir(tmp_path), found, (f"plan.{name}",))


@pytest.mark.parametrize("field", OTHER_MATHS)
def test_other_maths_are_no_plan_of_an_elastic_run(field: str) -> None:
    assert not has_same_maths(Plan.parse(OTHER_MATHS[field][0]), Plan.parse("dp2"))


def test_another_layout_is_the_same_maths(tmp_path: Path) -> None:
    assert OTHER_MATHS.keys() == set(MATHS)
    here, there = "dp2", "fsdp2 tp2 zero2 / mb2 / recompute=blocks"
    assert changes(tmp_path, config(), config(), (here, there)) == []
    assert has_same_maths(Plan.parse(here), Plan.parse(there))
    assert not has_same_maths(Plan.parse(here), Plan.parse("dp2 / gbs8"))


def test_a_warmup_that_follows_the_length_is_nobodys_change(tmp_path: Path) -> None:
    before = config(train={"steps": 10}, schedule={"warmup": 1})
    now = config(train={"steps": 20}, schedule={"warmup": 2}, origins={"schedule.warmup": "derived: a tenth"})
    assert {change.key: change.kind for change in changes(tmp_path, before, now)} == {
        "train.steps": "maths",  # leave for the length is all that is asked for
        "schedule.warmup": "other",
    }
    said = config(train={"steps": 20}, schedule={"warmup": 2}, origins={"schedule.warmup": "flag: --warmup"})
    assert changes(tmp_path, before, said)[0].kind == "maths"


@pytest.mark.parametrize(
    ("schedule", "steps", "kind"),
    [
        ({"name": "constant", "warmup": 3}, 20, "other"),
        ({"name": "cosine", "warmup": 1, "final": 1.0}, 20, "other"),  # the full rate from its warm-up on
        ({"name": "cosine", "warmup": 1}, 20, "maths"),
        ({"name": "cosine", "warmup": 1}, 8, "maths"),
        ({"name": "linear", "warmup": 1}, 20, "maths"),
        ({"name": "wsd", "warmup": 1}, 20, "maths"),
    ],
)
def test_a_length_that_the_rates_follow_changes_the_maths(
    tmp_path: Path, schedule: dict[str, Any], steps: int, kind: str
) -> None:
    before, now = (config(train={"steps": length}, schedule=schedule) for length in (10, steps))
    [change] = changes(tmp_path, before, now)
    assert (change.key, change.kind) == ("train.steps", kind)
    if kind == "maths":
        why = f"which the rates of schedule.name = '{schedule['name']}' follow"
        with pytest.raises(ChangedError, match=f"train.steps: 10 -> {steps}, {why}.*add --allow train.steps"):
            check_allowed(RunDir(tmp_path), [change], ())
    both = changes(tmp_path, before, config(train={"steps": steps}, schedule=schedule | {"warmup": 2}))
    assert {change.key: change.kind for change in both} == {"schedule.warmup": "maths", "train.steps": kind}


def test_a_schedule_of_a_record_that_is_not_known_is_taken_to_be_moved(tmp_path: Path) -> None:
    before, now = (config(train={"steps": length}, schedule={"name": "constant"}) for length in (10, 20))
    before["settings"]["schedule"]["shape"] = "waves"
    assert [change.kind for change in changes(tmp_path, before, now)] == ["maths"]


def test_what_is_allowed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    found = [Change("optimizer.lr", 0.1, 0.2, "maths"), Change("train.seed", 0, 1, "maths"),
             Change("train.nproc", 2, 4, "layout")]  # fmt: skip
    check_allowed(run, found[2:], ())
    check_allowed(run, found, ("all",))
    check_allowed(run, found, ("optimizer.lr", "train.seed"))
    with pytest.raises(ChangedError) as refused:
        check_allowed(run, found, ("optimizer.lr",))
    text = str(refused.value)
    assert "train.seed: 0 -> 1 (maths)" in text and "add --allow train.seed" in text and "optimizer.lr" not in text
    with pytest.raises(UsageError, match="--allow optimizer.l: found no such change"):
        check_allowed(run, found, ("optimizer.l",))


def test_leave_to_convert_averages_holds_until_a_save_makes_it_needless(tmp_path: Path) -> None:
    run, key = RunDir(tmp_path), "optimizer.state_dtype"
    assert not may_convert(leave_of(run, ())) and not may_convert(leave_of(run, ("optimizer.lr",)))
    assert may_convert(leave_of(run, (key,))) and may_convert(leave_of(run, ("all",)))
    run.add_event("changed", changes=["optimizer.lr: 1.0 -> 2.0 (maths)"], allowed=["all"])
    assert not may_convert(leave_of(run, ()))
    run.add_event("changed", changes=[f"{key}: 'fp32' -> '8bit' (maths)"], allowed=[key])
    assert may_convert(leave_of(run, ()))
    check_allowed(run, [], (key,))  # of another run's checkpoint, or of a start that came before


def test_leave_is_given_again_by_the_same_command(tmp_path: Path) -> None:
    """A batch system starts a job again as it is."""
    run = RunDir(tmp_path)
    with pytest.raises(UsageError, match="--allow optimizer.lr: found no such change"):
        check_allowed(run, [], ("optimizer.lr",), leave_of(run, ()))
    changes = ["optimizer.lr: 1.0 -> 2.0 (maths)", "train.nproc: 2 -> 4 (layout)"]
    run.add_event("changed", changes=changes, allowed=["optimizer.lr"])
    check_allowed(run, [], ("optimizer.lr",), leave_of(run, ()))
    with pytest.raises(UsageError, match="--allow train.nproc"):
        check_allowed(run, [], ("train.nproc",), leave_of(run, ()))
    assert changed_now(run) == {"optimizer.lr"}  # where no run has begun the record is that of the start
    run.starting.path.mkdir()
    run.starting.config_json.write_text("{}")
    assert changed_now(run) == set() and leave_of(run, ("a",)) == {"a", "optimizer.lr"}
    run.starting.add_event("changed", changes=["train.seed: 0 -> 5 (maths)"], allowed=["train.seed"])
    assert changed_now(run) == {"train.seed"} and leave_of(run, ()) == {"train.seed", "optimizer.lr"}


def test_a_start_that_never_began_is_no_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config_json.write_text(json.dumps(config(optimizer={"lr": 0.5})))
    assert Before.of_run(run) is None
    run.metrics.touch()
    assert Before.of_run(run) is not None


def test_a_checkpoint_says_what_its_run_was() -> None:
    model = {"preset": "tiny", "num_layers": 1}
    settings = RunSettings.model_validate({"model": model, "optimizer": {"lr": 0.5}}).model_dump(mode="json")
    spec = dict(vars(spec_from_dict(model, name="tiny")))
    before = Before.of_checkpoint(settings, asdict(Plan.parse("dp2 / bf16")))
    now = config(spec=spec, model=model, optimizer={"lr": 0.25})
    found = find_changes(before, now, Plan.parse("fsdp2"))
    assert [str(change) for change in found] == [
        "optimizer.lr: 0.5 -> 0.25 (maths)",
        "plan.precision: 'bf16' -> 'fp32' (maths)",
    ]
    wider = config(spec={**spec, "dim": 2 * spec["dim"]}, model=model, optimizer={"lr": 0.5})
    assert "model.dim" in {change.key for change in find_changes(before, wider, Plan())}
    for unknown in ({}, {"lr": 3}, {"model": "mine", "train": {"seed": 5, "mine": 1}}):
        keys = {change.key for change in find_changes(Before.of_checkpoint(unknown, {"new": 1}), now, Plan())}
        assert keys <= {"train.seed"}


@pytest.mark.parametrize(
    "change", [Change("model.dim", 32, 64, "maths"), Change("optimizer.name", "adamw", "lion", "maths")]
)
def test_what_can_never_load_is_not_offered_for_leave(tmp_path: Path, change: Change) -> None:
    for allow in ((), ("all",), (change.key,)):
        with pytest.raises(ChangedError, match=change.key) as refused:
            check_allowed(RunDir(tmp_path), [change], allow)
        assert "--allow" not in str(refused.value)
    check_allowed(RunDir(tmp_path), [Change("optimizer.name", "adamw", "lamb", "maths")], ("all",))


def test_other_rows_under_the_same_settings_need_leave(tmp_path: Path) -> None:
    here: dict[str, Any] = {"data": {"sources": ["a.txt"], "seq_len": 8, "num_workers": 2}}
    before, other = here | {"data.content": "ab"}, {"data": {**here["data"], "num_workers": 0}}
    now = here | {"data.content": "cd"}
    for then, rows in ((other, True), (before, False)):  # those of the probe, or others
        with pytest.raises(ChangedError, match=r"\(a.txt\).*add --allow data.content"):
            check_content(then, now, (), other_rows=rows)
        for leave in ("data.content", "all"):
            check_content(then, now, (leave,), other_rows=rows)
    check_content(other, now, (), other_rows=False)  # an older one, which holds no fingerprint
    check_content(now, now, (), other_rows=False)
    said = {"data": {**here["data"], "seq_len": 4}, "data.content": "ab"}
    check_content(said, now, (), other_rows=True)  # that was said, and asked for leave
    check_content({}, now, (), other_rows=True)  # of another program
    check_allowed(RunDir(tmp_path), [], ("data.content",))
