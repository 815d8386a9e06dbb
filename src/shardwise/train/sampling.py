"""`generate`: tokens of a trained model where it lies, on any mesh: every rank takes part, no rank holds all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError, ReplicaError
from shardwise.models import sample
from shardwise.parallel.inputs import Signature, model_inputs
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.parallel.together import come_together
from shardwise.train.data.tokens import Tokenizer
from shardwise.train.followed.between import set_aside
from shardwise.train.guards.agreement import Facts, difference, exchanged
from shardwise.train.guards.replicas import checksum

LENGTHS = ("max_seq_len", "max_position_embeddings", "n_positions")
"""Attributes of a model's `config` that say how many positions it has."""


class WholeModel(nn.Module):
    """A placed model as a function of tokens, the same on every rank.

    Where the plan wants one shape (pipelines, compiled blocks, sharded sequences) rows are padded at the end to
    `seq_len`, which a causal model does not see.
    """

    def __init__(self, placed: Placed, seq_len: int, num_tokens: int | None = None) -> None:
        """`num_tokens`: how many the tokenizer has; embeddings may be padded to more."""
        super().__init__()
        self.placed, self.seq_len, self.num_tokens = placed, seq_len, num_tokens
        plan = placed.plan
        self.pads = plan.axes.pp > 1 or plan.compile or plan.tensor.sequence

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, seq) int64 -> logits (batch, seq, vocab), on every rank."""
        width = ids.shape[1]
        padded = nn.functional.pad(ids, (0, self.seq_len - width)) if self.pads else ids
        batch = {"input_ids": padded, "labels": padded}
        logits = self._pipelined(batch) if self.placed.pipeline is not None else self._whole(batch)
        return logits[:, :width, : self.num_tokens]

    def _whole(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        part = self.placed.parts[0]
        args, kwargs = model_inputs(batch, Signature.of(part.root))
        return as_logits(part.run(*args, **kwargs))

    def _pipelined(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The last stage has the logits; the ranks of the pp axis sum them with zeros."""
        mesh, pipeline = self.placed.mesh, self.placed.pipeline
        assert pipeline is not None
        seen: list[torch.Tensor] = []

        def keep(output: Any, _batch: Any) -> torch.Tensor:
            seen.append(as_logits(output).detach())
            return seen[-1].float().sum()

        pipeline.run([batch], keep, backward=False)
        shape = torch.zeros(3, dtype=torch.int64, device=mesh.device)
        if seen:
            shape += torch.tensor(seen[-1].shape, device=mesh.device)
        mesh.all_reduce_sum(shape, "pp")
        holders = torch.tensor(1.0 if seen else 0.0, device=mesh.device)
        mesh.all_reduce_sum(holders, "pp")
        size = [int(n / float(holders)) for n in shape.tolist()]
        logits = seen[-1].float() if seen else torch.zeros(size, device=mesh.device)
        return mesh.all_reduce_sum(logits.contiguous(), "pp") / holders


def as_logits(output: Any) -> torch.Tensor:
    """Logits (batch, seq, vocab) of what a model returned, whole."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ModelError(
            f"cannot sample text: the model returned {shape}, needed logits of shape (batch, seq, vocab); "
            f"train it with --no-sample"
        )
    return logits


def generate(
    placed: Placed,
    ids: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    seq_len: int | None = None,
) -> torch.Tensor:
    """Continue each row of `ids` with a placed model as it is, between two steps. Collective: every rank calls it.

    Args:
        placed: a causal language model; it is called in evaluation mode and left in training mode.
        ids: (batch, seq) int64, seq at least 1, the same on every rank.
        max_new_tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        seed: of the draws: the same tokens under every plan.
        seq_len: the longest context that the model is shown, and the width that rows are padded to under plans that
            want one shape (`pp`, `seq`, `compile`); None: that of the longest row there will be, up to what `config`
            says (`max_seq_len`, `max_position_embeddings`), and a multiple of `tp` under `seq`.

    Returns:
        (batch, seq + max_new_tokens) int64, the same on every rank.

    Raises:
        UsageError: no token to start from, or a negative temperature.
        ReplicaError: on all ranks: they were given other tokens, or dials.
        ModelError: the model does not return logits (batch, seq, vocab).

    Cost: one forward of the whole context per token, on every rank of a replica (no cache of keys and values).

    >>> generate(placed, torch.tensor([[72, 105]]), 20, temperature=0)  # doctest: +SKIP
    """
    whole = WholeModel(placed, seq_len or _width(placed, ids.shape[-1] + max_new_tokens))
    return _continued(whole, ids, max_new_tokens, temperature, seed)


@set_aside()
@torch.inference_mode(False)  # of a script around it: as in `evaluate`
def _continued(
    whole: WholeModel, ids: torch.Tensor, max_new_tokens: int, temperature: float, seed: int
) -> torch.Tensor:
    placed = whole.placed
    come_together("generate()", placed.mesh)
    _check_alike(placed.mesh, ids, {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed})
    try:
        with placed.in_mode(False), placed.gathering():
            out = sample.generate(whole, ids.to(placed.mesh.device), max_new_tokens, temperature, seed, whole.seq_len)
    finally:
        placed.reshard()
    if dist.is_initialized() and placed.mesh.world > 1:
        dist.broadcast(out, src=0)
    return out


def _check_alike(mesh: Mesh, ids: torch.Tensor, dials: Mapping[str, float]) -> None:
    """All ranks continue the same rows: those of one would come out as another's."""
    if mesh.world == 1 or dist.get_backend() == "fake":
        return
    given = {"shape of ids": str(tuple(ids.shape)), "ids": f"{checksum(ids):x}"}
    if everyones := exchanged(Facts(0, given | {name: repr(dial) for name, dial in dials.items()}, {}), mesh):
        raise ReplicaError(
            f"generate(): {difference(everyones)}; needed: the same on every rank, which all compute the same rows; "
            "give it all rows on each"
        )


def _width(placed: Placed, longest: int) -> int:
    """Tokens of the longest context: as many as there will be, a multiple of `tp`, and no more than the model takes."""
    config = getattr(placed.parts[0].root, "config", None)
    most = next((int(n) for key in LENGTHS if (n := getattr(config, key, None))), None)
    unit = placed.plan.axes.tp if placed.plan.tensor.sequence else 1
    width = -(-longest // unit) * unit
    return width if most is None else min(width, most // unit * unit)


def sample_text(
    placed: Placed, tokenizer: Tokenizer, prompt: str, *, seq_len: int, num_tokens: int = 200, seed: int = 0
) -> str:
    """The prompt and what the model writes after it; see `generate`."""
    ids = torch.tensor([list(tokenizer.encode(prompt)) or [0]], dtype=torch.int64)
    whole = WholeModel(placed, seq_len, tokenizer.vocab_size)
    return tokenizer.decode(_continued(whole, ids, num_tokens, 0.7, seed)[0].tolist())
