"""Averages stored in one type and kept in another: by hand, under another mesh, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torchao.optim import quant_utils, subclass_4bit, subclass_8bit

from shardwise.checkpoint.manifest import FILE, Manifest
from shardwise.checkpoint.store import Loaded, Store
from shardwise.errors import CheckpointError
from shardwise.launch.rank.allowed import go_on as run_goes_on
from shardwise.models.moe import MoEConfig, MoEDecoder
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.parallel.placed import Placed
from shardwise.parallel.randomness.counter import Elements, Numbers, Stream
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.batches import loader
from shardwise.train.ema import Ema
from shardwise.train.kept.rundir import RunDir
from shardwise.train.optimizers import adamw, lamb, lion, sgd
from shardwise.train.settings import TrainSettings
from shardwise.train.state import TrainState
from shardwise.train.updates import low_bits
from shardwise.train.updates.low_bits import BLOCK, STATE_KINDS
from shardwise.train.updates.optim import NamedOptimizer
from shardwise.train.updates.rounding import rounded
from shardwise.train.updates.several import several
from tests.parity.placing import LAYOUTS, State, full, place, train

KINDS = ("fp32", *STATE_KINDS)
WIDE, STEPS = 1300, 3
"""`up` is 1300 x 6, `down` 5 x 1300: kept as codes, in rows that tp cuts inside a block."""
DIALS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
CODED = ("up.weight", "down.weight")
SOME = (("fp32", "8bit"), ("8bit", "fp32"), ("fp32", "bf16-stochastic"), ("4bit", "8bit"), ("bf16", "4bit"))
Make = Callable[[Placed], NamedOptimizer]


def with_averages(kind: str) -> Make:
    return lambda placed: adamw(placed, **DIALS, state_dtype=kind)


def make(layout: str, mesh: Mesh, optimizer: Make, dtype: torch.dtype = torch.float32, ema: bool = False) -> TrainState:
    placed = place(layout, mesh, dtype, wide=WIDE)
    return TrainState(placed, optimizer(placed), ema=Ema(placed, 0.5) if ema else None)


def go_on(state: TrainState, steps: int) -> None:
    train(state.placed, state.optimizer, range(state.step, state.step + steps))
    if state.ema is not None:
        state.ema.update()
    state.step += steps


def whole(state: TrainState) -> dict[str, Tensor]:
    return {name: full(tensor) for name, tensor in state.tensors().items()}


def untouched(state: TrainState, before: dict[str, Tensor]) -> bool:
    after = whole(state)
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def save(layout: str, path: str, kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    with open_mesh(LAYOUTS[layout]) as mesh:
        for kind in kinds:
            state = make(layout, mesh, with_averages(kind), dtype)
            go_on(state, STEPS)
            Store(f"{path}/{kind}").save(state)


def load(state: TrainState, path: str, convert_state: bool = True) -> Loaded:
    loaded = Store(path).load_latest(state, convert_state=convert_state)
    assert loaded is not None
    return loaded


# ---------------------------------------------------------------- by hand, in torchao's own functions


def table(kind: str, signed: bool) -> Tensor:
    module = subclass_8bit if kind == "8bit" else subclass_4bit
    return torch.tensor(module.get_qmap_signed() if signed else module.get_qmap_unsigned())


def by_hand(codes: Tensor, scale: Tensor, kind: str, signed: bool) -> Tensor:
    size, width = BLOCK[kind], codes.shape[-1]
    padded = pad(codes, (0, -width % size))
    values: Tensor = quant_utils.dequant_with_qmap(padded, table(kind, signed), scale.reshape(-1))
    return values[..., :width]


def torchaos(values: Tensor, kind: str, signed: bool) -> tuple[Tensor, Tensor]:
    size, width = BLOCK[kind], values.shape[-1]
    unit, scale = quant_utils.scale_tensor(pad(values, (0, -width % size)).contiguous(), size)
    quantise = quant_utils.quantize_8bit_with_qmap if kind == "8bit" else quant_utils.quantize_4bit_with_qmap
    return quantise(unit, table(kind, signed))[..., :width], scale.view(*values.shape[:-1], -1)


def values_of(state: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    found = {key: state[f"optim.{name}.{key}"] for key in KEYS if f"optim.{name}.{key}" in state}
    if "codes" not in found:
        return found["exp_avg"].float(), found["exp_avg_sq"].float()
    kind = "8bit" if "codes_sq" in found else "4bit"
    codes = split(found, kind)
    return by_hand(codes[0], found["scale"], kind, True), by_hand(codes[1], found["scale_sq"], kind, False)


KEYS = ("exp_avg", "exp_avg_sq", "codes", "codes_sq", "scale", "scale_sq", "seed")


def kept_by_hand(mean: Tensor, square: Tensor, kind: str, name: str) -> dict[str, Tensor]:
    if kind in BLOCK and name in CODED:
        pairs = [torchaos(mean, kind, True), torchaos(square, kind, False)]
        scales = {"scale": pairs[0][1], "scale_sq": pairs[1][1]}
        if kind == "4bit":
            return {"codes": pairs[0][0] << 4 | pairs[1][0]} | scales
        return {"codes": pairs[0][0], "codes_sq": pairs[1][0]} | scales
    if kind == "bf16":
        return {"exp_avg": mean.bfloat16(), "exp_avg_sq": square.bfloat16()}
    if kind == "bf16-stochastic":
        made = {"seed": torch.tensor(0)}
        for key, value in (("exp_avg", mean), ("exp_avg_sq", square)):
            numbers = Numbers(Stream.of(0, key, STEPS, name), Elements.row_major(mean.shape, mean.device), mean.device)
            made[key] = rounded(value, numbers)
            assert ((made[key].float() - value).abs() <= value.abs() / 128).all()
        return made
    return {"exp_avg": mean, "exp_avg_sq": square}


def as_near(
    values: tuple[Tensor, Tensor], kept: dict[str, Tensor], found: dict[str, Tensor], name: str, kind: str
) -> set[str]:
    """Keys of codes that differ only where a number lies in the middle of two.

    Few-digit numbers often do; which code they get hangs on the last bit of an fp32 sum. Both are then as near as fp32
    can tell.
    """
    ours, theirs = ({k: t[f"{prefix}{k}"] for k in kept} for t, prefix in ((found, f"{name}."), (kept, "")))
    both, near = [split(state, kind) for state in (ours, theirs)], set[str]()
    for i, (key, value, scale) in enumerate(zip(("codes", "codes_sq"), values, ("scale", "scale_sq"), strict=True)):
        points = table(kind, i == 0)
        unit = value / kept[scale].repeat_interleave(BLOCK[kind], -1)[..., : value.shape[-1]]
        off = [(points[codes[i].int()] - unit).abs() for codes in both]
        if torch.allclose(off[0], off[1], rtol=0, atol=1e-7):
            near.add(key if kind == "8bit" else "codes")
        elif kind == "4bit":
            return set()
    return near


def split(state: dict[str, Tensor], kind: str) -> tuple[Tensor, Tensor]:
    """The codes of both averages."""
    return (state["codes"], state["codes_sq"]) if kind == "8bit" else (state["codes"] >> 4, state["codes"] & 15)


class Outcome(NamedTuple):
    wrong: list[str]
    """Tensors that are not what they should be."""
    line: str


def compared(path: str, before: str, after: str) -> Outcome:
    """What a state holds after loading, against what is stored, changed by hand."""
    with open_mesh(LAYOUTS["one"]) as mesh:
        stored = make("one", mesh, with_averages(before))
        load(stored, f"{path}/{before}", convert_state=False)
        state = make("one", mesh, with_averages(after))
        line = load(state, f"{path}/{after if before == after else before}").proof.line
        theirs, found = whole(stored), whole(state)
    wanted = {name: tensor for name, tensor in theirs.items() if before == after or name.rpartition(".")[2] not in KEYS}
    ties = set[str]()
    for name in stored.placed.named_parameters() if before != after else ():
        values = values_of(theirs, name)
        kept = kept_by_hand(*values, after, name)
        wanted |= {f"optim.{name}.{key}": tensor for key, tensor in kept.items()}
        if before != "fp32" and "codes" in kept:
            ties |= {f"optim.{name}.{key}" for key in as_near(values, kept, found, f"optim.{name}", after)}
    assert wanted.keys() == found.keys()
    wrong = [n for n, t in wanted.items() if t.dtype != found[n].dtype or not torch.equal(t, found[n])]
    return Outcome([name for name in wrong if name not in ties], line)


@pytest.fixture(scope="module")
def stored(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with each kind of averages, in fp32, of two ranks."""
    path = str(tmp_path_factory.mktemp("types"))
    world(2, save, "fsdp2", path, KINDS, torch.float32)
    return path


@pytest.mark.parametrize("before", KINDS)
def test_what_is_kept_is_what_hands_make_of_what_is_stored(stored: str, before: str) -> None:
    for after in KINDS:
        outcome = compared(stored, before, after)
        assert outcome.wrong == [], after
        count = len(Manifest.read(Path(stored) / before / f"step-{STEPS:08d}").tensors)
        assert outcome.line.startswith(f"resume proof: {count}/{count} tensors, checksums ok")
        assert ("moments" in outcome.line) == (before != after)


def test_the_proof_says_what_happened(stored: str) -> None:
    assert compared(stored, "fp32", "bf16").line.endswith(
        ", 16 moments from float32 to bfloat16 (largest relative rounding 0.0039)"
    )
    assert compared(stored, "bf16", "fp32").line.endswith(", 16 moments from bfloat16 to float32 (exact)")
    assert compared(stored, "fp32", "8bit").line.endswith(
        ", 4 moments from float32 to 8bit (largest rounding 0.007 of its block's largest)"
    )
    line = compared(stored, "8bit", "bf16").line
    assert ", 4 moments from 8bit to bfloat16 (" in line and ", 12 moments from float32 to bfloat16 (" in line


# ---------------------------------------------------------------- under another mesh


def next_step(layout: str, path: str, pairs: tuple[tuple[str, str], ...]) -> list[dict[str, Tensor]]:
    """For each pair the whole state after loading with a change, and a step."""
    results = []
    with open_mesh(LAYOUTS[layout]) as mesh:
        for before, after in pairs:
            state = make(layout, mesh, with_averages(after), torch.float64)
            proof = load(state, f"{path}/{before}").proof
            assert proof.converted and proof.matched == proof.stored
            there = {f"there.{name}": tensor for name, tensor in whole(state).items()}
            go_on(state, 1)
            results.append(there | whole(state))
    return results


@pytest.fixture(scope="module")
def wide(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("wide"))
    world(2, save, "fsdp2", path, KINDS, torch.float64)
    return path


def same_as_one(world: World, path: str, layout: str, pairs: tuple[tuple[str, str], ...]) -> None:
    (truth,) = world(1, next_step, "one", path, pairs)
    seen: list[set[str]] = [set() for _ in pairs]
    for ranks in world(LAYOUTS[layout].world, next_step, layout, path, pairs):
        for i, found in enumerate(ranks):
            seen[i] |= found.keys()
            for name, tensor in found.items():
                want = truth[i][name]
                if pairs[i][1] == "fp32" and not name.startswith("there."):  # the fused kernel: as test_optim.py says
                    assert torch.allclose(tensor, want, rtol=1e-11, atol=1e-11), (pairs[i], name)
                else:
                    assert torch.equal(tensor, want), (pairs[i], name)
    assert [names == want.keys() for names, want in zip(seen, truth, strict=True)] == [True] * len(pairs)


@pytest.mark.share(3)
@pytest.mark.parametrize("layout", ["fsdp4", "tp2", "pp2"])
def test_the_next_step_is_that_of_one_process(world: World, wide: str, layout: str) -> None:
    same_as_one(world, wide, layout, SOME)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp4", "tp2", "hsdp2x2", "fsdp2tp2", "pp2", "pp2fsdp2"])
def test_every_pair_under_every_mesh(world: World, wide: str, layout: str) -> None:
    same_as_one(world, wide, layout, tuple(itertools.permutations(KINDS, 2)))


def test_and_so_it_is_where_weights_change_their_type_too(world: World, stored: str) -> None:
    """What fp32 parameters were saved with, codes and their scales, in a run in fp64."""
    same_as_one(world, stored, "fsdp4", (("4bit", "bf16"), ("8bit", "8bit"), ("bf16", "fp32")))


def test_what_was_in_fp64_is_kept_in_the_types_of_an_fp32_run(wide: str) -> None:
    with open_mesh(LAYOUTS["one"]) as mesh:
        for before, after in (("fp32", "8bit"), ("8bit", "4bit"), ("4bit", "bf16"), ("bf16", "fp32")):
            usual, state = (make("one", mesh, with_averages(after)) for _ in range(2))
            go_on(usual, 1)
            load(state, f"{wide}/{before}")
            kinds = [{name: (t.dtype, t.shape) for name, t in whole(each).items()} for each in (usual, state)]
            assert kinds[0] == kinds[1], (before, after)
            go_on(state, 1)


def torchs_own(path: str) -> list[str]:
    """Tensors that differ between torch's AdamW over the shards, as DTensors, and ours, after loading codes."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        ours = make("fsdp2", mesh, with_averages("fp32"))
        placed = place("fsdp2", mesh, wide=WIDE)
        theirs = TrainState(placed, torch.optim.AdamW(placed.parameters(), **DIALS))
        assert {load(state, path).proof.line for state in (ours, theirs)} == {load(ours, path).proof.line}
        go_on(theirs, 1)
        go_on(ours, 1)
        mine, found = whole(ours), whole(theirs)
        assert mine.keys() == found.keys()
        return [name for name in mine if not torch.allclose(mine[name], found[name], rtol=1e-6, atol=1e-6)]


def test_an_optimizer_of_ones_own_takes_codes(world: World, stored: str) -> None:
    assert world(2, torchs_own, f"{stored}/8bit") == [[], []]


# ---------------------------------------------------------------- models that `apply` placed

SIZES = MoEConfig(
    vocab_size=64, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, max_seq_len=16, num_experts=2
)
APPLIED = ("fsdp2 zero1 / fp64", "fsdp2 ep2 / fp64", "tp2 / fp64", "pp2 / 1f1b mb2 / fp64", "fsdp2 / bf16-pure")


def applied(text: str, path: str, before: str, after: str = "") -> dict[str, Tensor]:
    """Save the state of a model with routed experts after some steps, or load it, changed, and go one step on."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(lambda: MoEDecoder(SIZES), plan, mesh, seed=3)
        state = TrainState(placed, adamw(placed, **DIALS, state_dtype=after or before))
        if not after:
            go_on(state, STEPS)
            Store(path).save(state)
            return {}
        assert load(state, path).proof.converted
        there = {f"there.{name}": tensor for name, tensor in whole(state).items()}
        go_on(state, 1)
        return there | whole(state)


def test_zero_experts_stages_and_masters(world: World, tmp_path: Path) -> None:
    for i, text in enumerate(APPLIED):
        before, after = SOME[i % 2] if i < 4 else ("fp32", "4bit")
        path, single = str(tmp_path / str(i)), text.partition(" / ")[2].replace("1f1b mb2 / ", "")
        world(1, applied, f"dp1 / {single}", path, before)
        (want,) = world(1, applied, f"dp1 / {single}", path, before, after)
        names = set[str]()
        for found in world(2, applied, text, path, before, after):
            names |= found.keys()
            for name, tensor in found.items():
                if after == "fp32" and not name.startswith("there."):
                    assert torch.allclose(tensor, want[name], rtol=1e-11, atol=1e-11), (text, name)
                else:
                    assert torch.equal(tensor, want[name]), (text, name)
        assert names == want.keys()
        assert any(name.endswith("codes") for name in want) == (after != "fp32")


# ---------------------------------------------------------------- groups, averages of weights, frozen parameters


def parts_before(placed: Placed) -> NamedOptimizer:
    return several(placed, {"up.*": with_averages("8bit"), "*": with_averages("fp32")})


def parts_after(placed: Placed) -> NamedOptimizer:
    return several(
        placed, {"*norm*": with_averages("fp32"), "down.*": with_averages("4bit"), "*": with_averages("bf16")}
    )


def groups(path: str) -> tuple[str, list[str], bool]:
    def frozen(layout: str, mesh: Mesh, optimizer: Make) -> TrainState:
        placed = place(layout, mesh, wide=WIDE)
        placed.module.get_parameter("embed.weight").requires_grad_(False)
        return TrainState(placed, optimizer(placed), ema=Ema(placed, 0.5))

    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        state = frozen("fsdp2", mesh, parts_before)
        grads = {n: torch.full_like(p, 0.3) for n, p in state.placed.named_parameters().items() if p.requires_grad}
        state.optimizer.take_grads(grads)
        state.optimizer.step()
        state.ema.update()
        state.step = 1
        Store(path).save(state)
        before = whole(state)
        state = frozen("fsdp2", mesh, parts_after)
        line = load(state, path).proof.line
        after = whole(state)
    same = [n for n in before if n in after and before[n].dtype == after[n].dtype and torch.equal(before[n], after[n])]
    return line, same, any("embed" in name and name.startswith(("optim", "ema")) for name in after)


def test_groups_with_types_of_their_own_and_averages_of_weights(world: World, tmp_path: Path) -> None:
    for line, same, embedded in world(2, groups, str(tmp_path)):
        assert not embedded
        assert "2 moments from 8bit to bfloat16" in line  # up.weight
        assert "2 moments from float32 to 4bit" in line  # down.weight
        assert "4 moments from float32 to bfloat16" in line  # up.bias and cube
        assert {"optim.norm.weight.exp_avg", "optim.norm.bias.exp_avg_sq", "optim.down.bias.exp_avg"} < set(same)
        assert {name for name in same if name.startswith("ema.")} > {"ema.up.weight", "ema.cube"}
        assert {name for name in same if name.startswith("model.")} > {"model.embed.weight", "model.seen"}


# ---------------------------------------------------------------- what is refused


def refused(path: str, optimizer: Make, *, convert_state: bool, own: bool = False) -> str:
    """The error; the state must be as it was."""
    with open_mesh(LAYOUTS["one"]) as mesh:
        state = make("one", mesh, optimizer)
        go_on(state, 1)
        before = whole(state)
        with pytest.raises(CheckpointError) as caught:
            if own:
                Store(path).load_latest(State(state.placed, state.optimizer), convert_state=convert_state)
            else:
                Store(path).load_latest(state, convert_state=convert_state)
        assert untouched(state, before) and state.step == 1
        return str(caught.value)


def test_without_leave_it_is_refused_and_the_way_out_named(stored: str) -> None:
    for before, after, said in (("fp32", "8bit", "float32"), ("8bit", "bf16", "8bit"), ("bf16", "fp32", "bfloat16")):
        message = refused(f"{stored}/{before}", with_averages(after), convert_state=False)
        assert f"are {said} in the checkpoint" in message
        assert "convert_state=True" in message and "--allow optimizer.state_dtype" in message


def test_another_optimizer_stays_refused(stored: str) -> None:
    for make_other in (lion, lamb, sgd):
        message = refused(f"{stored}/8bit", lambda placed, m=make_other: m(placed, 0.01), convert_state=True)
        assert "another model or optimizer" in message
    assert "another model" in refused(f"{stored}/fp32", lambda placed: lion(placed, 0.01), convert_state=True)


def test_a_state_that_cannot_convert_is_refused(stored: str) -> None:
    assert "bfloat16 in this run" in refused(f"{stored}/fp32", with_averages("bf16"), convert_state=True, own=True)


def saved_twice(path: Path) -> dict[str, Tensor]:
    """Two checkpoints, of steps 1 and 2; the averages of the first one, in bf16."""
    with open_mesh(LAYOUTS["one"]) as mesh:
        state, store = make("one", mesh, with_averages("fp32")), Store(path)
        go_on(state, 1)
        store.save(state)
        first = {n: t.bfloat16() for n, t in whole(state).items() if "exp_avg" in n}
        go_on(state, 1)
        store.save(state)
        return first


def loads_the_first(path: Path, first: dict[str, Tensor]) -> str:
    """Why the second one was not loaded."""
    with open_mesh(LAYOUTS["one"]) as mesh:
        state = make("one", mesh, with_averages("bf16"))
        other = pytest.warns(UserWarning, match="no position in the data")
        with other, pytest.warns(UserWarning, match="loaded in place of step-00000002"):
            loaded = load(state, str(path))
        assert loaded.step == state.step == 1
        assert all(torch.equal(whole(state)[name], tensor) for name, tensor in first.items())
        return loaded.skipped[0].reason


def test_a_damaged_average_is_named_and_the_checkpoint_before_is_converted(tmp_path: Path) -> None:
    first = saved_twice(tmp_path)
    manifest = Manifest.read(tmp_path / "step-00000002")
    (piece,) = manifest.tensors["optim.up.weight.exp_avg_sq"].pieces
    file = tmp_path / "step-00000002" / manifest.files[0].name
    data = bytearray(file.read_bytes())
    header = int.from_bytes(data[:8], "little")
    data[8 + header + piece.start + 5] ^= 1
    file.write_bytes(data)
    reason = loads_the_first(tmp_path, first)
    assert "rank-00000.safetensors" in reason and "its bytes changed after they were written" in reason


def test_what_changed_before_it_was_written_is_named(tmp_path: Path) -> None:
    first = saved_twice(tmp_path)
    path = tmp_path / "step-00000002"
    manifest = Manifest.read(path)
    entry = manifest.tensors["optim.cube.exp_avg"]
    sums = dict(manifest.tensors) | {"optim.cube.exp_avg": type(entry)(entry.shape, entry.dtype, 7, entry.pieces)}
    (path / FILE).write_bytes(replace(manifest, tensors=sums).encode())
    assert "optim.cube.exp_avg: checksum" in loads_the_first(tmp_path, first)


def test_what_is_not_finite_is_refused(tmp_path: Path) -> None:
    with open_mesh(LAYOUTS["one"]) as mesh:
        state = make("one", mesh, with_averages("fp32"))
        go_on(state, 1)
        state.optimizer.state_tensors()["optim.up.weight.exp_avg"][0, 0] = float("inf")
        Store(tmp_path).save(state)
    for kind in ("bf16", "8bit"):
        message = refused(str(tmp_path), with_averages(kind), convert_state=True)
        assert "optim.up.weight.exp_avg: found a rounding of nan" in message and "not finite" in message


def rank_goes_on(run: RunDir, kind: str, allow: tuple[str, ...]) -> str:
    """What a rank of `shardwise train` does at its start; the proof."""
    with open_mesh(LAYOUTS["one"]) as mesh:
        placed = place("one", mesh, wide=WIDE)
        rows = [torch.zeros(1) for _ in range(8)]
        state = TrainState(placed, adamw(placed, **DIALS, state_dtype=kind), loader(rows, 4, mesh))
        loaded = run_goes_on(run, TrainSettings(), Store(run.checkpoints), state, allow)
        if loaded is None:
            go_on(state, 1)
            Store(run.checkpoints).save(state)
        return loaded.proof.line if loaded is not None else ""


def test_a_run_converts_with_leave_given_now_or_before_it_died(tmp_path: Path) -> None:
    run, key = RunDir(tmp_path), "optimizer.state_dtype"
    assert rank_goes_on(run, "fp32", ()) == ""
    with pytest.raises(CheckpointError, match=f"--allow {key}"):
        rank_goes_on(run, "bf16", ("optimizer.lr",))
    for allow in (key, "all"):
        assert "16 moments from float32 to bfloat16" in rank_goes_on(run, "bf16", (allow,))
    run.add_event("changed", changes=[f"{key}: 'fp32' -> 'bf16' (maths)"], allowed=[key])
    assert "16 moments from float32 to bfloat16" in rank_goes_on(run, "bf16", ())


def order_goes_on(run: RunDir, seed: int, allow: tuple[str, ...]) -> list[tuple[int, int]]:
    """What a rank of `shardwise train` keeps in quarantine at its start."""
    with open_mesh(LAYOUTS["one"]) as mesh:
        placed, rows = place("one", mesh, wide=WIDE), [torch.zeros(1) for _ in range(8)]
        batches = loader(rows, 4, mesh, seed=seed)
        state = TrainState(placed, adamw(placed, **DIALS), batches)
        if run_goes_on(run, TrainSettings(seed=seed), Store(run.checkpoints), state, allow) is None:
            go_on(state, 1)
            batches.quarantine(0, 2)
            Store(run.checkpoints).save(state)
        return batches.quarantined


def test_leave_for_another_order_holds_until_it_is_saved(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert order_goes_on(run, 0, ()) == order_goes_on(run, 0, ("all",)) == [(0, 2)]
    with pytest.raises(CheckpointError, match="saved seed=0, now 5"):
        order_goes_on(run, 5, ())
    assert order_goes_on(run, 5, ("train.seed",)) == []
    run.add_event("changed", changes=["train.seed: 0 -> 5 (maths)"], allowed=["train.seed"])
    run.starting.path.mkdir()
    run.starting.config_json.write_text("{}")  # of a start after the one that had leave, and died before it saved
    assert order_goes_on(run, 5, ()) == [] and order_goes_on(run, 0, ()) == [(0, 2)]


# ---------------------------------------------------------------- negative controls


def truncated(self: Any, state: dict[str, Any], mean: Tensor, square: Tensor) -> None:
    """Digits are cut off, not rounded."""
    for key, value in zip(low_bits.MOMENTS, (mean, square), strict=True):
        bits = value.float().contiguous().view(torch.int32).bitwise_and(-(1 << 16))
        state[key] = bits.view(torch.float32).bfloat16()


def test_control_a_cast_that_truncates_is_caught_while_loading(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bits.Plain, "write", truncated)
    message = refused_after_no_step(f"{stored}/fp32", "bf16")
    assert "found a rounding of 0.00" in message and "needed at most 0.0039" in message


def refused_after_no_step(path: str, kind: str) -> str:
    with open_mesh(LAYOUTS["one"]) as mesh:
        state = make("one", mesh, with_averages(kind))
        with pytest.raises(CheckpointError) as caught:
            load(state, path)
        return str(caught.value)


def test_control_the_next_code_is_caught_while_loading(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = low_bits.quantise
    monkeypatch.setattr(low_bits, "quantise", lambda v, s, codes: (right(v, s, codes) + 1).clamp(max=len(codes) - 1))
    assert "optim.up.weight.exp_avg" in refused_after_no_step(f"{stored}/fp32", "8bit")


def test_control_scales_that_change_places_are_caught_by_hand(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = low_bits.Coded.read

    def swapped(self: Any, state: dict[str, Any], wide: torch.dtype) -> tuple[Tensor, Tensor]:
        other = {"scale": state["scale_sq"], "scale_sq": state["scale"]} if state.keys() > {"scale"} else {}
        return right(self, state | other, wide)

    monkeypatch.setattr(low_bits.Coded, "read", swapped)
    wrong = compared(stored, "8bit", "fp32").wrong
    assert wrong == [f"optim.{name}.{key}" for name in CODED for key in ("exp_avg", "exp_avg_sq")]


def test_the_record_holds_what_was_changed(stored: str) -> None:
    with open_mesh(LAYOUTS["one"]) as mesh:
        state = make("one", mesh, with_averages("bf16"))
        kept = json.loads(json.dumps(load(state, f"{stored}/fp32").proof.to_dict()))
    assert kept["converted"] == [
        {"what": "moments", "count": 16, "before": "float32", "now": "bfloat16", "unit": "relative"}
        | {"rounding": kept["converted"][0]["rounding"]}
    ]
    assert 0.001 < kept["converted"][0]["rounding"] < 0.00391
