"""The proof at load sees a state that is not the stored one, whether parts lie as they are stored or not."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.checkpoint import loading, shardfile, store
from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.arrival import Arrival
from shardwise.checkpoint.digests import PartDigest
from shardwise.checkpoint.directory import Directory, Listing
from shardwise.checkpoint.files import LocalFiles
from shardwise.checkpoint.layout import local_of, numpy_bytes
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.store import Loaded, Store
from shardwise.errors import CheckpointError
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.loop import evaluate
from shardwise.train.loss import mean_over
from shardwise.train.optimizers import adamw
from shardwise.train.probe import Probe
from shardwise.train.state import TrainState
from shardwise.train.step import make_step
from tests.parity.placing import LAYOUTS, State, place
from tests.plain import Plain


class Wrong(State):
    """Takes a checkpoint over with a fault."""

    fault = ""

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        first, second = (next(n for n in tensors if n.endswith(key)) for key in (".exp_avg", ".exp_avg_sq"))
        if self.fault == "averages in each other's place":
            tensors = {**tensors, first: tensors[second], second: tensors[first]}
        super().load_tensors(tensors)
        if self.fault == "an average that is changed afterwards":
            tensors[first].add_(1)
        if self.fault == "a parameter, unseen by autograd, on the last rank" and self.mesh.rank == self.mesh.world - 1:
            local_of(next(iter(self._model().values()))).view(-1).numpy()[0] += 1


def save(path: str) -> None:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        placed = place("fsdp2", mesh)
        state = State(placed, adamw(placed, 0.01))
        state.run(1)
        Store(path).save(state)


def load(path: str, layout: str, fault: str) -> tuple[str, int]:
    """The error, if any, and how many parts a sum was taken of."""
    summed = []
    right = loading._contribution
    loading._contribution = lambda part, tensor: summed.append(part) or right(part, tensor)
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh)
        state = Wrong(placed, adamw(placed, 0.01))
        state.fault = fault
        try:
            Store(path).load_latest(state)
        except CheckpointError as error:
            return str(error), len(summed)
    return "", len(summed)


@pytest.fixture(scope="module")
def stored(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("proof"))
    world(2, save, path)
    return path


@pytest.mark.parametrize("layout", ["fsdp2", "dp2", "tp2", "one"])
def test_sums_are_taken_of_what_does_not_lie_as_it_is_stored(world: World, stored: str, layout: str) -> None:
    for error, summed in world(LAYOUTS[layout].world, load, stored, layout, ""):
        assert error == "" and (summed == 0) == (layout == "fsdp2")


@pytest.mark.parametrize("layout", ["fsdp2", "dp2", "one"])
@pytest.mark.parametrize(
    "fault",
    [
        "averages in each other's place",
        "an average that is changed afterwards",
        "a parameter, unseen by autograd, on the last rank",
    ],
)
def test_another_state_is_not_proven(world: World, stored: str, layout: str, fault: str) -> None:
    for error, _ in world(LAYOUTS[layout].world, load, stored, layout, fault):
        assert "checksums differ" in error or "the copies on ranks 0 and 1 differ" in error


WRITES: dict[str, Callable[[DTensor], object]] = {
    "of one number, through the tensor": lambda tensor: tensor.clamp_(max=1),
    "of one number, through its shard": lambda tensor: tensor.to_local()[7:8].add_(1),
    "through a view": lambda tensor: tensor.detach().view(-1)[3:].mul_(2),
    "of all of it, unseen by autograd": lambda tensor: tensor.to_local().numpy().__iadd__(1),
}


@pytest.mark.parametrize("numbers", [10, 200_000])
@pytest.mark.parametrize("how", WRITES)
def test_memory_that_was_taken_over_is_the_stored_part_until_it_is_written(how: str, numbers: int) -> None:
    with open_mesh(LAYOUTS["one"]):
        mesh = init_device_mesh("cpu", (1,))
        tensor = DTensor.from_local(torch.rand(numbers), mesh, [Shard(0)])
        tensor.to_local()[3] = 2
        (digest := PartDigest()).add(memoryview(numpy_bytes(local_of(tensor))))
        arrived = Arrival.of(tensor, local_of(tensor), 0, digest)
        copy = DTensor.from_local(local_of(tensor).clone(), mesh, [Shard(0)])
        assert arrived.is_in(tensor, local_of(tensor)) and arrived.is_in(copy, local_of(copy))
        WRITES[how](tensor)
        assert not arrived.is_in(tensor, local_of(tensor)) and arrived.is_in(copy, local_of(copy))
        local_of(copy).numpy()[5] += 1  # of one number, unseen by autograd
        assert not arrived.is_in(copy, local_of(copy))


class Told:
    """A probe that finds what it is told."""

    def __init__(self, loss: float, rows: str = "a" * 64) -> None:
        self.found = (loss, 1.0, rows)

    def measure(self, state: object) -> tuple[float, float, str]:
        return self.found


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loaded | None]:
    """Save with a probe's loss of 1 under a plan on a processor; load with another loss, plan, processor or rows."""

    def state_on(mesh: Mesh, text: str, cpu: str) -> State:
        monkeypatch.setattr(store, "processor", lambda: cpu)
        placed = replace(place("one", mesh), plan=Plan.parse(text))
        return State(placed, adamw(placed, 0.01))

    def run(
        loss: float,
        *,
        plans: tuple[str, str] = ("dp1", "dp1"),
        cpus: tuple[str, str] = ("x", "x"),
        rows: str = "a" * 64,
        old: bool = False,
    ) -> Loaded | None:
        path = tmp_path / uuid4().hex
        with open_mesh(LAYOUTS["one"]) as mesh:
            saved = Store(path, probe=Told(1.0)).save(state_on(mesh, plans[0], cpus[0])).path / "manifest.json"
            if old:  # by a version that did not keep the processor
                manifest = Manifest.decode(saved.read_bytes(), "")
                versions = {key: value for key, value in manifest.versions.items() if key != "cpu"}
                saved.write_bytes(replace(manifest, versions=versions).encode())
            return Store(path, probe=Told(loss, rows)).load_latest(state_on(mesh, plans[1], cpus[1]))

    return run


NEAR, FAR, OTHER_CPU = 1 + 5e-6, 1 + 1e-3, ("amd, AVX512", "amd, AVX2")


def test_equal_numbers_are_demanded_on_the_same_processor_alone(probed: Callable[..., Loaded]) -> None:
    assert probed(NEAR, cpus=OTHER_CPU).proof.tolerance == 1e-5
    for options in ({}, {"old": True}):
        with pytest.raises(CheckpointError, match="needed the same within 0;"):
            probed(NEAR, **options)
    with pytest.raises(CheckpointError, match="needed the same within 1e-05"):
        probed(FAR, cpus=OTHER_CPU)


@pytest.mark.parametrize("plans", [("bf16", "fp32"), ("fp32", "bf16"), ("tf32", "fp32"), ("fp32 reduce=bf16", "fp32")])
def test_a_precision_that_is_changed_on_purpose_is_proven_within_the_looser_one(
    probed: Callable[..., Loaded], plans: tuple[str, str]
) -> None:
    assert "~ 1.001 (within 0.0" in probed(FAR, plans=plans).proof.line
    with pytest.raises(CheckpointError, match="needed the same within 0.0"):
        probed(1.05, plans=plans)


class Crossed(nn.Sequential):
    """Uses its layers in an order that DDP learns from their gradients alone."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self[2], self[0], self[3], self[1]):
            x = layer(x)
        return x


def cancelling() -> tuple[list[Tensor], Probe]:
    """Rows whose gradients nearly cancel over three ranks, so that in another order their sum is another one."""
    row = torch.randn(16, generator=torch.Generator().manual_seed(1))
    rows = [row, -row, 1e-6 * row.flip(0)]
    return rows, Probe(rows, lambda output, _: mean_over(output))


def of_ddp(path: str, saves: bool) -> str:
    """A state under DDP on three ranks that is saved after a step, or loaded: what the proof says."""
    plan, (rows, probe) = Plan.parse("dp3"), cancelling()
    with open_mesh(plan) as mesh:
        placed = apply(lambda: Crossed(*(nn.Linear(16, 16, bias=False) for _ in range(4))), plan, mesh, seed=1)
        state = TrainState(placed, adamw(placed, 0.01))
        store = Store(path, probe=probe)
        if saves:
            make_step(state, probe.loss_fn)([rows[mesh.rank][None]])
            store.save(state)
            return ""
        loaded = store.load_latest(state)
        assert loaded is not None and loaded.proof.probe is not None and loaded.proof.tolerance == 0
        return loaded.proof.line


def test_a_probe_sums_at_a_load_as_at_the_save(world: World, tmp_path: Path) -> None:
    world(3, of_ddp, str(tmp_path), True)
    for line in world(3, of_ddp, str(tmp_path), False):
        assert "probe gradient norm" in line


def test_a_probe_leaves_parts_in_evaluation(tmp_path: Path) -> None:
    """A frozen batch norm trained on after the first save, without a word."""
    with open_mesh(Plan.parse("dp1")) as mesh:
        placed = apply(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), Plan.parse("dp1"), mesh)
        placed.module[1].eval()
        state = TrainState(placed, adamw(placed, lr=0.01))
        probe = Probe([torch.ones(4)] * 2, lambda output, _: mean_over(output.square().mean(1)))
        Store(tmp_path, probe=probe).save(state)
        assert [module.training for module in placed.module] == [True, False, True]
        evaluate(placed, probe.loss_fn, [torch.ones(2, 4)])
        assert [module.training for module in placed.module] == [True, False, True]


def test_other_rows_are_said(probed: Callable[..., Loaded]) -> None:
    proof = probed(7.0, rows="b" * 64).proof
    assert proof.other_rows and proof.line.endswith("probe not compared: its rows are not those of the save")


def test_what_a_processor_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    here = loading.processor()
    assert "threads=" in here and loading.processors([here, here]) == here
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert loading.processor() == f"{here}, ONEDNN_MAX_CPU_ISA=AVX2"


def saved(path: Path, times: int = 2) -> list[Path]:
    with open_mesh(LAYOUTS["one"]) as mesh:
        placed = place("one", mesh)
        state, target = State(placed, adamw(placed, 0.01)), Store(path, keep=times)
        for _ in range(times):
            state.run(1)
            target.save(state)
        return target.checkpoints()


def load_of(path: Path, named: Path | None = None) -> tuple[Loaded | None, list[str]]:
    with open_mesh(LAYOUTS["one"]) as mesh:
        placed = place("one", mesh)
        state, target = State(placed, adamw(placed, 0.01)), Store(path)
        loaded = target.load_latest(state) if named is None else target.load(state, named)
        return loaded, [str(finding) for finding in target.take_findings()]


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_fallback_is_no_error_where_warnings_are(tmp_path: Path, how: str) -> None:
    """What `latest` names and is not there is skipped as a damaged one is, also by the path of its store."""
    newest, _ = saved(tmp_path)
    shutil.rmtree(newest) if how == "gone" else (newest / "rank-00000.safetensors").write_bytes(b"")
    for named in (None, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded, _ = load_of(tmp_path if named is None else tmp_path / "new", named)
        assert loaded is not None and loaded.step == 1
        assert [item.path.name for item in loaded.skipped] == ["step-00000002"]
    with pytest.warns(UserWarning, match="step-00000001: loaded in place of step-00000002: "):
        load_of(tmp_path)


def test_a_store_whose_checkpoints_are_gone_is_no_new_one(tmp_path: Path) -> None:
    newest, *_ = checkpoints = saved(tmp_path / "store")
    for checkpoint in checkpoints:
        checkpoint.rename(tmp_path / checkpoint.name)
    with pytest.raises(CheckpointError, match="step-00000002: latest names it, and it is not there"):
        load_of(tmp_path / "store")
    newest.symlink_to(tmp_path / newest.name)
    with pytest.raises(CheckpointError, match="step-00000002: latest names it, and it is a link, or no directory: put"):
        load_of(tmp_path / "store")


def test_a_list_that_lacks_the_newest_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network's file system may keep it for a while: `latest` names what is there."""
    newest, _ = saved(tmp_path)
    real = LocalFiles.names
    monkeypatch.setattr(LocalFiles, "names", lambda self, path: [n for n in real(self, path) if n != newest.name])
    loaded, _ = load_of(tmp_path)
    assert loaded is not None and loaded.path == newest and not loaded.skipped


def test_checkpoints_that_go_while_they_are_looked_at_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that stand by read a store in which those that train save and prune."""
    newest, newer, *older = saved(tmp_path / "store", 4)
    aside, listing, calls = tmp_path / "aside", Directory.listing, list[bool]()
    aside.mkdir()
    for checkpoint in (newest, newer):
        checkpoint.rename(aside / checkpoint.name)
    (tmp_path / "store" / "latest").write_text(f"{older[0].name}\n")

    def prune_after(directory: Directory, *, known: bool = False) -> Listing:
        found = listing(directory, known=known)
        calls.append(known)
        if len(calls) == 1:
            for checkpoint in older:
                shutil.rmtree(checkpoint)
            for checkpoint in aside.iterdir():
                checkpoint.rename(tmp_path / "store" / checkpoint.name)
            (tmp_path / "store" / "latest").write_text(f"{newest.name}\n")
        return found

    monkeypatch.setattr(Directory, "listing", prune_after)
    loaded, _ = load_of(tmp_path / "store")
    assert loaded is not None and loaded.step == 4 and loaded.skipped == () and len(calls) == 2


@pytest.mark.parametrize("before", ["names", "_manifest"])
def test_what_is_pruned_while_it_is_listed_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A reader beside a run that keeps one: between its look at names and that at manifests a save came and went."""
    newest, older = saved(tmp_path / "store")
    newest.rename(tmp_path / newest.name)
    kind = LocalFiles if before == "names" else Directory
    real = getattr(kind, before)

    def prune(self: Any, path: Path, *known: bool) -> Any:
        found = real(self, path) if before == "names" else None
        if older.exists():
            shutil.rmtree(older)
            (tmp_path / newest.name).rename(newest)
        return found if before == "names" else real(self, path, *known)

    monkeypatch.setattr(kind, before, prune)
    (tmp_path / "store" / "latest").unlink()
    listing = Directory(tmp_path / "store", LocalFiles()).listing()
    assert [path for path, _ in listing.complete] == [newest] and not listing.damaged


@pytest.mark.parametrize("content", [None, "", "another digit"])
def test_store_json_is_written_anew(tmp_path: Path, content: str | None) -> None:
    saved(tmp_path)
    marker = tmp_path / "store.json"
    before = marker.read_text()
    if content:  # of the run's id, which every checkpoint then seems not to be of
        run = json.loads(before)["run"]
        content = before.replace(run, f"{int(run[0], 16) ^ 1:x}{run[1:]}")
    marker.unlink() if content is None else marker.write_text(content)
    assert load_of(tmp_path / "new", tmp_path)[0] is not None and not (content is None and marker.exists())
    loaded, said = load_of(tmp_path)
    assert loaded is not None and loaded.step == 2 and marker.read_text() == before
    assert "store.json was missing or damaged" in said[0]


def test_without_store_json_and_a_whole_checkpoint_it_is_no_store(tmp_path: Path) -> None:
    for checkpoint in saved(tmp_path):
        (checkpoint / "manifest.json").write_text("")
    (tmp_path / "store.json").unlink()
    with pytest.raises(CheckpointError, match="not a store of this library"):
        Store(tmp_path)


def test_a_runs_directory_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="its store is .*/checkpoints: give that"):
        Store(tmp_path)


def test_a_probe_in_fp16_is_measured_by_a_scale_that_its_gradients_bear() -> None:
    with open_mesh(plan := Plan.parse("dp1 / fp16")) as mesh:
        state = TrainState(placed := apply(lambda: nn.Linear(4, 4), plan, mesh, seed=1), adamw(placed, 0.01))
        assert state.loss_scale is not None
        probe = Probe([torch.full((4,), 3.0)] * 64, lambda output, _: mean_over(output.square().mean(1)))
        right = probe.measure(state)
        state.loss_scale.scale = 2.0**24  # too much for a sum over these rows, as another plan's sums may be
        assert probe.measure(state) == right and math.isfinite(right.grad_norm)
        assert state.loss_scale.scale == 2.0**24
        with torch.no_grad():
            next(iter(placed.parameters())).fill_(math.nan)
        assert math.isnan(probe.measure(state).grad_norm)


def test_a_load_meets_five_times_and_opens_its_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks come late a meeting costs more than all digests, and of many tensors a header more than its read."""
    meetings, headers = list[object](), list[str]()
    gather, parse = Peers.gather, shardfile.parse_header
    monkeypatch.setattr(Peers, "gather", lambda peers, value: meetings.append(value) or gather(peers, value))
    monkeypatch.setattr(shardfile, "parse_header", lambda *how: headers.append(how[2]) or parse(*how))
    state = Plain()
    path = Store(tmp_path).save(state).path
    store = Store(tmp_path)
    for load, meets in ((lambda: store.load(state, path), 5), (lambda: store.load_latest(state), 6)):
        meetings.clear()
        headers.clear()
        assert load().proof.line == "resume proof: 5/5 tensors, checksums ok"
        assert (len(meetings), len(headers)) == (meets, 1)
