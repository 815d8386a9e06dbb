"""Words that name a cluster (`h100:8x16`, `h100:8x16@eth100`), and what the table of devices and links says of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from shardwise.errors import UsageError
from shardwise.findings import nearest
from shardwise.records import RecordError

MIXED = (
    "needed one kind of device and a number of equal nodes, as h100:8x16; a job goes at the pace of its slowest node: "
    "plan for one kind, or for as many of the smallest as there are nodes"
)


class Word(NamedTuple):
    """What a word says: names, sizes, and the entries of the table, of the device without its links and shape."""

    device: dict[str, Any]
    nodes: int
    per_node: int
    local: dict[str, float]
    network: dict[str, float]
    shape: dict[str, Any]
    """`domain` and `host_bandwidth`, where the device says."""
    origins: tuple[str, ...] = ()
    """A line for the size that it does not say."""


def device_names() -> list[str]:
    """Names that presets know."""
    return [name for name in table() if name != "link"]


def device_named(text: str) -> str:
    """The preset that is meant by a usual spelling: of the maker, the form or the memory; the text where none is.

    >>> [device_named(text) for text in ("H100-80GB", "a100_80gb", "A100-SXM4-40GB", "4090", "a10g", "a100")]
    ['h100', 'a100-80g', 'a100-40g', 'rtx4090', 'a10g', 'a100']
    """
    name = text.lower().replace("_", "-")
    name = re.sub(r"^(nvidia|geforce|tesla|amd|instinct)-|-sxm\d?\b|-nvl\d+", "", name)
    sized = re.fullmatch(r"(.+)-(\d{2,3})(g|gb|gib)?", name)
    base, gib = (sized.group(1), int(sized.group(2))) if sized else (name, 0)
    for same in (name, name.replace("-", ""), f"rtx{name}", f"{base}-{gib}g"):
        if same in device_names():
            return same
    kinds = [kind for kind in device_names() if kind == base or kind.startswith(f"{base}-")]
    fitting = [kind for kind in kinds if abs(table()[kind]["memory"] / 2**30 - gib) <= 0.08 * gib]
    return base if base in fitting else fitting[0] if len(fitting) == 1 else name


def read_word(text: str) -> Word:
    """What `device:per-nodexnodes@network` says; `@local/network` names both tiers.

    Raises:
        UsageError: an unknown device or link, with the nearest; a size that is none; several kinds of nodes.
    """
    if re.search(r"[,+;]", text):
        raise UsageError(f"cluster {text!r}: found several kinds of nodes; {MIXED}")
    match = re.fullmatch(r"([a-zA-Z0-9_.-]+?)(?::(\d{1,9})(?:x(\d{1,9}))?)?(?:@([a-zA-Z0-9/-]+))?", text, re.ASCII)
    name = device_named(match.group(1)) if match else text
    known, colon, size = text.partition(":")
    if match is None and colon and device_named(known) in device_names():
        raise UsageError(
            f"cluster {text[:80]!r}: found the size {size[:40]!r}, needed devices per node and nodes, of at most nine "
            f"digits, and the network after an @: {known}:8, {known}:8x16 or {known}:8x16@eth100"
        )
    if match is None or name not in device_names():
        raise UsageError(
            f"cluster {text!r}: unknown; {_near(name)} A preset is written device:per-nodexnodes, as h100:8x16, and "
            "its network after an @, as h100:8x16@eth100; or give a .toml file, `probe` or `detect`"
        )
    entry = dict(table()[name])
    tiers = [entry.pop("local"), entry.pop("network")]
    given = match.group(4).lower().split("/") if match.group(4) else []
    if len(given) > 2:
        raise UsageError(f"cluster {text!r}: found {len(given)} links, needed @network, or @local/network")
    local, network = (_link(text, link) for link in tiers[: 2 - len(given)] + given)
    shape: dict[str, Any] = {key: entry.pop(key) for key in ("per_node", "domain", "host_bandwidth") if key in entry}
    per_node, nodes = int(match.group(2) or shape.get("per_node", 8)), int(match.group(3) or 1)
    shape.pop("per_node", None)
    if not per_node or not nodes:
        raise UsageError(f"cluster {text!r}: found a size of 0, needed at least one node of one device")
    origins = () if match.group(2) else (f"per_node: assumed, {per_node} in one node (give {name}:{per_node})",)
    return Word({"name": name, **entry}, nodes, per_node, local, network, shape, origins)


def on_preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """A cluster file's keys; over those of a preset, where it names one: `preset = "h100:8x2"`.

    Raises:
        RecordError: a preset that is not known, or no text.
    """
    given = dict(data)
    if (text := given.pop("preset", None)) is None:
        return given
    if not isinstance(text, str) or not text:
        raise RecordError(("preset",), f"found {text!r}, needed the name of a preset, as h100:8x16")
    try:
        word = read_word(text)
    except UsageError as error:
        raise RecordError(("preset",), str(error)) from None
    known = word._asdict()
    unsaid = [line for line in known.pop("origins") if "per_node" not in given]
    known |= {"name": f"{text}, changed" if {*given} - {"format", "origins"} else text, **known.pop("shape")}
    lines, origins = given.get("origins", []), unsaid
    for key, value in known.items():
        own = given.get(key, {})
        if key not in given and isinstance(value, dict):
            given[key] = {"origin": "table", **value}
            origins.append(f"{key}: table, {text}")
        elif isinstance(value, dict) and isinstance(own, dict):
            given[key], left = _over(value, own)
            origins += [f"{key}.{path}: table, {text}" for path in left]
        else:
            given.setdefault(key, value)
    return {**given, "origins": [*lines, *origins]} if isinstance(lines, list) else given


def _over(known: dict[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A table's keys over those that are known, and which of these are left as they are."""
    both, left = {**known, **own}, [key for key in known if key not in own]
    for key in (key for key in known if key in own and isinstance(known[key], dict) and isinstance(own[key], dict)):
        both[key], inner = _over(known[key], own[key])
        left += [f"{key}.{path}" for path in inner]
    return both, left


def _near(name: str) -> str:
    """The variants of a device that was named in part, else the nearest names."""
    variants = [known for known in device_names() if known.startswith(f"{name}-")]
    return f"did you mean {' or '.join(map(repr, variants))}?" if variants else nearest(name, device_names())


def _link(text: str, name: str) -> dict[str, float]:
    links = table()["link"]
    if name not in links:
        hint = nearest(name, list(links))
        raise UsageError(f"cluster {text!r}: unknown link {name!r}; {hint} (docs/planner-accuracy.md lists all)")
    return dict(links[name])


def domain_fault(domain: int, nodes: int, per_node: int, device: str) -> str:
    """Why so many devices cannot share a fast domain; empty: they can.

    A device's own domain may be larger than what is used of it: two nodes of a rack of 72.

    >>> domain_fault(3, 2, 8, "h100"), domain_fault(4, 2, 8, "h100"), domain_fault(72, 2, 4, "gb200")
    ('found 3, which neither divides the 8 devices of a node nor is a number of nodes; needed 8, or a divisor', '', '')
    """
    if not domain or table().get(device, {}).get("domain") == domain:
        return ""
    if per_node % domain and domain % per_node:
        return (
            f"found {domain}, which neither divides the {per_node} devices of a node nor is a number of nodes; needed "
            f"{per_node}, or a divisor"
        )
    if domain > max(nodes, 1) * per_node:
        return f"found {domain}, and {nodes} nodes of {per_node} have {nodes * per_node} devices; needed at most those"
    return ""


@cache
def table() -> dict[str, dict[str, Any]]:
    """`devices.toml`."""
    return tomllib.loads(files("shardwise.hardware").joinpath("devices.toml").read_text(encoding="utf-8"))
