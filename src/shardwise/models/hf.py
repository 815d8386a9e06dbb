"""Models of Hugging Face `transformers`: from a config file, a local directory or a name to a factory for `apply`.

Nothing is ever downloaded. This module imports `transformers` (the extra `hf`), so only callers who need it import it.
"""

from __future__ import annotations

import copy
import importlib.util
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
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from shardwise.errors import ConfigError, DataError, ModelError, UsageError
from shardwise.findings import near, nearest
from shardwise.model.spec import preset
from shardwise.models.hf_sizes import LENGTHS, SIZES, assumed_sizes, refuse_sizes, refuse_unsaid, text_of

PREFIX = "hf:"
"""What marks a model of `transformers` on the command line."""
POPULAR = "llama, qwen3, gemma3_text, mistral, mixtral, gpt2, bert, t5 or vit"
"""Of some hundred model types those that are said where none is near."""
REFUSALS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, StrictDataclassError)
"""What configurations of `transformers` raise over values that they do not take."""
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
    if path := _file_of(text):
        config = _with_class(_made(path, _read(path)))
        model_class(config, f"{PREFIX}{path}")  # refused by the name of the file
        return config
    if text in CONFIG_MAPPING:
        return _with_class(_default(text))
    known = getattr(transformers, text, None) if text.isidentifier() else None
    if isinstance(known, type) and issubclass(known, PreTrainedModel) and known.config_class is not None:
        config = _default(text, known.config_class)
        config.architectures = [text]
        return config
    names = sorted({*CONFIG_MAPPING.keys(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
    raise ConfigError(
        f"model {PREFIX}{text}: transformers {transformers.__version__} knows no model type or class of this name, and "
        f"there is no such file; needed: a config.json, a local directory, a model type or a class name; "
        f"{near(text, names) or f'such as {POPULAR}'}"
    )


def unsaid_sizes(source: str) -> list[str]:
    """Sizes that a config.json does not say, for which the family's defaults stand; a name asks for these.

    Args:
        source: as for `hf_config`, which has taken it.
    """
    path = _file_of(source.removeprefix(PREFIX))
    return assumed_sizes(_read(path), hf_config(source)) if path else []


def is_class_said(source: str) -> bool:
    """Whether a config.json names the class of its model; of a name, that its family has one."""
    path = _file_of(source.removeprefix(PREFIX))
    return path is None or bool(_read(path).get("architectures"))


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
    text = text_of(config)
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
    refuse_unsaid(f"{PREFIX}{config.model_type}", config)
    own = copy.deepcopy(_of_class(config, cls))
    fused = getattr(cls, "_supports_sdpa", False) and not _drops_attention(own)
    asked = getattr(config, "_attn_implementation", None)
    attention = asked if asked == "flex_attention" else "sdpa" if fused else "eager"
    try:
        made: nn.Module = cast(Any, cls)._from_config(own, attn_implementation=attention, dtype=torch.float32)
    except ImportError as error:
        raise ConfigError(
            f"model {PREFIX}{config.model_type}: {cls.__name__} needs a library that is not installed "
            f"({_on_one_line(error)}); install it, or name a class that does without"
        ) from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model {PREFIX}{config.model_type}: {cls.__name__} cannot be made of its configuration "
            f"({type(error).__name__}: {_on_one_line(error)}); needed: values that go together; mend "
            f"{_key_of(error, own)}"
        ) from error
    return made


def _key_of(error: Exception, config: PreTrainedConfig) -> str:
    """The key whose value a table of `transformers` has not, or that a configuration has not, where that went wrong."""
    owner = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(owner, PreTrainedConfig):
        part = next((f"{key}." for key, value in vars(config).items() if value is owner), "")
        return f"{part}{error.name}, which its family's default lacks too: say it in a config.json"
    unknown = error.args[0] if isinstance(error, KeyError) and error.args else None
    said = config.to_dict()
    inner = {
        f"{key}.{part}": v for key, values in said.items() if isinstance(values, dict) for part, v in values.items()
    }
    names = [key for key, value in {**said, **inner}.items() if unknown is not None and value == unknown]
    kinds = getattr(text_of(config), "layer_types", None) or ()
    if isinstance(unknown, str) and unknown in kinds:  # each kind of layer has its own positions
        return f"rope_parameters, which has none of layers of {unknown!r}: say them in a config.json"
    missing = "NoneType" in str(error) and [key for key in SIZES if key in said and said[key] is None]
    return " or ".join(names) or (f"what is null: {', '.join(missing)}" if missing else "that key")


def _of_class(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """What a class is made of: of a model of text and pictures, the text part, where it is that part's class."""
    made_for, text = cls.config_class, text_of(config)
    is_part = made_for is not None and not isinstance(config, made_for) and isinstance(text, made_for)
    return text if is_part else config


def _drops_attention(config: PreTrainedConfig) -> bool:
    """Whether probabilities of attention are dropped: a fused kernel would draw that mask where no plan can key it."""
    said = config.to_dict()
    names = [key for key in said if ("att" in key and "drop" in key) or key == "dropout_rate"]
    return any(isinstance(said[name], float) and said[name] > 0.0 for name in names)


def of_other_type(config: PreTrainedConfig) -> str:
    """What is to be said of a class of `architectures` that is made for another `model_type`; empty: it is not.

    >>> of_other_type(hf_config("llama"))
    ''
    """
    cls = model_class(config)
    if cls.config_class is None or isinstance(_of_class(config, cls), cls.config_class):
        return ""
    made_for = cls.config_class.model_type
    return f"architectures names {cls.__name__}, a class of {made_for}, and model_type is {config.model_type}"


def model_class(config: PreTrainedConfig, where: str = "") -> type[PreTrainedModel]:
    """The class that `architectures` names, else the usual one of the model type.

    Args:
        config: of `hf_config`.
        where: what it is called, for messages.

    Raises:
        ConfigError: a class that `transformers` does not have.
    """
    (name, *_) = config.architectures or [class_name(config)]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        known = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_MAPPING_NAMES.values()]
        raise ConfigError(
            f"model {where or PREFIX + config.model_type}: architectures names {name!r}, which is no model class of "
            f"transformers {transformers.__version__}; {nearest(name, [k for k in known if isinstance(k, str)])}; code "
            "that lies beside the weights (trust_remote_code) is not run: import it, and pass a factory of your own"
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
        MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,  # clip: both of its towers
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,  # blip is there and among those of two towers
        MODEL_MAPPING_NAMES,
    ]
    if getattr(config, "is_encoder_decoder", False):
        orders[:0] = [MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES]
    for table in orders:
        if kind in table:
            name = table[kind]
            return str(name[0] if isinstance(name, list | tuple) else name)
    return _only_class(config)


def _only_class(config: PreTrainedConfig) -> str:
    """The class that is made of a configuration beside the usual ones: the one with an output layer, or the only one.

    Raises:
        ConfigError: none, or several.
    """
    home = type(config).__module__.replace(".configuration_", ".modeling_")
    held = vars(importlib.import_module(home)) if importlib.util.find_spec(home) else {}
    made = [
        name
        for name, cls in held.items()
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and hasattr(transformers, name)
        if cls.config_class is type(config) and cls.forward is not nn.Module.forward
    ]
    with_head = [name for name in made if "For" in name or "Head" in name]
    if len(with_head) == 1 or len(made) == 1:
        return (with_head or made)[0]
    where = f"model {PREFIX}{config.model_type}: transformers {transformers.__version__} has"
    if made:
        raise ConfigError(
            f"{where} several classes for it; name the one that is meant: {PREFIX}{f' or {PREFIX}'.join(made)}"
        )
    raise ConfigError(
        f"{where} a configuration of this type and exports no model class that is made of it alone; name the "
        "model that it is a part of, or set `architectures` in its config.json to the class that is meant"
    )


def _default(name: str, made_by: Callable[[], PreTrainedConfig] | None = None) -> PreTrainedConfig:
    """The configuration that a family has by itself.

    Raises:
        ConfigError: it has none: its own values do not go together, or are of another model's.
    """
    try:
        return (made_by or CONFIG_MAPPING[name])()
    except REFUSALS as error:
        raise ConfigError(
            f"model {PREFIX}{name}: transformers {transformers.__version__} cannot make its default configuration "
            f"({_on_one_line(error).partition('. ')[0]}); needed: one that says its sizes; give its config.json"
        ) from error


def _with_class(config: PreTrainedConfig) -> PreTrainedConfig:
    if not config.architectures:
        config.architectures = [class_name(config)]
    return config


def _file_of(text: str) -> Path | None:
    """The file that is meant; None: a name."""
    path = Path(text)
    if path.suffix == ".json" or os.sep in text or os.path.exists(text):  # which takes names that are too long
        return path / "config.json" if os.path.isdir(text) else path
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"model {PREFIX}{path}: no such file; needed: a config.json of transformers, a local directory that holds "
            f"one, or a name such as `llama`; nothing is downloaded{_as_preset(str(path))}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"model {PREFIX}{path}: cannot be read as JSON ({error}); needed: the config.json of a model; copy it again"
        ) from None
    if not isinstance(said, dict):
        raise DataError(
            f"model {PREFIX}{path}: found a JSON {type(said).__name__}, needed an object: the config.json of a model; "
            "copy it again"
        )
    return said


def _as_preset(name: str) -> str:
    """What to say of the name of a repository that a preset has the sizes of."""
    try:
        return f"; the preset {preset(name).name} has these sizes: leave out {PREFIX}"
    except UsageError:
        return ""


def _made(path: Path, said: Mapping[str, Any]) -> PreTrainedConfig:
    kind, classes = said.get("model_type"), said.get("architectures")
    if not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        found = f"model_type {kind!r}" if kind else "no `model_type`"
        raise ConfigError(
            f"model {PREFIX}{path}: found {found}, needed one that transformers {transformers.__version__} knows; "
            f"{nearest(str(kind), list(CONFIG_MAPPING.keys()))}"
        )
    if not (classes is None or (isinstance(classes, list) and all(isinstance(name, str) for name in classes))):
        raise ConfigError(
            f"model {PREFIX}{path}: architectures: found {classes!r}, needed a list of one class's name: "
            '["LlamaForCausalLM"]; mend that key'
        )
    try:
        config = AutoConfig.for_model(**said)
        refuse_sizes(f"{PREFIX}{path}", config)
    except REFUSALS as error:
        raise ConfigError(
            f"model {PREFIX}{path}: transformers refuses the configuration ({_on_one_line(error)}); needed: "
            f"values that {kind} takes; mend that key"
        ) from error
    return config


def _on_one_line(error: Exception) -> str:
    """The first two lines: a refusal by huggingface_hub has what was refused in one and why in the next."""
    return " ".join(" ".join(str(error).strip().splitlines()[:2]).split())
