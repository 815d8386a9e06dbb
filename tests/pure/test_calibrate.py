"""What a source's errors were without it: constants that nobody else shows take the median of their like."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

import calibrate
from tests.pure.test_published import SAMPLE, variant


def test_a_stack_that_no_other_source_runs_gets_the_median_of_others() -> None:
    constants = calibrate.Constants()
    alone = calibrate.job_of([variant("sweep-1")], constants)
    rest = calibrate.job_of([variant("old-2", gpu="h100"), variant("core-4")], constants)
    found = calibrate.unseen(alone, rest, constants, seconds=0.0)
    key = ("stack", "megatron-flash", "network")
    names = constants.documents[calibrate.FILES["stack"]]
    known = [constants.get(("stack", name, "network")) for name in names if name != "megatron-flash"]
    assert found.keys() == alone.values.keys() and found[key] == median(filter(None, known)) != alone.values[key]
    assert alone.errors(found) != alone.errors(alone.values)


def test_shared_constants_are_fitted_to_the_others() -> None:
    constants, row = calibrate.Constants(), variant("core-1")
    alone = calibrate.job_of([row], constants)
    slower = replace(row, group="another", step_time=3 * (row.step_time or 1.0))
    found = calibrate.unseen(alone, calibrate.job_of([slower], constants), constants, seconds=1.0)
    assert alone.errors(found)[0] > alone.errors(alone.values)[0]


def test_leaving_a_source_out_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [path.read_bytes() for path in sorted(set(calibrate.FILES.values()))]
    monkeypatch.setattr("sys.argv", ["calibrate", str(SAMPLE), "--leave-out", "core", "--minutes", "0"])
    assert calibrate.main() == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} >= {"now", "unseen"}
    assert before == [path.read_bytes() for path in sorted(set(calibrate.FILES.values()))]
    monkeypatch.setattr("sys.argv", ["calibrate", str(SAMPLE), "--leave-out", "nobody"])
    assert calibrate.main() == 2


def test_models_are_left_out_by_fifths_of_their_source() -> None:
    row = variant("core-1")
    small = [replace(row, spec=replace(row.spec, num_layers=layers)) for layers in (8, 10, 12, 14, 16)]
    rows = [*small, replace(row, group="alone")]
    found = [calibrate.left_out(rows, f"model:{fold}") for fold in range(1, calibrate.FOLDS + 1)]
    assert [sum(fold) for fold in found] == [1] * calibrate.FOLDS  # each model once, but for one that has no other
    assert not any(fold[-1] for fold in found) and found[0][0] and found[4][4]


def test_a_device_that_is_left_out_has_its_siblings_constants() -> None:
    constants, row, other = calibrate.Constants(), variant("old-1", gpu="h200"), variant("old-2", gpu="h100")
    assert calibrate.left_out([row, other], "device:h200") == [True, False]
    alone, rest = calibrate.job_of([row], constants), calibrate.job_of([other], constants)
    faster = {**rest.values, ("device", "h100", "curve.best"): 0.75}
    found = calibrate.unseen(alone, replace(rest, values=faster), constants, seconds=0.0)
    assert found["device", "h200", "curve.best"] == 0.75


def test_small_sources_are_kept_whole_where_others_are_thinned() -> None:
    row = variant("core-1")
    rows = [replace(row, group="large")] * (calibrate.FEW + 1) + [replace(row, group="small")] * 3
    assert [row.group for row in calibrate.thinned(rows, 50)] == ["large"] * 3 + ["small"] * 3
