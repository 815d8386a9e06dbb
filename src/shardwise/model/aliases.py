"""Names by which people call the presets: repositories, versions, `-instruct`. Only what is one preset for sure."""

from __future__ import annotations

import re
from collections.abc import Collection

_SUFFIX = re.compile(r"-(instruct|chat|base|hf|it|pt|uncased)$|(?<=b)-v0\.[12]$|(?<=instruct)-v0\.[12]$")
"""What changes no size."""
_SAME: tuple[tuple[str, str], ...] = (
    (r"(?:meta-)?llama-?3-(8b|70b|405b)", r"llama-\1"),
    (r"(?:meta-)?llama-?3\.1-(8b|70b|405b)", r"llama-\1"),
    (r"(?:meta-)?llama-?3\.2-(1b|3b)", r"llama-\1"),
    (r"(?:meta-)?llama-?3\.3-(70b)", r"llama-\1"),
    (r"llama-?2-(7b|13b)", r"llama-\1"),
    (r"llama-?2-70b", "llama2-70b"),
    (r"llama-?(?:1-)?(7b|13b|30b|65b)", r"llama-\1"),
    (r"llama-?(?:1-)?33b", "llama-30b"),
    (r"llama-?4-(scout|maverick)(?:-.*)?", r"llama4-\1"),
    (r"qwen-?2-(0\.5b|1\.5b|7b|72b)", r"qwen-\1"),
    (r"qwen-?2\.5-(0\.5b|1\.5b|3b|7b|14b|32b|72b)", r"qwen-\1"),
    (r"gemma-([23])-(\d+b)", r"gemma\1-\2"),
    (r"olmo-?2-(?:\d{4}-)?(\d+b)", r"olmo2-\1"),
    (r"bloom-1b1", "bloom-1.1b"),
    (r"bloom-1b7", "bloom-1.7b"),
    (r"bloom-7b1", "bloom-7b"),
    (r"bloom", "bloom-176b"),
    (r"gpt-?2", "gpt2-small"),
    (r"gpt-2-(\w+)", r"gpt2-\1"),
    (r"gpt-?3", "gpt3-175b"),
    (r"gpt-3-([\d.]+b)", r"gpt3-\1"),
    (r"gpt-?3-xl", "gpt3-1.3b"),
    (r"gpt-?j-6b", "gpt-j-6b"),
    (r"deepseek-llm-(7b|67b)", r"deepseek-\1"),
    (r"deepseek-v3(?:\.1|-0324)", "deepseek-v3"),
    (r"nemotron-?4-(15b|340b)", r"nemotron-\1"),
    (r"olmoe-1b-7b(?:-\d+)?", "olmoe-7b"),
    (r"mistral-nemo(?:-\d+)?", "mistral-nemo-12b"),
    (r"mistral-large(?:-2|-\d{4})?", "mistral-large-123b"),
    (r"mistral-small(?:-24b)?(?:-\d+)?", "mistral-small-24b"),
    (r"smollm-?2-(135m|360m|1\.7b)", r"smollm-\1"),
    (r"tinyllama", "tinyllama-1.1b"),
    (r"glm-4-9b", "glm4-9b"),
    (r"glm-4\.[67]", "glm-4.5"),
    (r"dots\.llm1(?:\.inst)?", "dots-142b"),
)
"""A whole name, without its repository and suffix -> the preset with the same sizes. (Llama 3 and 3.1 differ in the
length that they were trained for.)"""

_OTHERS: tuple[tuple[str, str, str], ...] = (
    (
        r"(flan-|code-?|long-?|by|m)?t5|(flan-)?ul2|t0|m?bart|pegasus|marian|nllb|m2m|led",
        "an encoder and a decoder",
        "t5",
    ),
    (r"whisper", "an encoder and a decoder", "whisper"),
    (r"(falcon-?)?mamba-?2?|rwkv|recurrent-?gemma|retnet|hyena|xlstm", "no attention in most blocks", "mamba2"),
    (r"(wide-?|se-?)?resn(et|ext)|conv-?next|efficientnet|regnet|mobilenet|densenet|vgg", "convolutions", "resnet"),
    (r"swin", "stages of unlike blocks", "swin"),
    (r"(open-?)?clip|siglip|blip", "an encoder of pictures and one of words", "CLIPModel"),
    (r"albert", "one block that is called again and again", "albert"),
    (r"dit|sit|u-?net|sdxl|sd-?[123x]|stable-?diffusion|flux|pixart|wan-?2|cog-?video|dlrm", "parts of its own", ""),
)
"""Beginning of a name -> what its family has that no `ModelSpec` says, and a model of `hf:` that has it too."""


def other_family(name: str) -> str:
    """What to say of a model that no preset could be; empty: of no such family.

    >>> other_family("resnet50").partition(";")[0]
    'its family has convolutions, and presets are chains of equal blocks of attention'
    """
    short = re.sub(r"[\s_]+", "-", re.sub(r"/(?=\d+$)", "-", name).rpartition("/")[2].strip().lower())
    for pattern, has, hf in _OTHERS:
        if re.match(rf"({pattern})(?![a-z])", short):
            there = f"its config.json as hf:config.json (`hf:{hf}` has the sizes of a default), or " if hf else ""
            return (
                f"its family has {has}, and presets are chains of equal blocks of attention; "
                f"give {there}a function that builds it, as package.module:function"
            )
    return ""


def canonical(name: str, known: Collection[str]) -> str:
    """The preset that a name means; the name itself where none is sure.

    >>> canonical("meta-llama/Llama-3.1-8B-Instruct", ("llama-8b", "llama-70b"))
    'llama-8b'
    >>> canonical("llama-3.1-9b", ("llama-8b",))
    'llama-3.1-9b'
    """
    if name in known:
        return name
    name_only = re.sub(r"/(?=\d+$)", "-", name).rpartition("/")[2]  # ViT-L/16: sides of patches
    short = re.sub(r"[\s_]+", "-", name_only.strip().lower())
    while short not in known:
        found = next((re.sub(pattern, to, short) for pattern, to in _SAME if re.fullmatch(pattern, short)), "")
        if found in known:
            return found
        short, before = _SUFFIX.sub("", short), short
        if short == before:
            return name
    return short
