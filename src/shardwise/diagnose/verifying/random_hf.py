"""The same for models of `transformers`, shrunk, with random weights: `python -m` this module, `PLAN NAME`.

It imports `transformers` (the extra `hf`); only `shardwise verify hf:...` asks for it.
"""

from __future__ import annotations

import sys
from inspect import signature

import torch
from torch import nn
from transformers import PreTrainedConfig

from shardwise.diagnose.verifying.random_run import SEQ, Rows, Shape, train
from shardwise.errors import ModelError
from shardwise.models.hf import PREFIX, hf_config, hf_factory, model_class
from shardwise.models.hf_inputs import inputs_of
from shardwise.models.hf_sizes import CHOSEN, shrunk_config
from shardwise.parallel.inputs import Signature, model_inputs
from shardwise.plan.plan import Plan
from shardwise.plan.shrink import LARGE

EXPERTS = "_experts_implementation"
"""transformers' setting of how experts are run: torch's grouped products, its default, know no fp64."""

PIXELS = 32
"""Height and width of pictures where a configuration names none, as that of a convolutional network."""
FEWEST = 3
"""Of a vocabulary: the first two ids are not drawn, as they may mean padding."""
FEEDS = "token ids, pairs of them or pictures"


def shape_of(config: PreTrainedConfig) -> Shape:
    """What a model of this configuration reads."""
    size = getattr(config, "image_size", None) or PIXELS * (model_class(config).main_input_name == "pixel_values")
    size = max(size) if isinstance(size, list | tuple) else size  # tiny ones are square
    kind = "pairs" if config.is_encoder_decoder else "pictures" if size else "tokens"
    channels = getattr(config, "num_channels", 3)
    return Shape(vocab_size=getattr(config, "vocab_size", 64) or 0, kind=kind, image_size=size or 0, channels=channels)


def small_config(name: str, plan: Plan) -> PreTrainedConfig:
    """The default configuration of a name, or that of a file, with tiny sizes."""
    config = shrunk_config(hf_config(name), num_layers=max(4, plan.axes.pp * plan.schedule.stages))
    config.use_cache = False
    setattr(config, EXPERTS, "eager")
    return config


def check_name(name: str, plan: Plan) -> str:
    """What was made of a name, for reports; found out before any process starts.

    Raises:
        ConfigError: `transformers` knows no such model.
        DataError: a file that is missing or holds no configuration.
        ModelError: a model that stays large, or is not trained on what is fed to it here.
    """
    config = small_config(name, plan)
    _refuse_large(name, config)
    _refuse_unfed(name, config)
    before, after = hf_config(name).to_dict(), config.to_dict()
    numbers = [key for key, value in before.items() if isinstance(value, int) and not isinstance(value, bool)]
    changed = [f"{key} {before[key]:,} -> {after[key]:,}" for key in numbers if after.get(key) != before[key]]
    changed += [f"{key} null -> {after[key]:,}" for key in CHOSEN if before.get(key, 0) is None is not after[key]]
    kept = "; ties, ratios of heads and kinds of layers are kept; dropout is 0; weights are random"
    return f"shrunk: {', '.join(changed)}{kept}"


def _refuse_large(name: str, config: PreTrainedConfig) -> None:
    """Refuse what tiny sizes leave large, which several processes would hold in fp64."""
    with torch.device("meta"):
        held = dict(hf_factory(config)().named_parameters())
    count = sum(parameter.numel() for parameter in held.values())
    if count > LARGE:
        most = max(held, key=lambda key: held[key].numel())
        raise ModelError(
            f"verify {PREFIX}{name}: {model_class(config).__name__} has {count:,} parameters in tiny sizes too (the "
            f"largest: {most} of shape {list(held[most].shape)}), needed at most {LARGE:,}; write the sizes that are "
            "left in a config.json, small ones, and give that file"
        )


def _refuse_unfed(name: str, config: PreTrainedConfig) -> None:
    """Refuse a model whose forward does not take what is fed, or whose output the loss is not made of."""
    module, shape = hf_factory(config)(), shape_of(config)
    cls = type(module).__name__
    do = f"write a script that trains it on what it takes (here {FEEDS} are fed): shardwise verify train.py"
    if shape.vocab_size < FEWEST:
        raise ModelError(
            f"verify {PREFIX}{name}: {cls} has a vocabulary of {shape.vocab_size}, needed at least {FEWEST} to be fed "
            f"token ids; {do}"
        )
    batch = {key: column[:2] for key, column in Rows(shape).columns.items()}
    labels = batch["labels"]
    try:
        args, kwargs = model_inputs(batch, Signature.of(module))
        given = ", ".join(f"{key} of shape {list(column.shape)}" for key, column in kwargs.items())
        output = _output(module, *args, **kwargs)
    except Exception as error:  # the model's own code
        what = " ".join(str(error).split())[:300]
        raise ModelError(
            f"verify {PREFIX}{name}: {cls} cannot be fed{_taken(config)} ({type(error).__name__}: {what}), needed a "
            f"model of {FEEDS}; {do}"
        ) from error
    found = getattr(output, "logits", output if isinstance(output, torch.Tensor) else None)
    if found is None or found.shape[:-1] != labels.shape:
        gives = f"logits of shape {list(found.shape)}" if found is not None else "no logits"
        raise ModelError(
            f"verify {PREFIX}{name}: {cls}, given {given}, gives {gives}, needed logits of shape "
            f"{[*labels.shape, 'classes']}; name a class with such an output layer (hf:CLASS), or {do}"
        )


def _taken(config: PreTrainedConfig) -> str:
    """What a model takes beside or in place of what is fed, and whether rows meet in its loss; empty: not known."""
    try:
        inputs = inputs_of(config)
    except ModelError:
        inputs = None
    if inputs is None:
        return ""
    cls = model_class(config)
    takes = f": it takes {' and '.join(inputs.sample(SEQ))} ({inputs.note})"
    if "return_loss" in signature(cls.forward).parameters:
        takes += (
            ", and its loss compares the rows of a batch with each other, for which a script says how (docs/loss.md)"
        )
    return takes


@torch.no_grad()
def _output(module: nn.Module, *args: object, **kwargs: object) -> object:
    return module(*args, **kwargs)


def main(argv: list[str]) -> None:
    """`PLAN NAME PLAN`: the layout of this run, and the one that is verified, whose stages need a block each."""
    plan = Plan.load(argv[0])
    config = small_config(argv[1], Plan.load(argv[2]))
    train(hf_factory(config), shape_of(config), plan)


if __name__ == "__main__":
    main(sys.argv[1:])
