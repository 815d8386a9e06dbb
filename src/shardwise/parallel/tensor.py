"""`shard_tensor`: split layers over the `tp` axis by strict rules, with torch's tensor-parallel styles.

The residual stream between modules is made of plain tensors, so the model's own code runs unchanged:

- `Tensor(sequence=False)`: the stream is whole, the same on every tp rank.
- `Tensor(sequence=True)`: inside the repeated blocks the stream is split along dim 1. It is split before the first
  block of a stage and gathered after the last one, so embeddings, final norm, head and pipeline transport see whole
  sequences; a module that holds column layers is given the gathered sequence.

Matching is ours: torch's `parallelize_module` only warns of a plan key that matches nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shardwise.errors import ModelError
from shardwise.model.adapters import UP, has_adapters, home
from shardwise.model.recipes import recipe_for
from shardwise.model.rules import check_covered, match
from shardwise.parallel.blocks import own_blocks
from shardwise.parallel.declared import HEAD_COUNTS, declares, is_transposed, localise_heads, rules_of
from shardwise.parallel.layers.linear import AXIS, check_divides
from shardwise.parallel.layers.regions import own
from shardwise.parallel.layers.tensor_hooks import (
    Holder,
    accept_whole_or_split,
    check_same_input,
    hold,
    leave_sequence,
    looks_up_alone,
    split_sequence,
    split_table,
    with_local_parameters,
)
from shardwise.parallel.layers.transposed import split_transposed
from shardwise.parallel.layers.whole import let_holders_read
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Part, Placed, Placement
from shardwise.parallel.sequence.mixing import refuse_batch_norms, refuse_mixing, watch_blocks
from shardwise.parallel.ties import follow_ties, retie
from shardwise.plan.plan import Plan

COLUMNS = ("column", "column-gather")
REPLICATED = ("sequence", "heads", "replicate")
SEQUENCE_DIM = 1


@dataclass(frozen=True, kw_only=True)
class _Site:
    """One module that a rule names."""

    name: str
    module: nn.Module
    style: str
    parent: str
    block: str | None
    """Name of the repeated block that holds the module."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all sites of a part share."""

    tp_mesh: DeviceMesh
    sequence: bool
    loss: bool
    holders: dict[str, Holder] = field(default_factory=dict)
    """Parent of column layers -> where its forward leaves the input that they share."""


def shard_tensor(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Split the layers that the rules name over the `tp` axis; each parameter becomes a DTensor on that axis.

    Rules are `placed.rules`, those that the model itself declares (`transformers`), or those of the recipe
    `plan.tensor.recipe`. Attention code must take the number of heads from its tensors
    (`view(batch, seq, -1, head_dim)`) or from an attribute of its own (`self.num_heads`), not from its configuration.

    Raises:
        ModelError: A rule matches nothing or twice; a parameter is covered by no rule; tp does not divide a weight or a
            number of heads; a module is not of the type that its style needs; two modules share a parameter; the
            model's shape does not allow sequence shards.

    Cost: no communication for a module on the meta device; else one scatter or broadcast per parameter.

    Example:
        >>> apply(GPT, Plan.parse("tp2"), mesh, rules={"fc1": "column", "fc2": "row"})  # doctest: +SKIP
    """
    if plan.axes.tp == 1:
        return placed
    rules = _rules(placed, plan, mesh)
    styles = match(rules, ("", *placed.original_names))
    blocks = [name for name, _ in own_blocks(placed)]
    if plan.tensor.sequence and not placed.blocks:
        raise ModelError(
            f"tensor parallelism with sequence shards: no repeated blocks were found in "
            f"{type(placed.parts[0].root).__name__}, and the sequence is split between the first and the last; "
            "name them with blocks=PATTERN (as `blocks=layers.*`), or drop `seq` from the plan",
            row="module.no-blocks",
        )
    placements = dict(placed.placements)
    for part in placed.parts:
        sites = list(_sites(part.root, styles, blocks))
        _check(part.root, sites, rules, plan, mesh)
        job = _Job(tp_mesh=mesh.device_mesh[AXIS], sequence=plan.tensor.sequence, loss=plan.tensor.loss)
        placements = _shard_part(part, sites, job, placed.ties) | placements
        if plan.tensor.sequence:
            refuse_batch_norms(part.root, blocks, job.holders)
            watch_blocks(part.root, () if plan.compile else blocks)  # compiled code is not watched
            _bound_sequence(part, blocks, job)
    return placed.with_(placements=placements, styles=styles)


def _rules(placed: Placed, plan: Plan, mesh: Mesh) -> dict[str, str]:
    """The caller's rules, the model's own completed by ours, or a recipe's."""
    if placed.rules is not None:
        return dict(placed.rules)
    root = placed.blueprint.module if placed.blueprint is not None else placed.parts[0].root
    if plan.tensor.recipe != "auto" or not declares(root) or has_adapters(placed.original_names):
        return recipe_for(placed.original_names, plan.tensor.recipe)
    found = rules_of(root, placed.blocks, mesh.size(AXIS))
    if found.notes and mesh.is_first:
        with suppress(Warning):  # `-W error` does not end one rank, for which the others would wait
            warnings.warn(
                f"tensor parallelism of {type(root).__name__}: some layers cannot be split and stay whole on every "
                f"rank ({'; '.join(found.notes)}): right, but of no use to memory; use a tp that divides them",
                stacklevel=4,
            )
    return dict(found.rules)


def _sites(root: nn.Module, styles: Mapping[str, str], blocks: list[str]) -> Iterator[_Site]:
    """The modules of this stage that a rule names; pruned ones hold no parameters."""
    modules = dict(root.named_modules(remove_duplicate=False))
    for name, style in styles.items():
        module = modules.get(name)
        if style == "experts":
            continue  # `shard_experts` has placed them
        if module is None or next(module.parameters(recurse=style not in REPLICATED), None) is None:
            continue
        block = next((b for b in blocks if name == b or name.startswith(b + ".")), None)
        yield _Site(name=name, module=module, style=style, parent=home(name), block=block)


def _check(root: nn.Module, sites: list[_Site], rules: Mapping[str, str], plan: Plan, mesh: Mesh) -> None:
    """Everything that can be refused, before anything is changed."""
    by_hand = [name for name, p in root.named_parameters() if isinstance(p, DTensor)]
    placed = [f"{s.name}.{n}" if s.name else n for s in sites for n, _ in s.module.named_parameters(recurse=False)]
    placed = _first_names(root, placed)
    check_covered((name for name, _ in root.named_parameters()), by_hand + placed, patterns=list(rules))
    tp = mesh.size(AXIS)
    for site in sites:
        _check_type(site)
        _check_sizes(site, root, tp)
    _check_siblings(sites, plan.tensor.sequence)


def _first_names(root: nn.Module, names: list[str]) -> list[str]:
    """Each parameter once, under its first name: a tie may be placed by any of the modules that hold it."""
    parameters = dict(root.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in root.named_parameters()}
    tied = {name: first[id(parameters[name])] for name in names if name in parameters}
    return list(dict.fromkeys(tied[name] for name in names if name in tied))


def _check_type(site: _Site) -> None:
    needed: type[nn.Module] | None = {"vocab": nn.Embedding}.get(site.style)
    if site.style in ("column", "row", "head", "column-gather"):
        needed = nn.Linear
    names = {name for name, _ in site.module.named_parameters()}
    if needed is nn.Linear and site.style != "head" and is_transposed(site.module):
        return
    if needed and not (isinstance(site.module, needed) and names <= {"weight", "bias"}):
        raise ModelError(
            f"sharding rule {site.style!r} on {site.name}: found {type(site.module).__name__} with parameters "
            f"{sorted(names)}, needed nn.{needed.__name__} with weight and bias only; use an nn.{needed.__name__}, "
            "or the rule 'replicate'",
            row="module.rule-kind",
        )
    if isinstance(site.module, nn.ParameterList | nn.ParameterDict):
        raise ModelError(
            f"sharding rule {site.style!r} on {site.name}: found {type(site.module).__name__}, whose parameters are "
            "used by the forward of another module; register them on the module that uses them",
            row="module.rule-kind",
        )


def _check_sizes(site: _Site, root: nn.Module, tp: int) -> None:
    """The dims that are split, and the heads of the attention that holds a column layer."""
    module = site.module
    if isinstance(module, nn.Embedding) and site.style not in REPLICATED:
        check_divides(
            tp, module.num_embeddings, f"num_embeddings={module.num_embeddings} of {site.name}", "pad the vocabulary"
        )
    elif site.style not in REPLICATED and (isinstance(module, nn.Linear) or is_transposed(module)):
        weight = cast(torch.Tensor, module.weight)
        outputs, inputs = weight.shape if isinstance(module, nn.Linear) else weight.T.shape
        size, what = (inputs, "in_features") if site.style == "row" else (outputs, "out_features")
        remedy = "the rule 'replicate'" if site.style == "head" else "the rule 'column-gather' for all its siblings"
        check_divides(tp, size, f"{what}={size} of {site.name}", remedy if site.style != "row" else "other sizes")
        if site.style == "column":
            _check_heads(site, outputs, root.get_submodule(site.parent), tp)


def _check_heads(site: _Site, outputs: int, parent: nn.Module, tp: int) -> None:
    remedy = "the rule 'column-gather' for all projections of the attention"
    for attribute in HEAD_COUNTS:
        count = getattr(parent, attribute, None)
        if isinstance(count, int) and count > 0:
            check_divides(tp, count, f"{attribute}={count} of {site.parent}", remedy)
    head_dim = getattr(parent, "head_dim", None)
    if isinstance(head_dim, int) and head_dim > 0 and outputs % head_dim == 0:
        heads = outputs // head_dim
        found = f"the {heads} heads (out_features={outputs}, head_dim={head_dim}) of {site.name}"
        check_divides(tp, heads, found, remedy)


def _check_siblings(sites: list[_Site], sequence: bool) -> None:
    """What torch would compute without an error, and wrongly."""
    for parent in dict.fromkeys(s.parent for s in sites if s.style in COLUMNS):
        linears = [s for s in sites if s.parent == parent and isinstance(s.module, nn.Linear) and not _after_row(s)]
        kinds = {s.style for s in linears}
        if parent and "column" in kinds and kinds & {"column-gather", "replicate", "sequence"}:
            shown = ", ".join(f"{s.name}: {s.style}" for s in linears)
            raise ModelError(
                f"sharding rules inside {parent} mix split and whole outputs ({shown}): split heads would meet the "
                "wrong whole ones; give all of them 'column', or all of them 'column-gather'",
                row="module.mixed-rules",
            )
    if sequence:
        _check_sequence(sites)


def _after_row(site: _Site) -> bool:
    """The whole half of an adapter on a row layer: it gets sums, not heads."""
    return UP in site.name.split(".") and site.style in REPLICATED


def _check_sequence(sites: list[_Site]) -> None:
    """Inside a block, only modules that hold column layers see the whole sequence."""
    holders = {s.parent for s in sites if s.style in COLUMNS and s.block}
    adapter = next((s for s in sites if _after_row(s) and s.block), None)
    if adapter:
        raise ModelError(
            f"sequence shards: {adapter.name} is the second half of an adapter on a row layer, and would see 1/tp of "
            "the sequence where it is taken to see all of it; drop `seq` from the plan, or adapt column layers only",
            row="module.adapter-on-row",
        )
    ended = {s.parent for s in sites if s.style == "row"}
    for holder in sorted(holders - ended):
        if not any(name.startswith(holder + ".") for name in ended):
            raise ModelError(
                f"sequence shards: {holder} holds column layers and no row layer, found a module that gathers the "
                "sequence and does not split it again; needed: the layer that leads out of it inside of it (rule "
                "'row'); or drop `seq` from the plan",
                row="module.no-row-layer",
            )
    for site in sorted(sites, key=lambda s: s.name.count(".")):
        if site.style in COLUMNS and site.block in (site.parent, site.name):
            raise ModelError(
                f"sequence shards: {site.name} is a column layer of the block itself, whose own code would see "
                f"1/tp of the sequence; needed: attention and feed-forward as modules of their own inside {site.block}"
                "; move them there, or drop `seq` from the plan",
                row="module.column-in-block",
            )
        if site.style in COLUMNS and site.block and (outer := _enclosing(site.parent, holders)):
            raise ModelError(
                f"sequence shards: {site.parent} and {outer} around it both hold column layers, so it is not clear "
                "which one gathers the sequence; keep the column layers in one of them, or drop `seq` from the plan",
                row="module.nested-columns",
            )
        if site.style == "replicate" and site.block and not _inside(site, holders):
            raise ModelError(
                f"sequence shards: {site.name} is declared 'replicate' inside the block {site.block}, where it would "
                "see 1/tp of the sequence; use 'sequence' when it works on each token alone, or drop `seq` from the "
                "plan",
                row="module.replicate-in-block",
            )


def _enclosing(name: str, holders: set[str]) -> str | None:
    return next((h for h in holders if name.startswith(h + ".")), None)


def _inside(site: _Site, holders: set[str]) -> bool:
    """Whether the site runs within a module that is given the gathered sequence."""
    return site.name in holders or _enclosing(site.name, holders) is not None


def _shard_part(part: Part, sites: list[_Site], job: _Job, ties: Mapping[str, str]) -> dict[str, Placement]:
    """Distribute every site's parameters, and connect column layers to the module that holds them."""
    shapes = {name: (tuple(p.shape), str(p.dtype)) for name, p in part.root.named_parameters()}
    for parent in dict.fromkeys(s.parent for s in sites if s.style in COLUMNS):
        inner = job.sequence and any(s.block for s in sites if s.parent == parent)
        job.holders[parent] = Holder(job.tp_mesh, SEQUENCE_DIM if inner else None, parent)
        hold(part.root.get_submodule(parent), job.holders[parent])
        if any(s.style == "column" for s in sites if s.parent == parent):
            localise_heads(part.root.get_submodule(parent), job.tp_mesh.size())
    for site in sites:
        if site.style not in REPLICATED:
            _split(site, job)
    alike = [site.name for site in sites if site.style in REPLICATED and _replicate(site, job)]
    let_holders_read(part.root, alike, job.tp_mesh)
    follow_ties(part.root, ties, {site.name for site in sites})
    retie(part.root, ties)
    placements: dict[str, Placement] = {}
    by_owner = {site.name: site.style for site in sites}
    for name, parameter in part.root.named_parameters():
        if isinstance(parameter, DTensor):
            style = by_owner.get(name.rpartition(".")[0], "by hand")
            (shape, dtype), text = shapes[name], f"{style}: {_placement_text(parameter)} over {AXIS}"
            placements[name] = Placement(pass_name="shard_tensor", text=text, global_shape=shape, dtype=dtype)
    return placements


def _placement_text(parameter: DTensor) -> str:
    (placement,) = parameter.placements
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate"


def _split(site: _Site, job: _Job) -> None:
    if is_transposed(site.module):
        to_sequence = job.sequence and site.block is not None
        whole = Shard(SEQUENCE_DIM) if to_sequence and site.style == "row" else Replicate()
        split_transposed(site.module, job.tp_mesh, site.style == "row", Shard(-1) if site.style == "column" else whole)
        if site.style in COLUMNS:
            job.holders[site.parent].serve(site.module)
        site.module.register_forward_hook(lambda _, __, output: own(output))
        return
    if site.style == "vocab" and looks_up_alone(cast(nn.Embedding, site.module)):
        split_table(cast(nn.Embedding, site.module), job.tp_mesh)
        return
    parallelize_module(site.module, job.tp_mesh, _torch_style(site, job))
    if site.style in COLUMNS:
        job.holders[site.parent].serve(site.module)
    elif site.style == "row":
        assert isinstance(site.module, nn.Linear)
        accept_whole_or_split(site.module, job.tp_mesh, site.name)
    if site.style != "head" or not job.loss:  # with `wrap` any layer may be one that `fully_shard` gathers
        site.module.register_forward_hook(lambda _, __, output: own(output))


def _torch_style(site: _Site, job: _Job) -> ParallelStyle:
    """A fresh style object per module: torch's keep state."""
    to_sequence = job.sequence and site.block is not None
    match site.style:
        case "column":
            return ColwiseParallel()
        case "column-gather":
            return ColwiseParallel(output_layouts=Replicate())
        case "row":
            return RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM) if to_sequence else Replicate())
        case "vocab":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        case _:
            assert site.style == "head"
            return ColwiseParallel(output_layouts=Shard(-1) if job.loss else Replicate(), use_local_output=not job.loss)


def _replicate(site: _Site, job: _Job) -> bool:
    """Own parameters become replicated DTensors; forward sees them as plain tensors. Whether gradients are the same.

    Where each rank works on its own tokens or heads its gradient is a summand; else all ranks have the same one.
    """
    for name, parameter in list(site.module.named_parameters(recurse=False)):
        shared = distribute_tensor(parameter.detach(), job.tp_mesh, (Replicate(),))
        site.module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))
    on_tokens = job.sequence and site.block is not None and not _inside(site, set(job.holders))
    with_local_parameters(site.module, Partial() if on_tokens or site.style == "heads" else Replicate())
    if on_tokens:
        refuse_mixing(site.name, site.module)
    elif site.style != "heads":
        check_same_input(site.module, job.tp_mesh, f"'{site.style}' on {site.name}")
    return not on_tokens and site.style != "heads"


def _bound_sequence(part: Part, blocks: list[str], job: _Job) -> None:
    """Split the stream before the first block of the stage, gather it after the last."""
    here = [name for name in blocks if next(part.root.get_submodule(name).parameters(), None) is not None]
    if here:
        split_sequence({name: part.root.get_submodule(name) for name in here}, job.tp_mesh, SEQUENCE_DIM)
        leave_sequence(part.root.get_submodule(here[-1]), job.tp_mesh, SEQUENCE_DIM, here[-1])
