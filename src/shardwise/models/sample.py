"""Draw text from a model that maps token numbers to logits."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.errors import UsageError


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    max_seq_len: int | None = None,
) -> torch.Tensor:
    """Continue each row of `ids`, one token at a time.

    Args:
        model: (batch, seq) token numbers to (batch, seq, vocab) logits, whole on this process. It is called in
            evaluation mode and left in the mode that it had.
        ids: (batch, seq) int64, seq at least 1.
        max_new_tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        seed: of the draws, which are made on the CPU: the same text on every device that gives the same logits.
        max_seq_len: longest context to show the model; None: what its `config` says, else all.

    Returns:
        (batch, seq + max_new_tokens) int64.

    Raises:
        UsageError: no token to start from, or a negative temperature.

    Cost: one forward of the whole context per token (no cache of keys and values).

    >>> generate(model, torch.tensor([[72, 105]]), 20)  # doctest: +SKIP
    """
    if ids.ndim != 2 or ids.shape[1] == 0 or temperature < 0:
        raise UsageError(
            f"generate: found ids of shape {tuple(ids.shape)} and temperature {temperature}; needed (batch, seq >= 1) "
            f"and temperature >= 0; start from at least one token, for example that of a newline"
        )
    if max_seq_len is None:
        max_seq_len = getattr(getattr(model, "config", None), "max_seq_len", None)
    generator = torch.Generator().manual_seed(seed)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context = ids if max_seq_len is None else ids[:, -max_seq_len:]
            logits = model(context)[:, -1].float().cpu()
            if temperature == 0:
                following = logits.argmax(-1, keepdim=True)
            else:
                chances = torch.softmax(logits / temperature, dim=-1)
                following = torch.multinomial(chances, 1, generator=generator)
            ids = torch.cat((ids, following.to(ids.device)), dim=1)
    finally:
        for module, mode in modes:
            module.training = mode
    return ids
