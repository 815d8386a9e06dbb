"""The planner's command line as people and programs meet it: odd words, places that are full, locales, pipes, JSON."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.cli import bars
from shardwise.cli.estimate import estimate
from shardwise.cli.explain import explain
from shardwise.cli.letters import plain_letters
from shardwise.cli.main import READER_LEFT, main
from shardwise.cli.options.made_for import MadeFor, question_of, save_plan
from shardwise.cli.options.planning import check_path, question, read_cluster, show_memory
from shardwise.cli.plan import plan, words_of
from shardwise.errors import ConfigError, ExitCode, ShardwiseError, UsageError
from shardwise.hardware.cluster import GIB, load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan import pictures
from shardwise.plan.advice import LESS
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.records import write_text
from tests.pure.test_plan_cli import EIGHT, invoke

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keys_of(verb: object, *words: str) -> set[str]:
    return set(json.loads(invoke(verb, *words, "--json")[1]))


def test_each_key_of_the_json_is_documented(here: Path) -> None:
    """And each documented one is printed."""
    rows = re.findall(r"^\| (`.*?) \| ([a-z, ]+) \|", (ROOT / "docs" / "planner-json.md").read_text(), re.MULTILINE)
    told = {verb: {name for names, verbs in rows if verb in verbs or verbs == "all"
                   for name in re.findall(r"`(\w+)`", names)} for verb in ("plan", "estimate", "explain")}  # fmt: skip
    fits = keys_of(plan, "tiny", "h100:2", "--front")
    none = keys_of(plan, "llama-405b", "l4:1", "--forbid", "offload")
    assert none - fits == {"would_fit"} and fits - none == {"front", "better_batch"}
    assert fits | none == told["plan"] - {"error"}
    given = ("dp2 / gbs2", "--model", "tiny", "--cluster", "cpu:2")
    assert keys_of(estimate, *given, "--traffic", "--trace") == told["estimate"] - {"error"}
    assert keys_of(explain, *given) == told["explain"] - {"error"}


def test_the_front_is_asked_for(here: Path) -> None:
    words = ("llama-1b", "h100:2", "--seq", "2048", "--global-batch", "8", "--top", "1")
    assert "front" not in json.loads(invoke(plan, *words, "--json")[1])
    found = json.loads(invoke(plan, *words, "--json", "--front")[1])
    front = [(each["device_bytes"], each["seconds"]) for each in found["front"]]
    assert len(front) > 2 and front == sorted(front)
    assert [time for _, time in front] == sorted((time for _, time in front), reverse=True)
    assert front[-1][1] == pytest.approx(found["time"]["total"], rel=0.002)  # the fastest plan ends it
    page = json.loads(invoke(plan, *words, "--json", "--html", "page.html")[1])
    assert (page["front"], page["html"]) == (found["front"], "page.html")
    assert "no other beats in both" in invoke(plan, *words, "--front")[1]


BAD = [
    (plan, ("llama-1b", "h100:8", "--tokens", "1e400"), "tokens '1e400': needed at most 1,000,000,000,000,000"),
    (plan, ("llama-1b", "h100:8", "--global-batch", "9" * 30), "needed at most"),
    (plan, ("llama-1b", "h100:1000000x1000000"), "1,000,000,000,000 devices, needed at most 1,048,576"),
    (plan, ("llama-1b", "nodes.yaml"), "cluster nodes.yaml: found the ending '.yaml', needed .toml or .json"),
    (plan, ("sizes.yml", "h100:8"), "model sizes.yml: found the ending"),
    (estimate, ("plan.yaml", *EIGHT), "plan plan.yaml: found the ending"),
    (plan, ("llama-1b", "h100:8", "--trace-on", "gpu"), "found 'gpu', needed meta"),
    (plan, ("llama-1b", "h100:8", "--trace-on", "cpu"), "no forward is read"),
    (plan, ("llama-1b", "h100:8", "--expert-imbalance", "2"), "llama-1b has no experts"),
    (plan, ("tiny-moe", "h100:8", "--expert-imbalance", "inf"), "needed at most 4, the experts of tiny-moe"),
    (plan, ("llama-1b", "h100:8", "--adapters", "q,v"), "found 'q,v', needed a rank of 1 to 2048, as 16 or 16:q,v"),
    (plan, ("llama-1b", "h100:8", "--adapters", "16:q,w"), "found 'w'"),
    (plan, ("gpt2", "h100:8", "--adapters", "16:gate"), "found 'gate'"),
    (plan, ("llama-1b", "h100:8", "--base", "nf4"), "give the rank of adapters: --adapters 16"),
    (plan, ("llama-1b", "h100:8", "--adapters", "16", "--base", "nf5"), "--base: found 'nf5'"),
    (plan, ("llama-1b", "h100:8", "--adapters", "16", "--optimizer", "muon"), "goes by whole matrices"),
    (plan, ("tiny", "cpu:2", "--adapters", "16"), "what adapters keep on a CPU is not known"),
    (estimate, ("fsdp8", *EIGHT, "--adapters", "16", "--trace"), "--trace: no reference model has adapters"),
    (estimate, ("fsdp8", *EIGHT, "--adapters", "16", "--traffic"), "--traffic: no reference model has adapters"),
    (plan, ("llama-1b", "h100:8", "--allow", "fp8", "--forbid", "tp,fp8"), "found 'fp8' in both"),
    (plan, ("resnet-50", "h100:8"), "its family has convolutions, and presets are chains of equal blocks of attention"),
    (plan, ("no-such-50", "h100:8"), "or a model type or config.json of transformers as hf:NAME"),
    (plan, ("llama-1b", "h100:8", "--forbid", "PP"), "found 'PP', which no plan has; did you mean 'pp'?"),
    (plan, ("llama-1b", "h100:8", "--goal", "Time"), "did you mean 'time'?"),
    (plan, ("llama-1b", "h100:8", "--allow", "tp"), "found 'tp', which is tried unless it is forbidden"),
    (plan, ("llama-8b", "h100:8", "--global-batch", "8", "--forbid", "tp,pp,fsdp,dp,cp"), "what is forbidden; forbid"),
    (plan, ("llama-1b", "h100:8", "--out", "folder.toml"), "needed a file in a folder"),
    (
        estimate, ("dp8 / bf16 fp8", "--model", "llama-1b", "--cluster", "a100-80g:8"),
        "the plan `dp8 / bf16 fp8=tensorwise` multiplies in float8, and a100-80g has no unit for it",
    ),
    (estimate, ("fsdp9", *EIGHT), "needs 9 devices"),  # and not a batch for nine
]  # fmt: skip


@pytest.mark.parametrize(("verb", "words", "says"), BAD)
def test_what_cannot_be_is_refused_in_its_own_words(
    here: Path, verb: object, words: tuple[str, ...], says: str
) -> None:
    (here / "folder.toml").mkdir()
    code, _, error = invoke(verb, *words)
    assert code != 0 and says in str(error), str(error)


def test_words_as_people_write_them(here: Path) -> None:
    assert read_cluster("H100: 8X2") == read_cluster("h100:8x2")
    assert question("llama-1b", "h100:8", seq=4096, batch=None, tokens="1E6").workload.global_batch == 248
    assert words_of(["tp, pp", "dp", "fsdp,"]) == ("tp", "pp", "dp_replicate", "dp_shard")
    text = invoke(plan, "llama-1b", "h100:8", "--forbid", "tp,fsdp", "--json")[1]
    shorthand = json.loads(text)["plan"]["shorthand"].split()
    assert not {word[:2] for word in shorthand} & {"tp", "fs"}
    assert invoke(explain, "plan.toml")[0] == ExitCode.OK


def test_an_imbalance_of_the_file_is_not_the_users_word(here: Path) -> None:
    save_plan(Plan.parse("fsdp8 / gbs8 / bf16"), here / "p.toml", MadeFor(model="tiny-moe", imbalance=2.0))
    assert invoke(estimate, "p.toml", *EIGHT)[2] is None


@pytest.mark.parametrize(
    "words", [("plan", "llama-1b"), ("plan", "llama-1b", "h100:8", "--top", "0"), ("explain", "--x")]
)
def test_a_wrong_option_is_json_too(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)["error"]
    assert (ended.value.code, found["exit_code"], found["type"]) == (2, 2, "UsageError")


def test_a_verb_under_json_ends_with_its_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in ((("tiny", "h100:1"), 0), (("llama-405b", "l4:1", "--forbid", "offload"), 1)):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *words, "--json"])
        assert (ended.value.code or 0) == code
        assert json.loads(capsys.readouterr().out)["fits"] is not bool(code)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_ctrl_c_ends_with_a_word(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.cli.plan.find_plan", stop)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "tiny", "h100:1", *more])
    said = capsys.readouterr()
    assert ended.value.code == ExitCode.INTERRUPTED
    if more:
        error = {"type": "KeyboardInterrupt", "message": "interrupted before it was done", "exit_code": 130}
        assert json.loads(said.out) == {"error": error}
    else:
        assert said.err == "shardwise: interrupted before it was done\n"


def test_ctrl_c_that_a_library_wraps_is_no_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def importing(name: str) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError(f"Error calling __set_name__ in {name}") from error

    monkeypatch.setattr("shardwise.cli.main.import_module", importing)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "tiny", "h100:1"])
    assert ended.value.code == ExitCode.INTERRUPTED


def shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    line = line.replace("shardwise", f"{sys.executable} -m shardwise")
    words = {**os.environ, **environment}
    return subprocess.run(line, shell=True, cwd=folder, env=words, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full, the file that takes no byte")
@pytest.mark.parametrize("more", ["", "--json"])
def test_output_that_has_no_room_is_one_sentence(here: Path, more: str) -> None:
    done = shell(f"shardwise plan tiny h100:1 {more} > /dev/full", here)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in done.stderr


def test_a_locale_without_utf8(here: Path) -> None:
    done = shell("shardwise plan tiny h100:1", here, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^ 0 .*#*[.]+[|] *$", done.stdout, re.MULTILINE) and "written: plan.toml" in done.stdout


def test_letters_that_have_no_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    plain_letters()
    print("█·µ", end="", flush=True)
    assert raw.getvalue() == b"#.?"


def test_a_reader_that_leaves_and_no_colours(here: Path) -> None:
    done = shell("shardwise plan tiny h100:1 | head -1", here)
    assert (done.stderr, len(done.stdout.splitlines())) == ("", 1)
    shown = shell("shardwise explain plan.toml", here, NO_COLOR="1", FORCE_COLOR="1").stdout
    assert "what binds" in shown and not re.search(r"\x1b\[[\d;]*\b(3[0-7]|9[0-7])m", shown)


@pytest.mark.parametrize("words", ["plan tiny h100:1", "check tp2 --world 2 --json", "explain dp1 --help"])
def test_a_reader_that_has_left_is_no_refusal(here: Path, words: str) -> None:
    done = shell(f"(shardwise {words}; echo $? >&2) | true", here)
    assert done.stderr == f"{READER_LEFT}\n" and READER_LEFT == 128 + signal.SIGPIPE


def test_another_broken_pipe_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def importing(name: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe", name)

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # typer wraps them
    monkeypatch.setattr("shardwise.cli.main.import_module", importing)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "tiny", "h100:1"])
    assert ended.value.code == ExitCode.INTERNAL
    assert "internal error: BrokenPipeError" in capfd.readouterr().err


def test_a_page_appears_whole_or_not_at_all(here: Path) -> None:
    (here / "page.html").mkdir()
    with pytest.raises(ConfigError, match="page.html: cannot be written"):
        write_text(here / "page.html", "text")
    assert [path.name for path in here.iterdir()] == ["page.html"]


def test_names_in_a_file_are_no_markup(here: Path) -> None:
    odd = replace(load_cluster("h100:8"), name="[/x]c", origins=("[/y]a: assumed, [/z]",))
    replace(odd, device=replace(odd.device, name="[/red]x")).save("odd.toml")
    more = ("--model", "llama-1b", "--cluster", "odd.toml", "--seq", "2048", "--global-batch", "8")
    for verb in (estimate, explain):
        code, text, error = invoke(verb, "fsdp8 / bf16 / recompute=blocks", *more)
        assert (code, error) == (ExitCode.OK, None)
        assert "[/red]x" in text
        assert "[/y]a: assumed, [/z]" in text
    assert invoke(plan, "llama-1b", "odd.toml", "--seq", "2048", "--global-batch", "8")[0] == ExitCode.OK


def test_a_file_is_not_looked_for_in_small_letters(here: Path) -> None:
    load_cluster("h100:8").save("mine.toml")
    with pytest.raises(ConfigError, match=r"Mine.TOML: found the ending '.TOML', needed .toml or .json"):
        read_cluster("Mine.TOML")


def test_more_devices_than_can_be_planned_are_refused_of_detect_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NNODES", "99999999")
    with pytest.raises(UsageError, match="cluster 'detect': found .* devices, needed at most 1,048,576"):
        read_cluster("detect")


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # for root, every folder can be
    for file in ("c.toml", "c.html"):
        with pytest.raises(ConfigError, match="needed a folder that this user may write to"):
            check_path(Path(file), (".toml", ".html"))


def test_what_a_plan_is_made_from_is_not_written_over(here: Path) -> None:
    """The cluster's file became the plan's."""
    (here / "sizes.toml").write_text('preset = "tiny"')
    load_cluster("h100:1").save(here / "plan.toml")
    (here / "link.toml").symlink_to("sizes.toml")
    for words, what in ((("tiny", "plan.toml"), "cluster"), (("sizes.toml", "h100:1", "--out=link.toml"), "model")):
        assert f"is the file of the {what}, which" in str(invoke(plan, *words)[2])
    assert load_cluster(here / "plan.toml").device.name == "h100"


def test_a_place_that_leads_nowhere_is_no_internal_error(here: Path) -> None:
    (here / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(ConfigError, match=r"loop.toml: cannot be written \(.*needed a file in a folder that exists"):
        check_path(here / "loop.toml", (".toml",))
    (gone := here / "gone").mkdir()
    done = shell("rmdir ../gone && shardwise plan tiny h100:1", gone)
    assert done.returncode == ExitCode.USAGE and "plan.toml: cannot be written" in done.stderr


def test_explain_says_of_a_plan_what_plan_said(here: Path) -> None:
    """What was forbidden is so for the neighbours too: compiled ones would be faster than the plan itself."""
    words = ("llama-1b", "h100:8", "--seq", "2048", "--global-batch", "8", "--forbid", "compile,recompute", "--json")
    chosen = json.loads(invoke(plan, *words)[1])
    again = json.loads(invoke(explain, "plan.toml", "--json")[1])
    assert {name: again[name] for name in ("plan", "decisions", "binds")} == {
        name: chosen[name] for name in ("plan", "decisions", "binds")
    }


def test_hosts_that_are_too_small_are_named_where_nothing_fits(here: Path) -> None:
    """70 billion parameters fit one H100 with their states in host memory, of which 256 GiB are assumed."""
    text = " ".join(invoke(plan, "llama-70b", "h100:1")[1].split())
    assert "or offloads more than the 256 GiB of host memory per device (assumed)" in text
    assert "or offloads" not in invoke(plan, "llama-70b", "h100:1", "--forbid", "offload")[1]


def test_host_memory_that_would_be_enough_is_named_and_is(here: Path) -> None:
    """Alone, offloading needs too much of the device; with recompute it fits there, and the host is what lacks."""
    found = json.loads(invoke(plan, "llama-70b", "h100:2", "--json")[1])
    reason = next(each["reason"] for each in found["decisions"] if each["field"] == "offload.state")
    says = r"(\d+) GiB do not fit \(with recompute=blocks (\d+) GiB do, but offloaded states need (\d+) GiB of host"
    [(alone, both, hosts)] = [tuple(map(int, numbers)) for numbers in re.findall(says, reason)]
    assert alone > 79 > both
    change = next(each["change"] for each in found["would_fit"] if "host memory" in each["change"])
    needs = int(change.removesuffix(" GiB of host memory per device in place of 256 (assumed)"))
    assert needs in (hosts, hosts + 1)
    h100 = load_cluster("h100:2")
    for gib, code in ((needs, ExitCode.OK), (needs * LESS, ExitCode.REFUSED)):
        h100.with_(host_memory=float(2 * gib * GIB)).save("host.toml")  # of a node
        assert invoke(plan, "llama-70b", "host.toml")[0] == code
    assert "of host memory per device in" not in invoke(plan, "llama-70b", "h100:2", "--forbid", "offload")[1]


def test_what_is_reserved_outside_of_steps_is_above_what_steps_reserve(here: Path) -> None:
    """Of live tensors this step has more than the load, of the allocator less: one kind of bytes is named."""
    words = ("dp1 zero3 / bf16", "--model", "llama-405b", "--cluster", "l4:1", "--global-batch", "1")
    text = " ".join(invoke(estimate, *words)[1].split())
    [step] = map(float, re.findall(r"reserved ([\d.]+) GiB, on the device", text))
    [most] = map(float, re.findall(r"most is reserved outside of steps: ([\d.]+) GiB at the load", text))
    peak = json.loads(invoke(estimate, *words, "--json")[1])["memory"]["peak"]
    assert most > step and most == pytest.approx(peak["reserved"] / GIB, abs=0.06)
    assert peak["phase"] == "load" and peak["allocated"] < peak["reserved"]


def test_an_error_of_a_word_in_a_plans_file_names_the_file(here: Path) -> None:
    save_plan(Plan.parse("fsdp8 / bf16"), here / "p.toml", MadeFor(model="nope", cluster="h100:8"))
    with pytest.raises(UsageError, match=r"'nope': unknown .*; p.toml says that it was made for --model nope"):
        question_of("explain", "p.toml", Plan.load("p.toml"))
    save_plan(Plan.parse("dp8"), here / "p.toml", MadeFor(model="tiny", cluster="h100:8", global_batch=0))
    with pytest.raises(
        UsageError, match="global_batch: found 0.*made for --model tiny --cluster h100:8 --global-batch 0"
    ):
        question_of("explain", "p.toml", Plan.load("p.toml"))


def test_an_error_of_a_stack_or_of_a_forbidden_word_names_the_file(here: Path) -> None:
    made = MadeFor(model="tiny", cluster="h100:8", seq=64, stack="megatron")
    save_plan(Plan.parse("dp8"), here / "p.toml", made)
    for verb in (estimate, explain):
        text = str(invoke(verb, "p.toml")[2])
        assert "stack 'megatron': unknown" in text and "p.toml says that it was made for" in text, text
    save_plan(Plan.parse("dp8"), here / "p.toml", replace(made, stack="", forbid=("ppp",)))
    assert "p.toml: made_for.forbid: found 'ppp', which no plan has; did you" in str(invoke(explain, "p.toml")[2])


def test_a_neighbour_that_is_refused_says_why_and_not_an_id_alone(here: Path) -> None:
    shown = " ".join(invoke(plan, "gpt2-small", "h100:2x2", "--seq", "1024", "--global-batch", "8")[1].split())
    assert "tp2: refused: tp=2 does not divide the 50257 tokens of the vocabulary of gpt2-small (tp.vocab)" in shown


def test_what_has_no_effect_is_said(here: Path) -> None:
    """Notes and warnings of the constraints, which only `check` showed."""
    words = ("--model", "tiny", "--cluster", "cpu:4")
    for text, id_, kind in (
        ("dp4 / split=layers.1", "pp.schedule", "note"),
        ("dp4 / tf32", "precision.tf32", "note"),
        ("dp4 / bf16 bucket=50", "ddp.bucket", "warning"),
        ("dp2", "world.idle", "note"),
    ):
        assert f"{kind}: [{id_}] " in invoke(estimate, text, *words)[1]
        for verb in (estimate, explain):
            assert id_ in [each["id"] for each in json.loads(invoke(verb, text, *words, "--json")[1])["findings"]]
    assert json.loads(invoke(plan, "tiny", "cpu:4", "--json")[1])["findings"] == []


def test_sizes_of_small_models_are_no_zeros(here: Path) -> None:
    text = " ".join(invoke(estimate, "dp2 / gbs2", "--model", "tiny", "--cluster", "cpu:2")[1].split())
    assert re.search(
        r"optimizer 2\.5\d MiB .* allocated \d+\.\d MiB, reserved \d+\.\d MiB, on the device 0\.6 GiB", text
    )
    assert re.search(r"update \d\.\d MiB", text)


def test_bars_fit_a_narrow_terminal() -> None:
    """The bar of memory lost its end, so that a full device looked like one that is not."""
    sizes, device = preset("llama-8b"), load_cluster("h100:8")
    work = Workload(seq_len=4096, global_batch=64)
    memory = estimate_memory(profile_of(sizes), Plan.parse("fsdp8 / mb4 / bf16"), work, device=device.device)
    for width in (60, 120):
        out = io.StringIO()
        show_memory(Console(file=out, width=width), memory, Plan.parse("fsdp8 / mb4 / bf16"), device)
        shown = out.getvalue()
        bars = [line for line in shown.splitlines() if "█·" in line or "██>" in line or "██|" in line]
        assert len(bars) == 1 and "…" not in shown and bars[0].rstrip()[-1] in ">|"


def lab(colour: str) -> tuple[float, float, float]:
    """A colour of a page in CIELAB, where distances are what people see."""

    def linear(share: float) -> float:
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    def root(share: float) -> float:
        return share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116

    r, g, b = (linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    x, y, z = (
        root((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047),
        root(0.2126 * r + 0.7152 * g + 0.0722 * b),
        root((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883),
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_colours_of_terms_are_told_apart() -> None:
    """Of ten, two were near-equal greens and two near-equal reds; an eleventh term had the first one's."""
    assert min(math.dist(lab(one), lab(other)) for one, other in combinations(pictures.COLOURS, 2)) > 25
    assert len(pictures.COLOURS) >= 14 and len(set(bars.COLOURS)) == len(bars.COLOURS) >= 14


def test_a_term_has_one_colour_on_all_ranks_and_is_in_the_legend() -> None:
    """Colours went by places: the last rank's logits had that of what others compute in; and no line named them."""
    sizes, cluster = preset("deepseek-v3"), load_cluster("h100:8x256")
    made = Plan.parse("pp16 fsdp128 ep8 zero2 / interleaved mb128 / bf16 / recompute=blocks")
    memory = estimate_memory(profile_of(sizes), made, Workload(seq_len=4096, global_batch=16384), device=cluster.device)
    assert "logits" not in memory.worst.terms and "logits" in memory.stages[-1].terms
    out = io.StringIO()
    show_memory(Console(file=out, width=120, force_terminal=True, color_system="standard"), memory, made, cluster)
    shown = out.getvalue()
    style = re.search(r"(\x1b\[[0-9]+m)█ \x1b\[0mlogits", shown)
    assert style and re.search(rf"logits {memory.stages[-1].terms['logits'] / GIB:.2f} GiB on rank 15", shown)
    plain = re.compile(r"\x1b\[[0-9;]*m")
    lines = {plain.sub("", line).split()[0]: line for line in shown.splitlines() if "█" in line and "loss" in line}
    assert style.group(1) + "█" in lines["15"] and style.group(1) + "█" not in lines["0"]
    assert [int(rank) for rank in lines] == [0, 1, 2, 3, 4, 12, 13, 14, 15]  # the fullest stands in its place


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("h100:8", "llama-8b"), r"cluster 'llama-8b': is a model; the model is said first, then the cluster"),
        ((".", "h100:8"), r"model '\.': is a folder; one with a config.json of transformers is hf:\."),
        (("llama-8b", "h100:8", "--seq", "9" * 20), r"--seq '9{20}': needed at most 1,000,000,000,000,000 tokens"),
        (("tiny", "h100:8", "--forbid", "dp,fsdp,tp,pp,cp,ep"), r"forbid less than dp, fsdp, tp, pp, cp, ep$"),
        (("tiny", "h100:8", "--forbid", "tensor"), r"known: .* cp, dp, dualpipe-v, .* fsdp, gather"),
        (("gpt-3-999b", "h100:8"), r"unknown preset; did you mean 'gpt3"),
        (("sizes.toml", "h100:8"), r"line 1: num_layer: .*'num_layers'.*; width: unknown key; known: "),
    ],
)
def test_words_that_are_nearly_right_are_told_what_is(here: Path, words: tuple[str, ...], said: str) -> None:
    (here / "sizes.toml").write_text('num_layer = 2\nwidth = 64\nkind = "llama"\n')
    error = invoke(plan, *words)[2]
    assert isinstance(error, ShardwiseError) and re.search(said, str(error)), error


OTHERS = {
    "cluster.toml": ("[device]\nnodes = 2\n", "found a cluster (device), needed a plan; give it as CLUSTER"),
    "config.json": ('{"model_type": "llama"}', "found a config.json of transformers (model_type), needed a plan; give"),
    "ds.json": ('{"zero_optimization": {}}', "found a configuration of DeepSpeed (zero_optimization), needed a plan"),
    "sizes.toml": ("dim = 64\nnum_layers = 2\n", "found sizes of a model (dim, num_layers), needed a plan"),
    "run.toml": ("[model]\n[train]\n", "found a run's configuration (model, train), needed a plan; give it to"),
    "answer.json": ('{"plan": {}, "decisions": []}', "found what --json printed (decisions), needed a plan; its key"),
    "rules.toml": ("[rules]\n", "found tensor-parallel rules (rules), needed a plan"),
    "manifest.json": ('{"tensors": {}}', "found a checkpoint's manifest (tensors), needed a plan"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_is_told_as_what_it_is(here: Path, name: str) -> None:
    """It was an unknown key, and the nearest one."""
    text, says = OTHERS[name]
    (here / name).write_text(text)
    error = invoke(explain, name)[2]
    assert isinstance(error, ConfigError) and says in str(error), error


def test_a_plan_is_neither_a_model_nor_a_cluster(here: Path) -> None:
    Plan.parse("fsdp8 / bf16").save("made.toml")
    for words, needed in ((("made.toml", "h100:8"), "sizes of a model"), (("tiny", "made.toml"), "a cluster")):
        error = invoke(plan, *words)[2]
        assert re.search(rf"found a plan \(axes, .*needed {needed}; give it as PLAN", str(error)), error


def test_a_wrong_value_of_an_option_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for words, found in ((("--global-batch", "1.5"), "1.5"), (("--top=1000",), "1000"), (("--price", "x"), "x")):
        with pytest.raises(SystemExit) as stop:
            main(["plan", "tiny", "h100:8", *words, "--json"])
        message = json.loads(capsys.readouterr().out)["error"]["message"]
        assert stop.value.code == ExitCode.USAGE and f"found '{found}'; input should be" in message
