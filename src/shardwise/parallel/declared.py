"""Models that declare plans of their own, as those of Hugging Face `transformers` do: recognised by what they have.

Nothing is imported from `transformers`: a module that carries `config.model_type` and `_tp_plan` is such a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.findings import nearest
from shardwise.model.hf_plan import Fact, Kind, Rules, caches_keys, hf_rules
from shardwise.model.nested import leaves, put
from shardwise.parallel.layers.regions import own
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import Plan

HEAD_COUNTS = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "total_num_heads",
)
"""Attributes of attention modules that count heads."""
GATHERED = ("free_full_weight", "keep_full_weight")
"""Styles of `_fsdp_plan`: gathered again in the backward pass, or kept. The plan's `zero` and `reshard` say it here."""
HEAD_WIDTHS = ("all_head_size", "inner_dim")
"""Attributes of attention modules that are heads times the size of a head."""


def declares(root: nn.Module) -> bool:
    """Whether a module is one of those that declare plans."""
    return hasattr(getattr(root, "config", None), "model_type") and isinstance(getattr(root, "_tp_plan", None), dict)


def home_of(root: nn.Module) -> str:
    """What the names of declared plans begin with: of a wrapper that passes on what it wraps (as those of `peft` do).

    Empty: the module itself declares them, or none does. Else with a dot at its end.
    """
    if not declares(root):
        return ""
    own = (name for name, module in root.named_modules() if isinstance(_own(module, "_tp_plan"), dict))
    name = next(own, "")
    return f"{name}." if name else ""


def _own(module: nn.Module, name: str) -> object:
    """An attribute that is not passed on from what a module wraps."""
    return vars(module).get(name, getattr(type(module), name, None))


def prepare(root: nn.Module, blocks: tuple[str, ...]) -> None:
    """Make a model that declares plans ready for training under any plan; no change to others.

    Keys and values are not cached (a recomputed block would add its own twice), and what a block returns is never a
    view, which `fully_shard` warns of.
    """
    if not declares(root):
        return
    root.register_forward_pre_hook(_for_training, with_kwargs=True)
    for module in (root, *(root.get_submodule(name) for name in blocks)):
        module.register_forward_hook(_without_views)


def check_declared(root: nn.Module, plan: Plan) -> None:
    """What no model of a kind can do, before anything is built.

    Raises:
        ModelError: an encoder and a decoder under a pipeline or sequence shards, which divide one chain of blocks; a
            number of tokens that cannot be divided.
    """
    if not declares(root):
        return
    if plan.tensor.sequence and plan.axes.tp > 1 and getattr(root, "main_input_name", None) == "pixel_values":
        raise ModelError(
            f"{type(root).__name__} under seq: found pictures, whose patches and class token are an odd number; needed "
            "tokens that tp divides; use tensor parallelism without `seq`",
            row="module.pictures",
        )
    if not getattr(root.config, "is_encoder_decoder", False):
        return
    for asked, axis, remedy in (
        (plan.axes.pp > 1, f"pp={plan.axes.pp}", "pp1"),
        (plan.tensor.sequence and plan.axes.tp > 1, "seq", "tensor parallelism without `seq`"),
        (plan.axes.cp > 1, f"cp={plan.axes.cp}", "cp1"),
    ):
        if asked:
            raise ModelError(
                f"{type(root).__name__} under {axis}: found an encoder and a decoder, two chains of blocks, of which "
                f"every block of the second takes the output of the first; needed: one chain of blocks; use {remedy}",
                row="module.two-chains",
            )


def declared_blocks(root: nn.Module) -> tuple[str, ...]:
    """The repeated blocks of a model that declares them: the list in its pipeline plan, else in its sharding plan.

    `_pp_plan` names the modules that stages may begin with, in their order; `_fsdp_plan` gives each `layers.*` a style
    of gathering, for all models alike unless a family says more, so it may name what a model lacks. Empty: look for it.

    Raises:
        ModelError: `_pp_plan` names a module that is not there; or a style of `_fsdp_plan` that is not known.
    """
    if not declares(root):
        return ()
    modules, home = dict(root.named_modules()), home_of(root)
    stages, groups = (
        {f"{home}{name}": how for name, how in (getattr(root, plan, None) or {}).items()}
        for plan in ("_pp_plan", "_fsdp_plan")
    )
    if lacking := [name for name in stages if name not in modules]:
        raise ModelError(
            f"{type(root).__name__}: its _pp_plan names {', '.join(lacking)}, found no such module; needed: names out "
            f"of the model; {nearest(lacking[0], list(modules))}; correct base_model_pp_plan in its configuration",
            row="module.declared-plan",
        )
    if unknown := {name: style for name, style in groups.items() if style not in GATHERED}:
        raise ModelError(
            f"{type(root).__name__}: its _fsdp_plan has styles that are not known: {unknown}, needed one of "
            f"{', '.join(GATHERED)}; correct base_model_fsdp_plan in its configuration",
            row="module.declared-plan",
        )
    shards = [name.removesuffix(".*") for name in groups if name.endswith(".*")]
    for names in (stages, shards):
        lists = [name for name in names if isinstance(modules.get(name), nn.ModuleList)]
        if len(lists) == 1:
            return tuple(f"{lists[0]}.{child}" for child, _ in modules[lists[0]].named_children())
    return ()


def divide_declared(placed: Placed) -> Placed:
    """After `shard_context`: attention masks of models that declare plans are made for the whole sequence."""
    if placed.context is None:
        return placed
    for root in {id(root): root for root in (*(part.root for part in placed.parts), *_blueprints(placed))}.values():
        if declares(root):
            # the library that such a model comes from is there; without one it is never imported
            import_module("shardwise.parallel.sequence.hf_context").divide_attention(
                root, cast(Any, placed.context).divided
            )
    return placed


def _blueprints(placed: Placed) -> list[nn.Module]:
    """What a pipeline traces."""
    return [cast(nn.Module, cast(Any, placed.pipeline).blueprint)] if placed.pipeline is not None else []


def sample_of(root: nn.Module) -> dict[str, torch.Tensor] | None:
    """A micro-batch to trace a language model with, when the caller gives none; only its shape matters."""
    if declares(root) and getattr(root, "main_input_name", None) == "input_ids":
        return {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    return None


def _for_training(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "use_cache" not in kwargs and caches_keys(module):
        kwargs = {**kwargs, "use_cache": False}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.is_meta and mask.dim() == 2 and _takes_whole_masks(module):
        # while the forward is traced without data: models look whether anything is padded, unless the mask is complete
        rows, tokens = mask.shape
        kwargs = {**kwargs, "attention_mask": mask[:, None, None, :].bool().expand(rows, 1, tokens, tokens)}
    return args, kwargs


def _takes_whole_masks(module: nn.Module) -> bool:
    return bool(getattr(module, "_supports_attention_backend", False))


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    views = {path: own(t) for path, t in leaves(output) if isinstance(t, torch.Tensor) and t._is_view()}
    return put(output, views) if views else output


def rules_of(root: nn.Module, blocks: tuple[str, ...], tp: int) -> Rules:
    """The tensor-parallel rules of a model that declares plans.

    Raises:
        ModelError: see `hf_rules`.
    """
    plans, home = (getattr(root, "_ep_plan", None) or {}, root._tp_plan), home_of(root)
    declared = {f"{home}{name}": style for plan in plans for name, style in cast(Mapping[str, str], plan).items()}
    return hf_rules(_facts(root, blocks), declared, head_counts(root), tp)


def head_counts(root: nn.Module) -> dict[str, dict[str, int]]:
    """Module -> its head counts, and `head_dim`, as far as they are attributes."""
    found: dict[str, dict[str, int]] = {}
    for name, module in root.named_modules():
        held = {key: value for key in (*HEAD_COUNTS, "head_dim") if _is_count(value := vars(module).get(key))}
        if held:
            found[name] = held
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def localise_heads(module: nn.Module, tp: int) -> None:
    """An attention whose projections are split works on 1/tp of the heads: so its own counts say.

    Code that takes the number from its tensors (`view(..., -1, head_dim)`) does not read them.
    """
    for key in (*HEAD_COUNTS, *HEAD_WIDTHS):
        value = vars(module).get(key)
        if _is_count(value) and cast(int, value) % tp == 0:
            setattr(module, key, cast(int, value) // tp)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a linear layer that keeps its weight as (in, out): `Conv1D` of GPT-2."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return (
        type(module).__name__ == "Conv1D"
        and not isinstance(module, nn.Conv1d)
        and isinstance(weight, nn.Parameter)
        and weight.dim() == 2
        and isinstance(bias, nn.Parameter)
        and bias.shape[0] == weight.shape[1]
    )


def _facts(root: nn.Module, blocks: tuple[str, ...]) -> list[Fact]:
    holders: dict[nn.Parameter, list[str]] = {}
    for name, module in root.named_modules():
        for _, parameter in module.named_parameters(recurse=False):
            holders.setdefault(parameter, []).append(name)
    head, lists = _output_layer(root), _containers(blocks, root)
    facts = []
    for name, module in root.named_modules():
        own_parameters = dict(module.named_parameters(recurse=False))
        if not own_parameters:
            continue
        kind, inputs, outputs = _kind(name, module)
        sharers = {other for p in own_parameters.values() for other in holders[p] if other != name}
        facts.append(
            Fact(
                name=name,
                kind=kind,
                inputs=inputs,
                outputs=outputs,
                in_block=any(name == block or name.startswith(f"{block}.") for block in lists),
                is_head=module is head,
                shared_by=tuple(sorted(sharers)),
                only_shared=kind == "other" and all(len(holders[p]) > 1 for p in own_parameters.values()),
            )
        )
    return facts


def _containers(blocks: tuple[str, ...], root: nn.Module) -> tuple[str, ...]:
    """The blocks that a plan divides, and other repeated ones (the decoder beside the encoder)."""
    lists = [name for name, module in root.named_modules() if isinstance(module, nn.ModuleList)]
    return (*blocks, *lists)


def _output_layer(root: nn.Module) -> nn.Module | None:
    """The layer that makes the logits: what the model says, else the last linear layer outside of the blocks."""
    said = getattr(root, "get_output_embeddings", None)
    found = said() if callable(said) else None
    if isinstance(found, nn.Linear):
        return found
    outer = [m for name, m in root.named_children() if isinstance(m, nn.Linear)]
    return outer[-1] if outer else None


def _kind(name: str, module: nn.Module) -> tuple[Kind, int, int]:
    if isinstance(module, nn.Linear):
        return "linear", module.in_features, module.out_features
    if is_transposed(module):
        weight = cast(torch.Tensor, module.weight)
        return "transposed", weight.shape[0], weight.shape[1]
    if isinstance(module, nn.Embedding):
        return "embedding", module.num_embeddings, module.embedding_dim
    if name.rpartition(".")[2] == "experts":
        return "experts", 0, 0
    if "norm" in type(module).__name__.lower():
        return "norm", 0, 0
    return "other", 0, 0
