"""`ModelSpec`: the sizes of a decoder as data, as far as plans need them; presets of known models.

Parameter counts are sums of the shapes of the layers, exact to the parameter for the published models.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from shardwise.errors import ConfigError, ModelError, PlanError, UsageError
from shardwise.findings import nearest
from shardwise.model.aliases import canonical, other_family
from shardwise.records import RecordError, from_dict, located, read_kind

ModelKind = Literal["llama", "gpt", "moe"]

_BLOCKS = {"llama": "layers.*", "moe": "layers.*", "gpt": "h.*"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "kind": get_args(ModelKind),
    "ffn": ("gated", "plain"),
    "norm": ("rms", "layer"),
    "positions": ("learned", "rotary", "none"),
}
_FROM_ONE = ("num_layers", "dim", "num_heads", "ffn_dim", "vocab_size", "max_seq_len", "block_norms", "moe_every")
_MOST = 10**12
_MOST_LAYERS = 1000
"""The deepest published decoders have some 150; each is one in a search for a plan."""
"""Of any size: beyond it digits too many were typed, and a product of sizes is no float."""
_PLAIN = {"ffn": "plain", "norm": "layer", "positions": "learned"}
_GATED = {"ffn": "gated", "norm": "rms", "positions": "rotary"}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes of a decoder: a chain of `num_layers` equal blocks between an embedding and a head.

    `kind` says which layers a block has: `llama` RMSNorm, grouped-query attention, gated feed-forward of three
    matrices, no bias; `moe` the same with `num_experts` feed-forwards and a router; `gpt` LayerNorm, attention and
    a feed-forward of two matrices, all with bias, and learned positions. Fields below `num_experts` may say otherwise;
    `other_parts` names those that no reference model has, so that such a model is planned and not built.

    Raises:
        ConfigError: a size that is not positive, or heads that do not fit.
    """

    num_layers: int
    dim: int
    num_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    name: str = "custom"
    kind: ModelKind = "llama"
    num_kv_heads: int = 0
    """0: as many as `num_heads`."""
    head_dim: int = 0
    """0: `dim / num_heads`."""
    num_experts: int = 0
    experts_per_token: int = 0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    ffn: Literal["", "gated", "plain"] = ""
    """Three matrices (gate, up, down) or two; empty: plain for gpt, gated for the others."""
    norm: Literal["", "rms", "layer"] = ""
    """RMSNorm (a factor), or LayerNorm (with a bias); empty: layer for gpt, rms for the others."""
    block_norms: int = 2
    """Normalisations of a block: 4 where results are normalised too (Gemma 2), 1 where attention and feed-forward share
    one and run side by side (Falcon, GPT-J)."""
    positions: Literal["", "learned", "rotary", "none"] = ""
    """A table of `max_seq_len`, rotated heads, or neither (ALiBi); empty: learned for gpt, rotary for the others."""
    causal: bool = True
    window: int = 0
    """Tokens that attention looks back on; 0: all."""
    full_every: int = 0
    """With a window: one layer in so many, the last of them, looks back on all tokens; 0: none does."""
    scan_dim: int = 0
    """Channels of a state-space mixer (Mamba-2), whose products stand as attention over a window; 0: none."""
    dropout: bool = False
    """Dropout is drawn in training, and its masks kept."""
    num_dense_layers: int = 0
    """moe: the first layers, whose feed-forward is one of `dense_ffn_dim`."""
    dense_ffn_dim: int = 0
    moe_every: int = 1
    """moe: one layer in so many has experts, the others a feed-forward of `dense_ffn_dim`."""
    shared_ffn_dim: int = 0
    """moe: width of the feed-forward that every token meets beside its experts."""
    expert_dim: int = 0
    """moe: width in which the routed experts work, behind a projection down and up; 0: `dim`."""
    kv_rank: int = 0
    """Multi-head latent attention (arXiv:2405.04434): rank of keys and values; 0: plain projections."""
    q_rank: int = 0
    rope_dim: int = 0
    """Latent attention: sizes of a head that carry positions, beside `head_dim`."""
    patch: int = 0
    """Vision: side of the patches of an image of three colours, one token each; the head gives `vocab_size` classes for
    a whole image. 0: tokens are words."""
    other_params: int = 0
    """Parameters outside the blocks that no other field counts: a pooler, token types, a class token, a head's bias."""
    hf: str = ""
    """Model type of `transformers` that has this architecture."""
    blocks: str = ""
    """Name pattern of the blocks; empty: `layers.*`, or `h.*` for gpt."""

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ConfigError(
                f"model: name: found {self.name!r}, needed a name in one line, of letters that can be shown"
            )
        for key, known in _CHOICES.items():
            found = getattr(self, key)
            if found not in known and (found or key == "kind"):
                raise ConfigError(f"model {self.name}: {key}: found {found!r}; {nearest(found, known)}")
        for key in (f.name for f in fields(self) if f.type == "int"):
            least, size = int(key in _FROM_ONE), getattr(self, key)
            if size < least:
                raise ConfigError(f"model {self.name}: {key}: found {size}, needed at least {least}")
            if key == "num_layers" and size > _MOST_LAYERS:
                raise ConfigError(f"model {self.name[:80]}: num_layers: found {size}, needed at most {_MOST_LAYERS}")
            if size > _MOST:
                raise ConfigError(f"model {self.name}: {key}: found {len(str(size))} digits, needed at most {_MOST}")
        if not self.head_dim and self.dim % self.num_heads:
            raise ConfigError(
                f"model {self.name}: dim: found {self.dim}, which num_heads={self.num_heads} does not divide; "
                "give head_dim, or change one of them"
            )
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.dim // self.num_heads)
        object.__setattr__(self, "blocks", self.blocks or _BLOCKS[self.kind])
        for key, usual in (_PLAIN if self.kind == "gpt" else _GATED).items():
            object.__setattr__(self, key, getattr(self, key) or usual)
        if self.kind == "moe" and (self.num_dense_layers or self.moe_every > 1) and not self.dense_ffn_dim:
            object.__setattr__(self, "dense_ffn_dim", self.ffn_dim)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: num_kv_heads: found {self.num_kv_heads}, needed a divisor of "
                f"num_heads={self.num_heads}"
            )
        if self.kind == "moe" and not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"model {self.name}: experts_per_token: found {self.experts_per_token} of "
                f"num_experts={self.num_experts}, needed 1 <= experts_per_token <= num_experts"
            )

    @property
    def attention_params(self) -> int:
        """Parameters of one block's attention projections (and head norms)."""
        if self.kv_rank:
            return self._latent_attention_params
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = 2 * self.dim * width + 2 * self.dim * kv_width
        biases = (width + 2 * kv_width) if self.qkv_bias or self.kind == "gpt" else 0
        biases += self.dim if self.kind == "gpt" else 0
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def _latent_attention_params(self) -> int:
        query = self.num_heads * (self.head_dim + self.rope_dim)
        down = self.dim * (self.kv_rank + self.rope_dim) + self.kv_rank
        up = self.kv_rank * self.num_heads * 2 * self.head_dim + self.num_heads * self.head_dim * self.dim
        return down + up + (self.q_rank * (self.dim + query + 1) if self.q_rank else self.dim * query)

    @property
    def ffn_params(self) -> int:
        """Parameters of one feed-forward (of one expert)."""
        return self._ffn_params(self.ffn_dim, self.expert_dim if self.kind == "moe" else 0)

    def _ffn_params(self, width: int, inner: int = 0) -> int:
        biases = width + self.dim if self.kind == "gpt" else 0
        return (3 if self.ffn == "gated" else 2) * (inner or self.dim) * width + biases

    @property
    def norm_params(self) -> int:
        """Parameters of one normalisation over `dim`."""
        return 2 * self.dim if self.norm == "layer" else self.dim

    @property
    def block_params(self) -> int:
        """Parameters of one block, with all its experts and the router."""
        ffn = self.ffn_params
        if self.kind == "moe":
            ffn = self.num_experts * ffn + self.dim * self.num_experts + self._ffn_params(self.shared_ffn_dim)
            ffn += 2 * self.dim * self.expert_dim
        return self.attention_params + ffn + self.block_norms * self.norm_params

    @property
    def dense_block_params(self) -> int:
        """Parameters of one block without experts in a model that has both."""
        return self.attention_params + self._ffn_params(self.dense_ffn_dim) + self.block_norms * self.norm_params

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(self.is_moe(layer) for layer in range(self.num_layers))

    def is_moe(self, layer: int) -> bool:
        """True where layer `layer` (from 0) has experts."""
        return self.kind == "moe" and layer >= self.num_dense_layers and (layer + 1) % self.moe_every == 0

    def window_of(self, layer: int) -> int:
        """Tokens that layer `layer` (from 0) looks back on; 0: all."""
        return 0 if self.full_every and (layer + 1) % self.full_every == 0 else self.window

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding of tokens or patches, and of learned positions."""
        table = 3 * self.patch**2 if self.patch else self.vocab_size
        return (table + (self.max_seq_len if self.positions == "learned" else 0)) * self.dim

    @property
    def head_params(self) -> int:
        """Parameters of the last normalisation, of the head (none of its own where it is tied), and all others."""
        return self.norm_params + self.other_params + (0 if self.tie_embeddings else self.vocab_size * self.dim)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model.

        >>> preset("llama-8b").num_params
        8030261248
        """
        moe = self.num_moe_layers if self.kind == "moe" else self.num_layers
        blocks = moe * self.block_params + (self.num_layers - moe) * self.dense_block_params
        return self.embedding_params + blocks + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all but the experts it is not routed to."""
        idle = (self.num_experts - self.experts_per_token) * self.ffn_params if self.kind == "moe" else 0
        return self.num_params - self.num_moe_layers * idle

    @property
    def other_parts(self) -> tuple[str, ...]:
        """What it has and no reference model of its kind does, as `field=value`; empty: `models.presets` can build it.

        >>> preset("llama-8b").other_parts, preset("deepseek-v3").other_parts[:2]
        ((), ('kv_rank=512', 'shared_ffn_dim=2048'))
        """
        gpt = self.kind == "gpt"
        usual = {
            "kv_rank": 0, "shared_ffn_dim": 0, "num_dense_layers": 0, "moe_every": 1, "expert_dim": 0, "dropout": False,
            "scan_dim": 0, "window": 0, "causal": True, "patch": 0, "other_params": 0, "block_norms": 2,
            **(_PLAIN if gpt else _GATED),
            **({"num_kv_heads": self.num_heads, "qk_norm": False} if gpt else {}),
        }  # fmt: skip
        return tuple(f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value)

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks in order.

        >>> preset("tiny-gpt").block_names
        ('h.0', 'h.1', 'h.2', 'h.3')
        """
        return tuple(self.blocks.replace("*", str(i)) for i in range(self.num_layers))


def refuse_unbuilt(spec: ModelSpec) -> None:
    """Refuse sizes that can be planned for, and that no reference model has, before anything is started.

    Raises:
        ModelError: the parts that are in no reference model, and which of `hf:` has them.
    """
    if spec.other_parts:
        there = (
            f"`hf:{spec.hf}` (or `hf:` with the config.json of these sizes)" if spec.hf else "`hf:` with a config.json"
        )
        todo = (
            f"to verify it on random pictures, give {there}; `train` reads text: write a script, for `shardwise run`"
            if spec.patch
            else f"to train or verify it, give {there}, or your own module as package.module:function"
        )
        raise ModelError(
            f"model {spec.name}: cannot be built: found {', '.join(spec.other_parts)}, which no reference model of "
            f"kind {spec.kind!r} has; needed a model of equal blocks, such as `llama-8b` or `mixtral-8x7b`; `plan`, "
            f"`estimate` and `explain` take it by its sizes; {todo}"
        )


def presets(*, built: bool = False) -> list[str]:
    """Names that `preset` knows; `built`: those of which `models.presets.build` makes a model."""
    return [name for name in _table() if not (built and preset(name).other_parts)]


def preset(name: str) -> ModelSpec:
    """The sizes of a known model.

    Raises:
        UsageError: an unknown name, with the nearest one, or with what its family has that no preset holds.
    """
    table = _table()
    given, name = name, canonical(name, table)  # `meta-llama/Llama-3.1-8B` and the like are `llama-8b`
    if name not in table:
        if other := other_family(given):
            raise UsageError(f"model {given!r}: unknown preset: {other}")
        hint = nearest(given.rpartition("/")[2].lower(), list(table))
        raise UsageError(
            f"model {given!r}: unknown preset; {hint} (or give a .toml file of sizes, or a model type or config.json "
            "of transformers as hf:NAME)"
        )
    return spec_from_dict(table[name], name=name)


def spec_from_dict(data: Mapping[str, Any], *, name: str = "custom") -> ModelSpec:
    """A user's sizes; keys are the fields of `ModelSpec`. A key `preset` starts from a known model.

    Raises:
        ConfigError: an unknown key with the nearest one, a missing key, a wrong type, or sizes that do not fit.

    >>> spec_from_dict({"preset": "tiny", "num_layers": 2}).num_layers
    2
    """
    sizes = dict(data)
    base: dict[str, Any] = {}
    if "preset" in sizes:
        known = sizes.pop("preset")
        if not isinstance(known, str):
            raise RecordError(("preset",), f"found {known!r}, needed the name of a preset")
        known = canonical(known, _table())
        if known not in _table():
            raise RecordError(("preset",), f"unknown preset {known!r}; {nearest(known, presets())}")
        base = {"name": known, **_table()[known]}
    found = {"name": name, **base, **sizes}
    known = [f.name for f in fields(ModelSpec)]
    if unknown := [key for key in found if key not in known]:  # before what is missing, which is often what was meant
        more = "".join(f"; {key}: unknown key; {nearest(key, known)}" for key in unknown[1:])
        raise RecordError((unknown[0],), f"unknown key; {nearest(unknown[0], known)}{more}")
    missing = [f.name for f in fields(ModelSpec) if f.default is MISSING and f.name not in found]
    if missing:
        raise RecordError(
            (), f"missing {', '.join(missing)}; needed: numbers; or begin with a known model: preset = 'tiny'"
        )
    return from_dict(ModelSpec, found)


def load_spec(source: str | os.PathLike[str]) -> ModelSpec:
    """A preset by name, or the sizes in a .toml or .json file.

    Raises:
        UsageError: an unknown preset, or (as ConfigError) a file that does not hold sizes, with the line.
    """
    if isinstance(source, str) and not source.endswith((".toml", ".json")):
        return preset(source)
    data, text = read_kind(source, "sizes")
    try:
        return spec_from_dict(data, name=os.path.splitext(os.path.basename(source))[0])
    except (ConfigError, PlanError) as error:
        raise located(error, source, text) from None


@cache
def _table() -> dict[str, dict[str, Any]]:
    """Presets by name; one that names another as its `preset` has the fields of that one too."""
    table = tomllib.loads(files("shardwise.model").joinpath("presets.toml").read_text(encoding="utf-8"))
    for sizes in table.values():
        if "preset" in sizes:
            base = table[sizes.pop("preset")]
            sizes |= {key: value for key, value in base.items() if key not in sizes}
    return table
