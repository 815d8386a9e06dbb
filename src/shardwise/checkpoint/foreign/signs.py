"""What tells that other ranks have more of a model whose file holds plain tensors, and says nothing of itself.

config.json            beside it: the vocabulary, the width and the number of layers of the whole model
rank_0/ rank_1/        directories that are named after ranks, with a file of the same name in each
shard_0.pt shard_1.pt  files whose names differ in a number, with other rows of the same tensors, or other layers
layers.2, layers.3     layers whose first ones are missing
fc1 (64, 64), fc2      products of which each gives half of what the next one takes
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.beside import SUFFIXES
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.parts import NEEDED, NORM, OF_RANK
from shardwise.checkpoint.foreign.views import Source
from shardwise.checkpoint.format import parse_json
from shardwise.errors import CheckpointError
from shardwise.findings import shown

Weights = Mapping[str, Source]

_CONFIG = "config.json"
_MAX_CONFIG = 16 * 1024 * 1024
_WIDTH = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_TABLE = re.compile(r"(^|\.)(embed_tokens|word_embeddings|tok_embeddings|wte|embed_in|lm_head)\.weight$")
_NUMBERED = re.compile(r"(.*?)(\d{1,6})(\.\w+)")
_LAYER = re.compile(r"(?:^|\.)(\d{1,6})\.")


def check_whole(files: OpenFiles, source: Path, weights: Weights, read: Callable[[Path], Weights]) -> list[str]:
    """Refuse weights that what lies around them says to be a part of a model's.

    Args:
        files: they stay open.
        source: the file that was given, or the directory.
        weights: that were read.
        read: those of another file of that kind.

    Returns:
        Notes of what may be signs of a part, too.

    Raises:
        CheckpointError: naming the sign.
    """
    _check_folder(files, source)
    config = _config(files, source.parent if source.is_file() else source)
    _check_sizes(source, weights, config)
    others = _numbered(files, source) if source.is_file() else []
    if others:
        _check_other(source, weights, source.with_name(others[-1] if source.name != others[-1] else others[0]), read)
    notes = [_lost_layers(weights, config), _broken_chain(weights)]
    if others:
        notes.append(f"perhaps other ranks' parts: {shown(others)} lie together; {source.name} {_TAKEN}")
    return [note for note in notes if note]


def _check_folder(files: OpenFiles, source: Path) -> None:
    """A directory with a rank's name, beside those of all other ranks, which hold a file of the same name."""
    own, inside = (source.parent, [source.name]) if source.is_file() else (source, files.names(source))
    found = OF_RANK.fullmatch(own.name)
    if found is None or found[3]:
        return
    ranks: dict[int, str] = {}
    with suppress(CheckpointError):  # a directory that may not be listed says nothing
        for name in files.names(own.parent):
            match = OF_RANK.fullmatch(name)
            if match and (match[1], match[3]) == (found[1], found[3]) and {*inside} & {*files.names(own.parent / name)}:
                ranks[int(match[2])] = name
    if len(ranks) > 1 and sorted(ranks) == list(range(len(ranks))):
        raise CheckpointError(
            f"{source}: found {shown([ranks[rank] for rank in sorted(ranks)])}, by the name directories of ranks with "
            f"files of the same name; {NEEDED} (where each rank saved the whole model, give a copy elsewhere)"
        )


def _config(files: OpenFiles, folder: Path) -> dict[str, Any]:
    """What a config.json of transformers says of the model; nothing, where there is none that can be read."""
    with suppress(CheckpointError):
        if _CONFIG in files.names(folder) and files.size(path := folder / _CONFIG) <= _MAX_CONFIG:
            said = parse_json(files.read(path, 0, files.size(path)), str(path))
            text = said.get("text_config")
            return said | (text if isinstance(text, dict) else {})
    return {}


def _size(config: Mapping[str, Any], *keys: str) -> tuple[str, int]:
    for key in keys:
        if type(config.get(key)) is int and config[key] > 0:
            return key, config[key]
    return "", 0


def _check_sizes(source: Path, weights: Weights, config: Mapping[str, Any]) -> None:
    """Tables with a fraction of the vocabulary, norms with a fraction of the width."""
    tables = {n: s.shape for n, s in weights.items() if len(s.shape) == 2 and _TABLE.search(n)}
    norms = {n: s.shape for n, s in weights.items() if len(s.shape) == 1 and NORM.search(n)}
    for held, keys in ((tables, ("vocab_size",)), (norms, _WIDTH)):
        key, whole = _size(config, *keys)
        if not held or not whole or any(s.shape == (whole,) for s in weights.values()):  # norms of heads beside others
            continue
        name, shape = max(held.items(), key=lambda item: item[1][0])
        if 0 < shape[0] < whole and _is_cut(whole, shape[0]):
            raise CheckpointError(
                f"{source}: found {name} with {shape[0]} of the {whole} that {key} of {_CONFIG} says, as where "
                f"{-(-whole // shape[0])} ranks have parts of it; {NEEDED} (where it is whole, {_CONFIG} is of another "
                "model: give a copy without it)"
            )


def _is_cut(whole: int, part: int) -> bool:
    """Whether a part is what one of several ranks has, the last one's included, which may be smaller.

    >>> _is_cut(32, 16), _is_cut(10, 4), _is_cut(10, 2), _is_cut(32, 31)
    (True, True, True, False)
    """
    return any(part in (-(-whole // ranks), whole - (ranks - 1) * -(-whole // ranks)) for ranks in range(2, 1025))


def _numbered(files: OpenFiles, source: Path) -> list[str]:
    """Files whose names differ from this one's in one number, where these are 0, 1, 2, ...; empty: it is alone."""
    own = _NUMBERED.fullmatch(source.name)
    if own is None or own[3] not in (*SUFFIXES, ".safetensors"):
        return []
    names: list[str] = []
    with suppress(CheckpointError):
        names = files.names(source.parent)
    found = [
        match for name in names if (match := _NUMBERED.fullmatch(name)) and (match[1], match[3]) == (own[1], own[3])
    ]
    numbers = {int(match[2]): match[0] for match in found}
    return [numbers[i] for i in range(len(numbers))] if len(numbers) > 1 and {*numbers} == {*range(len(found))} else []


def _check_other(source: Path, weights: Weights, other: Path, read: Callable[[Path], Weights]) -> None:
    """Another file of the same names with other rows of them, or with other layers of the same lists."""
    there: Weights = {}
    with suppress(CheckpointError):  # it was not asked for
        there = read(other)
    both = [name for name in weights if name in there]
    differ = [name for name in both if weights[name].shape != there[name].shape]
    cut = [name for name in differ if _one_dim(weights[name].shape, there[name].shape)]
    sign = f"{shown(cut)} of other sizes in one dim" if cut and cut == differ and len(both) == len(weights) else ""
    here, elsewhere = _lists(weights), _lists(there)
    parted = [name for name in here if name in elsewhere and not here[name] & elsewhere[name]]
    sign = sign or (f"other layers of {shown(parted)}" if parted and len(parted) == len(here) else "")
    if sign:
        raise CheckpointError(f"{source}: found beside it {other.name} with {sign}: parts of ranks; {NEEDED}")


def _one_dim(here: tuple[int, ...], there: tuple[int, ...]) -> bool:
    return len(here) == len(there) and sum(a != b for a, b in zip(here, there, strict=True)) == 1


def _lists(weights: Weights) -> dict[str, set[int]]:
    """The numbers of the layers in each list of modules, by the name before the number."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in weights:
        if match := _LAYER.search(name):
            found[name[: match.start(1)].rstrip(".")].add(int(match[1]))
    return dict(found)


def _lost_layers(weights: Weights, config: Mapping[str, Any]) -> str:
    """A note, where the longest list of layers lacks its first ones, or has fewer than config.json says."""
    lists = _lists(weights)
    name = max(lists, key=lambda each: len(lists[each]), default="")
    numbers = sorted(lists.get(name, ()))
    key, whole = _size(config, *_LAYERS)
    if whole > len(numbers) > 1 or (whole and numbers and numbers[0] and len(numbers) < whole):
        return (
            f"perhaps other ranks' parts: of {name} there are {len(numbers)}, and {key} of {_CONFIG} is {whole}; {_IT}"
        )
    alike = {frozenset(_rest(n, name, number) for n in weights) - {""} for number in numbers}
    if len(numbers) > 1 and numbers[0] and numbers == [*range(numbers[0], numbers[-1] + 1)] and len(alike) == 1:
        return f"perhaps other ranks' parts: of {name} the first is {numbers[0]}, and none before it is here; {_IT}"
    return ""


def _rest(name: str, of: str, number: int) -> str:
    """What stands behind the number in a name of that layer; empty: it is another's."""
    start = f"{of}.{number}." if of else f"{number}."
    return name.removeprefix(start) if name.startswith(start) else ""


def _broken_chain(weights: Weights) -> str:
    """A note, where each matrix gives one fraction of what the next one takes: FSDP cuts the first dim of each."""
    matrices = [s.shape for n, s in weights.items() if len(s.shape) == 2 and not _TABLE.search(n)]
    ratios = {b[1] / a[0] if a[0] else 0.0 for a, b in zip(matrices, matrices[1:], strict=False)}
    ranks = next(iter(ratios), 0.0)
    if len(matrices) < 3 or len(ratios) != 1 or ranks < 2 or not ranks.is_integer():
        return ""
    return (
        f"perhaps other ranks' parts: each matrix takes {int(ranks)} times what the one before it gives, as where FSDP "
        f"cut a model over {int(ranks)} ranks; {_IT}"
    )


_TAKEN = "is taken for the whole model"
_IT = f"it {_TAKEN}"
