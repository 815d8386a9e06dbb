"""`Profile`: a model as a chain of blocks of operators, in sizes that no layout changes.

The planner reads nothing else of a model. `profile_of` writes it from the sizes of a decoder;
`model.tracer` from any module on meta. Sizes are elements, per token where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardwise.model.course import Courses
from shardwise.model.ops import Attention, Matmul, Op, Pointwise, attention_flops
from shardwise.model.spec import ModelSpec
from shardwise.records import hash_of


@dataclass(frozen=True, eq=False)
class Block:
    """One block: its operators in the order of the forward pass, and the parameters that are not in a `Matmul`.

    Equal to itself alone: profiles share blocks, and caches know them by identity.
    """

    name: str
    ops: tuple[Op, ...]
    small: int = 0
    """Norms, and biases that every tp rank holds whole."""
    width: float = 0
    """Elements of its input per token: what full recompute keeps, and a pipeline sends."""
    beside: float = 0
    """Elements per token of its further inputs that another block is not given too: a second stream, which full
    recompute keeps as well."""
    ahead: int = 0
    """So many of its operators run before the first block of the chain: they are not recomputed with it, and their
    parameters are the profile's `embedding`."""
    frozen: int = 0
    """Parameters without a gradient."""
    unused: int = 0
    """Those of them that nobody froze: forward does not use them. What reduces them takes zeros."""
    apart: bool = False
    """It is trained, and nothing that it is fed has a gradient: its own are reduced at the end of a backward pass."""
    courses: Courses = ()
    """What a step was seen to hold of it; empty: none was run."""
    courses_ahead: Courses = ()
    """Of what runs before the first block."""
    through: Block | None = None
    """It as its input has a gradient, which a later stage of a pipeline asks for; None: that changes nothing."""
    buffers: int = 0
    """Bytes of buffers that no other part of the model has: only its own stage of a pipeline has them."""
    calls: int = 1
    """Times that a forward calls it: its operators are those of all calls, and `courses` those of one."""
    tensors: tuple[int, ...] = ()
    """Elements of each of its parameters that get a gradient, in the module's order, of a head of those in no block;
    empty: of sizes alone, whose products say it."""

    @cached_property
    def params(self) -> int:
        """All parameters."""
        return self.small + sum(op.params for op in self.matmuls)

    @cached_property
    def matmuls(self) -> tuple[Matmul, ...]:
        """Its products."""
        return tuple(op for op in self.ops if isinstance(op, Matmul))

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """Its attention over positions."""
        return tuple(op for op in self.ops if isinstance(op, Attention))

    @cached_property
    def met_params(self) -> int:
        """Parameters that one token meets: all but the experts it is not routed to."""
        idle = sum(op.params // op.experts * (op.experts - op.chosen) for op in self.matmuls if op.experts)
        return self.params - idle

    @cached_property
    def expert_params(self) -> int:
        """Parameters that `ep` divides."""
        return sum(op.params for op in self.matmuls if op.experts)

    @cached_property
    def split_params(self) -> int:
        """Parameters outside experts that `tp` divides."""
        return sum(op.params for op in self.matmuls if op.split in ("column", "row") and not op.experts)


@dataclass(frozen=True)
class Profile:
    """A chain: an embedding, blocks, a head. Equal neighbours may be the same object.

    >>> from shardwise.model.spec import preset
    >>> profile_of(preset("llama-8b")).num_params
    8030261248
    """

    name: str
    blocks: tuple[Block, ...]
    embedding: int
    """Parameters of the embedding (a table that is read, not multiplied)."""
    vocab: int
    """Logits per token."""
    dim: int
    head: Block
    """Last norm and the product with the vocabulary."""
    tied: bool = False
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    chosen: int = 0
    buffers: int = 0
    """Bytes of its buffers, those of blocks with them: each rank of a stage has them whole."""
    given: int = 8
    """Bytes of what its forward is given, per token: of token ids."""
    labels: int = 8
    """Bytes of labels beside it, per token: of what is no token ids a sample has few."""
    frozen: int = 0
    """Parameters of the embedding without a gradient."""
    unused: int = 0
    """Those of them that nobody froze."""
    outputs: float = 0.0
    """Elements per token that a loss takes; 0: as many as `vocab`."""
    one_number: bool = False
    """A step goes backward from a number that forward returns beside other outputs, which have no part in it."""
    added: int = 0
    """Numbers that forward returns beside what a loss takes, and a step adds to it."""
    wide: bool = False
    """Its forward was read in fp32, since it does not run in 16 bits: the copies that it would make are not known."""
    calls: tuple[int, ...] = ()
    """Numbers of its blocks in the order in which a forward calls them; empty: each once, in the order of the chain."""
    even: Profile | None = None
    """The same with as many rows for every expert, by which pipelines are cut; None: this one is."""
    unseen: str = ""
    """Why no step of it could be run without data, so that what it holds is put together from its operators."""

    def __hash__(self) -> int:
        return hash_of(self)

    @property
    def num_params(self) -> int:
        """Distinct parameters; a tied head counts once."""
        tied = self.vocab * self.dim if self.tied else 0
        return self.embedding + sum(block.params for block in self.blocks) + self.head.params - tied

    @cached_property
    def trained(self) -> float:
        """Share of the parameters that get a gradient."""
        head = self.head.frozen - (min(self.frozen, self.head.frozen) if self.tied else 0)
        frozen = self.frozen + head + sum(block.frozen for block in self.blocks)
        return 1 - frozen / self.num_params if frozen else 1.0

    def forward_flops(self, seq_len: int) -> float:
        """Floating point operations of a forward pass per token: 2 per multiply-add, causal attention halved.

        Source: arXiv:2205.05198, appendix A, with attention counted as computed.
        """
        return _forward_flops(self, seq_len)


@lru_cache(maxsize=256)
def _forward_flops(profile: Profile, seq_len: int) -> float:
    return sum(block_flops(block, seq_len) for block in (*profile.blocks, profile.head))


def block_flops(block: Block, seq_len: int) -> float:
    """Forward operations of a block per token, in a sequence of `seq_len`."""
    total = 0.0
    for op in block.ops:
        if isinstance(op, Matmul):
            total += 2.0 * op.ins * op.made
        elif isinstance(op, Attention):
            total += op.rows * attention_flops(op, seq_len * op.reach)
    return total


CLAMPED = ("gpt_oss",)
"""Architectures whose gate and its factor are clamped before they are multiplied, and whose experts have biases, as has
what attention gives."""
SCANNED = 60
"""Elements whose passing through memory takes as long as convolution, scan and gated norm of a state-space mixer, per
channel and token (Nemotron-H and Nemotron-3 on H100 and B200: 50 to 100; their small kernels wait for memory, and no
low precision speeds them up)."""


def profile_of(spec: ModelSpec) -> Profile:
    """The profile of a decoder from its sizes. Needs no torch; microseconds."""
    blocks = tuple(_block(spec, spec.is_moe(layer), spec.window_of(layer)) for layer in range(spec.num_layers))
    return Profile(
        name=spec.name,
        blocks=blocks,
        embedding=spec.embedding_params,
        vocab=_logits(spec),
        dim=spec.dim,
        head=_head(spec),
        tied=spec.tie_embeddings,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        experts=spec.num_experts if spec.kind == "moe" else 0,
        chosen=spec.experts_per_token if spec.kind == "moe" else 0,
    )


def _logits(spec: ModelSpec) -> int:
    """Outputs of the head per token: an image has its classes once."""
    return -(-spec.vocab_size // spec.max_seq_len) if spec.patch else spec.vocab_size


@lru_cache(maxsize=1024)
def _block(spec: ModelSpec, experts: bool, window: int) -> Block:
    dim = spec.dim
    norm = _norm(spec)
    after = [norm] if spec.block_norms > 2 else []
    add = Pointwise("residual", 3 * dim, "sequence", masks=dim if spec.dropout else 0, kernels=3 if spec.dropout else 1)
    attention = [norm, *_attention_ops(spec, window), *after]
    ffn = _expert_ops(spec) if experts else _ffn_ops(spec, spec.dense_ffn_dim or spec.ffn_dim)
    ops = [*attention, add, norm, *ffn, *after, add] if spec.block_norms > 1 else [*attention, *ffn, add]
    block = Block("moe" if experts else "dense", tuple(ops), width=dim)
    params = spec.block_params if experts or spec.kind != "moe" else spec.dense_block_params
    return Block(block.name, block.ops, small=params - block.params, width=dim)


def _norm(spec: ModelSpec) -> Pointwise:
    """LayerNorm is one kernel in every stack; RMSNorm is six primitives where nobody fuses them."""
    if spec.norm == "layer":
        return Pointwise("norm", 2 * spec.dim, "sequence", saves=spec.dim, saves_apart=spec.dim)
    return Pointwise("norm", 2 * spec.dim, "sequence", saves=spec.dim, saves_apart=2 * spec.dim, upcast=True, kernels=6)


@lru_cache(maxsize=1024)
def _head(spec: ModelSpec) -> Block:
    norm = _norm(spec)
    product = Matmul("head", spec.dim, _logits(spec), "column", saves=spec.dim)
    apart = spec.dim * (spec.vocab_size - _logits(spec))
    return Block("head", (norm, product), small=spec.norm_params + spec.other_params + apart, width=spec.dim)


def _attention_ops(spec: ModelSpec, window: int) -> list[Op]:
    dim, heads, size = spec.dim, spec.num_heads, spec.head_dim
    qk_dim = size + spec.rope_dim
    core = Attention(heads, spec.num_kv_heads, qk_dim, size, spec.causal, window, spec.dropout)
    biased = spec.kind == "gpt"
    out = Matmul("out", heads * size, dim, "row", biased=biased or spec.hf in CLAMPED)
    width = (heads + spec.num_kv_heads) * size
    rotate = Pointwise("rope", 2 * width, "heads", kernels=8)
    if spec.kv_rank:
        query = heads * qk_dim
        down = Matmul("kv-down", dim, spec.kv_rank + spec.rope_dim, saves=dim)
        up = Matmul("kv-up", spec.kv_rank, heads * 2 * size, "column", saves=spec.kv_rank)
        norm = Pointwise(
            "latent-norm", 2 * (spec.kv_rank + spec.q_rank), "none", saves=spec.kv_rank + spec.q_rank, kernels=8
        )
        first: list[Op] = [Matmul("q", dim, query, "column")]
        if spec.q_rank:
            first = [
                Matmul("q-down", dim, spec.q_rank),
                Matmul("q-up", spec.q_rank, query, "column", saves=spec.q_rank),
            ]
        wide = Pointwise("rope", 2 * heads * (qk_dim + size), "heads", kernels=10)
        return [*first, down, norm, up, wide, core, out]
    outs = (heads + 2 * spec.num_kv_heads) * size
    parts = 1 if spec.kind == "gpt" and (spec.causal or spec.patch) else 3
    qkv = Matmul("qkv", dim, outs, "column", saves=dim, biased=biased or spec.qkv_bias, parts=parts)
    norms: list[Op] = []
    if spec.qk_norm:
        norms = [Pointwise("qk-norm", 2 * width, "heads", saves=width, saves_apart=2 * width, upcast=True, kernels=12)]
    scan = [Pointwise("scan", SCANNED * spec.scan_dim, "heads")] if spec.scan_dim else []
    return [qkv, *norms, *([rotate] if spec.positions == "rotary" else []), core, *scan, out]


def _ffn_ops(spec: ModelSpec, width: int, name: str = "") -> list[Op]:
    outs, biased = width * (2 if spec.ffn == "gated" else 1), spec.kind == "gpt"
    parts = 2 if spec.ffn == "gated" else 1
    up = Matmul(f"{name}up", spec.dim, outs, "column", saves=spec.dim, biased=biased, parts=parts)
    return [up, _activation(spec, width), Matmul(f"{name}down", width, spec.dim, "row", saves=width, biased=biased)]


def _activation(spec: ModelSpec, width: int, chosen: int = 0) -> Pointwise:
    """Gated: keeps gate and up, and apart silu(gate) too; plain: keeps its input, as gelu is one kernel anyway.

    Apart, a gate that is clamped keeps both parts twice, its sigmoid, and their product (gpt-oss, in its own code,
    torchtitan's and that of transformers: no kernel of PyTorch has it).
    """
    if spec.ffn == "gated" and spec.hf in CLAMPED:
        return Pointwise("clamped-swiglu", 3 * width, "heads", 2 * width, 6 * width, kernels=7, per_choice=chosen)
    if spec.ffn == "gated":
        return Pointwise("swiglu", 3 * width, "heads", 2 * width, 3 * width, kernels=2, per_choice=chosen)
    return Pointwise("gelu", 2 * width, "heads", width, width, kernels=2, per_choice=chosen)


def _expert_ops(spec: ModelSpec) -> list[Op]:
    dim, width, count, chosen = spec.dim, spec.ffn_dim, spec.num_experts, spec.experts_per_token
    inner = spec.expert_dim or dim
    router = Matmul("router", dim, count, saves=dim)
    choose = Pointwise("route", 4 * count, "none", saves=2 * count, saves_apart=4 * count, kernels=12)
    permute = Pointwise("permute", 2 * inner, "sequence", kernels=4, per_choice=chosen)
    up = Matmul("experts-up", inner, width * (2 if spec.ffn == "gated" else 1), "column", inner, count, chosen)
    down = Matmul("experts-down", width, inner, "row", width, count, chosen)
    combine = Pointwise("combine", 2 * inner, "sequence", saves=inner, saves_apart=inner, kernels=4, per_choice=chosen)
    shared = _ffn_ops(spec, spec.shared_ffn_dim, "shared-") if spec.shared_ffn_dim else []
    outs = up.outs + inner  # no grouped product adds what its experts have: rows of it are spelled out, and added
    biases = [Pointwise("expert-bias", 2 * outs, "heads", kernels=3, per_choice=chosen)] if spec.hf in CLAMPED else []
    ends: tuple[list[Op], list[Op]] = ([], [])
    if spec.expert_dim:
        ends = ([Matmul("latent-down", dim, inner)], [Matmul("latent-up", inner, dim, saves=inner)])
    products: list[Op] = [up, _activation(spec, width, chosen), down, *biases]
    return [router, choose, *ends[0], permute, *products, combine, *ends[1], *shared]


def runs(blocks: Sequence[Block]) -> Iterator[tuple[Block, int]]:
    """Neighbours that are equal, with how many there are."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] is not blocks[start]:
            yield blocks[start], end - start
            start = end
