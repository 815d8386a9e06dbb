"""Sizes in a configuration of `transformers`: their many names, those that cannot be, and a family with tiny ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from shardwise.errors import ConfigError

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of a configuration that say how many positions there are."""
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers", "depth"),
)
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
INNER = (
    *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "hidden_dim"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "shared_intermediate_size"),
)
HEAD_DIMS = ("head_dim", "d_kv", "query_pre_attn_scalar")
HEAD_DIM = 8
MORE_OF_ROPE = "ignore_keys_at_rope_validation"
"""Where a configuration of `transformers` says that its positions are of pictures too."""
STAGED = 64
"""Height and width of a picture of which each of four stages takes a half, after the first a quarter."""
SCAN_HEADS = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
SCAN_DIMS = ("mamba_d_head", "mamba_headdim", "mamba_head_dim")
EXPANDS = ("mamba_expand", "expand")
"""How many times its width a state space is wide; its heads hold all of that."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token")
TINY: Mapping[str, int] = {
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "sliding_window": 5,
    "type_vocab_size": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
    "rotary_dim": 4,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups", "linear_num_key_heads"), 2),
    **dict.fromkeys(("mamba_dt_rank", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
SIZES = (*LAYERS, *WIDTHS, *HEADS, *KV_HEADS, *INNER, *HEAD_DIMS, *LENGTHS, "vocab_size")
"""Keys without which a model cannot be made."""
SHORT = 8
"""Numbers of a list, up to which it may be of stages, not of layers."""
MOST_LAYERS = 2_000
"""Of a model that is built to be read: each is read by itself, which takes some milliseconds."""
MOST = 2**30
"""Of any other size: products of two stay within what a tensor counts."""


def text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that is of texts, or all of it; of two the one that writes (musicgen)."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def refuse_sizes(where: str, config: PreTrainedConfig) -> None:
    """Refuse sizes that cannot be, of which `transformers` makes a model without layers, or torch a failure.

    Args:
        where: what the configuration is called, for messages.
        config: with those of its parts.

    Raises:
        ConfigError: a size below its least or above its most, a dropout that is no share, or heads that their key heads
            do not divide.
    """
    for said in _said(config):
        for key, value in said.items():
            least = 1 if key in (*LAYERS, *WIDTHS, *HEADS, *KV_HEADS, *LENGTHS, "vocab_size") else 0
            most = MOST_LAYERS if key in LAYERS else MOST
            if (least or key in (*INNER, *HEAD_DIMS, *TINY)) and _is_count(value) and not least <= value <= most:
                needed = f"at least {least}" if value < least else f"at most {most:,}"
                raise ConfigError(f"model {where}: {key}: found {value:,}, needed {needed}; mend that key")
            if "drop" in key and isinstance(value, int | float) and not 0 <= value <= 1:
                raise ConfigError(f"model {where}: {key}: found {value}, needed a share between 0 and 1; mend that key")
        for all_of, key in product(EXPERTS, CHOSEN):
            if not (_is_count(said.get(all_of)) and _is_count(said.get(key))):
                continue
            if said[all_of] > 0 and not 1 <= said[key] <= said[all_of]:
                needed = f"at least 1 and at most {all_of} = {said[all_of]}"
                raise ConfigError(f"model {where}: {key}: found {said[key]}, needed {needed}; mend one")
        heads, groups = (next((k for k in keys if _is_count(said.get(k))), "") for keys in (HEADS, KV_HEADS))
        if heads and groups and said[heads] % said[groups]:
            raise ConfigError(
                f"model {where}: {groups}: found {said[groups]}, needed a divisor of {heads} = {said[heads]} "
                "(as many heads share each key); mend one of them"
            )


def refuse_unsaid(where: str, config: PreTrainedConfig) -> None:
    """Refuse experts of which nobody says how many a token is given to: `deepseek_v2` has no default of it.

    Args:
        where: what the configuration is called, for messages.
        config: with those of its parts.

    Raises:
        ConfigError: it is null, and there are experts.
    """
    for said in _said(config):
        for all_of, key in _unsaid(said):
            raise ConfigError(
                f"model {where}: {key}: found null, needed how many of the {said[all_of]} experts ({all_of}) a token "
                "is given to; its family has no default: write it in a config.json, and give that file"
            )


def _unsaid(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Key of the number of experts, and that of how many of them a token is given to, which is null."""
    pairs = product(EXPERTS, CHOSEN)
    return [(all_of, key) for all_of, key in pairs if said.get(all_of) and key in said and said[key] is None]


def assumed_sizes(said: Mapping[str, Any], config: PreTrainedConfig) -> list[str]:
    """Sizes that a file does not say, which are the defaults of its family: `hidden_size 4096`.

    Args:
        said: the file, as it was read.
        config: what `transformers` made of it.
    """
    text = text_of(config)
    own = said if text is config else _part_of(said, config, text)
    known = {text.attribute_map.get(key, key) for key in own} | {*own}
    held = text.to_dict()
    keys = (*LAYERS, *WIDTHS, *HEADS, *KV_HEADS, *INNER, "vocab_size", *EXPERTS)
    return [f"{key} {held[key]:,}" for key in keys if key in held and key not in known and _is_count(held[key])]


def _part_of(said: Mapping[str, Any], config: PreTrainedConfig, part: PreTrainedConfig) -> Mapping[str, Any]:
    key = next((name for name, value in vars(config).items() if value is part), "")
    return said.get(key) or {}


def _said(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    yield config.to_dict()
    for part in _parts(config):
        yield from _said(part)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shrunk_config(config: PreTrainedConfig, *, num_layers: int = 4) -> PreTrainedConfig:
    """The same family with tiny sizes, for trials: ratios of heads, ties, kinds of layers and experts stay.

    Dropout is zero, so that runs can be compared number by number.

    Args:
        config: of any size.
        num_layers: of each stack.

    Raises:
        ConfigError: a size that is no number, as it is in other families.

    >>> shrunk_config(hf_config("mistral")).num_key_value_heads
    2
    """
    made = copy.deepcopy(config)
    try:
        for part in (made, *_parts(made)):
            _shrink(part, num_layers)
    except (AttributeError, LookupError, TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"model hf:{config.model_type}: its tiny sizes are not known here: a size is of another kind than it is of "
            f"other families ({' '.join(str(error).split())[:200]}); write small ones in a config.json, and train it "
            "with a script: shardwise verify train.py"
        ) from error
    for part in _parts(made):
        if getattr(part, "out_hidden_size", None):  # what it gives is added to the text
            part.out_hidden_size = text_of(made).hidden_size
    return made


def _shrink(config: PreTrainedConfig, num_layers: int) -> None:
    said = config.to_dict()

    def change(keys: tuple[str, ...], value: Any) -> None:
        for key in keys:
            if isinstance(said.get(key), int | float) and not isinstance(said[key], bool) and said[key]:
                setattr(config, key, value)

    heads = next((said[k] for k in HEADS if said.get(k) and _is_count(said[k])), 4)
    kv_heads = next((said[k] for k in KV_HEADS if said.get(k) and _is_count(said[k])), heads)
    small_kv = 4 if kv_heads == heads else min(kv_heads, 2)
    small = small_kv * min(heads // kv_heads, 4) if kv_heads > 1 else 4
    width = small * HEAD_DIM
    old_width = next((said[k] for k in WIDTHS if said.get(k)), 0)
    same = ("word_embed_proj_dim", "embedding_size", "pooler_output_size", "projection_size")
    change(tuple(k for k in same if said.get(k) == old_width), width)
    change(HEADS, small)
    change(KV_HEADS, small_kv)
    change(WIDTHS, width)
    change(INNER, 2 * width)
    change(HEAD_DIMS, HEAD_DIM)
    for key in KV_HEADS:
        if key in said and said[key] is None:
            setattr(config, key, small_kv)
    if "head_dim" in said and said["head_dim"] is None:
        config.head_dim = HEAD_DIM
    change(("embed_dim",), width)
    inner = width * int(next((said[key] for key in EXPANDS if said.get(key)), 2))
    change(SCAN_HEADS, inner // HEAD_DIM)
    change(SCAN_DIMS, HEAD_DIM)
    change(("mamba_d_ssm",), inner)
    if said.get("state_size"):  # Mamba 2 has no other heads
        change(("num_heads",), inner // HEAD_DIM)
    for _, chosen in _unsaid(said):
        setattr(config, chosen, TINY["num_experts_per_tok"])
    if said.get("qk_rope_head_dim"):  # there `head_dim` is that of the rotary part
        config.head_dim = TINY["qk_rope_head_dim"]
        config.qk_head_dim = TINY["qk_rope_head_dim"] + TINY["qk_nope_head_dim"]
    for key, value in TINY.items():
        change((key,), min(value, said[key]) if isinstance(said.get(key), int) else value)
    if isinstance(said.get("image_size"), list | tuple):
        config.image_size = type(said["image_size"])([TINY["image_size"]] * 2)
    change(LAYERS, num_layers)
    _shrink_lists(config, said, num_layers)
    _shrink_stages(config, said)
    for key, value in said.items():
        if ("dropout" in key or "pdrop" in key or key == "layerdrop") and isinstance(value, float):
            setattr(config, key, 0.0)
        elif key.endswith("_token_id") and isinstance(value, int) and value >= TINY["vocab_size"]:
            setattr(config, key, value % TINY["vocab_size"])


def _shrink_lists(config: PreTrainedConfig, said: Mapping[str, Any], num_layers: int) -> None:
    old = next((said[key] for key in LAYERS if _is_count(said.get(key))), 0)
    for key, value in said.items():
        if isinstance(value, list) and len(value) == old > SHORT:
            sizes = [value[i * old // num_layers] for i in range(num_layers)]
            setattr(config, key, [2 * config.hidden_size] * num_layers if key in INNER else sizes)
    for key in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(said.get(key) or ()))
        if kinds:
            setattr(config, key, [kinds[i % len(kinds)] for i in range(num_layers)])
    if said.get("num_kv_shared_layers"):  # the last ones, which take keys of one of their kind before them
        config.num_kv_shared_layers = max(0, num_layers - len(set(said["layer_types"])))
    if said.get("per_layer_config"):
        config.per_layer_config = _shrunk_layers(said, config)
    if said.get("attention_types"):  # GPT-Neo: [[[kinds], times]]
        kinds = said["attention_types"][0][0]
        config.attention_types = [[kinds, num_layers // len(kinds)]]
        config.attention_layers = [kinds[i % len(kinds)] for i in range(num_layers)]
    if said.get("mlp_only_layers"):
        config.mlp_only_layers = [0]
    rope = said.get("rope_parameters") or {}
    if "mrope_section" in (getattr(config, MORE_OF_ROPE, None) or ()):  # of half a head: its time, height, width
        rope = config.rope_parameters = {**rope, "mrope_section": [HEAD_DIM // 4, HEAD_DIM // 8, HEAD_DIM // 8]}
    if rope.get("rope_type", "default") not in ("default", "axial"):  # its factors speak of the longer head
        kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        config.rope_parameters = {**kept, "rope_type": "default"}


def _shrink_stages(config: PreTrainedConfig, said: Mapping[str, Any]) -> None:
    """Of a model of pictures in stages, each of which has half the pixels and twice the width of the one before."""
    if not isinstance(said.get("depths"), list):
        return
    widths = [HEAD_DIM * 2**stage for stage in range(len(said["depths"]))]
    config.depths = [2] * len(widths)
    for key in (*HEADS, "hidden_sizes"):
        if isinstance(said.get(key), list):
            setattr(config, key, widths if key == "hidden_sizes" else [width // HEAD_DIM for width in widths])
    for key, value in (("embed_dim", HEAD_DIM), ("image_size", STAGED), ("window_size", 2)):
        if said.get(key):
            setattr(config, key, widths if isinstance(said[key], list | tuple) and key == "embed_dim" else value)


def _shrunk_layers(said: Mapping[str, Any], config: PreTrainedConfig) -> dict[int | str, dict[str, Any]]:
    """What single layers say for themselves: each what the first of its kind does, in tiny sizes."""
    own = {int(index): changes for index, changes in said["per_layer_config"].items()}
    tiny = {**TINY, **dict.fromkeys(HEAD_DIMS, 2 * HEAD_DIM), **dict.fromkeys(KV_HEADS, 1)}
    layers = (own.get(said["layer_types"].index(kind), {}) for kind in config.layer_types)
    return {
        index: {key: tiny.get(key, value) if value else value for key, value in changes.items()}
        for index, changes in enumerate(layers)
        if changes
    }


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [held for held in vars(config).values() if isinstance(held, PreTrainedConfig)]
