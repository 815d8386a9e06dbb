"""Tokenizers: bytes, or a `tokenizers` JSON file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError, DataError
from shardwise.extras import optional_module

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""Names that end-of-text tokens go by, in the order they are looked for."""


class Tokenizer(Protocol):
    """What turns text into integers below `vocab_size` and back."""

    @property
    def name(self) -> str:
        """For people: shown in tables."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokenizers only: keys caches and checkpoints."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the greatest token."""
        ...

    @property
    def end_id(self) -> int | None:
        """The token put after each document; None: a newline where the document does not end in one."""
        ...

    def encode(self, text: str) -> Sequence[int] | NDArray[Any]:
        """Text -> tokens, without special tokens."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens -> text."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Each byte of the UTF-8 text is a token: 256 of them, nothing to download, nothing unknown.

    >>> ByteTokenizer().encode("AB").tolist()
    [65, 66]
    """

    name: str = "bytes"
    fingerprint: str = "bytes-1"
    vocab_size: int = 256
    end_id: int | None = None

    def encode(self, text: str) -> NDArray[np.uint8]:
        """Text -> its bytes, uint8."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes -> text; those that are no UTF-8 (a character cut in two) show as U+FFFD."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library; made by `load_tokenizer`."""

    def __init__(self, inner: Any, name: str, fingerprint: str) -> None:
        self._inner = inner
        self.name = name
        self.fingerprint = fingerprint
        ids: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        self.end_id: int | None = next((ids[end] for end in END_NAMES if end in ids), None)

    def encode(self, text: str) -> list[int]:
        """Text -> tokens, without special tokens."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens -> text, special tokens left out."""
        return str(self._inner.decode([int(token) for token in tokens]))


def load_tokenizer(path: str | Path) -> FileTokenizer:
    """A tokenizer from the JSON file that the `tokenizers` library writes (`tokenizer.json`).

    Raises:
        DataError: the file is missing, or is no such file.
        ConfigError: the `tokenizers` library is not installed.

    >>> load_tokenizer("tokenizer.json").vocab_size  # doctest: +SKIP
    32000
    """
    file = Path(path)
    if file.is_dir():
        raise DataError(f"tokenizer {file}: is a directory; needed: a JSON file; give {file / 'tokenizer.json'}")
    if not file.is_file():
        raise DataError(
            f"tokenizer {file}: no such file; needed: a JSON file of the tokenizers library; correct the path, "
            "or use the byte tokenizer"
        )
    library = optional_module("tokenizers", extra="tokenizers", need=f"tokenizer {file}")
    content = file.read_bytes()
    try:
        inner = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"tokenizer {file}: not a file of the tokenizers library: {error}; needed: what Tokenizer.save writes; "
            "export it again, or check that the download is complete"
        ) from error
    tokenizer = FileTokenizer(inner, file.stem, hashlib.sha256(content).hexdigest()[:16])
    if tokenizer.vocab_size == 0:
        raise DataError(f"tokenizer {file}: its vocabulary is empty; needed: at least one token; export it again")
    return tokenizer


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer whose tokens the model's embedding does not hold.

    Raises:
        ConfigError: `vocab_size` of the model is smaller.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.name}: gives tokens up to {tokenizer.vocab_size - 1}, the model's vocabulary holds "
            f"{vocab_size}; needed: vocab_size >= {tokenizer.vocab_size}; enlarge the model's vocabulary, "
            "or choose another tokenizer"
        )
