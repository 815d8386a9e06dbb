"""The reference decoder with mixtures of experts in place of its feed-forwards. Plain PyTorch.

    x --> router --> chosen experts and their weights --> experts on their own tokens --> weighted sum --> + x

Everything that decides about a token looks at that token's own row of the batch alone: choice, capacity, auxiliary
losses. So they are the same in one process and however the batch is divided. The bias that balances the load is
the one exception: it follows the token counts of the whole step, which are integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import ConfigError
from shardwise.models.decoder import Attention, DecoderConfig, FeedForward, document_mask
from shardwise.models.weights import fill_weights


@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Sizes of a `MoEDecoder`, beside those of the `Decoder`.

    Raises:
        ConfigError: heads that do not fit, or more experts per token than experts.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    expert_ffn_dim: int = 0
    """0: `ffn_dim`."""
    num_shared_experts: int = 0
    """Experts that every token meets: one feed-forward of their joint width (DeepSeekMoE, arXiv:2401.06066)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """Divide a token's weights by their sum."""
    route_scale: float = 1.0
    """Factor of the weights."""
    capacity_factor: float | None = None
    """An expert takes at most `ceil(factor * seq * k / experts)` tokens of a row of the batch; None: all."""
    bias_rate: float = 0.0
    """Step of the bias that balances the load without a loss (arXiv:2408.15664); 0: no bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} of num_experts={self.num_experts}; needed at least 1 and "
                "at most all of them"
            )
        if self.score not in ("softmax", "sigmoid"):
            raise ConfigError(f"score={self.score!r}; needed 'softmax' or 'sigmoid'")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ConfigError(f"capacity_factor={self.capacity_factor}; needed a factor above 0, or None for no limit")
        object.__setattr__(self, "expert_ffn_dim", self.expert_ffn_dim or self.ffn_dim)


class MoEOutput(NamedTuple):
    """What a `MoEDecoder` returns. The auxiliary losses are per token, summed over layers, without a factor."""

    logits: torch.Tensor
    """(batch, seq, vocab)."""
    balance: torch.Tensor
    """(batch, seq): its mean is the load-balance loss, 1 per layer where all experts are used alike."""
    router_z: torch.Tensor
    """(batch, seq): squared log of the sum of the exponentials of the router's logits."""


class RowCounts(nn.Module):
    """How many tokens of each row of the batch chose each expert."""

    sums_over_row = True
    """Where a row is divided over ranks, the counts of its parts are to be added."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.is_padding = False
        """True while a batch runs whose tokens are copies, and count in no load."""

    def forward(self, chosen: torch.Tensor) -> torch.Tensor:
        """(batch, seq, k) numbers of experts to (batch, experts) int64."""
        flat = chosen.flatten(1)
        counts = torch.zeros(flat.shape[0], self.num_experts, dtype=torch.int64, device=flat.device)
        return counts.scatter_add(1, flat, torch.ones_like(flat))


class _CountOnce(torch.autograd.Function):
    """Identity on `weights`; its backward adds `amounts` to `totals`.

    A backward pass happens once for each token that is trained on, however often its forward is computed
    (recomputed blocks) or run for other ends (evaluation).
    """

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, amounts: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
        ctx.amounts, ctx.totals = amounts, totals
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.totals.add_(ctx.amounts)
        return grads[0], None, None


class Router(nn.Module):
    """Chooses `experts_per_token` experts for each token, and their weights. Computes in fp32 at least.

    Balance loss: sequence-wise, `sum_i f_i P_i` of a row (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20; of the kind of
    the Switch Transformer's, arXiv:2101.03961, eq. 4). Router z-loss: ST-MoE, arXiv:2202.08906, eq. 5.

    Capacity is counted in each row: first choices of all its tokens go before second ones, earlier tokens before later
    ones (GShard, arXiv:2006.16668). A choice over the capacity is dropped: it adds nothing to the token.
    """

    counters = ("tokens", "dropped")
    """Integer buffers that count over a step; `after_step` takes them summed over all ranks and micro-batches."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token
        self.score, self.normalise, self.route_scale = config.score, config.normalise, config.route_scale
        self.capacity_factor, self.bias_rate = config.capacity_factor, config.bias_rate
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.row_counts = RowCounts(config.num_experts)
        # in steps of bias_rate: integers are the same bits on every mesh and in every precision
        self.register_buffer("bias_steps", torch.zeros(config.num_experts, dtype=torch.int64))
        self.register_buffer("tokens", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("load", torch.zeros(config.num_experts + 1, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Route a batch.

        Args:
            x: (batch, seq, dim).

        Returns:
            Chosen experts (batch, seq, k) int64, `num_experts` standing for a dropped choice; their weights, the same
            shape; auxiliary losses (batch, seq, 2): balance and z.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        with torch.no_grad():
            biased = scores + self.bias_rate * cast(torch.Tensor, self.bias_steps) if self.bias_rate else scores
            chosen = biased.topk(self.experts_per_token, dim=-1).indices
            counts = self.row_counts(chosen)
        weights = scores.gather(-1, chosen)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        weights = weights * self.route_scale
        losses = self._losses(logits, scores, counts)
        kept = self._kept(chosen)
        weights = self._counted(weights, chosen, kept)
        if kept is not None:
            chosen, weights = torch.where(kept, chosen, self.num_experts), weights * kept
        return chosen, weights, losses

    def _losses(self, logits: torch.Tensor, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        shares = scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        load = counts.to(shares.dtype) * (self.num_experts / counts.sum(-1, keepdim=True))
        return torch.stack(((shares * load[:, None]).sum(-1), logits.logsumexp(-1).square()), dim=-1)

    def _kept(self, chosen: torch.Tensor) -> torch.Tensor | None:
        """Which choices are within the capacity; None: all."""
        if self.capacity_factor is None:
            return None
        batch, seq, k = chosen.shape
        capacity = math.ceil(self.capacity_factor * seq * k / self.num_experts)
        in_order = chosen.transpose(1, 2).reshape(batch, k * seq, 1)  # first choices first
        is_choice = (in_order == torch.arange(self.num_experts, device=chosen.device)).long()
        place = is_choice.cumsum(1).gather(-1, in_order).view(batch, k, seq)
        return (place <= capacity).transpose(1, 2)

    def _counted(self, weights: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        if not (self.training and weights.requires_grad) or self.row_counts.is_padding:
            return weights
        flat = chosen.flatten()
        here = torch.zeros_like(cast(torch.Tensor, self.tokens)).scatter_add(0, flat, torch.ones_like(flat))
        weights = cast(torch.Tensor, _CountOnce.apply(weights, here, self.tokens))  # type: ignore[no-untyped-call]  # torch has no types here
        if kept is not None:
            lost = (~kept).sum()
            weights = cast(torch.Tensor, _CountOnce.apply(weights, lost, self.dropped))  # type: ignore[no-untyped-call]  # torch has no types here
        return weights

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the bias by one step against each expert's load in the step that ends, and begin to count anew.

        `load` keeps the counts: the tokens of each expert, and as its last number the choices that were dropped.
        """
        tokens, dropped = cast(torch.Tensor, self.tokens), cast(torch.Tensor, self.dropped)
        if self.bias_rate:
            cast(torch.Tensor, self.bias_steps).add_(torch.sign(tokens.sum() - tokens * self.num_experts))
        cast(torch.Tensor, self.load).copy_(torch.cat((tokens, dropped.reshape(1))))
        tokens.zero_()
        dropped.zero_()


class Experts(nn.Module):
    """SwiGLU feed-forwards with stacked weights, each on the tokens that chose it."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        wide = (config.num_experts, config.expert_ffn_dim, config.dim)
        self.w1 = nn.Parameter(torch.empty(wide))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, config.dim, config.expert_ffn_dim))
        self.w3 = nn.Parameter(torch.empty(wide))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each token's chosen experts.

        Args:
            x: (tokens, dim).
            chosen: (tokens, k) numbers of experts; the number of experts stands for none.
            weights: (tokens, k).

        Returns:
            (tokens, dim).

        Cost: one look at the number of tokens per expert, for which an accelerator is waited for.
        """
        num_experts, k = self.w1.shape[0], chosen.shape[1]
        flat = chosen.flatten()
        order, counts = by_expert(flat, num_experts)
        order = order[: sum(counts)]
        parts = torch.split(x[order // k], counts)
        experts = zip(self.w1.unbind(), self.w2.unbind(), self.w3.unbind(), parts, strict=True)
        done = torch.cat([F.linear(F.silu(F.linear(p, w1)) * F.linear(p, w3), w2) for w1, w2, w3, p in experts])
        slots = done.new_zeros(len(flat), done.shape[1]).index_copy(0, order, done)  # no two share a slot
        return (slots.view(*chosen.shape, done.shape[1]) * weights[..., None]).sum(1).to(x.dtype)


def by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """The order that sorts choices by expert, dropped ones last, and how many each expert has.

    On the meta device, where there are no values, experts are taken to be used alike.
    """
    order = chosen.argsort(stable=True)
    if chosen.is_meta:
        share, rest = divmod(len(chosen), num_experts)
        return order, [share + (i < rest) for i in range(num_experts)]
    return order, chosen.bincount(minlength=num_experts)[:num_experts].tolist()


class MoE(nn.Module):
    """A router, its experts, and shared ones if any."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        joint = replace(config, ffn_dim=config.num_shared_experts * config.expert_ffn_dim)
        self.shared = FeedForward(joint) if config.num_shared_experts else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, seq, dim) to the same, and the auxiliary losses (batch, seq, 2)."""
        chosen, weights, losses = self.router(x)
        y = self.experts(x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1).to(x.dtype)).view_as(x)
        return (y if self.shared is None else y + self.shared(x)), losses


class MoEBlock(nn.Module):
    """One layer: attention and a mixture of experts, each after a norm and added to its input."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe = MoE(config)

    def forward(
        self,
        x: torch.Tensor,
        losses: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, seq, dim) and the auxiliary losses of the layers before, to the same of this one."""
        x = x + self.attn(self.attn_norm(x), position_ids, mask)
        y, own = self.moe(self.ffn_norm(x))
        return x + y, own if losses is None else losses + own


class MoEDecoder(nn.Module):
    """A decoder-only transformer with a mixture of experts in every layer.

    >>> config = MoEConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, num_experts=4)
    >>> MoEDecoder(config)(torch.zeros(2, 5, dtype=torch.long)).logits.shape
    torch.Size([2, 5, 256])
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(MoEBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, smaller by sqrt(2 layers) where a layer adds to the residual stream; ones; zero biases."""
        fill_weights(self, self.config.init_std, self.config.num_layers, (".wo.weight", ".w2.weight", ".w2"))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> MoEOutput:
        """(batch, seq) token numbers to logits and auxiliary losses; other arguments as those of `Decoder`."""
        mask = None if document_ids is None else document_mask(document_ids)
        x, losses = self.embed(input_ids), None
        for layer in self.layers:
            x, losses = layer(x, losses, position_ids, mask)
        assert losses is not None, "a decoder has at least one layer"
        # no views: `fully_shard` hangs its hooks on what a model returns
        return MoEOutput(self.head(self.norm(x)), losses[..., 0].clone(), losses[..., 1].clone())


def flops_per_token(config: MoEConfig, seq_len: int) -> int:
    """As `decoder.flops_per_token`: of experts, only the ones that a token meets count."""
    experts = (config.experts_per_token + config.num_shared_experts) * 3 * config.dim * config.expert_ffn_dim
    layer = _attention_params(config) + experts + config.num_experts * config.dim
    weights = config.num_layers * layer + config.vocab_size * config.dim
    return 6 * weights + 12 * config.num_layers * seq_len * config.num_heads * config.head_dim


def _attention_params(config: MoEConfig) -> int:
    return 2 * config.dim * (config.num_heads + config.num_kv_heads) * config.head_dim
