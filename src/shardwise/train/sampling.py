"""`sample_text`: text of a trained model where it lies, on any mesh: every rank takes part, no rank holds all of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.models.sample import generate
from shardwise.parallel.inputs import Signature, model_inputs
from shardwise.parallel.placed import Placed
from shardwise.train.loop import reshard
from shardwise.train.tokens import Tokenizer


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
        """(1, seq) int64 -> logits (1, seq, vocab), on every rank."""
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


def sample_text(
    placed: Placed, tokenizer: Tokenizer, prompt: str, *, seq_len: int, num_tokens: int = 200, seed: int = 0
) -> str:
    """The prompt and what the model writes after it. Collective: every rank calls it and gets the same text.

    Cost: one forward pass of the whole context per token.

    Raises:
        ModelError: the model does not return logits (batch, seq, vocab).
    """
    ids = torch.tensor([list(tokenizer.encode(prompt)) or [0]], dtype=torch.int64, device=placed.mesh.device)
    placed.train(False)
    try:
        out = generate(WholeModel(placed, seq_len, tokenizer.vocab_size), ids, num_tokens, 0.7, seed, seq_len)
    finally:
        placed.train(True)
        reshard(placed)
    if dist.is_initialized() and placed.mesh.world > 1:
        dist.broadcast(out, src=0)
    return tokenizer.decode(out[0].tolist())
