"""Files of records that somebody edited: what a start reads of them is refused, with its line, where it is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import CheckpointError, UsageError
from shardwise.train.kept.rundir import RunDir
from shardwise.train.metrics import MetricsLog

EVENTS = [
    ('{"event": "quarantine", "rows": "x"}', "rows: found str 'x', needed a list of integers"),
    ('{"event": "quarantine", "rows": [0, NaN]}', "rows: found list [0, nan], needed a list of integers"),
    ('{"event": "quarantine", "rows": [0, true]}', "rows: found list [0, True], needed a list of integers"),
    ('{"event": "quarantine", "rows": [4]}', "rows: found [4], needed the first position of a window"),
    ('{"event": "quarantine", "rows": [4, 2]}', "rows: found [4, 2], needed the first position of a window"),
    ('{"event": "quarantine", "rows": [0, 99999999999]}', "rows: found [0, 99999999999], needed the first position"),
    ('{"event": "quarantine", "rows": [0, 99999999999999999999]}', "rows: found int 99999999999999999999, needed a"),
    ('{"event": "quarantine"}', "rows: found (), needed the first position"),
    ('{"event": "quarantine", "rows": null, "nth": "1"}', "nth: found str '1', needed an integer"),
    ('{"event": "changed", "changes": 3}', "changes: found int 3, needed a list of strings"),
    ('{"event": "changed"}', "changes: found NoneType None, needed a list of strings"),
    ('{"event": "weights"}', "asked: found NoneType None, needed a string"),
    ('{"event": "elastic", "plan": 2}', "plan: found int 2, needed a string"),
    ('{"event": ["changed"]}', "event: found list ['changed'], needed a string"),
    ("{}", "event: found NoneType None, needed a string"),
]


@pytest.mark.parametrize(("line", "said"), EVENTS)
def test_an_event_of_wrong_types_is_refused_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    run = RunDir(tmp_path)
    run.add_event("weights", asked="a")
    with run.events.open("a") as file:
        file.write(f"{line}\n")
    needed = re.escape(f"{run.events}:2: {said}") + ".*; repair or remove the line"
    with pytest.raises(UsageError, match=needed):
        run.read_events("weights")


METRICS = [
    ('{"step": "4", "loss": 1.0}', "step: found str '4', needed an integer"),
    ('{"loss": 1.0}', "step: found NoneType None, needed an integer"),
    ('{"step": 4, "loss": NaN}', "loss: found float nan, needed a number below"),
    ('{"step": 4, "step_s": 1e400}', "step_s: found float inf, needed a number below"),
    ('{"step": 4, "eval_loss": []}', "eval_loss: found list [], needed a number"),
]


@pytest.mark.parametrize(("line", "said"), METRICS)
def test_metrics_of_wrong_types_are_refused_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 3, "loss": null}\n' + f"{line}\n")
    for read in (run.read_metrics, lambda: MetricsLog(run.metrics, after_step=3)):
        with pytest.raises(UsageError, match=re.escape(f"{run.metrics}:2: {said}")):
            read()


@pytest.mark.parametrize(
    "settings", [3, {"train": []}, {"train": {}, "model": 3}, {"train": {}, "model": [["a", "b"]]}]
)
def test_a_record_without_tables_of_settings_is_damaged(tmp_path: Path, settings: Any) -> None:
    run = RunDir(tmp_path)
    for found in ({"settings": settings, "identity": {}}, {"settings": {"train": {}}, "identity": {}, "spec": "x"}):
        run.config_json.write_text(json.dumps(found))
        with pytest.raises(CheckpointError, match=r"config.json is damaged"):
            run.identity()
    run.config_json.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config.json is damaged"):
        run.identity()
