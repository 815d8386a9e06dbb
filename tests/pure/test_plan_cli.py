"""The verbs `plan`, `estimate` and `explain`: what they print and write, and what they make of bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from shardwise.cli.estimate import estimate
from shardwise.cli.explain import explain
from shardwise.cli.main import _command, main
from shardwise.cli.options.counts import count_of, length_of
from shardwise.cli.options.made_for import load_made_for, save_plan
from shardwise.cli.options.planning import question
from shardwise.cli.plan import plan
from shardwise.errors import ExitCode, ShardwiseError, UsageError
from shardwise.hardware.cluster import load_cluster
from shardwise.model.ops import Attention
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.advice import advise
from shardwise.plan.band import band_of_kind, likeness
from shardwise.plan.memory import Memory, estimate_memory
from shardwise.plan.pictures import shown_of
from shardwise.plan.plan import Plan
from shardwise.plan.searching.space import Space
from shardwise.plan.spelled import seconds
from shardwise.plan.stack import load_stack
from shardwise.plan.workload import Workload

STACK = load_stack("shardwise")
RUNNER = CliRunner()


def run(verb: Callable[..., None], *words: str) -> Result:
    app = Typer()
    app.command()(verb)
    return RUNNER.invoke(app, list(words), env={"COLUMNS": "200"})


def invoke(verb: Callable[..., None], *words: str) -> tuple[int, str, BaseException | None]:
    result = run(verb, *words)
    return result.exit_code, result.output, result.exception


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_plan_is_shown_with_the_batch_that_was_asked(here: Path) -> None:
    words = ["--model=llama-8b", "--cluster=h100:8", "--global-batch=32", "--seq=512", "--json"]
    for verb in (estimate, explain):
        found = json.loads(invoke(verb, "fsdp8 / gbs64 / bf16", *words)[1])
        assert found["plan"]["shorthand"] == "fsdp8 / gbs32 / bf16" and found["time"]["tokens"] == 32 * 512


def test_the_fullest_rank_of_a_long_pipeline_is_drawn() -> None:
    one = estimate_memory(profile_of(preset("tiny")), Plan(), Workload(seq_len=64, global_batch=1)).stages[0]
    ranks = tuple(replace(one, rank=i, terms={"weights": 9.0 if i == 15 else 1.0}) for i in range(32))
    drawn = [rank.rank for rank in shown_of(cast(Memory, SimpleNamespace(stages=ranks)))]
    assert 15 in drawn and len(drawn) == 16 and drawn == sorted(drawn)


def test_explain_takes_what_estimate_takes(here: Path) -> None:
    words = ("fsdp8 ep4 / gbs64 / bf16", "--model", "tiny-moe", "--cluster", "h100:8", "--seq", "128", "--json")
    even, uneven = (json.loads(invoke(explain, *words, *more)[1]) for more in ((), ("--expert-imbalance", "2")))
    assert uneven["time"] != even["time"] and "imbalance" in json.dumps(uneven["time"])


def test_plan_prints_and_writes(here: Path) -> None:
    code, text, error = invoke(plan, "llama-1b", "h100:8", "--seq", "4096", "--global-batch", "64", "--price", "2.5")
    assert (code, error) == (ExitCode.OK, None)
    for word in (
        "memory per device",
        "MFU",
        "what binds",
        "runners-up",
        "assumed:",
        "cost",
        "half of the measurements within",
    ):
        assert word in text
    written = Plan.load(here / "plan.toml")
    assert (written.world, written.batch.global_size) == (8, 64)
    code, text, _ = invoke(explain, "plan.toml", "--model", "llama-1b", "--cluster", "h100:8", "--seq", "4096")
    assert code == ExitCode.OK
    assert "what binds" in text


def test_plan_as_json_agrees_with_estimate(here: Path) -> None:
    code, text, _ = invoke(plan, "llama-1b", "h100:8", "--seq", "4096", "--global-batch", "64", "--json")
    found = json.loads(text)
    assert (code, found["fits"]) == (ExitCode.OK, True)
    assert sum(found["time"]["terms"].values()) == pytest.approx(found["time"]["total"])
    words = ("plan.toml", "--model", "llama-1b", "--cluster", "h100:8", "--seq", "4096", "--json")
    again = json.loads(invoke(estimate, *words)[1])
    assert again["time"]["total"] == found["time"]["total"]
    assert again["memory"]["device"] == found["memory"]["device"]


def test_nothing_fits_exits_1_and_writes_nothing(here: Path) -> None:
    code, text, _ = invoke(plan, "llama-405b", "l4:1", "--seq", "8192", "--global-batch", "1", "--forbid", "offload")
    assert code == ExitCode.REFUSED
    assert "nothing fits" in text
    assert "nearest plan" in text
    assert not (here / "plan.toml").exists()


def test_tokens(here: Path) -> None:
    assert count_of("4M") == count_of("4e6") == count_of("4_000_000") == 4e6
    assert [length_of(text) for text in ("8192", "8_192", "8k", "1.5K", "1M")] == [8192, 8192, 8192, 1536, 1 << 20]
    for text in ("8,192", "0", "-8", "8kb", "1e3", "0.3k", "many", "", "8\u0660"):  # the last is Arabic: 80
        with pytest.raises(UsageError, match=r"needed tokens per sample such as 8192, or 8k"):
            length_of(text)
    code, text, _ = invoke(plan, "llama-1b", "h100:8", "--seq", "4k", "--global-batch", "64", "--json")
    assert (code, json.loads(text)["seq_len"]) == (ExitCode.OK, 4096)


@pytest.mark.parametrize(
    ("tokens", "seq", "cluster", "samples", "said"),
    [
        ("64M", 4096, "h100:8x256", 16384, "64M asked, 16,384 samples of 4,096 = 67,108,864 tokens"),
        ("67108864", 4096, "h100:8x256", 16384, "67108864 asked, 16,384 samples"),
        ("64000000", 4096, "h100:8x256", 15625, "64000000 asked, 15,625 samples"),  # in full: as it is
        ("1e9", 4096, "h100:8x256", 119 * 2048, "1e9 asked, 243,712 samples"),
        ("16M", 8192, "h100:8", 2048, "16,777,216"),
        ("16M", 8192, "h100:8x2048", 2048, "16,777,216"),  # fewer than devices: they divide into it
        ("4M", 8192, "h100:8x125", 500, "4M asked, 500 samples"),
        ("4M", 1000, "h100:8", 4000, "4M asked, 4,000 samples of 1,000 = 4,000,000 tokens"),
        ("4100", 1000, "h100:8", 4, "4100 asked, 4 samples of 1,000 = 4,000 tokens"),
        ("12K", 8192, "h100:8", 1, "12K asked, 1 sample of 8,192"),
    ],
)
def test_round_tokens_become_a_batch_that_the_devices_divide(
    tokens: str, seq: int, cluster: str, samples: int, said: str
) -> None:
    asked = question("llama-8b", cluster, seq=seq, batch=None, tokens=tokens)
    assert asked.workload.global_batch == samples
    assert any(note.startswith("tokens: ") and said in note for note in asked.assumed)
    poor = max(samples, asked.cluster.world) % min(samples, asked.cluster.world) > 0
    assert any("neither a multiple of" in note for note in asked.assumed) is poor


def test_what_tokens_were_read_as_is_in_the_json(here: Path) -> None:
    code, text, _ = invoke(plan, "llama-1b", "h100:8", "--seq", "4096", "--tokens", "256K", "--json")
    assert (code, json.loads(text)["global_batch"]) == (ExitCode.OK, 64)
    assert "tokens: 256K asked, 64 samples of 4,096 = 262,144 tokens" in json.loads(text)["assumed"]


EIGHT = ("--model", "llama-8b", "--cluster", "h100:8")
BAD = [
    (plan, ("lama-8b", "h100:8"), "llama-8b"),
    (plan, ("llama-8b", "h1000:8"), "h100"),
    (plan, ("llama-8b", "h100:0"), "size of 0"),
    (plan, ("llama-8b", "h100:8,a100-80g:8"), "several kinds of nodes.*slowest node: plan for one kind"),
    (plan, ("llama-8b", "h100:8", "--tokens", "4MB"), "units: k, M, B, T"),
    (plan, ("llama-8b", "h100:8", "--tokens", "-4M"), "needed a count"),
    (plan, ("deepseek-v4", "h100:8"), "did you mean 'deepseek-v"),
    (plan, ("llama-8b", "h100:8", "--tokens", "4Q"), "units: k, M, B, T"),
    (plan, ("llama-8b", "h100:8", "--tokens", "4M", "--global-batch", "8"), "keep one"),
    (plan, ("llama-8b", "h100:8", "--forbid", "tensors"), "no plan has"),
    (plan, ("llama-8b", "h100:8", "--goal", "fast"), "goal"),
    (plan, ("llama-8b", "h100:8", "--optimizer", "adam"), "adamw"),
    (plan, ("llama-8b", "h100:8", "--out", "plan.txt"), "ending in .toml"),
    (plan, ("no_such_module:build", "h100:8"), "cannot be imported"),
    (estimate, ("fsdp8 bf16", *EIGHT, "--global-batch", "7"), "7"),
    (estimate, ("pp2 fsdp4 bf16 / mb2", *EIGHT, "--global-batch", "12"), "use a global batch of"),
    (estimate, ("fsdp16 bf16", *EIGHT, "--global-batch", "16"), "needs 16 devices"),
    (estimate, ("fsdp8 bf16", *EIGHT, "--stack", "megaton"), "megatron"),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "words", "says"), BAD)
def test_bad_input(here: Path, verb: object, words: tuple[str, ...], says: str) -> None:
    code, _, error = invoke(verb, *words)
    assert code != 0
    assert isinstance(error, ShardwiseError)
    assert re.search(says, str(error)), str(error)


def test_a_plan_of_another_version(here: Path) -> None:
    (here / "old.toml").write_text("# from elsewhere\nformat = 7\n")
    for verb in (estimate, explain):
        _, _, error = invoke(verb, "old.toml", "--model", "llama-8b", "--cluster", "h100:8")
        assert re.search("old.toml, line 2: format: found 7.*reads format 1; plan again", str(error)), str(error)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("nodes = 1", "nodes = [1, 2]", "line 4: nodes: found a list; needed one kind.*slowest node"),
        ("per_node = 8", "per_node = [8, 4]", "per_node: found a list; needed one kind.*slowest node"),
        ("[device]", "[[device]]", "device: found a list; needed one kind"),
        ("per_node = 8", "per_nodes = 8", "did you mean 'per_node'"),
        ("format = 1", "format = 3", "line 2: format: found 3, this version of Shardwise reads 1; write the file"),
        ("\nmemory = ", '\nmemory = "80 GB" #', "device.memory: found the text '80 GB', needed a number in bytes"),
        ("latency = ", 'latency = "3us" #', "local.latency: found the text '3us', needed a number in seconds"),
    ],
)
def test_a_cluster_file_that_is_wrong(here: Path, before: str, after: str, says: str) -> None:
    load_cluster("h100:8").save(here / "c.toml")
    text = (here / "c.toml").read_text().replace(before, after, 1)
    (here / "c.toml").write_text(text)
    _, _, error = invoke(plan, "llama-8b", "c.toml")
    assert isinstance(error, ShardwiseError)
    assert re.search(says, str(error)), str(error)


def test_a_batch_that_the_devices_do_not_divide_is_remarked() -> None:
    asked = question("llama-1b", "h100:8", seq=128, batch=13, tokens=None)
    assert any("nearest: 8 or 16" in note for note in asked.assumed)
    asked = question("llama-1b", "h100:8", seq=128, batch=16, tokens=None)
    assert not any("multiple" in note for note in asked.assumed)
    for batch, nearest in ((7, "4 or 8"), (6, "4 or 8"), (100, "64 or 128")):  # `cp8` was planned without a word
        asked = question("llama-1b", "h100:8x16" if batch == 100 else "h100:8", seq=128, batch=batch, tokens=None)
        assert any(f"nearest: {nearest}" in note for note in asked.assumed)
    assert not any("multiple" in note for note in question("llama-1b", "h100:8", seq=128, batch=2, tokens=None).assumed)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("gpt2", "a100-40g:8", "--tokens", "500k"),
            r"488 samples are 61 for each of the 8 devices.*--global-batch 480 ",
        ),
        (("llama-8b", "h100:8", "--global-batch", "100"), r"100 samples are no multiple of the 8 devices; with .* 96 "),
        (("llama-1b", "h100:8", "--global-batch", "61"), r"61 samples are no multiple of the 8 devices; with .* 64 "),
    ],
)
def test_where_the_batch_decides_the_nearest_better_one_is_said(here: Path, words: tuple[str, ...], says: str) -> None:
    """A part of the sequence on each of two ranks was the answer to 61 samples per device, without a word on why."""
    code, text, _ = invoke(plan, *words)
    found = re.search(rf"the batch decides: {says}", " ".join(text.split()))
    assert code == ExitCode.OK and found, text
    better = json.loads(invoke(plan, *words, "--json")[1])["better_batch"]
    assert better["change"] in text and better["seconds"] > 0
    again = invoke(plan, *words[:2], *better["change"].split(), "--json")[1]
    assert json.loads(again)["plan"]["shorthand"].startswith(better["plan"]["shorthand"].partition(" / ")[0])
    assert json.loads(again)["better_batch"] is None


def test_the_verbs_are_on_the_help_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in ("plan", "estimate", "explain"))
    assert _command("plan").name == "plan"


class Page(HTMLParser):
    """Tags that must close, and everything that would leave the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.outside += [f"{tag} {name}" for name, value in attrs if name in ("src", "href", "onload") and value]
        if tag == "script":
            self.outside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("more", [(), ("--forbid", "dp_shard", "--forbid", "tp", "--forbid", "cp")])
def test_the_page_is_one_well_formed_file_that_needs_nothing_else(here: Path, more: tuple[str, ...]) -> None:
    (here / "a&b<script>.toml").write_text('name = "a&b<script>"\npreset = "llama-1b"\n')
    words = ("a&b<script>.toml", "h100:8", "--seq", "2048", "--global-batch", "32", "--html", "r.html", "--json")
    assert invoke(plan, *words, *more)[0] == ExitCode.OK
    text = (here / "r.html").read_text()
    page = Page()
    page.feed(text)
    assert (page.open, page.outside) == ([], [])
    assert page.svgs >= 4
    assert not re.search(r"https?:|url\(|@import|xlink", text)
    pictures = ["memory by term", "timeline of one step", "memory against time", "mesh on nodes"]
    assert all(f'aria-label="{name}"' in text for name in pictures)
    assert all(word in text for word in ("exposed communication", "hidden communication", "bubble", "chosen", "node 0"))
    assert ("node 1" in text) is False
    assert "a&amp;b&lt;script&gt;" in text
    assert "<script" not in text


def test_the_page_says_numbers_as_the_tables_do(here: Path) -> None:
    """A step of an hour was 3.83e+03 s there, and a full device 79.1 GiB of 79 GiB."""
    for words in (("llama-1b", "cpu:8", "--seq=2048"), ("llama-8b", "h100:8", "--seq=4096", "--stack=deepspeed")):
        found = json.loads(invoke(plan, *words, "--global-batch", "64", "--html", "r.html", "--json")[1])
        text = (here / "r.html").read_text()
        assert all(value == 0 or value > 1e-6 for value in found["time"]["hidden"].values()), "rounding was drawn"
        assert f'<span class="big">{seconds(found["time"]["total"])}</span>' in text
        assert not re.search(r"\de[+-]\d", re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL))
        [(needs, limit)] = re.findall(r">([\d.]+) GiB of ([\d.]+) GiB<", text)
        assert float(needs) <= float(limit) == round(found["memory"]["limit"] / 2**30, 1)
        terms = dict(re.findall(r"<tr><td>(\w[\w-]*)</td><td>([\d,.]+ m?u?s)</td><td>[\d.]+%</td></tr>", text))
        assert terms == {name: seconds(value) for name, value in found["time"]["terms"].items()}


def test_a_plan_file_says_what_it_was_made_for_and_options_win(here: Path) -> None:
    words = ("--seq", "2048", "--global-batch", "16", "--optimizer", "lion", "--forbid", "pp")
    assert invoke(plan, "llama-1b", "h100:8", *words)[0] == ExitCode.OK
    assert Plan.load("plan.toml") == Plan.parse(str(Plan.load("plan.toml")))  # a plan as any other
    made = load_made_for("plan.toml")
    assert (made.model, made.cluster, made.seq, made.global_batch) == ("llama-1b", "h100:8", 2048, 16)
    assert (made.optimizer, made.goal, made.forbid) == ("lion", "time", ("pp",))
    code, text, error = invoke(explain, "plan.toml")
    assert (code, error) == (ExitCode.OK, None)
    assert "as plan.toml says it was made for: --model llama-1b --cluster h100:8 --seq 2048" in text
    alone = json.loads(invoke(estimate, "plan.toml", "--json")[1])
    given = ("--model", "llama-1b", "--cluster", "h100:8", "--seq", "2048", "--optimizer", "lion")
    assert alone["time"] == json.loads(invoke(estimate, "plan.toml", *given, "--json")[1])["time"]
    other = json.loads(invoke(estimate, "plan.toml", "--seq", "1024", "--cluster", "h200:8", "--json")[1])
    assert other["time"]["total"] < alone["time"]["total"]
    assert other["memory"]["limit"] > alone["memory"]["limit"]


def test_a_plan_file_remembers_its_price(here: Path) -> None:
    words = ("--seq", "2048", "--global-batch", "8", "--goal", "cost", "--price", "2.5")
    assert invoke(plan, "llama-1b", "h100:4", *words)[0] == ExitCode.OK
    assert load_made_for("plan.toml").price == 2.5
    for verb in (explain, estimate):
        assert "(at 2.5 per device hour)" in invoke(verb, "plan.toml")[1]
        text = invoke(verb, "plan.toml", "--price", "3")[1]
        assert "(at 3.0 per device hour)" in text and "--price 2.5" not in text
    assert invoke(plan, "llama-1b", "h100:4", *words[:4])[0] == ExitCode.OK
    assert load_made_for("plan.toml").price is None
    assert "per device hour" not in invoke(explain, "plan.toml")[1]


def test_a_plan_file_remembers_how_unevenly_experts_are_met(here: Path) -> None:
    words = ("--seq", "2048", "--global-batch", "16")
    assert invoke(plan, "mixtral-8x7b", "h100:8", *words, "--expert-imbalance", "1.5")[0] == ExitCode.OK
    made = load_made_for("plan.toml")
    assert made.imbalance == 1.5
    save_plan(Plan.parse("fsdp8 ep8 bf16"), here / "ep.toml", made)
    unevenly, evenly = (), ("--expert-imbalance", "1")
    times = [
        json.loads(invoke(estimate, "ep.toml", *more, "--json")[1])["time"]["total"] for more in (unevenly, evenly)
    ]
    assert times[0] > times[1]


def test_a_plan_file_remembers_adapters_and_what_is_below_them(here: Path) -> None:
    words = ("llama-8b", "rtx4090:1", "--seq", "2048", "--global-batch", "2", "--forbid", "offload")
    assert invoke(plan, *words)[0] == ExitCode.REFUSED, "16 bytes per parameter"
    assert invoke(plan, *words, "--adapters", "16:q,v", "--base", "nf4")[0] == ExitCode.OK
    made = load_made_for("plan.toml")
    assert (made.adapters, made.base) == ("16:q,v", "nf4")
    for verb in (explain, estimate):
        assert "adapters of rank 16 on q, v, 0.08% of the parameters" in " ".join(invoke(verb, "plan.toml")[1].split())
    sizes = [
        json.loads(invoke(estimate, "plan.toml", *more, "--json")[1])["memory"]["allocated"]
        for more in ((), ("--base", "int8"))
    ]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("", "explain: --model is missing, and p.toml does not say what it was made for"),
        ('model = "llama-1b"', "--cluster is missing"),
        ('model = "mine.py:build"\ncluster = "h100:8"', "not imported.*give --model mine.py:build if you trust it"),
        ('model = "gone.toml"\ncluster = "h100:8"', "the model in gone.toml, which is no file here"),
        ('model = "hf:gone.json"\ncluster = "h100:8"', "the model in gone.json, which is no file here"),
        ('model = "llama-1b"\ncluster = "gone.toml"', "the cluster in gone.toml, which is no file here"),
        ('model = "llama-1b"\ncluster = "probe"', "as it was measured; give --cluster cluster.toml"),
        ('model = 3\ncluster = "h100:8"', "p.toml, line 3: made_for.model: found int 3, needed a string"),
        ('model = "llama-1b"\ncluster = "h100:8"\nseq = -1', "seq_len: found -1"),
        ('model = "llama-1b"\ncluster = "h100:8"\nprice = -1', "price: found -1.*made for .* --price -1"),
    ],
)
def test_what_a_file_cannot_say(here: Path, monkeypatch: pytest.MonkeyPatch, made: str, says: str) -> None:
    (here / "p.toml").write_text(f'precision = "bf16"\n[made_for]\n{made}\nof_a_later_version = 1\n')
    assert Plan.load("p.toml") == Plan.parse("bf16")
    (here / "mine.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(here)
    _, _, error = invoke(explain, "p.toml")
    assert isinstance(error, ShardwiseError)
    assert re.search(says, str(error), re.DOTALL), str(error)


def test_a_shorthand_needs_a_model(here: Path) -> None:
    _, _, error = invoke(estimate, "fsdp8 bf16", "--cluster", "h100:8")
    assert isinstance(error, UsageError)
    assert "estimate: --model is missing, and a shorthand does not say it; give --model llama-8b" in str(error)


def test_what_would_fit_is_shown_and_does(here: Path) -> None:
    lion = ("--optimizer", "lion")  # Adam's states do not fit twice, as they are while a checkpoint is loaded
    words = ("--seq", "2560", "--global-batch", "2", "--forbid", "offload", "--forbid", "recompute", *lion)
    code, text, _ = invoke(plan, "llama-1b", "l4:1", *words)
    assert code == ExitCode.REFUSED
    assert "what would fit, each change alone, with a global batch of 2" in text
    found = json.loads(invoke(plan, "llama-1b", "l4:1", *words, "--json", "--html", "r.html")[1])
    page = unescape((here / "r.html").read_text())
    assert all(f"<td>{change}</td>" in page for change in (each["change"] for each in found["would_fit"]))
    advice = {each["change"]: each for each in found["would_fit"]}
    nodes, seq = "2 nodes in place of 1 (l4:1x2)", next(change for change in advice if change.startswith("--seq"))
    assert {nodes, "without --forbid offload"} <= set(advice)
    assert all(word in text for word in advice)
    for change, cluster, length in ((nodes, "l4:1x2", "2560"), (seq, "l4:1", seq.split()[1])):
        shown = advice[change]
        more = ("--model", "llama-1b", "--cluster", cluster, "--seq", length, "--global-batch", "2", *lion, "--json")
        code, text, _ = invoke(estimate, shown["plan"]["shorthand"], *more)
        assert (code, json.loads(text)["memory"]["device"]) == (ExitCode.OK, shown["device_bytes"])
    assert invoke(plan, "llama-1b", "l4:1x2", *words)[0] == ExitCode.OK


def test_nothing_that_was_not_tried_is_advised(here: Path) -> None:
    """Words that no plan is freed by, and axes that a module cannot have, are not shown."""
    sizes, cluster = preset("llama-1b"), load_cluster("l4:1")
    work, left_out = Workload(seq_len=2560, global_batch=2), (("recompute", "module.no-blocks"),)
    space = Space(profile_of(sizes), sizes, cluster, work, STACK, forbid=("offload", "tp"), left_out=left_out)
    changes = [each.change for each in advise(space)]
    assert "without --forbid offload" in changes
    assert not {"without --forbid tp", "without --forbid recompute"} & set(changes)
    assert not any(word.startswith(("--allow fp16", "--allow fp32")) for word in changes)
    assert advise(space, seconds=-1.0) == ()


def test_lamb_is_planned_as_what_it_keeps(here: Path) -> None:
    words = ("--model", "llama-1b", "--cluster", "h100:8", "--seq", "2048", "--global-batch", "8", "--json")
    found = [json.loads(invoke(estimate, "fsdp8 bf16", *words, "--optimizer", name)[1]) for name in ("lamb", "adamw")]
    (lamb, adamw) = (each["memory"] for each in found)
    assert lamb["terms"] == adamw["terms"] and lamb["phases"]["load"] == adamw["phases"]["load"]
    assert lamb["phases"]["update"] > adamw["phases"]["update"], "its steps wait for their norms"


def test_the_band_is_of_the_device_and_of_the_layout(here: Path) -> None:
    words = ("--model", "llama-1b", "--seq", "2048", "--global-batch", "8")
    text = invoke(estimate, "dp2 pp2 tp2 / 1f1b mb4 / bf16", *words, "--cluster", "h100:8")[1]
    assert "no measurement" not in text
    kind, narrow = band_of_kind("time", "tp + pp + replicas"), band_of_kind("time", "pp")
    assert kind is not None and narrow is not None
    assert kind.p90 > 2 * narrow.p90  # why one band for all would say too much
    said = f"(tp + pp + replicas): time half within {kind.median:.0%}, nine of ten within {kind.p90:.0%} of {kind.rows}"
    assert said in " ".join(text.split())
    text = " ".join(invoke(estimate, "fsdp8 bf16", *words, "--cluster", "trainium2:8")[1].split())
    assert text.count("no measurement of trainium2: its constants are nominal; on others half of the") == 2
    found = json.loads(invoke(estimate, "fsdp8 bf16", *words, "--cluster", "trainium2:8", "--json")[1])
    assert "no measurement of trainium2" in found["time"]["band"]["caution"]
    text = invoke(estimate, "cp8 bf16", *words, "--cluster", "h100:8")[1]
    assert "(cp): fewer than 10, so nobody knows; sources outside the fit" in " ".join(text.split())


def test_a_model_without_attention_is_like_no_published_one() -> None:
    profile = profile_of(preset("llama-1b"))
    assert "without attention" not in likeness(Plan(), profile)
    blocks = tuple(
        replace(block, ops=tuple(op for op in block.ops if not isinstance(op, Attention))) for block in profile.blocks
    )
    assert likeness(Plan(), replace(profile, blocks=blocks)).endswith("none of them is of a model without attention")
