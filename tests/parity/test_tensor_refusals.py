"""What `shard_tensor` refuses, and what it composes with: meta device, recompute, compile, no_grad."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.parallel.placed import Part, Placed
from shardwise.parallel.tensor import shard_tensor
from shardwise.plan.plan import Axes, Plan, Tensor
from shardwise.testing.world import World

DIM, VOCAB, HIDDEN = 8, 12, 16
RULES = {
    "embed": "vocab",
    "layers.*.norm": "sequence",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "head": "head",
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Across(nn.Module):
    """Attention from the stream to a second sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k = (self.up(each).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (x, memory))
        return self.down(nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2))


class AcrossBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Across()

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x), memory=memory)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        memory = x + 1
        for layer in self.layers:
            x = layer(x, memory) if isinstance(layer, AcrossBlock) else layer(x)
        return self.head(x)


def place(
    model: nn.Module, mesh: Mesh, rules: dict[str, str], *, sequence: bool = False, blocks: bool = True
) -> Placed:
    plan = Plan(axes=Axes(tp=mesh.size("tp")), tensor=Tensor(sequence=sequence))
    placed = Placed(
        parts=(Part(root=model, run=model),),
        plan=plan,
        mesh=mesh,
        blocks=("layers.0", "layers.1") if blocks else (),
        rules=rules,
        original_names=tuple(name for name, _ in model.named_modules()),
    )
    return shard_tensor(placed, plan, mesh)


def change(name: str, model: Model) -> tuple[dict[str, str], dict[str, bool]]:
    """Plant one fault in the model or in the rules."""
    rules, options = dict(RULES), {}
    mlp = model.layers[0].get_submodule("mlp")
    match name:
        case "misspelled":
            rules = {k.replace("mlp.up", "mlp.upp"): v for k, v in rules.items()}
        case "uncovered":
            del rules["layers.*.mlp.down"]
        case "twice":
            rules["layers.0.mlp.up"] = "column"
        case "vocabulary":
            model.embed = nn.Embedding(VOCAB + 1, DIM)
        case "features":
            mlp.up = nn.Linear(DIM, 15)
        case "heads":
            mlp.num_kv_heads = 3
        case "head_dim":
            mlp.head_dim = 16
        case "type":
            mlp.up = nn.Bilinear(DIM, DIM, HIDDEN)
        case "list":
            model.extra, rules["extra"] = nn.ParameterList([torch.ones(2)]), "replicate"
        case "siblings":
            mlp.gate, rules["layers.*.mlp.gate"] = nn.Linear(DIM, HIDDEN), "replicate"
        case "no blocks":
            options = {"sequence": True, "blocks": False}
        case "column in block":
            model.layers[0].up, rules["layers.*.up"] = nn.Linear(DIM, HIDDEN), "column"
            options = {"sequence": True}
        case "replicate in block":
            rules["layers.*.norm"] = "replicate"
            options = {"sequence": True}
        case _:
            mlp.inner, rules["layers.*.mlp.inner.up"] = MLP(), "column"
            rules["layers.*.mlp.inner.down"] = "row"
            options = {"sequence": True}
    return rules, options


REFUSALS = {
    "misspelled": r"'layers.\*.mlp.upp' matches no module; did you mean 'layers.\*.mlp.up'",
    "uncovered": r"no rule covers layers.0.mlp.down.weight, layers.0.mlp.down.bias, layers.1.* and 1 more",
    "twice": r"'layers.0.mlp.up' is matched by 2 rules",
    "vocabulary": r"tp=2 does not divide num_embeddings=13 of embed; use tp in \{1, 13\}",
    "features": r"tp=2 does not divide out_features=15 of layers.0.mlp.up; use tp in \{1, 3, 5, 15\}",
    "heads": r"tp=2 does not divide num_kv_heads=3 of layers.0.mlp",
    "head_dim": r"tp=2 does not divide the 1 heads",
    "type": r"found Bilinear .* needed nn.Linear",
    "list": r"found ParameterList",
    "siblings": r"mix split and whole outputs",
    "no blocks": r"no repeated blocks were found in Model",
    "column in block": r"column layer of the block itself",
    "replicate in block": r"use 'sequence' when it works on each token alone",
    "nested": r"both hold column layers",
}


def refusal(name: str) -> str:
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        model = Model()
        rules, options = change(name, model)
        before = {n: type(p) for n, p in model.named_parameters()}
        try:
            place(model, mesh, rules, **options)
        except ModelError as error:
            # refused before anything was changed
            assert {n: type(p) for n, p in model.named_parameters()} == before
            return str(error)
        return "accepted"


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_before_anything_changes(world: World, name: str) -> None:
    for text in world(2, refusal, name):
        with pytest.raises(ModelError, match=REFUSALS[name]):
            raise ModelError(text)


def test_negative_control_the_unchanged_model_is_accepted(world: World) -> None:
    assert world(2, accepted) == ["accepted", "accepted"]


def accepted() -> str:
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        place(Model(), mesh, RULES, sequence=True)
        return "accepted"


def runtime_refusal(name: str) -> str:
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        model, tokens, rules = Model(), 4, dict(RULES)
        if name.endswith("on split"):
            model.layers[0].mlp.up = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.PReLU())
            rules = {k: v for k, v in rules.items() if "mlp.up" not in k} | {"layers.1.mlp.up": "column"}
            rules |= {"layers.0.mlp.up.0": "column", "layers.0.mlp.up.1": name.split()[0]}
        elif name == "two sequences":
            model.layers = nn.ModuleList(AcrossBlock() for _ in range(2))
        elif name == "row on thirds":
            model.layers[0].mlp.down = nn.Linear(3 * HIDDEN, DIM)
        else:
            tokens = 5
        place(model, mesh, rules, sequence="sequence" in name.split()[-1])
        try:
            model(torch.arange(2 * tokens).reshape(2, tokens))
        except ModelError as error:
            return str(error)
        return "accepted"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("replicate on split", "rule 'replicate' on .*: its input differs between tp ranks"),
        ("sequence on split", "rule 'sequence' on .*: its input differs between tp ranks"),
        ("row on thirds", "needed 24 .* or 48"),
        ("two sequences", "layers.0.mlp is given memory .*, of which each rank has a part"),
        ("odd sequence", "tp=2 does not divide the 5 tokens"),
    ],
)
def test_refused_at_the_first_call(world: World, name: str, text: str) -> None:
    for found in world(2, runtime_refusal, name):
        with pytest.raises(ModelError, match=text):
            raise ModelError(found)


def meta_placements() -> dict[str, tuple[str, tuple[int, ...], str]]:
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        with torch.device("meta"):
            model = Model()
        placed = place(model, mesh, RULES, sequence=True)
        assert all(p.is_meta for p in placed.parameters())
        shards = {n: tuple(p.to_local().shape) for n, p in placed.named_parameters().items() if isinstance(p, DTensor)}
        return {n: (p.text, shards[n], p.pass_name) for n, p in placed.placements.items()}


def test_placements_on_the_meta_device(world: World) -> None:
    table = world(2, meta_placements)[0]
    assert table["layers.0.mlp.up.weight"] == ("column: Shard(0) over tp", (HIDDEN // 2, DIM), "shard_tensor")
    assert table["layers.0.mlp.down.weight"] == ("row: Shard(1) over tp", (DIM, HIDDEN // 2), "shard_tensor")
    assert table["layers.0.mlp.down.bias"] == ("row: Replicate over tp", (DIM,), "shard_tensor")
    assert table["layers.1.norm.weight"] == ("sequence: Replicate over tp", (DIM,), "shard_tensor")
    assert table["embed.weight"] == ("vocab: Shard(0) over tp", (VOCAB // 2, DIM), "shard_tensor")


def one_process_untouched() -> bool:
    plan = Plan()
    with open_mesh(plan) as mesh:
        model = Model()
        placed = Placed(parts=(Part(root=model, run=model),), plan=plan, mesh=mesh)
        return shard_tensor(placed, plan, mesh) is placed


def test_an_axis_of_size_one_returns_its_input(world: World) -> None:
    assert world(1, one_process_untouched) == [True]


def worst_difference(how: str) -> float:
    """Largest relative difference of outputs and gradients to one process."""
    with warnings.catch_warnings(), open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        torch.manual_seed(3)
        reference = Model().double()
        model = copy.deepcopy(reference)
        place(model, mesh, RULES, sequence=True)
        for layer in model.layers:
            if how == "recompute":
                inner = layer.forward
                object.__setattr__(layer, "forward", lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False))
            elif how == "compile":
                layer.compile(backend="aot_eager")
        if how == "compile":  # torch's compiler looks at .grad of its inputs and instantiates autograd functions
            warnings.simplefilter("ignore")
        ids = torch.arange(8).reshape(2, 4)
        if how == "no_grad":
            with torch.no_grad():
                assert torch.allclose(model(ids), reference(ids), rtol=1e-12, atol=1e-14)
        expected, found = reference(ids), model(ids)
        expected.square().sum().backward()
        found.square().sum().backward()
        assert isinstance(model.layers[0].norm.weight, DTensor)  # the local tensors are gone again
        worst = float((found - expected).detach().norm() / expected.detach().norm())
        parameters = dict(model.named_parameters())
        for name, parameter in reference.named_parameters():
            gradient = parameters[name].grad
            assert isinstance(gradient, DTensor) and parameter.grad is not None
            worst = max(worst, float((gradient.full_tensor() - parameter.grad).norm() / parameter.grad.norm()))
        return worst


@pytest.mark.parametrize("how", ["plain", "no_grad", "recompute", "compile"])
def test_composes(world: World, how: str) -> None:
    assert max(world(2, worst_difference, how)) < 1e-11


def gradient_error_of_unreduced_norm() -> float:
    """Plant the classic fault: the norm's gradient of this rank's tokens, taken for the whole one."""
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        torch.manual_seed(3)
        reference = Model().double()
        model = copy.deepcopy(reference)
        place(model, mesh, RULES, sequence=True)
        ids = torch.arange(8).reshape(2, 4)
        for m in (reference, model):
            m(ids).square().sum().backward()
        gradient = model.layers[0].norm.weight.grad
        expected = reference.layers[0].norm.weight.grad
        assert isinstance(gradient, DTensor) and gradient.placements[0].is_partial()
        assert model.layers[0].mlp.up.weight.placements == (Shard(0),)
        return float((gradient.to_local() - expected).norm() / expected.norm())


def test_negative_control_an_unreduced_norm_gradient_shows(world: World) -> None:
    assert min(world(2, gradient_error_of_unreduced_norm)) > 1e-2


class Attention(nn.Module):
    """Two key-value heads, as its forward pass takes them from the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv = self.q(x).view(len(x), -1, 4), self.kv(x).view(len(x), -1, 4)
        return self.o((q * kv.repeat_interleave(2, dim=1)).flatten(1))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x)


def with_heads(text: str) -> str:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        rules = {"attn.q": "column", "attn.kv": "column", "attn.o": "row"}
        placed = sw.apply(Heads, plan, mesh, seed=1, rules=rules)
        try:
            return str(placed.module(torch.ones(3, 16)).shape)
        except ModelError as error:
            return str(error)


def test_key_value_heads_that_do_not_divide_are_named(world: World) -> None:
    assert world(2, with_heads, "tp2") == [str(torch.Size([3, 16]))] * 2
    for said in world(4, with_heads, "tp4"):
        assert said.startswith("tp=4: attn: shape '[3, -1, 4]'") and "kv 2 of 8" in said and "heads" in said


class WeighedBlock(Block):
    """A number for each token, joined with the stream."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x)) * weight.unsqueeze(-1)


class Weighed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WeighedBlock() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids.float())
        return self.head(x)


def weighed() -> str:
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        placed = place(Weighed(), mesh, dict(RULES), sequence=True)
        try:
            placed.module(torch.arange(8).reshape(2, 4))
        except (ModelError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"


def test_a_number_for_each_token_beside_a_part_of_the_stream(world: World) -> None:
    """Torch ended it with the sizes of two tensors."""
    for text in world(2, weighed):
        assert text.startswith("ModelError: sequence shards: the block layers.0 is given a tensor (2, 4) beside its")
