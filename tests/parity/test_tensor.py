"""`shard_tensor` against one process: logits, loss and every gradient; and what it refuses."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.parallel.layers.tensor_hooks import looks_up_alone, split_table
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.parallel.placed import Part, Placed
from shardwise.parallel.tensor import shard_tensor
from shardwise.plan.plan import Axes, Plan, Tensor
from shardwise.testing.world import World
from shardwise.train.loss import token_cross_entropy

VOCAB, DIM, HEAD_DIM, HEADS, KV_HEADS, TOKENS = 32, 32, 4, 8, 4, 8


class Attention(nn.Module):
    """Grouped queries; `qk_norm` adds norms on the split heads."""

    def __init__(self, qk_norm: bool = False) -> None:
        super().__init__()
        self.head_dim = HEAD_DIM
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(HEAD_DIM) if qk_norm else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        b, s, _ = hidden.shape
        q, k, v = (w(hidden).view(b, s, -1, HEAD_DIM) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 64, bias=False), nn.Linear(DIM, 64, bias=False)
        self.w2 = nn.Linear(64, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DecoderBlock(nn.Module):
    def __init__(self, qk_norm: bool) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attn, self.ffn = Attention(qk_norm), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(hidden=self.attn_norm(x))  # by keyword, as Hugging Face models do
        return x + self.ffn(self.ffn_norm(x))


class TinyDecoder(nn.Module):
    def __init__(self, qk_norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(DecoderBlock(qk_norm) for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class GPTAttention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.head_dim = fused, HEAD_DIM
        if fused:
            self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        else:
            self.q, self.k, self.v, self.proj = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        parts = self.c_attn(x).split(DIM, dim=2) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.view(b, s, -1, HEAD_DIM).transpose(1, 2) for t in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        return self.c_proj(out) if self.fused else self.proj(out)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.gelu(self.fc(x)))


class GPTBlock(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.mlp = GPTAttention(fused), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TinyGPT(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(TOKENS, DIM)
        self.h = nn.ModuleList(GPTBlock(fused) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class ScaledBlock(nn.Module):
    """Parameters of the block itself, on the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(DIM))
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.mlp(x)


class TinyScaled(nn.Module):
    """Parameters owned by the root and by blocks, and a head that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.rand(1, TOKENS, DIM))
        self.wte = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(2))
        self.out = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.start
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class BesideBlock(ScaledBlock):
    """It is given the embeddings beside the stream, as the blocks before and after it are."""

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.scale * first)


class TinyBeside(TinyScaled):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BesideBlock() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.wte(ids) + self.start
        for block in self.blocks:
            x = block(x, first)
        return self.out(x)


class Thrice(nn.Module):
    """Attention that is given queries, keys and values, as torch's is."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        given = (self.q, query), (self.k, key), (self.v, value)
        heads = (layer(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for layer, x in given)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(seen.transpose(1, 2).flatten(2))


class ThriceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), Thrice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attn(h, h, value=h)


class TinyThrice(TinyScaled):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ThriceBlock() for _ in range(2))


SCALED_RULES = {
    "": "replicate",
    "wte": "vocab",
    "blocks.*": "sequence",
    "blocks.*.mlp.fc": "column",
    "blocks.*.mlp.proj": "row",
    "out": "replicate",
}


@dataclass(frozen=True)
class Case:
    model: str = "decoder"
    tp: int = 2
    sequence: bool = False
    loss: bool = False
    dtype: torch.dtype = torch.float64
    fsdp: int = 1


def build(name: str) -> tuple[nn.Module, str, dict[str, str] | None]:
    """Model, list of blocks, rules."""
    torch.manual_seed(7)
    match name:
        case "decoder":
            config = DecoderConfig(
                vocab_size=VOCAB,
                dim=DIM,
                num_layers=2,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                ffn_dim=64,
                max_seq_len=TOKENS,
            )
            return Decoder(config), "layers", None
        case "by-keyword":
            return TinyDecoder(), "layers", None
        case "qk-norm":
            return TinyDecoder(qk_norm=True), "layers", None
        case "gpt":
            config = GPTConfig(vocab_size=VOCAB, dim=DIM, num_layers=2, num_heads=HEADS, max_seq_len=TOKENS)
            return GPT(config), "h", None
        case "gpt-fused":
            rules = {"wte": "vocab", "wpe": "replicate", "h.*.ln_1": "sequence", "h.*.ln_2": "sequence"}
            rules |= {"h.*.attn.c_attn": "column-gather", "h.*.attn.c_proj": "row", "h.*.mlp.fc": "column"}
            return TinyGPT(fused=True), "h", rules | {"h.*.mlp.proj": "row", "ln_f": "sequence", "lm_head": "head"}
        case "thrice":
            rules = {f"blocks.*.attn.{name}": "column" for name in "qkv"} | {"blocks.*.attn.o": "row"}
            ends = {"": "replicate", "wte": "vocab", "out": "replicate"}
            return TinyThrice(), "blocks", {**rules, **ends, "blocks.*.norm": "sequence"}
        case "beside":
            return TinyBeside(), "blocks", SCALED_RULES
        case _:
            return TinyScaled(), "blocks", SCALED_RULES


def perturbed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """No parameter keeps a value (0, 1) that would hide a wrong gradient or a bias counted twice."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def place(model: nn.Module, plan: Plan, mesh: Mesh, blocks: str, rules: dict[str, str] | None = None) -> Placed:
    count = len(model.get_submodule(blocks)) if blocks else 0  # type: ignore[arg-type]
    placed = Placed(
        parts=(Part(root=model, run=model),),
        plan=plan,
        mesh=mesh,
        blocks=tuple(f"{blocks}.{i}" for i in range(count)),
        rules=rules,
        original_names=tuple(name for name, _ in model.named_modules()),
    )
    return shard_tensor(placed, plan, mesh)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(case: Case) -> dict[str, float]:
    """Largest relative difference to one process of logits, loss and gradients; the latter by parameter."""
    plan = Plan(
        axes=Axes(tp=case.tp, dp_shard=case.fsdp),
        zero=3 if case.fsdp > 1 else 0,
        tensor=Tensor(sequence=case.sequence, loss=case.loss),
    )
    with open_mesh(plan) as mesh:
        model, blocks, rules = build(case.model)
        reference = perturbed(model, case.dtype)
        model, exact = copy.deepcopy(reference), copy.deepcopy(reference).double()
        placed = place(model, plan, mesh, blocks, rules)
        if case.fsdp > 1:
            for name in placed.blocks:
                fully_shard(model.get_submodule(name), mesh=mesh.device_mesh["dp_shard"])
            fully_shard(model, mesh=mesh.device_mesh["dp_shard"])
        found = {}
        for step in range(2):  # twice: gradients accumulate, and nothing is left over from a first call
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, VOCAB, (2 * case.fsdp, TOKENS), generator=generator)
            labels = torch.randint(0, VOCAB, ids.shape, generator=generator)
            labels[0, :3] = -100
            mine = slice(2 * mesh.batch.rank, 2 * mesh.batch.rank + 2)
            expected, logits = reference(ids), model(ids[mine])
            assert isinstance(logits, DTensor) == case.loss
            found[f"logits{step}"] = relative(whole(logits).detach(), expected[mine].detach())
            expected_loss, loss = token_cross_entropy(expected, labels), token_cross_entropy(logits, labels[mine])
            expected_loss.sum.backward()
            token_cross_entropy(exact(ids), labels).sum.backward()
            (loss.sum * case.fsdp).backward()  # fully_shard averages
            total = mesh.all_reduce_sum(loss.sum.detach().clone(), "dp_shard")
            found[f"loss{step}"] = relative(total, expected_loss.sum.detach())
        expected_parameters = dict(reference.named_parameters())
        exact_gradients = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
        total_norm = torch.stack([p.grad.norm() for p in expected_parameters.values() if p.grad is not None]).norm()
        assert list(expected_parameters) == list(placed.named_parameters())
        for name, parameter in placed.named_parameters().items():
            assert isinstance(parameter, DTensor) and parameter.grad is not None
            assert tuple(parameter.shape) == placed.placements[name].global_shape
            expected_gradient = expected_parameters[name].grad
            assert expected_gradient is not None
            gradient = whole(parameter.grad)
            if name.endswith("attn.k.bias"):  # zero in exact arithmetic: softmax does not see a shift of the keys
                found[name] = float((gradient - expected_gradient).norm() / total_norm)
            else:
                # in fp32 one process is itself that far from the truth; 0 in fp64
                rounding = relative(expected_gradient.double(), exact_gradients[name])
                found[name] = max(relative(gradient, expected_gradient) - rounding, 0.0)
    return found


TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-11}


def check(world: World, case: Case) -> None:
    for found in world(case.tp * case.fsdp, differences, case):
        assert {k: v for k, v in found.items() if not v <= TOLERANCE[case.dtype]} == {}


@pytest.mark.share(4)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("loss", [False, True], ids=["gathered", "sharded-loss"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("model", ["decoder", "gpt"])
def test_parity_in_fp64(world: World, model: str, tp: int, sequence: bool, loss: bool) -> None:
    check(world, Case(model=model, tp=tp, sequence=sequence, loss=loss))


@pytest.mark.share(4)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("model", ["decoder", "gpt"])
def test_parity_in_fp32(world: World, model: str, sequence: bool) -> None:
    check(world, Case(model=model, sequence=sequence, loss=sequence, dtype=torch.float32))


@pytest.mark.share(4)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("model", ["by-keyword", "qk-norm", "gpt-fused", "scaled", "beside", "thrice"])
def test_parity_of_other_architectures(world: World, model: str, sequence: bool) -> None:
    check(world, Case(model=model, sequence=sequence))


@pytest.mark.share(4)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("model", ["decoder", "gpt", "scaled"])
def test_parity_under_fully_shard(world: World, model: str, sequence: bool) -> None:
    check(world, Case(model=model, sequence=sequence, loss=model != "scaled", fsdp=2))


class Doubled(nn.Embedding):
    """As some models scale what they look up."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def looked_up(options: dict[str, Any]) -> tuple[list[float], tuple[int, ...]]:
    """Differences of a split table to a whole one: vectors and the gradient; and the shape of the gradient here."""
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        table = nn.Embedding(VOCAB, DIM, dtype=torch.float64, **options)
        with torch.no_grad():
            table.weight.copy_(torch.arange(VOCAB * DIM).view(VOCAB, DIM).sin())
        reference = copy.deepcopy(table)
        split_table(table, mesh.device_mesh["tp"])
        ids = torch.tensor([[0, 5, 15, 16, 31, 5], [17, 16, 16, 3, 0, 31]])
        found, expected = table(input=ids), reference(ids)
        for vectors in (found, expected):
            (vectors * torch.arange(vectors.numel()).view_as(vectors).cos()).sum().backward()
        assert isinstance(table.weight.grad, DTensor) and reference.weight.grad is not None
        gaps = [
            relative(found.detach(), expected.detach()),
            relative(table.weight.grad.full_tensor(), reference.weight.grad),
        ]
        return gaps, tuple(table.weight.grad.to_local().shape)


@pytest.mark.parametrize("padding", [None, 0, 16, 31])
def test_a_rank_makes_the_gradient_of_its_rows_of_a_table(world: World, padding: int | None) -> None:
    for gaps, shape in world(2, looked_up, {"padding_idx": padding}):
        assert gaps == [0.0, 0.0] and shape == (VOCAB // 2, DIM)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_tables_whose_rows_depend_on_more_are_left_to_torch(options: dict[str, Any]) -> None:
    assert looks_up_alone(nn.Embedding(4, 2)) and not looks_up_alone(nn.Embedding(4, 2, **options))
    assert not looks_up_alone(Doubled(4, 2))
