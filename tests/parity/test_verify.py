"""`verify`: what is right is proven, and each known fault, planted in a script, is seen and named."""

from __future__ import annotations

import faulthandler
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cli import verify as verify_verb
from shardwise.cli.main import main
from shardwise.cli.options.subjects import subject_for
from shardwise.diagnose.prove import make_subject
from shardwise.diagnose.verify import Options, Report, Verifier, _factor, _finding
from shardwise.diagnose.verifying.faults import FAULTS, Evidence
from shardwise.diagnose.verifying.parity import Difference
from shardwise.diagnose.verifying.subject import Failed, Run, Subject, record
from shardwise.launch.forked import WorldError
from shardwise.train.guards.witness import Request

SCRIPT = Path(__file__).with_name("verified.py")
PLANTED = {
    # fault: (plan, model)
    "initial-weights": ("fsdp2", ""),
    "untied": ("dp2", "tied"),
    "global-batch": ("dp2", ""),
    "same-data": ("dp2", ""),
    "other-data": ("dp2", ""),
    "stage-boundary": ("pp2 / 1f1b mb2", ""),
    "batch-norm": ("dp2", "conv"),
    "sequence-positions": ("tp2 / seq", "positions"),
    "dropout": ("dp2 / mb2", "draws"),
    "grouping": ("dp2", "rowmean"),
    "mean-of-means": ("dp2", ""),
    "divided-by-accumulation": ("dp1 / mb4", ""),
    "loss-counted-twice": ("dp2", ""),
    "gradients-divided": ("dp2", ""),
    "gradients-multiplied": ("dp2", ""),
    "unreduced": ("fsdp2", ""),
    "clipping-per-shard": ("fsdp2", "clip"),
    "learning-rate": ("dp2", ""),
    "optimizer-per-shard": ("fsdp2", "per-shard"),
    "names": ("dp2", ""),
    "sharded-layer": ("tp2", ""),
}
OWN_NATURE = ("dropout", "grouping", "sequence-positions")
"""Faults that the model itself has, one process included: nothing is planted."""


@pytest.fixture(scope="module")
def verifiers(world, tmp_path_factory) -> dict[str, Verifier]:
    """One process per model is run once."""

    class Known(dict):
        def __missing__(self, kind: str) -> Verifier:
            words = (kind,) if kind else ()
            self[kind] = Verifier(Subject(target=str(SCRIPT), words=words), world, tmp_path_factory.mktemp("verify"))
            return self[kind]

    return Known()


def planted(verifiers: dict[str, Verifier], fault: str, plan: str, kind: str) -> Report:
    clean = verifiers[kind]
    clean.verify(sw.Plan())
    subject = Subject(target=str(SCRIPT), words=clean.subject.words, environment={"FAULT": fault})
    faulty = Verifier(subject, clean.world, clean.directory / f"{fault}{len(list(clean.directory.iterdir()))}")
    faulty.baselines = clean.baselines
    return faulty.verify(sw.Plan.parse(plan))


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("dp2 / mb2", ""),
        ("fsdp2 / zero1", ""),
        ("tp2 / seq / loss-parallel", ""),
        ("pp2 / 1f1b mb2", ""),
        ("fsdp2 / recompute=blocks", "clip"),
        ("dp2", "tied"),
        ("dp2 / mb2", "conv"),
        ("fsdp2", "per-shard"),
    ],
)
def test_a_right_script_is_proven(verifiers, plan: str, kind: str) -> None:
    report = verifiers[kind].verify(sw.Plan.parse(plan))
    assert report.proven, str(report)
    assert {row.kind for row in report.rows} >= {"loss", "norm", "grad", "param"}
    assert all(row.largest <= row.tolerance <= 1e-9 for row in report.rows)


@pytest.mark.share(3)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen_and_named(verifiers, fault: str) -> None:
    plan, kind = PLANTED[fault]
    report = planted(verifiers, fault, plan, kind)
    assert report.verdict == "different", str(report)
    assert report.findings[0].id == f"verify.{fault}", str(report)


def test_ranks_that_all_read_the_whole_batch_are_seen_though_every_number_is_right(verifiers) -> None:
    report = planted(verifiers, "whole-data", "dp2", "")
    assert report.verdict == "different" and [finding.id for finding in report.findings] == ["verify.same-data"]
    assert "were read by several data ranks" in report.findings[0].what + str(report.findings[0])
    assert not any(row.over for row in report.rows)


def test_a_model_whose_backward_alone_depends_on_how_rows_are_grouped_is_not_proven(verifiers) -> None:
    """What its gradients move by between groupings is no measure of rounding, under which a fault could hide."""
    report = verifiers["rowgrad"].verify(sw.Plan.parse("dp2"))
    assert report.verdict == "different" and report.findings[0].id == "verify.grouping", str(report)


def test_a_loss_that_is_no_number_has_no_factor() -> None:
    """A mean over a micro-batch in which nothing counts ended in an internal error."""
    nothing: Any = None
    of_loss = Evidence(data=2, world=2, rows=8, num_grads=10, loss_ratio=float("nan"))
    for evidence in (of_loss, replace(of_loss, grad_factor=float("nan"))):
        assert _factor(evidence, None, (nothing, nothing), 1) is None


def test_every_known_fault_is_planted() -> None:
    assert [fault.id.removeprefix("verify.") for fault in FAULTS] == list(PLANTED)


def test_a_difference_says_where_it_begins_and_which_factor_it_is(verifiers) -> None:
    doubled = planted(verifiers, "gradients-multiplied", "dp2", "")
    assert (doubled.first_forward, doubled.first_backward) == (None, "head.weight")
    assert doubled.factor == "gradients: exactly 2 = world size, data ranks"
    divided = planted(verifiers, "gradients-divided", "dp2", "")
    assert divided.factor == "gradients: 0.5 = 1 / world size, 1 / data ranks"
    boundary = planted(verifiers, "stage-boundary", "pp2 / 1f1b mb2", "")
    assert boundary.first_forward == "blocks.2"
    means = planted(verifiers, "mean-of-means", "dp2", "")
    assert means.first_forward == "the loss"
    assert not doubled.proven and doubled.exit_code == 1


@pytest.mark.share(2)
@pytest.mark.parametrize("fault", ["mean-of-means", "gradients-multiplied"])
def test_fp32_sees_faults_too(verifiers, world, tmp_path, fault: str) -> None:
    options = Options(dtype="fp32")
    clean = Verifier(Subject(target=str(SCRIPT)), world, tmp_path / "clean", options)
    assert clean.verify(sw.Plan.parse("dp2 / mb2")).proven
    subject = Subject(target=str(SCRIPT), environment={"FAULT": fault})
    faulty = Verifier(subject, world, tmp_path / "faulty", options)
    faulty.baselines = clean.baselines
    assert faulty.verify(sw.Plan.parse("dp2 / mb2")).findings[0].id == f"verify.{fault}"


def test_a_plan_that_is_ignored_is_refused(verifiers) -> None:
    report = planted(verifiers, "plan-ignored", "fsdp2", "")
    assert (report.verdict, report.exit_code, report.findings[0].id) == ("refused", 2, "verify.plan-ignored")
    assert "trained under `dp2 / mb2 / fp64`" in report.findings[0].what


def test_an_illegal_plan_is_refused_with_the_id_of_its_row(verifiers) -> None:
    report = verifiers[""].verify(sw.Plan.parse("dp16"))
    assert [finding.id for finding in report.findings] == ["batch.small"]
    report = verifiers[""].verify(sw.Plan.parse("tp1 / seq"))
    assert [finding.id for finding in report.findings] == ["tp.sequence"]


def test_a_model_that_cannot_is_refused_with_the_id_of_its_limit(verifiers, monkeypatch, capsys) -> None:
    report = verifiers["conv"].verify(sw.Plan.parse("recompute=blocks"))
    monkeypatch.setattr(verify_verb, "_verify_one", lambda *_, **__: report)
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(SCRIPT), "--plan", "recompute=blocks", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (stop.value.code, answer["verdict"]) == (2, "refused")
    assert [finding["id"] for finding in answer["findings"]] == ["module.no-blocks"]


def test_what_is_found_without_running_is_refused_without_running(verifiers, world, tmp_path) -> None:
    subject = subject_for("hf:t5", sw.Plan.parse("pp2"), (), small=True, device="cpu")
    verifier = Verifier(subject, world, tmp_path)
    (finding,) = verifier.verify(sw.Plan.parse("pp2 / mb2")).findings
    assert finding.id == "module.two-chains" and not verifier.baselines


def test_a_hang_ends_and_names_the_ranks(verifiers, world, tmp_path) -> None:
    verifiers[""].verify(sw.Plan())
    subject = Subject(target=str(SCRIPT), environment={"FAULT": "hang"})
    hanging = Verifier(subject, world, tmp_path, Options(timeout_s=3))
    hanging.baselines = verifiers[""].baselines
    report = hanging.verify(sw.Plan.parse("dp2"))
    assert report.findings[0].id == "verify.hang", str(report)
    assert "ranks 0, 1 did not end within 3 s" in report.findings[0].what


def test_a_script_that_makes_fp32_is_told_of_the_other_type() -> None:
    said = "mat1 and mat2 must have the same dtype, but got Float and Double"
    for message, fix in (
        (said, "verify with --dtype fp32"),
        ("no doubles here", "with the plan as its first argument"),
    ):
        assert _finding(Failed(kind="RuntimeError", message=message), "one process").fix.endswith(fix)


def test_an_error_on_one_rank_is_the_finding(verify, tmp_path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys\nif sys.argv[1].startswith('dp1'):\n    raise ValueError('no such file')\n")
    report = verify(script, "dp2")
    assert report.findings[0].id == "verify.value-error"
    assert "one process failed on rank 0: no such file" in report.findings[0].what
    assert "broken.py" in report.findings[0].evidence


def test_a_script_without_a_step_is_refused(verify, tmp_path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('hello')\n")
    report = verify(script, "dp2")
    assert report.findings[0].id == "verify.no-step" and "hello" in report.findings[0].what


def test_runs_that_start_differently_are_refused(verify, tmp_path) -> None:
    script = tmp_path / "unseeded.py"
    body = SCRIPT.read_text().replace("random.seed(0)", "seed = random.SystemRandom().randrange(10**6)")
    script.write_text(body.replace("seed = 7 +", "seed +="))
    report = verify(script, "dp2")
    assert report.findings[0].id == "verify.not-reproducible", str(report)


def square_error(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> sw.Loss:
    return sw.mean_over((output - batch[1]).square())


def wrong_error(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> sw.Loss:
    return sw.Loss((output - batch[1]).square().mean() * len(output) ** 2, len(output))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def test_a_model_with_a_batch_needs_no_script(verify) -> None:
    draw = torch.Generator().manual_seed(0)
    batch = (torch.randn(12, 4, generator=draw), torch.randn(12, 1, generator=draw))
    assert verify(model, "fsdp2", batch=batch, loss_fn=square_error).proven
    assert verify(model, "dp2", batch=batch, loss_fn=square_error).proven
    report = verify(model, "dp2", batch=batch, loss_fn=wrong_error)
    assert not report.proven and "verify.loss" in report.findings[0].id, str(report)


class Shifted(nn.Module):
    """One parameter with a usual gradient, and one that is next to nothing beside it, the same in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight[:1] + 1e-20 * self.weight[1:2] + 0.0 * self.weight[2:]).squeeze(-1)


def plain_sum(output: torch.Tensor, batch: tuple[torch.Tensor]) -> sw.Loss:
    return sw.Loss(output.sum(), len(output))


def test_what_an_optimizer_makes_of_a_rounding_is_measured(world, tmp_path) -> None:
    """Of sums that are zero but for rounding (keys in GPT-NeoX's fused bias) Adam makes 1e-12 of the others'."""
    subject = make_subject(Shifted, (), (torch.ones(12, 1, dtype=torch.float64),), plain_sum)
    verifier = Verifier(subject, world, tmp_path)
    assert verifier.verify(sw.Plan()).proven
    (base,) = verifier.baselines.values()
    made = base.tolerances.of(Difference(kind="param", step=1, name="weight", value=0.0))
    seen = base.tolerances.of(Difference(kind="grad", step=1, name="weight", value=0.0))
    assert 1e-11 < made < 1e-8 and seen < 1e-13  # 16 x 1e-2 x 2e-16 over Adam's 1e-8, of 1; nothing is moved that is 0


def test_a_function_that_trains_needs_no_script(verify) -> None:
    assert verify(train_digits, "dp2").proven


def train_digits(plan: sw.Plan) -> None:
    rows = [(torch.full((4,), i / 8), torch.full((1,), float(i))) for i in range(8)]
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(model, plan, mesh, seed=1)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), sw.loader(rows, plan.batch, mesh, global_size=4))
        for _ in sw.steps(state, square_error, until=5):
            pass


@pytest.mark.parametrize(
    ("target", "keywords"),
    [("none.py", {}), (SCRIPT, {"batch": 1}), (model, {"words": ("a",)}), (model, {"batch": 1})],
)
def test_arguments_that_do_not_fit_are_named(verify, target, keywords) -> None:
    with pytest.raises(sw.errors.UsageError, match="verify\\("):
        verify(target, "dp2", **keywords)


def test_a_function_that_processes_cannot_find_is_refused_clearly(verify) -> None:
    with pytest.raises(sw.errors.UsageError, match="top level of a module"):
        verify(lambda plan: None, "dp2")


def test_a_script_that_resumes_is_refused(verify, tmp_path) -> None:
    script = tmp_path / "resumes.py"
    script.write_text(SCRIPT.read_text().replace("        clip = 0.5", "        state.step = 3\n        clip = 0.5"))
    report = verify(script, "dp2")
    assert report.findings[0].id == "verify.resumed" and "{out}" in report.findings[0].what


def test_a_process_that_dies_is_named(verify, tmp_path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import os, sys\nprint('before the end')\nsys.stdout.flush()\nos._exit(3)\n")
    report = verify(script, "dp2")
    assert report.findings[0].id == "verify.died" and "exit code 3" in report.findings[0].what
    assert "before the end" in report.findings[0].what


LOST = {"rank": 1, "type": "RuntimeError", "message": "Connection closed by peer", "known": False, "traceback": "..."}


@pytest.mark.parametrize(
    ("said", "kind", "rank"),
    [
        ("rank 0:\nno answer: hung\nrank 1:\nno answer: hung", "hang", None),  # it lost rank 0 when that was ended
        ("rank 0:\nthe process died (exit code -11)\nrank 1:\nTraceback\nLaunchError: ended with 6", "died", 0),
        ("rank 0:\nTraceback\nLaunchError: ended with 4\nrank 1:\nTraceback\nLaunchError: ended with 6", "ended", 0),
        ("rank 1:\nTraceback\nLaunchError: ended with 6", "RuntimeError", 1),
    ],
)
def test_who_has_lost_another_is_not_the_cause(tmp_path, said: str, kind: str, rank: int | None) -> None:
    def world(*_: object, **__: object) -> None:
        Path(tmp_path, "run", "error1.json").write_text(json.dumps(LOST | {"time_s": 1.0}))
        raise WorldError(said)

    run = Run(plan=sw.Plan.parse("dp2"), request=Request(steps=1))
    failed = record(Subject(target=str(SCRIPT)), run, tmp_path / "run", world)
    assert (failed.kind, failed.rank) == (kind, rank)


def test_a_crash_in_native_code_says_where_in_python_it_was(verify, world, tmp_path) -> None:
    script = tmp_path / "crashes.py"
    script.write_text("import faulthandler\n\ndef inner() -> None:\n    faulthandler._sigsegv()\n\ninner()\n")
    report = verify(script, "dp2")
    assert report.findings[0].id == "verify.died" and "exit code -11" in report.findings[0].what
    assert 'crashes.py", line 4 in inner' in report.findings[0].what
    with pytest.raises(WorldError, match=r"the process died \(exit code -11\)(?s:.*) in crashing"):
        world(2, crashing)


def crashing() -> None:
    faulthandler._sigsegv()


def test_a_script_that_exits_with_a_code_is_refused(verify, tmp_path) -> None:
    script = tmp_path / "exits.py"
    script.write_text("raise SystemExit('no data here')\n")
    report = verify(script, "dp2")
    assert report.findings[0].id == "verify.ended" and "no data here" in report.findings[0].what


def test_a_script_that_ends_early_says_so(verify, tmp_path) -> None:
    script = tmp_path / "short.py"
    script.write_text(SCRIPT.read_text().replace("until=10", "until=1"))
    report = verify(script, "dp2")
    assert report.proven and report.steps == 1
    assert "the script ended after 1 of 2 steps" in report.notes


def test_a_device_that_is_not_there_is_refused(verify) -> None:
    report = verify(SCRIPT, "dp2", options=Options(device="cuda", steps=1))
    there = torch.cuda.device_count() > 1
    assert report.proven if there else report.findings[0].id in ("verify.device", "verify.launch-error"), str(report)


RAGGED = """
import sys

import torch
from torch import nn

import shardwise as sw

ROWS = [(torch.arange(4 + i % 5) * (i + 1)) % 50 + 3 for i in range(32)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(60, 16), nn.Linear(16, 60)

    def forward(self, ids):
        return self.head(self.words(ids))


def collate(rows):
    ended = [torch.cat([torch.tensor([1]), row, torch.tensor([2])]) for row in rows]
    ids = nn.utils.rnn.pad_sequence(ended, batch_first=True)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)}


plan = sw.Plan.load(sys.argv[1])
with sw.open_mesh(plan) as mesh:
    placed = sw.apply(Net, plan, mesh, seed=1)
    data = sw.loader(ROWS, plan.batch, mesh, global_size=8, seed=1, collate=collate)
    state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), data)
    for _ in sw.steps(state, lambda logits, batch: sw.token_cross_entropy(logits, batch["labels"]), until=2):
        pass
"""


def test_rows_that_differ_in_what_nothing_depends_on_are_noted_and_no_difference(verify, tmp_path) -> None:
    """The longest row of a micro-batch loses its last token where inputs are all but the last: an end, or padding."""
    script = tmp_path / "ragged.py"
    script.write_text(RAGGED)
    report = verify(script, "fsdp2 / mb2")
    assert report.proven, str(report)
    assert any("nothing that is compared depends on" in note for note in report.notes), report.notes


CONTRAST = """
import sys

import torch
from torch import nn

import shardwise as sw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.block = nn.Embedding(50, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, ids):
        return nn.functional.normalize(self.block(self.words(ids)).mean(1), dim=-1)


class AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, mesh):
        ctx.mesh, ctx.mine = mesh, slice(mesh.batch.rank * len(rows), (mesh.batch.rank + 1) * len(rows))
        whole = rows.new_zeros(mesh.batch.size * len(rows), *rows.shape[1:])
        whole[ctx.mine] = rows
        return mesh.all_reduce_sum(whole, "dp_replicate", "dp_shard")

    @staticmethod
    def backward(ctx, gradient):
        return ctx.mesh.all_reduce_sum(gradient.clone(), "dp_replicate", "dp_shard")[ctx.mine], None


plan = sw.Plan.load(sys.argv[1])
draw = torch.Generator().manual_seed(0)
rows = [{"ids": torch.randint(0, 50, (6,), generator=draw), "twin": torch.randn(16, generator=draw)} for _ in range(32)]
with sw.open_mesh(plan) as mesh:

    def loss_fn(own, batch):
        target = torch.arange(len(own)) + mesh.batch.rank * len(own)
        alike = batch["twin"].to(own.dtype) @ AllRows.apply(own, mesh).T
        return sw.mean_over(nn.functional.cross_entropy(5 * alike, target, reduction="none"))

    placed = sw.apply(Net, plan, mesh, seed=1)
    data = sw.loader(rows, plan.batch, mesh, global_size=16, seed=1)
    state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), data)
    for _ in sw.steps(state, loss_fn, until=2):
        pass
"""


def test_rounding_is_measured_where_a_loss_compares_rows_with_each_other(verify, tmp_path) -> None:
    """The gradient of the keys' bias is nothing but rounding, and AdamW makes a step of it."""
    script = tmp_path / "contrast.py"
    script.write_text(CONTRAST)
    report = verify(script, "dp2")
    assert report.proven, str(report)
    assert "kept together" in report.how


FLOAT_LOGITS = """
import sys

import torch
from torch import nn

import shardwise as sw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.block, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, ids):
        return self.head(torch.tanh(self.block(self.words(ids)))).float()


def loss_fn(logits, batch):
    loss = sw.token_cross_entropy(logits, batch["labels"])
    return sw.Loss(loss.sum / loss.weight, 1) if MEAN else loss


plan = sw.Plan.load(sys.argv[1])
draw = torch.Generator().manual_seed(0)
ids = torch.randint(0, 50, (64, 7), generator=draw)
kept = torch.arange(6) < torch.randint(1, 7, (64, 1), generator=draw)
labels = torch.where(kept, ids[:, 1:], -100)
rows = [{"ids": row, "labels": label} for row, label in zip(ids[:, :-1], labels)]
with sw.open_mesh(plan) as mesh:
    placed = sw.apply(Net, plan, mesh, seed=1)
    data = sw.loader(rows, plan.batch, mesh, global_size=16, seed=1)
    state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), data)
    for _ in sw.steps(state, loss_fn, until=2):
        pass
"""


def test_a_loss_in_fp32_is_judged_by_the_roundings_of_fp32(verify, tmp_path) -> None:
    """Logits that are cast in the model: a loss that moved by 8e-8 was called a mean of means."""
    script = tmp_path / "cast.py"
    script.write_text(FLOAT_LOGITS.replace("MEAN", "False"))
    report = verify(script, "dp2")
    assert report.proven, str(report)
    assert "rows shuffled and in other micro-batches" in report.how
    (of_loss,) = (row for row in report.rows if row.kind == "loss")
    assert of_loss.tolerance < 1e-4
    script.write_text(FLOAT_LOGITS.replace("MEAN", "True"))
    assert verify(script, "dp2").findings[0].id == "verify.mean-of-means"


BAGS = """
import sys

import torch
from torch import nn

import shardwise as sw

ROWS = [(torch.arange(1 + i % 4) * 7 % 50, float(i % 3)) for i in range(32)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(8, 1)

    def forward(self, words, starts):
        return self.head(self.words(words, starts)).squeeze(1)


def collate(rows):
    lengths = torch.tensor([0, *(len(words) for words, _ in rows[:-1])])
    wanted = torch.tensor([y for _, y in rows])
    return {"wanted": wanted, "starts": lengths.cumsum(0), "words": torch.cat([words for words, _ in rows])}


plan = sw.Plan.load(sys.argv[1])
with sw.open_mesh(plan) as mesh:
    placed = sw.apply(Net, plan, mesh, seed=1)
    data = sw.loader(ROWS, plan.batch, mesh, global_size=8, seed=1, collate=collate)
    state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), data)
    for _ in sw.steps(state, lambda out, batch: sw.mean_over((out - batch["wanted"]).square()), until=2):
        pass
"""


def test_rows_that_cannot_be_regrouped_are_left_as_they_come(verify, tmp_path) -> None:
    """Words of all rows in one tensor, and where each row's begin: the script runs, and no dim of it is the rows."""
    script = tmp_path / "bags.py"
    script.write_text(BAGS)
    report = verify(script, "dp2 / mb2")
    assert report.proven, str(report)
    assert "as they come" in report.how
