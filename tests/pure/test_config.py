"""Settings from files and flags: errors name the key and the nearest one; every value knows where it came from."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import pytest

from shardwise.cli.options.config import Configuration, Given, Origin, read_configuration
from shardwise.cli.options.derive import Derived, Surroundings, derive, workload_optimizer
from shardwise.cli.options.made_for import MadeFor, save_plan
from shardwise.cli.options.resolved import configuration_json, configuration_toml
from shardwise.errors import ConfigError, PlanError, UsageError
from shardwise.hardware.cluster import load_cluster
from shardwise.plan.plan import Plan
from shardwise.plan.workload import STATE_BYTES
from shardwise.train.settings import KEYS, OptimizerName, OptimizerSettings, RunSettings, get

CPU = Surroundings(device="cpu", num_devices=0, device_reason="none seen", now=datetime(2026, 1, 2, 3, 4, 5))
H100S = load_cluster("h100:4")
GPUS = Surroundings(device="cuda", num_devices=4, device_reason="4 seen", now=datetime(2026, 1, 2), cluster=H100S)
COMPILERS = replace(GPUS, compiles=True)


def read(tmp_path: Path, text: str, *sets: str) -> Configuration:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return read_configuration(path, sets=sets)


def resolve(*sets: str, around: Surroundings = CPU) -> Derived:
    return derive(read_configuration(None, sets=sets), around)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("[train]\nsteps = 1\nsead = 3\n", ["run.toml:3", "'sead' in [train]", "did you mean 'seed'"]),
        ("[trian]\nsteps = 1\n", ["run.toml:1", "table 'trian'", "did you mean 'train'"]),
        ("\nseed = 3\n", ["run.toml:2", "'seed' belongs in [train]"]),
        ("[model]\n\nsteps = 3\n", ["run.toml:3", "'steps' belongs in [train]"]),
        (
            "[optimizer]\nlearning = 3\n",
            ["'learning' in [optimizer]", "known: betas, lr, momentum, name, state_dtype, weight_decay"],
        ),
        ("train.sead = 3\n", ["run.toml:1", "did you mean 'seed'"]),
        ("train = 3\n", ["run.toml:1", "[train]"]),
        ('[train]\nsteps = "10"\n', ["run.toml:2", "train.steps = '10'", "integer", "leave out the quotes"]),
        ("[train]\nseed = -1\n", ["run.toml:2", "train.seed = -1", "greater than or equal to 0"]),
        ("[train]\nsteps = 1.5\n", ["train.steps = 1.5", "integer"]),
        ('[optimizer]\nname = "adam"\n', ["optimizer.name = 'adam'", "did you mean 'adamw'"]),
        ("[optimizer]\nbetas = [0.9]\n", ["optimizer.betas"]),
        ('[train]\nnonfinite = "ignore"\n', ["train.nonfinite = 'ignore'", "known: raise, skip, stop"]),
        ("[data]\nholdout = 1.0\n", ["data.holdout = 1.0", "less than 1"]),
        ("[train\n", ["is not TOML", "line 1"]),
    ],
)
def test_file_errors(tmp_path: Path, text: str, texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert [text for text in texts if text not in str(caught.value)] == [], str(caught.value)


def test_all_bad_values_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "[train]\nseed = -1\nsteps = 0\n")
    assert len(str(caught.value).splitlines()) == 2


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_configuration(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="TOML text file"):
        read_configuration(tmp_path / "binary.toml")


def test_a_word_that_is_no_configuration_is_told_its_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    for word, hint in (("fsdp2", "--plan fsdp2"), ("llama-8b", "--model llama-8b"), (str(script), "shardwise run")):
        with pytest.raises(ConfigError, match=hint):
            read_configuration(Path(word))


@pytest.mark.parametrize("text", ["seed=3", "train.seed", "train.sead=3", "tarin.seed=3"])
def test_set_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        read_configuration(None, sets=[text])


def test_later_words_win_and_say_so(tmp_path: Path) -> None:
    found = read(tmp_path, "[train]\nseed = 1\nsteps = 5\n[model]\ndim = 64\n", "train.seed=3", "optimizer.name=lion")
    assert found.settings.train.seed == 3
    assert found.settings.optimizer.name == "lion"
    assert str(found.origin("train.seed")) == "flag --set train.seed=3"
    assert str(found.origin("train.steps")) == f"file {tmp_path / 'run.toml'}:3"
    assert str(found.origin("train.keep")) == "default"


def test_a_flag_replaces_a_files_other_spelling(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[train]\ntokens = 100\n[plan]\nfile = "p.toml"\n')
    flag = Origin(kind="flag", detail="--steps")
    found = read_configuration(
        tmp_path / "run.toml",
        [Given(key="train.steps", value=7, origin=flag), Given(key="plan.shorthand", value="dp1", origin=flag)],
    )
    assert (found.settings.train.steps, found.settings.train.tokens) == (7, None)
    assert found.settings.plan.file is None


def test_the_page_names_every_setting(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/train.md").read_text().split("```toml\n")[1].split("```")[0]
    configuration = read(tmp_path, text)
    for part in re.split(r"^\[", text, flags=re.MULTILINE)[1:]:
        section = part.partition("]")[0]
        named = set(re.findall(r"\w+", part))
        assert not {key for key in KEYS if key.startswith(f"{section}.") and key.partition(".")[2] not in named}, (
            section
        )
    for key in KEYS:
        assert get(RunSettings(), key) in (None, configuration.value(key)), (
            f"{key}: what has a default is shown with it"
        )


def test_every_setting_has_a_value_and_an_origin_after_derivation() -> None:
    derived = resolve()
    settings = derived.configuration
    optional = {"train.grace_s", "plan.file", "train.tokens", "train.clip_value", "optimizer.momentum", "model.factory"}
    optional |= {"train.checkpoints", "train.weights"} | {
        key for key in KEYS if key.startswith("model.") and key != "model.preset"
    }
    assert {key for key in KEYS if settings.value(key) is None} == optional
    reasons = [str(settings.origin(key)) for key in KEYS if settings.origin(key).kind == "derived"]
    assert len(reasons) >= 15
    assert all(len(reason) > len("derived: ") for reason in reasons)


@pytest.mark.parametrize(
    ("sets", "around", "plan"),
    [
        ((), CPU, "dp2 / gbs4 / fp32"),
        (("train.nproc=3",), CPU, "dp3 / gbs6 / fp32"),
        (("train.nproc=1",), CPU, "dp1 / gbs4 / fp32"),
        ((), GPUS, "dp4 / gbs64 / bf16"),
        ((), COMPILERS, "dp4 / gbs64 / bf16"),
        (("model.preset=llama-8b",), GPUS, "fsdp4 / mb4 gbs64 / bf16"),
        (("model.preset=llama-8b",), COMPILERS, "fsdp4 / mb4 gbs64 / bf16 / compile"),
        (("plan.shorthand=auto", "train.nproc=1"), CPU, "dp1 / gbs4 / fp32"),
        (("plan.shorthand=tp2",), CPU, "tp2 / gbs4 / fp32"),
        (("plan.shorthand=dp2 mb3",), CPU, "dp2 / mb3 gbs6 / fp32"),
        (("plan.shorthand=dp2 gbs6", "train.micro_batches=3"), CPU, "dp2 / mb3 gbs6 / fp32"),
    ],
)
def test_plans(sets: tuple[str, ...], around: Surroundings, plan: str) -> None:
    assert str(resolve(*sets, around=around).plan) == plan


def test_a_plan_has_room_for_the_state_of_the_optimizer_that_is_used() -> None:
    sizes, adamw = "model.preset=llama-3b", "fsdp4 zero2 / mb2 gbs64 / bf16 / compile"
    assert str(resolve(sizes, "optimizer.name=adamw", around=COMPILERS).plan) == adamw
    assert str(resolve(sizes, "optimizer.name=lamb", around=COMPILERS).plan) == adamw
    assert str(resolve(sizes, "optimizer.name=sgd", around=COMPILERS).plan) == "fsdp4 / gbs64 / bf16 / compile"


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_the_planner_has_a_word_for_every_optimizer(name: OptimizerName) -> None:
    settings = [OptimizerSettings(name=name), OptimizerSettings(name=name, momentum=0.9)]
    settings += [OptimizerSettings(name=name, state_dtype=kept) for kept in ("bf16", "bf16-stochastic", "8bit", "4bit")]
    words = [workload_optimizer(each) for each in settings]
    assert set(words) <= set(STATE_BYTES)
    bare, momentum, *kept = (STATE_BYTES[word] for word in words)
    assert (bare < momentum) is (name == "sgd") and all((each < bare) is (name == "adamw") for each in kept)


def test_a_launcher_decides_the_number_of_processes() -> None:
    around = Surroundings(device="cpu", num_devices=0, device_reason="", now=datetime(2026, 1, 1), launched_world=8)
    assert resolve(around=around).plan.world == 8


def test_tokens_become_steps() -> None:
    derived = resolve("train.tokens=10000", "train.global_batch=10", "data.seq_len=100")
    assert derived.settings.train.steps == 10
    assert "10,000 tokens of 1,000 per step" in str(derived.configuration.origin("train.steps"))


@pytest.mark.parametrize(
    ("sets", "error", "text"),
    [
        (("train.steps=1", "train.tokens=1"), ConfigError, "both given"),
        (("plan.shorthand=dp2", "plan.file=p.toml"), ConfigError, "both given"),
        (("model.factory=a:b", "model.preset=tiny"), ConfigError, "both given"),
        (("model.factory=a:b", "model.dim=64"), ConfigError, "inside the factory"),
        (("model.factory=a.b",), ConfigError, "package.module:function"),
        (("model.preset=bytes-3n",), UsageError, "bytes-3m"),
        (("model.num_heads=7",), UsageError, "num_heads"),
        (("optimizer.name=adafactor", "optimizer.betas=[0.9, 0.9]"), ConfigError, "adafactor has none"),
        (("optimizer.momentum=0.9",), ConfigError, "sgd, muon"),
        (("schedule.warmup=9", "train.steps=9"), ConfigError, "leaves nothing"),
        (("plan.shorthand=dpp2",), PlanError, "dpp2"),
        (("plan.file=none.toml",), ConfigError, "none.toml"),
    ],
)
def test_contradictions(sets: tuple[str, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        resolve(*sets)


def test_one_step_is_a_legal_run() -> None:
    settings = resolve("train.steps=1").settings
    assert (settings.schedule.warmup, settings.train.eval_every) == (0, 1)


def test_saved_configuration_gives_the_same_run(tmp_path: Path) -> None:
    first = resolve("train.seed=3", "optimizer.betas=[0.8, 0.9]", "data.sources=['a.txt', 'b.txt']")
    text = configuration_toml(first.configuration)
    assert "flag --set train.seed=3" in text
    for file in (tmp_path / "config.toml", tmp_path / "two\nlines.toml"):
        file.write_text(text)
        again = derive(read_configuration(file), GPUS)
        text = configuration_toml(again.configuration)  # with the file's name in its comments
        assert again.settings == first.settings
    assert again.plan == first.plan
    saved = json.loads(json.dumps(configuration_json(first)))
    assert RunSettings.model_validate_json(json.dumps(saved["settings"])) == first.settings
    assert saved["identity"] == json.loads(json.dumps(configuration_json(again)["identity"]))
    assert tomllib.loads(text)["train"]["seed"] == 3


def test_a_plan_for_devices_without_a_known_name_is_asked_for() -> None:
    around = replace(GPUS, cluster=None)
    assert str(resolve(around=around).plan) == "dp4 / gbs64 / bf16"
    with pytest.raises(ConfigError, match="needs devices of a known name"):
        resolve("plan.shorthand=auto", around=around)


def test_a_model_that_fits_nowhere_is_refused_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.cli.options.auto.host_memory", lambda: 16 * 2**30)
    with pytest.raises(PlanError, match="llama-8b does not fit 2 x cpu with 8.0 GiB each.*needs the least"):
        resolve("model.preset=llama-8b")


def planned(place: Path, **made: Any) -> str:
    """A plan's file that says what it was made for, as a setting."""
    save_plan(Plan.parse("cp2 / gbs6 / fp32"), place / "p.toml", MadeFor(**made))
    return f"plan.file={place / 'p.toml'}"


def test_a_plans_file_says_what_is_trained_where_nobody_does(tmp_path: Path) -> None:
    file = planned(tmp_path, model="tiny", seq=64, optimizer="adamw")
    found = resolve(file, "train.tokens=768")
    assert (found.settings.model.preset, found.settings.data.seq_len, found.settings.train.steps) == ("tiny", 64, 2)
    assert "p.toml was made for" in str(found.configuration.origin("data.seq_len"))
    other = resolve(file, "model.preset=bytes-3m").settings  # samples of another model are not what was planned
    assert (other.model.preset, other.data.seq_len) == ("bytes-3m", 128)
    assert resolve(file, "data.seq_len=32").settings.data.seq_len == 32


def test_what_a_plan_was_made_for_is_not_exchanged_in_silence(tmp_path: Path) -> None:
    for model in ("os:system", "hf:llama", "sizes.toml"):
        with pytest.raises(ConfigError, match=f"was made for the model {model}, and no model is given"):
            resolve(planned(tmp_path, model=model))
    file = planned(tmp_path, model="tiny", optimizer="muon")
    with pytest.raises(ConfigError, match=r"made for the optimizer muon, and optimizer.name = 'adamw' is only"):
        resolve(file)
    for name in ("muon", "adamw"):
        assert resolve(file, f"optimizer.name={name}").settings.optimizer.name == name
