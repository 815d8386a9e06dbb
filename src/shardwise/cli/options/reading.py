"""How a module was read that `plan` and `estimate` are given: what of its step is assumed."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.model.profile import Profile


def how_read(profile: Profile) -> Iterator[str]:
    """What could not be seen of a module as it trains."""
    if profile.wide:
        yield "its forward was read in fp32, for it does not run in 16 bits: copies to fp32 are not counted"
    if profile.one_number:
        yield "a step goes backward from the number that its forward returns: other outputs have no part in its loss"
    if profile.added:
        yield (
            f"a step goes backward from its logits (or first output) and from {profile.added} number(s) beside them, "
            "as a router's loss is added; a number that is the whole loss is to be called `loss`"
        )
    if profile.calls and profile.unseen:
        yield "its blocks are called more than once in a forward: memory is rough, the most under recompute (--trace)"
    if profile.unseen:
        yield f"no step of it runs without values ({profile.unseen}): what it holds is put together from its operators"
