"""The same for models of `transformers`: `python -m shardwise.diagnose.random_hf PLAN NAME`, shrunk, random weights.

It imports `transformers` (the extra `hf`); only `shardwise verify hf:...` asks for it.
"""

from __future__ import annotations

import sys

from transformers import PreTrainedConfig

from shardwise.diagnose.random_run import Shape, train
from shardwise.models.hf import hf_config, hf_factory
from shardwise.models.hf_sizes import CHOSEN, shrunk_config
from shardwise.plan.plan import Plan

EXPERTS = "_experts_implementation"
"""transformers' setting of how experts are run: torch's grouped products, its default, know no fp64."""


def shape_of(config: PreTrainedConfig) -> Shape:
    """What a model of this configuration reads."""
    size = getattr(config, "image_size", None)
    kind = "pairs" if config.is_encoder_decoder else "pictures" if size else "tokens"
    channels = getattr(config, "num_channels", 3)
    return Shape(vocab_size=getattr(config, "vocab_size", 64), kind=kind, image_size=size or 0, channels=channels)


def small_config(name: str, plan: Plan) -> PreTrainedConfig:
    """The default configuration of a name, or that of a file, with tiny sizes."""
    config = shrunk_config(hf_config(name), num_layers=max(4, plan.axes.pp * plan.schedule.stages))
    config.use_cache = False
    setattr(config, EXPERTS, "eager")
    return config


def check_name(name: str, plan: Plan) -> str:
    """What was made of a name, for reports.

    Raises:
        ConfigError: `transformers` knows no such model.
        DataError: a file that is missing or holds no configuration.
    """
    before, after = hf_config(name).to_dict(), small_config(name, plan).to_dict()
    numbers = [key for key, value in before.items() if isinstance(value, int) and not isinstance(value, bool)]
    changed = [f"{key} {before[key]:,} -> {after[key]:,}" for key in numbers if after.get(key) != before[key]]
    changed += [f"{key} null -> {after[key]:,}" for key in CHOSEN if before.get(key, 0) is None is not after[key]]
    kept = "; ties, ratios of heads and kinds of layers are kept; dropout is 0; weights are random"
    return f"shrunk: {', '.join(changed)}{kept}"


def main(argv: list[str]) -> None:
    """`PLAN NAME PLAN`: the layout of this run, and the one that is verified, whose stages need a block each."""
    plan = Plan.load(argv[0])
    config = small_config(argv[1], Plan.load(argv[2]))
    train(hf_factory(config), shape_of(config), plan)


if __name__ == "__main__":
    main(sys.argv[1:])
