"""`TokenDataset`: rows of a fixed length out of a flat array of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.errors import ConfigError, DataError

IGNORED_LABEL = -100
"""The label of a position without a next token; `token_cross_entropy` gives it no weight."""


class TokenDataset:
    """Rows of `seq_len` tokens with the tokens that follow them.

    Row i reads tokens [i * seq_len, (i + 1) * seq_len] and predicts all but the first: rows share one token, so
    that each token but the very first is predicted exactly once. The last row is filled up with token 0 and
    labels -100. An array that is mapped from a file is read row by row.

    Args:
        tokens: a flat array (or memory map) of integers.
        seq_len: tokens per row.

    Raises:
        DataError: fewer than two tokens, or not a flat array of integers.
        ConfigError: `seq_len` is not positive.

    >>> TokenDataset(np.arange(6, dtype=np.uint8), seq_len=3)[1]["labels"].tolist()
    [4, 5, -100]
    """

    def __init__(self, tokens: NDArray[Any] | torch.Tensor, seq_len: int) -> None:
        array = tokens.numpy() if isinstance(tokens, torch.Tensor) else tokens
        if seq_len < 1:
            raise ConfigError(f"TokenDataset: seq_len={seq_len}; needed: 1 or more; correct seq_len")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"TokenDataset: found an array of {array.dtype} with shape {tuple(array.shape)}; needed: a flat array "
                "of integers; give the tokens of read_corpus, or ravel yours"
            )
        if array.size < 2:
            raise DataError(
                f"TokenDataset: {array.size} tokens, so there is no next token to predict; needed: at least 2; "
                "give more text, or a smaller held-out share"
            )
        self.tokens = array
        self.seq_len = seq_len
        self._num_whole = (array.size - 1) // seq_len
        self._window = np.arange(seq_len + 1, dtype=np.int64)

    def __len__(self) -> int:
        """Number of rows."""
        return -(-(self.tokens.size - 1) // self.seq_len)

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted in one pass."""
        return int(self.tokens.size) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Row `index`: input_ids and labels, int64, shape (seq_len,)."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a TokenDataset with {len(self)} rows")
        return {key: value[0] for key, value in self.get_batch([index % len(self)]).items()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """Rows, read together."""
        batch = self.get_batch(indices)
        return [
            {"input_ids": inputs, "labels": labels}
            for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        ]

    def get_batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """A collated micro-batch: input_ids and labels, int64, shape (len(indices), seq_len)."""
        rows = np.asarray(indices, dtype=np.int64)
        at = rows[:, None] * self.seq_len + self._window
        short = rows >= self._num_whole
        any_short = bool(short.any())
        read = self.tokens[np.minimum(at, self.tokens.size - 1) if any_short else at].astype(np.int64)
        inputs, labels = read[:, :-1].copy(), read[:, 1:].copy()  # never two views of the same row
        if any_short:
            inputs[at[:, :-1] >= self.tokens.size] = 0
            labels[at[:, 1:] >= self.tokens.size] = IGNORED_LABEL
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
