from __future__ import annotations

import errno
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, PlanError
from shardwise.plan.plan import Axes, Communication, Plan, Recompute, Schedule
from shardwise.plan.report import mesh_picture, plan_rows, plan_table
from shardwise.records import as_dict

SHORTHANDS = (
    "dp1",
    "pp2 dp2 fsdp4 tp2 / 1f1b mb8 / bf16 / recompute=blocks",
    "hsdp2x4 zero1 / fp16 / reshard=false reduce=fp32 offload=state",
    "pp4 / interleaved vs3 mb8 gbs64 split=h.1,h.2 / bf16-pure tf32 / recompute=33.3% no-bucket-view bucket=1.5",
    "tp2 / fp64 / seq loss-parallel recipe=gpt blocks=h.* wrap=1000",
)


@pytest.mark.parametrize("text", SHORTHANDS)
@pytest.mark.parametrize("ending", [".toml", ".json"])
def test_a_saved_plan_is_the_same_plan(text: str, ending: str, tmp_path: Path) -> None:
    plan = Plan.parse(text)
    file = tmp_path / f"plan{ending}"
    plan.save(file)
    assert Plan.load(file) == Plan.load(str(file)) == plan
    assert Plan.load(file).hash == plan.hash
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    data = tomllib.loads(file.read_text()) if ending == ".toml" else json.loads(file.read_text())
    assert data["format"] == 1


def test_load_takes_a_shorthand() -> None:
    assert Plan.load("fsdp4 / bf16") == Plan.parse("fsdp4 bf16")


def test_hash_is_stable_and_tells_plans_apart() -> None:
    assert Plan.parse("fsdp4 tp2 bf16").hash == Plan.parse("bf16 / tp2 / fsdp4").hash == "7702bd5aef329f00"
    assert len({Plan.parse(text).hash for text in SHORTHANDS}) == len(SHORTHANDS)
    assert Plan(communication=Communication(bucket_mb=30)).hash == Plan.parse("dp1 bucket=30.0").hash


def test_diff_names_the_fields() -> None:
    here, there = Plan.parse("dp2 / bf16"), Plan.parse("fsdp2 / bf16 / seq")
    assert here.diff(there) == {
        "axes.dp_replicate": (2, 1),
        "axes.dp_shard": (1, 2),
        "zero": (0, 3),
        "tensor.sequence": (False, True),
    }
    assert here.diff(here) == {}


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("p.toml", "zero = 3\n\n[axes]\ndp_shrad = 4\n", "line 4.*unknown key.*did you mean 'dp_shard'"),
        ("p.toml", "zeros = 3\n", "line 1.*unknown key.*did you mean 'zero'"),
        ("p.json", '{\n "axes": {\n  "pp": "2"}}', "line 3.*axes.pp: found str '2', needed an integer"),
        ("p.toml", "[axes]\npp = true\n", "found bool True, needed an integer"),
        ("p.toml", "[axes]\npp = 2.0\n", "found float 2.0, needed an integer"),
        ("p.toml", "axes = 4\n", "found int 4, needed a table"),
        ("p.toml", 'precision = "bf61"\n', "needed one of 'fp64', 'fp32', 'bf16'"),
        ("p.toml", "[schedule]\nboundaries = [1]\n", "found list .1., needed a list of strings$"),
        ("p.json", '{"axes": {"pp": 2,\n"tp": 2, "pp": 4}}', ": pp: the same key more than once in one table"),
        ("p.json", '{"zero": 1, "axes": {}, "zero": 3}', ": zero: the same key more than once"),
        ("p.toml", "format = 2\n", "line 1.*reads format 1"),
        ("p.toml", "[axes]\npp = 0\n", "axes.pp: found 0"),
        ("p.toml", "[axes]\npp = \n", "malformed or truncated TOML.*line 2"),
        ("p.json", '{"axes": {"pp": 2}', "line 1: malformed or truncated JSON"),
        ("p.json", "[1, 2]", "found a list, needed a table"),
        ("p.toml", "", "the file is empty"),
        ("p.toml", b"\x80\x81\xff\x00", "not a text file"),
        ("p.yaml", "axes: {}", "needed .toml or .json"),
    ],
)
def test_a_bad_file_says_what_and_where(file: str, content: str | bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=f"(?s){file}.*{says}"):
        Plan.load(path)


@pytest.mark.parametrize(
    "content", ["\ufeff[axes]\npp = 2\n", '\ufeff{"axes": {"pp": 2}}', "\ufeffzero = 0\r\naxes.pp = 2\r\n"]
)
def test_a_mark_of_the_bytes_order_is_no_part_of_a_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / ("p.json" if "{" in content else "p.toml")
    path.write_bytes(content.encode())
    assert Plan.load(path).axes.pp == 2


def test_a_place_that_only_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There nothing can be removed either, and the error is still the one of a place that cannot be written."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(ConfigError, match=r"plan.toml: cannot be written \(Read-only file system\); check the folder"):
        Plan().save(tmp_path / "plan.toml")


def test_a_missing_file_or_place_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Plan.load(str(tmp_path / "none.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan.load(tmp_path / "folder.toml")
    with pytest.raises(ConfigError, match="it is a folder; needed a plan file, whose name ends in .toml or .json"):
        Plan.load(str(tmp_path))
    (tmp_path / "plan.txt").touch()
    with pytest.raises(ConfigError, match="it is a file of another kind; needed a plan file"):
        Plan.load(str(tmp_path / "plan.txt"))
    with pytest.raises(ConfigError, match="cannot be written"):
        Plan().save(tmp_path / "nowhere" / "plan.toml")
    with pytest.raises(ConfigError, match="needed .toml or .json"):
        Plan().save(tmp_path / "plan.txt")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(data=st.data())
def test_a_truncated_file_never_loads_as_another_plan(data: st.DataObject, tmp_path: Path) -> None:
    plan = Plan.parse(SHORTHANDS[3])
    file = tmp_path / "plan.json"
    plan.save(file)
    text = file.read_text().strip()
    file.write_text(text[: data.draw(st.integers(0, len(text) - 1))])
    with pytest.raises(ConfigError):
        Plan.load(file)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Axes(pp=0),
        lambda: Axes(tp=True),
        lambda: Axes(tp=2.0),  # type: ignore[arg-type]
        lambda: Axes(tp=None),  # type: ignore[arg-type]
        lambda: Schedule(kind="1b1f"),  # type: ignore[arg-type]
        lambda: Schedule(boundaries=("a b",)),
        lambda: Recompute(mode="blocks", every=2),
        lambda: Recompute(mode="ratio", ratio=float("nan")),
        lambda: Communication(reshard_after_forward=1),
        lambda: Communication(bucket_mb=0),
        lambda: Communication(prefetch=0),
        lambda: Plan(zero=4),  # type: ignore[arg-type]
        lambda: Plan(precision="fp8"),  # type: ignore[arg-type]
        lambda: Plan(blocks=""),
    ],
)
def test_parts_are_valid_from_the_start(make: Any) -> None:
    with pytest.raises(PlanError):
        make()


def test_to_dict_and_back() -> None:
    for text in SHORTHANDS:
        plan = Plan.parse(text)
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert as_dict(Plan(), drop_none=False)["batch"] == {"global_size": None, "micro_batches": 1}


def test_picture_shows_every_rank_once() -> None:
    assert mesh_picture(Plan.parse("dp1")) == "1 rank: no axis above 1\n0"
    text = mesh_picture(Plan.parse("pp2 fsdp4 tp2"))
    ranks = [int(r) for line in text.splitlines()[1:] for r in line.split(":")[1].split()]
    assert ranks == list(range(16))
    assert len(mesh_picture(Plan.parse("pp16 fsdp64 tp16")).splitlines()) < 20


def test_table_says_what_is_on_and_why() -> None:
    plan = Plan.parse("pp2 fsdp4 / bf16 / recompute=blocks")
    names = [name for name, _, _ in plan_rows(plan)]
    assert {"axes.pp", "axes.dp_shard", "zero", "schedule.kind", "precision", "recompute.mode"} <= set(names)
    assert "axes.tp" not in names
    table = plan_table(plan, reasons={"axes.pp": "two nodes"})
    assert [c.header for c in table.columns] == ["field", "value", "meaning", "reason"]
    assert "two nodes" in list(table.columns[3].cells)


def test_plans_need_no_torch() -> None:
    code = "import sys; import shardwise.plan.plan, shardwise.plan.constraints, shardwise.model.spec; "
    code += "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
