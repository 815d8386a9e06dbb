"""Models of Hugging Face `transformers`: from a config file, a local directory or a name to a factory for `apply`.

Nothing is ever downloaded. This module imports `transformers` (the extra `hf`), so only callers who need it import it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from shardwise.errors import ConfigError, DataError, ModelError
from shardwise.findings import nearest

PREFIX = "hf:"
"""What marks a model of `transformers` on the command line."""
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of a configuration that say how many positions there are."""
FROM_PADDING = "create_position_ids_from_input_ids"
"""What the embeddings of RoBERTa and its kin have: their positions are counted from the padding token's id on."""


def hf_config(source: str | os.PathLike[str]) -> PreTrainedConfig:
    """The configuration of a model of `transformers`; `architectures` names the class that is built.

    Args:
        source: path of a config.json, a local directory that holds one, a model type (`llama`) or the name of a class
            (`LlamaForCausalLM`), which give the default sizes of that family. A leading `hf:` is dropped.

    Raises:
        ConfigError: a name that `transformers` does not know, with the nearest ones.
        DataError: a file that is missing or holds no configuration.

    >>> hf_config("llama").architectures
    ['LlamaForCausalLM']
    """
    text = os.fspath(source).removeprefix(PREFIX)
    path = Path(text)
    if path.exists() or path.suffix == ".json" or os.sep in text:
        return _with_class(_read(path / "config.json" if path.is_dir() else path))
    if text in CONFIG_MAPPING:
        return _with_class(CONFIG_MAPPING[text]())
    known = getattr(transformers, text, None) if text.isidentifier() else None
    if isinstance(known, type) and issubclass(known, PreTrainedModel) and known.config_class is not None:
        config: PreTrainedConfig = known.config_class()
        config.architectures = [text]
        return config
    names = sorted({*CONFIG_MAPPING.keys(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
    raise ConfigError(
        f"model {PREFIX}{text}: transformers {transformers.__version__} knows no model type or class of this name, and "
        f"there is no such file; needed: a config.json, a local directory, a model type or a class name; "
        f"{nearest(text, names)}"
    )


def hf_factory(config: PreTrainedConfig) -> Callable[[], nn.Module]:
    """A factory of the model, for `apply`: the class of `config.architectures`, in fp32, with torch's fused attention.

    With dropout inside attention it is the model's own attention ("eager"), whose masks are keyed like other draws. A
    `config` that asks for "flex_attention" gets it.

    >>> hf_factory(hf_config("llama"))  # doctest: +SKIP
    functools.partial(<function build at 0x...>, LlamaConfig {...})
    """
    return partial(build, config)


def chain_config(source: str) -> PreTrainedConfig:
    """`hf_config` of a model that is one chain of blocks over token ids, as plans divide.

    Raises:
        ModelError: an encoder with a decoder, or a model of pictures.
        ConfigError: as `hf_config`.
    """
    config = hf_config(source)
    pictures = getattr(config, "image_size", None) and not getattr(config, "vocab_size", None)
    if config.is_encoder_decoder or pictures:
        found = "an encoder and a decoder" if config.is_encoder_decoder else "a model of pictures"
        raise ModelError(
            f"model {source!r}: found {found} ({config.model_type}), needed one chain of blocks over token ids; to "
            "train it, write a script for `shardwise run` (sw.apply takes such a model, `shardwise verify` too); "
            "`shardwise plan` and `estimate` read it as it is"
        )
    return config


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Tokens that a model has positions for; None: its configuration sets no limit.

    >>> [longest_sequence(hf_config(name)) for name in ("bert", "roberta", "bloom")]
    [512, 510, None]
    """
    text = config.get_text_config()
    said = (getattr(text, key, None) for key in LENGTHS)
    found = next((number for number in said if isinstance(number, int) and number > 0), None)
    home = vars(sys.modules[model_class(config).__module__]).values()
    if found is None or not any(hasattr(thing, FROM_PADDING) for thing in home):
        return found
    return max(1, found - (getattr(text, "pad_token_id", None) or 0) - 1)


def build(config: PreTrainedConfig) -> nn.Module:
    """A new model with the weights that its constructor draws; `config` is copied.

    Raises:
        ConfigError: `architectures` names no class of `transformers`, or one that cannot be made of these sizes.
    """
    cls = model_class(config)
    own = copy.deepcopy(config)
    fused = getattr(cls, "_supports_sdpa", False) and not _drops_attention(config)
    asked = getattr(config, "_attn_implementation", None)
    attention = asked if asked == "flex_attention" else "sdpa" if fused else "eager"
    try:
        made: nn.Module = cast(Any, cls)._from_config(own, attn_implementation=attention, dtype=torch.float32)
    except ImportError as error:
        raise ConfigError(
            f"model {PREFIX}{config.model_type}: {cls.__name__} needs a library that is not installed "
            f"({_on_one_line(error)}); install it, or name a class that does without"
        ) from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model {PREFIX}{config.model_type}: {cls.__name__} cannot be made of its configuration "
            f"({type(error).__name__}: {_on_one_line(error)}); needed: sizes that go together; mend that key"
        ) from error
    return made


def _drops_attention(config: PreTrainedConfig) -> bool:
    """Whether probabilities of attention are dropped: a fused kernel would draw that mask where no plan can key it."""
    said = config.to_dict()
    names = [key for key in said if ("att" in key and "drop" in key) or key == "dropout_rate"]
    return any(isinstance(said[name], float) and said[name] > 0.0 for name in names)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that `architectures` names, else the usual one of the model type.

    Raises:
        ConfigError: a class that `transformers` does not have.
    """
    (name, *_) = config.architectures or [class_name(config)]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        known = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_MAPPING_NAMES.values()]
        raise ConfigError(
            f"model {PREFIX}{config.model_type}: architectures names {name!r}, which is no model class of transformers "
            f"{transformers.__version__}; {nearest(name, [k for k in known if isinstance(k, str)])}; code that lies "
            "beside the weights (trust_remote_code) is not run: import it, and pass a factory of your own"
        )
    return found


def class_name(config: PreTrainedConfig) -> str:
    """The class that is trained for a model type: one with a head if there is one.

    Raises:
        ConfigError: the type has no model.
    """
    kind = config.model_type
    orders: list[Mapping[str, Any]] = [
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,  # bert is there and among the causal ones
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    ]
    if getattr(config, "is_encoder_decoder", False):
        orders.insert(0, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    for table in orders:
        if kind in table:
            name = table[kind]
            return str(name[0] if isinstance(name, list | tuple) else name)
    raise ConfigError(
        f"model {PREFIX}{kind}: transformers {transformers.__version__} has a configuration of this type and no model "
        "class for it; set `architectures` in its config.json to the class that is meant"
    )


def shrunk_config(config: PreTrainedConfig, *, num_layers: int = 4) -> PreTrainedConfig:
    """The same family with tiny sizes, for trials: ratios of heads, ties, kinds of layers and experts stay.

    Dropout is zero, so that runs can be compared number by number.

    Args:
        config: of any size.
        num_layers: of each stack.

    >>> shrunk_config(hf_config("mistral")).num_key_value_heads
    2
    """
    made = copy.deepcopy(config)
    for part in (made, *_parts(made)):
        _shrink(part, num_layers)
    return made


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
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "image_size": 16,
    "patch_size": 4,
    "rotary_dim": 4,
}
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers"),
)
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
INNER = (
    *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "hidden_dim"),
    *("encoder_ffn_dim", "decoder_ffn_dim"),
)
HEAD_DIMS = ("head_dim", "d_kv", "query_pre_attn_scalar")
HEAD_DIM = 8


def _shrink(config: PreTrainedConfig, num_layers: int) -> None:
    said = config.to_dict()

    def change(keys: tuple[str, ...], value: Any) -> None:
        for key in keys:
            if isinstance(said.get(key), int | float) and not isinstance(said[key], bool) and said[key]:
                setattr(config, key, value)

    heads = next((said[k] for k in HEADS if said.get(k)), 4)
    kv_heads = next((said[k] for k in KV_HEADS if said.get(k)), heads)
    small_kv = 4 if kv_heads == heads else min(kv_heads, 2)
    small = small_kv * min(heads // kv_heads, 4) if kv_heads > 1 else 4
    width = small * HEAD_DIM
    old_width = next((said[k] for k in WIDTHS if said.get(k)), 0)
    same = ("word_embed_proj_dim", "embedding_size", "pooler_output_size")
    change(tuple(k for k in same if said.get(k) == old_width), width)
    change(HEADS, small)
    change(KV_HEADS, small_kv)
    change(WIDTHS, width)
    change(INNER, 2 * width)
    change(HEAD_DIMS, HEAD_DIM)
    if "head_dim" in said and said["head_dim"] is None:
        config.head_dim = HEAD_DIM
    if said.get("qk_rope_head_dim"):  # there `head_dim` is that of the rotary part
        config.head_dim = TINY["qk_rope_head_dim"]
        config.qk_head_dim = TINY["qk_rope_head_dim"] + TINY["qk_nope_head_dim"]
    for key, value in TINY.items():
        change((key,), min(value, said[key]) if isinstance(said.get(key), int) else value)
    change(LAYERS, num_layers)
    _shrink_lists(config, said, num_layers)
    for key, value in said.items():
        if ("dropout" in key or "pdrop" in key or key == "layerdrop") and isinstance(value, float):
            setattr(config, key, 0.0)
        elif key.endswith("_token_id") and isinstance(value, int) and value >= TINY["vocab_size"]:
            setattr(config, key, value % TINY["vocab_size"])


def _shrink_lists(config: PreTrainedConfig, said: Mapping[str, Any], num_layers: int) -> None:
    for key in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(said.get(key) or ()))
        if kinds:
            setattr(config, key, [kinds[i % len(kinds)] for i in range(num_layers)])
    if said.get("attention_types"):  # GPT-Neo: [[[kinds], times]]
        kinds = said["attention_types"][0][0]
        config.attention_types = [[kinds, num_layers // len(kinds)]]
        config.attention_layers = [kinds[i % len(kinds)] for i in range(num_layers)]
    if said.get("mlp_only_layers"):
        config.mlp_only_layers = [0]
    rope = said.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":  # its factors speak of the longer head
        kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        config.rope_parameters = {**kept, "rope_type": "default"}


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [held for held in vars(config).values() if isinstance(held, PreTrainedConfig)]


def _with_class(config: PreTrainedConfig) -> PreTrainedConfig:
    if not config.architectures:
        config.architectures = [class_name(config)]
    return config


def _read(path: Path) -> PreTrainedConfig:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"model {PREFIX}{path}: no such file; needed: a config.json of transformers, a local directory that holds "
            "one, or a name such as `llama`; nothing is downloaded"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"model {PREFIX}{path}: cannot be read as JSON ({error}); needed: the config.json of a model; copy it again"
        ) from None
    kind = said.get("model_type") if isinstance(said, dict) else None
    if kind not in CONFIG_MAPPING:
        found = f"model_type {kind!r}" if kind else "no `model_type`"
        raise ConfigError(
            f"model {PREFIX}{path}: found {found}, needed one that transformers {transformers.__version__} knows; "
            f"{nearest(str(kind), list(CONFIG_MAPPING.keys()))}"
        )
    try:
        return AutoConfig.for_model(**said)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"model {PREFIX}{path}: transformers refuses the configuration ({_on_one_line(error)}); needed: "
            f"values that {kind} takes; mend that key"
        ) from error


def _on_one_line(error: Exception) -> str:
    """The first two lines: a refusal by huggingface_hub has what was refused in one and why in the next."""
    return " ".join(" ".join(str(error).strip().splitlines()[:2]).split())
