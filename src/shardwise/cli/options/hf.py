"""What a model of `transformers` cannot do under a plan, found out before any process starts.

The plan is applied for real, in one process that plays one rank of each pipeline stage; nothing is computed and no
weight gets a value.
"""

from __future__ import annotations

import warnings
from functools import partial
from math import gcd
from typing import Any

from shardwise.diagnose.read_module import ONE_BLOCK, Planned, another, said_of
from shardwise.errors import ConfigError, ModelError, ShardwiseError
from shardwise.findings import Finding
from shardwise.model.alike import shorter
from shardwise.model.hf_plan import value_of
from shardwise.model.spec import ModelSpec
from shardwise.model.stacks import WHOLE, stacks_of
from shardwise.models.hf import (
    PREFIX,
    hf_config,
    hf_factory,
    is_class_said,
    longest_sequence,
    model_class,
    of_other_type,
    unsaid_sizes,
)
from shardwise.models.hf_inputs import advice, inputs_of, steady, with_example
from shardwise.models.hf_sizes import CHOSEN, EXPERTS, text_of
from shardwise.parallel.compose import place
from shardwise.parallel.initial.blueprint import Blueprint, record
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.constraints import check
from shardwise.plan.plan import Plan
from shardwise.testing.fake import fake_world

UNBOUNDED = 1 << 30
"""Tokens of a sequence where a configuration sets no limit."""


def hf_findings(config: Any, plan: Plan, blueprint: Blueprint | None = None) -> list[Finding]:
    """Errors: what `apply` would refuse, with the module and the reason. Warnings: layers that stay whole.

    Args:
        config: of `hf_config`.
        plan: one that the constraints accept.
        blueprint: what its constructor does, where it is known; it is left as it is.

    Cost: time to record the model's constructor, per pipeline stage at most; memory for shapes only.

    >>> hf_findings(hf_config("t5"), Plan.parse("pp2 / mb2"))[0].id  # doctest: +SKIP
    'module.two-chains'
    """
    if any(finding.severity == "error" for finding in check(plan)):
        return []
    findings: list[Finding] = []
    factory = hf_factory(config)
    per_stage = plan.world // plan.axes.pp
    for stage in range(plan.axes.pp):
        with warnings.catch_warnings(record=True) as caught, fake_world(plan.world, rank=stage * per_stage):
            warnings.simplefilter("always")
            try:
                with open_mesh(plan, device="cpu") as mesh:
                    place(record(factory) if blueprint is None else another(blueprint, factory), plan, mesh)
            except ShardwiseError as error:
                row = _row(error)
                text = str(error).removeprefix(f"[{row}] ")
                return [*findings, _finding(row, "error", text, "change the plan as it says")]
        for warning in caught:
            text = str(warning.message)
            if issubclass(warning.category, UserWarning) and "tensor parallelism of" in text:
                findings.append(_finding("hf.whole", "warning", text, "use a tp that divides them"))
    unique = {finding.what: finding for finding in findings}
    return list(unique.values())


def refused_axes(config: Any, blocks: str = "auto") -> dict[str, str]:
    """Axes that a model cannot have, or whose layers would stay whole -> the id of the limit.

    Args:
        config: of `hf_config`.
        blocks: the pattern of its repeated blocks, or `WHOLE`.
    """
    texts = {"tp": "tp2", "ep": "fsdp2 ep2", "cp": "cp2", "pp": "pp2 / gpipe mb2"}
    known: dict[str, str] = {}
    if blocks == WHOLE:
        known = dict.fromkeys(ONE_BLOCK, "module.no-blocks")
        blocks = "auto"
    plans = {axis: Plan.parse(text).with_(blocks=blocks) for axis, text in texts.items() if axis not in known}
    factory = hf_factory(config)
    try:
        blueprint = record(shorter(factory, blocks))
    except ShardwiseError:  # is told of each axis
        blueprint = None
    for axis, plan in plans.items():
        found = None if blueprint is None else hf_findings(config, plan, blueprint)
        if found is None or (found and found[0].id != "module.no-experts"):  # no kind of block has any
            found = hf_findings(config, plan)  # of the whole model: a short one may be refused for what it lacks
        if found:
            known[axis] = found[0].id
    return known


def planned_hf(model: str, blocks: str = "auto") -> Planned:
    """The planner's MODEL `hf:...`: a configuration, and what its model is fed.

    Args:
        model: see `hf_config`.
        blocks: the pattern of its repeated blocks.

    Raises:
        ConfigError, DataError: see `hf_config`.
        ModelError: a model that takes what is not known, or a pattern that matches nothing.

    >>> planned_hf("hf:vit").usual  # doctest: +SKIP
    3
    """
    config, notes = steady(hf_config(model))
    inputs, factory, other = inputs_of(config), hf_factory(config), of_other_type(config)
    try:
        found = stacks_of(factory, blocks, several=inputs is not None and (inputs.is_text or not inputs.is_fixed))
    except ConfigError as error:  # of the constructor, which knows the type alone
        text = str(error).replace(f"model {PREFIX}{config.model_type}:", f"model {model}:", 1)
        raise ConfigError(f"{text}; {other}: mend one" if other else text) from error
    how = f"{other}: mend one; or {advice(config)}" if other else advice(config)
    notes += [f"its {other}: that class is read with its sizes"] if other else []
    notes += [*said_of(found), *([inputs.note] if inputs else [])]
    if unsaid := unsaid_sizes(model):
        notes.append(f"its config.json does not say {', '.join(unsaid)}: the defaults of {config.model_type}")
    if not is_class_said(model):
        notes.append(f"its config.json names no class (`architectures`): {model_class(config).__name__} is read")
    if getattr(config, "quantization_config", None):
        notes.append("its quantization_config is left out: weights have the types of the plan")
    if getattr(config, "auto_map", None):
        notes.append(f"its own code (auto_map) is not run: {model_class(config).__name__} of transformers is read")
    if found not in (WHOLE, blocks):
        notes.append(f"its blocks are {found} (give --blocks)")
    limits = sizes_of(config) if inputs is None or inputs.is_text else None
    left = {} if limits else dict.fromkeys(("tp", "ep"), "its configuration does not say what it must divide")
    if inputs is None:
        others = [kind for kind in ("vision", "audio") if getattr(config, f"{kind}_config", None) is not None]
        notes += [f"a sample is text alone: what the {kind} part keeps and computes is not counted" for kind in others]
        longest = longest_sequence(config)
        return Planned(
            made=lambda _: factory, longest=longest, refused=lambda _: refused_axes(config, found) | left,
            limits=limits, notes=tuple(notes), blocks=found, how=how,
        )  # fmt: skip
    if not inputs.is_text:
        left["cp"] = "what it is fed is no text, whose tokens could be divided"
    fed = inputs.sample
    return Planned(
        made=lambda seq: partial(with_example, factory, fed(seq)), longest=inputs.longest, usual=inputs.usual,
        is_fixed=inputs.is_fixed, refused=lambda _: refused_axes(config, found) | left, limits=limits,
        notes=tuple(notes), blocks=found, how=how,
    )  # fmt: skip


def sizes_of(config: Any) -> ModelSpec | None:
    """The sizes that axes must divide, as a configuration names them; None: it names others.

    >>> sizes_of(hf_config("llama")).num_heads  # doctest: +SKIP
    32
    """
    text = text_of(config)

    def first(*names: str) -> int:
        found = next((found for name in names if (found := value_of(text, name))), 0)
        # of layers of several sizes an axis divides each
        return gcd(*map(int, found)) if isinstance(found, list | tuple) else int(found)

    experts, dim = first(*EXPERTS), first("hidden_size")
    heads = first("num_attention_heads")
    try:
        return ModelSpec(
            name=config.model_type,
            kind="moe" if experts else "llama",
            num_layers=first("num_hidden_layers"),
            dim=dim,
            num_heads=heads,
            num_kv_heads=first("num_key_value_heads") or heads,
            head_dim=first("head_dim"),
            ffn_dim=(first("moe_intermediate_size") if experts else 0) or first("intermediate_size") or 4 * dim,
            vocab_size=first("vocab_size"),
            max_seq_len=longest_sequence(config) or UNBOUNDED,
            num_experts=experts,
            experts_per_token=first(*CHOSEN),
        )
    except ConfigError:
        return None


def _row(error: ShardwiseError) -> str:
    """The limit that was met: an id of docs/constraints.md; else what is wrong is the model's own."""
    return (error.row if isinstance(error, ModelError) else "") or "hf.refused"


def _finding(name: str, severity: Any, text: object, fix: str) -> Finding:
    return Finding(id=name, severity=severity, what=str(text), fix=fix)
