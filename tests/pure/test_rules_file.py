from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError, DataError, ModelError
from shardwise.model.rules_file import Rules, load_rules

RULES = Rules(
    styles={"": "replicate", "embed": "vocab", "layers.*.wq": "column", "layers.*.wo": "row"},
    reasons={"layers.*.wq": "its heads stay split until wo", "": "found nothing"},
    model="pkg.mod:Net",
    tp_divides=4,
)


def test_a_verified_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    RULES.with_verified("tp2").save(path)
    loaded = load_rules(path)
    assert dict(loaded) == dict(RULES)
    assert (loaded.reasons, loaded.model, loaded.tp_divides, loaded.verified) == (RULES.reasons, RULES.model, 4, "tp2")


def test_unverified_rules_are_refused_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    RULES.save(path)
    with pytest.raises(ConfigError, match=r"not verified \(nobody compared.*shardwise rules MODEL --rules .* --verify"):
        load_rules(path)
    assert dict(load_rules(path, unverified=True)) == dict(RULES)


def test_rules_edited_after_they_were_verified_are_not(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    RULES.with_verified("tp2").save(path)
    path.write_text(path.read_text().replace('"row"', '"replicate"'))
    with pytest.raises(ConfigError, match="not verified \\(they were changed since"):
        load_rules(path)
    assert load_rules(path, unverified=True).verified == ""


def test_a_file_by_hand_needs_the_table_only(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('[rules]\nup = "column"\n"down" = "row"\n')
    assert dict(load_rules(path, unverified=True)) == {"up": "column", "down": "row"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[rules]\nup = "colum"\n', r"rules.toml, line 2: rule 'up': unknown style 'colum'; did you mean 'column'"),
        ('modle = "x"\n[rules]\nup = "row"\n', r"line 1: unknown key 'modle'; did you mean 'model'"),
        ('[rules]\n"layers.w*" = "row"\n', r"line 2: sharding rule 'layers.w\*'.*a component is a name"),
        ('[rules]\nlayers.up = "row"\n', r"unknown style .*quote patterns that have dots"),
        ('tp_divides = "4"\n[rules]\nup = "row"\n', r"line 1: found tp_divides = '4', needed a number"),
        ('tp_divides = -4\n[rules]\nup = "row"\n', r"line 1: found -4, needed a number of units"),
        ('model = "x"\n', r"found no rules; needed: \[rules\]"),
        ("[rules]\n", r"found no rules"),
        ('rules = "x"\n', r"needed a table of pattern = style"),
        ("[rules\n", r"no TOML \(.*line 1.*\)"),
    ],
)
def test_mistakes_in_a_file_name_the_line_and_the_cure(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises((ConfigError, DataError), match=message):
        load_rules(path, unverified=True)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("")
    with pytest.raises(DataError, match=r"No such file.*did you mean 'rules.toml'"):
        load_rules(tmp_path / "ruels.toml")
    with pytest.raises(DataError, match="shardwise rules MODEL --out"):
        load_rules(tmp_path / "none" / "rules.toml")
    (tmp_path / "latin.toml").write_bytes(b"\xff")
    with pytest.raises(DataError, match="no UTF-8"):
        load_rules(tmp_path / "latin.toml")
    with pytest.raises(DataError, match="cannot write rules"):
        RULES.save(tmp_path / "none" / "rules.toml")


def test_degrees_that_do_not_divide_are_refused() -> None:
    RULES.check(tp=1, sequence=False)
    RULES.check(tp=4, sequence=True)
    with pytest.raises(ModelError, match=r"tp=3 does not divide the 4 units that they split; use tp in \{1, 2, 4\}"):
        RULES.check(tp=3, sequence=False)


def test_sequence_shards_are_refused_where_they_would_be_wrong() -> None:
    rules = Rules(styles={"up": "column"}, no_sequence="`mean` runs over tokens")
    rules.check(tp=2, sequence=False)
    with pytest.raises(ModelError, match="sequence shards would train something else: `mean` runs over tokens; drop"):
        rules.check(tp=2, sequence=True)
