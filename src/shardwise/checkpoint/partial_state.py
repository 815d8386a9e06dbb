"""Loading less than a whole state: the weights alone, or what another library's checkpoint has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwise.checkpoint.format import MODEL, OPTIM, parameter_of
from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import CheckpointError
from shardwise.findings import near

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
FITS = "; of another model, `shardwise ckpt export` it, and give `apply` a module that has loaded what fits of that"
EMA, MASTER = "ema.", ".master"


def weights(
    manifest: Manifest, tensors: Mapping[str, Tensor], masters: Collection[str]
) -> tuple[Manifest, dict[str, Tensor]]:
    """A manifest and tensors of a state without what is not the model's.

    Args:
        manifest: of the checkpoint.
        tensors: this rank's.
        masters: fp32 copies that some rank keeps of its weights; those that are stored too are the model's.
    """
    known = {n: entry for n, entry in manifest.tensors.items() if n.startswith(MODEL) or n in masters}
    return replace(manifest, tensors=known), {n: t for n, t in tensors.items() if n.startswith(MODEL) or n in known}


def masters_in(tensors: Iterable[str]) -> list[str]:
    """Names of the fp32 copies that an optimizer steps in place of weights."""
    return [name for name in tensors if name.startswith(OPTIM) and name.endswith(MASTER)]


def masters_for(manifest: Manifest, live: Mapping[str, Tensor]) -> list[str]:
    """Names of the fp32 copies that belong to a state's weights: its own, and stored ones of weights of other types."""
    stored = [name for name in masters_in(manifest.tensors) if name not in live]
    weights = {name: MODEL + name.removeprefix(OPTIM).removesuffix(MASTER) for name in stored}
    types = {name: str(live[weight].dtype) for name, weight in weights.items() if weight in live}
    other = [name for name, kind in types.items() if kind != f"torch.{manifest.tensors[weights[name]].dtype}"]
    return masters_in(live) + other


def followers(loaded: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the weights that a state keeps and did not load: averages, which begin with them, and fp32 masters."""
    found = {}
    for name, tensor in live.items():
        if name in loaded:
            continue
        if name.startswith(EMA):
            found[name] = loaded[MODEL + name.removeprefix(EMA)].detach().to(tensor.dtype, copy=True)
        elif name.startswith(OPTIM) and name.endswith(MASTER):
            parameter = name.removeprefix(OPTIM).removesuffix(MASTER)
            found[name] = loaded[MODEL + parameter].detach().to(tensor.dtype, copy=True)
    return found


def check_trains_the_same(manifest: Manifest, own: Collection[str], extra: Collection[str]) -> None:
    """Where all that a checkpoint has more is the whole optimizer's state of some parameters, these are frozen here.

    Or they are stepped by an optimizer that keeps nothing of them, as one of `several`.

    Args:
        manifest: of the checkpoint.
        own: names of this rank's tensors.
        extra: names in the checkpoint that no rank has.

    Raises:
        CheckpointError: naming the parameters.
    """
    kept: dict[str, set[str]] = {}
    for name in manifest.tensors:
        if name.startswith(OPTIM):
            kept.setdefault(parameter_of(name, manifest.tensors), set()).add(name)
    gone = [name for name, keys in kept.items() if keys <= {*extra}]
    is_all = {*extra} == {key for name in gone for key in kept[name]}
    if gone and is_all and len(gone) < len(kept) and any(name.startswith(OPTIM) for name in own):
        raise CheckpointError(
            f"the checkpoint holds the optimizer's state of {', '.join(gone[:3])} ({len(gone)} parameters), of which "
            "this run keeps none; needed: the same parameters trained as at the save, by the same optimizers; freeze "
            "no more, give each the optimizer that it had, or begin with its weights and a new one (weights_only=True)"
        )


def check_imported(manifest: Manifest) -> None:
    """A converted checkpoint without optimizer state does not continue a run, and must not seem to.

    Raises:
        CheckpointError: saying what to do.
    """
    imported = manifest.scalars.get("imported")
    if isinstance(imported, dict) and not imported.get("optimizer"):
        raise CheckpointError(
            f"found weights without optimizer state, converted from {imported.get('from')}, needed a whole state; "
            "begin a run with them: `shardwise train --weights PATH`, or store.load(state, path, weights_only=True)"
        )


def scalars_for(manifest: Manifest, live: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a state takes over: of a converted checkpoint what it has, and the state's own for the rest."""
    return {**live, **manifest.scalars} if "imported" in manifest.scalars else manifest.scalars


def hint_of(manifest: Manifest, template: Mapping[str, Tensor], missing: Sequence[str], extra: Sequence[str]) -> str:
    """What names that differ may come from: an optimizer, a wrapper, or a tensor of the same kind, shape and type.

    Args:
        manifest: of the checkpoint.
        template: this rank's tensors.
        missing: names of those that the checkpoint lacks.
        extra: names of those that no rank has.
    """
    names = [*missing, *extra]
    if names == masters_in(names):
        return "fp32 masters are what `bf16-pure` keeps, and no other precision"
    if all(name.startswith(OPTIM) for name in names):
        optimizer = manifest.scalars.get("optimizer")
        named = f", {optimizer.get('name')} at the save" if isinstance(optimizer, dict) else ""
        return f"only the optimizer is another one{named}: weights_only=True begins with the weights and a new one"
    if missing and {*map(_bare, missing)} <= {*map(_bare, extra)}:
        return (
            "their names differ by what torch.compile(module) puts in; module.compile() does not, nor does the plan's"
        )
    if not missing:
        hint = f"it has more than this run{FITS}"
        if "imported" in manifest.scalars:  # DCP stores a tied weight under each of its names
            hint += "; `ckpt convert --rename` leaves out what is given an empty name, as a tied weight's other name"
        return hint
    for name in missing[:5]:
        wanted = tuple(template[name].shape), str(template[name].dtype).removeprefix("torch.")
        kind = name.partition(".")[0]
        alike = [other for other in extra if other.partition(".")[0] == kind]
        alike = [other for other in alike if (manifest.tensors[other].shape, manifest.tensors[other].dtype) == wanted]
        if found := near(name, alike):
            return f"{name}: {found}"
    return ("it has less than this run" if not extra else "none of these has nearly the name of one of those") + FITS


def _bare(name: str) -> str:
    """Without what wrappers put into a name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
