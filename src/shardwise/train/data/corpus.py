"""From text sources to tokens: read, tokenize, split off held-out documents.

Tokens lie in one flat array of the smallest unsigned type that holds the vocabulary; with a cache folder they
lie in a file there and are memory-mapped, so that a corpus may be larger than memory and is tokenized once.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError, DataError
from shardwise.train.data.sources import STDLIB_BYTES, Document, Skipped, SourceFile, find_files, read_documents
from shardwise.train.data.token_data import TokenDataset as TokenDataset
from shardwise.train.data.tokens import Tokenizer

Tokens = NDArray[Any]
"""A flat array of uint8, uint16 or uint32."""

_COPY_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens of documents that follow one another. Made by `read_corpus`."""

    tokens: Tokens = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    """Of the documents: a file, or `file:line`."""
    stops: NDArray[np.int64] = field(repr=False)
    """Where each document ends in `tokens`."""
    num_bytes: int
    """Bytes of UTF-8 text that were tokenized."""
    tokenizer: str
    """Name of the tokenizer."""
    fingerprint: str
    """Equal for equal tokens only."""
    skipped: tuple[Skipped, ...] = ()
    """Files that a pattern found and that were left out, with the reason."""
    path: Path | None = None
    """The file that `tokens` are mapped from."""

    @property
    def num_documents(self) -> int:
        """Documents in the corpus."""
        return len(self.names)

    @property
    def num_tokens(self) -> int:
        """Tokens in the corpus."""
        return int(self.tokens.size)


def read_corpus(
    sources: Sequence[str | Path] | str | Path,
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    max_bytes: int | None = None,
    cache: str | Path | None = None,
) -> Corpus:
    """Read and tokenize text.

    Args:
        sources: files (text, `.jsonl`, `.parquet`), globs, or `"stdlib"`: the Python standard library's own
            `.py` files, in the order of their names.
        tokenizer: `ByteTokenizer()` or `load_tokenizer(path)`.
        text_field: key (jsonl) or column (parquet) of the text.
        max_bytes: read no further document once this many bytes of text were read; None: all, and 8 MB of the
            standard library.
        cache: folder where tokens are kept; a second call with equal files maps them and reads no text. Several
            processes may share it.

    Cost: the standard library as bytes takes about 0.3 s; a `tokenizers` file about 1 s per MB.

    Raises:
        DataError: a source is missing, empty, a directory, binary, truncated or malformed; names file and line.
        ConfigError: a library for the kind of file is not installed.

    >>> from shardwise.train.data.tokens import ByteTokenizer
    >>> read_corpus("stdlib", ByteTokenizer(), max_bytes=10_000).num_tokens >= 10_000
    True
    """
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    files = find_files(listed, STDLIB_BYTES if max_bytes is None else max_bytes)
    if cache is None:
        with _Sink(None, tokenizer) as sink:
            return _read(files, tokenizer, text_field, max_bytes, sink)
    stem = Path(cache) / _cache_key(files, tokenizer, text_field, max_bytes)
    if not stem.with_suffix(".json").exists():
        _make_folder(Path(cache))
        with _Sink(stem, tokenizer) as sink:
            _save_index(stem, _read(files, tokenizer, text_field, max_bytes, sink))
    return _load(stem, tokenizer)


def split(corpus: Corpus, holdout: float = 0.05) -> tuple[Tokens, Tokens]:
    """Tokens to train on and held-out tokens; whole documents, chosen by a hash of their names.

    The choice depends on names, sizes and `holdout` only. A corpus of one document gives its end. A corpus
    that lies in a file is split into two files beside it, once.

    Raises:
        ConfigError: `holdout` is not between 0 and 1.
        DataError: too few tokens for both parts.

    >>> from shardwise.train.data.tokens import ByteTokenizer
    >>> train, held_out = split(read_corpus("stdlib", ByteTokenizer(), max_bytes=100_000), holdout=0.1)
    """
    if not 0.0 < holdout < 1.0:
        raise ConfigError(f"holdout={holdout}: needed: a share between 0 and 1, such as 0.05; correct it")
    wanted = int(corpus.num_tokens * holdout)
    if wanted < 1 or corpus.num_tokens - wanted < 1:
        raise DataError(
            f"corpus of {corpus.num_tokens} tokens: too small to hold out a share of {holdout}; needed: at least one "
            "token on each side; give more text, or a share nearer to one half"
        )
    if corpus.num_documents == 1:
        return corpus.tokens[:-wanted], corpus.tokens[-wanted:]
    held = _held_out(corpus, wanted)
    stem = None if corpus.path is None else corpus.path.with_suffix(f".{holdout:g}")
    return _gather(corpus, ~held, stem, "train"), _gather(corpus, held, stem, "held-out")


def unigram_entropy(tokens: Tokens) -> float:
    """Entropy of the tokens' frequencies in nats per token: the loss of a model that knows nothing but how often.

    >>> unigram_entropy(np.array([0, 1, 0, 1], dtype=np.uint8))
    0.6931471805599453
    """
    counts = np.zeros(1, dtype=np.int64)
    for start in range(0, len(tokens), _COPY_TOKENS):
        more = np.bincount(tokens[start : start + _COPY_TOKENS], minlength=counts.size)
        more[: counts.size] += counts
        counts = more
    seen = counts[counts > 0] / max(1, len(tokens))
    return float(-(seen * np.log(seen)).sum())


class _Sink(AbstractContextManager["_Sink"]):
    """Collects tokens in memory, or in a file that gets its name only when it is complete."""

    def __init__(self, stem: Path | None, tokenizer: Tokenizer) -> None:
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.parts: list[Tokens] = []
        self.path = stem.with_suffix(".tokens") if stem is not None else None
        self._unfinished = _unfinished(stem) if stem is not None else None
        self._file: BinaryIO | None = self._unfinished.open("wb") if self._unfinished is not None else None
        self._hash = hashlib.sha256(f"{tokenizer.fingerprint} {self.dtype}".encode())

    def add(self, tokens: Tokens) -> None:
        self._hash.update(tokens.data)
        if self._file is not None:
            self._file.write(tokens.data)
        else:
            self.parts.append(tokens)

    def close(self) -> tuple[Tokens, str]:
        """The tokens and their fingerprint."""
        fingerprint = self._hash.hexdigest()[:16]
        if self._file is None:
            return np.concatenate(self.parts), fingerprint
        assert self.path is not None and self._unfinished is not None
        self._file.close()
        os.replace(self._unfinished, self.path)
        return np.memmap(self.path, dtype=self.dtype, mode="r"), fingerprint

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None and self._unfinished is not None:
            self._file.close()
            self._unfinished.unlink(missing_ok=True)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned integer type that holds tokens below `vocab_size`."""
    return np.dtype(np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _read(files: list[SourceFile], tokenizer: Tokenizer, text_field: str, max_bytes: int | None, sink: _Sink) -> Corpus:
    names: list[str] = []
    stops: list[int] = []
    skipped: list[Skipped] = []
    num_bytes = num_tokens = 0
    for document in _documents(files, text_field):
        if max_bytes is not None and num_bytes >= max_bytes:
            break
        if isinstance(document, Skipped):
            skipped.append(document)
            continue
        tokens = _encode(document, tokenizer, sink.dtype)
        if tokens.size:
            sink.add(tokens)
            num_bytes += len(document.text) if document.text.isascii() else len(document.text.encode())
            num_tokens += tokens.size
            names.append(document.name)
            stops.append(num_tokens)
    if not names:
        raise DataError(
            f"data: {len(files)} files hold no text at all (the first: {files[0].path}); needed: at least one "
            "document; correct the sources"
        )
    array, fingerprint = sink.close()
    return Corpus(
        tokens=array,
        names=tuple(names),
        stops=np.array(stops, dtype=np.int64),
        num_bytes=num_bytes,
        tokenizer=tokenizer.name,
        fingerprint=fingerprint,
        skipped=tuple(skipped),
        path=sink.path,
    )


def _documents(files: list[SourceFile], text_field: str) -> Iterator[Document | Skipped]:
    for file in files:
        yield from read_documents(file, text_field)


def _encode(document: Document, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Tokens:
    """A document's tokens, closed by the end token or by a newline."""
    text = document.text
    if tokenizer.end_id is None and text and not text.endswith("\n"):
        text += "\n"
    raw = np.asarray(tokenizer.encode(text))
    if tokenizer.end_id is not None:
        raw = np.append(raw, tokenizer.end_id)
    if raw.size == 0:
        return np.empty(0, dtype=dtype)
    if int(raw.max()) >= tokenizer.vocab_size or int(raw.min()) < 0:
        raise DataError(
            f"document {document.name}: tokenizer {tokenizer.name} gave tokens from {raw.min()} to {raw.max()}; "
            f"needed: 0 to {tokenizer.vocab_size - 1}, what its vocab_size says; correct the tokenizer"
        )
    return np.ascontiguousarray(raw, dtype=dtype)


def _held_out(corpus: Corpus, wanted: int) -> NDArray[np.bool_]:
    """Documents in the order of their names' hashes up to `wanted` tokens; one that is too long is passed over."""
    sizes = np.diff(corpus.stops, prepend=0)
    held = np.zeros(corpus.num_documents, dtype=np.bool_)
    order = sorted(range(corpus.num_documents), key=lambda i: (_hash(corpus.names[i]), i))
    taken = 0
    for index in order:
        if taken + sizes[index] <= wanted:
            held[index] = True
            taken += int(sizes[index])
    if not held.any():
        held[int(np.argmin(sizes))] = True
    return held


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()


def _gather(corpus: Corpus, chosen: NDArray[np.bool_], stem: Path | None, part: str) -> Tokens:
    """The tokens of the chosen documents, in order; as a file where the corpus is one."""
    starts = np.concatenate(([0], corpus.stops[:-1]))
    pieces = [corpus.tokens[a:b] for a, b in zip(starts[chosen], corpus.stops[chosen], strict=True)]
    if stem is None:
        return np.concatenate(pieces)
    path = stem.with_name(f"{stem.name}.{part}.tokens")
    if not path.exists():
        unfinished = _unfinished(path)
        with unfinished.open("wb") as out:
            for piece in pieces:
                for start in range(0, piece.size, _COPY_TOKENS):
                    out.write(np.ascontiguousarray(piece[start : start + _COPY_TOKENS]).data)
        os.replace(unfinished, path)
    return np.memmap(path, dtype=corpus.tokens.dtype, mode="r")


def _cache_key(files: list[SourceFile], tokenizer: Tokenizer, text_field: str, max_bytes: int | None) -> str:
    """Changes with any file's name, size or time, and with how it is read."""
    key = hashlib.sha256(json.dumps([tokenizer.fingerprint, text_field, max_bytes]).encode())
    for file in files:
        stat = file.path.stat()
        key.update(f"{file.path.absolute()} {stat.st_size} {stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return key.hexdigest()[:24]


def _unfinished(path: Path) -> Path:
    """A name of this writer's own beside it: processes of several containers may have the same number."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"token cache {folder}: cannot be made: {error.strerror}; needed: a folder that this user may write; "
            "give another, or none"
        ) from error


def _save_index(stem: Path, corpus: Corpus) -> None:
    """Written last and atomically: where it is, the tokens are complete."""
    index = {
        "names": corpus.names,
        "stops": corpus.stops.tolist(),
        "num_bytes": corpus.num_bytes,
        "fingerprint": corpus.fingerprint,
        "skipped": [[skipped.name, skipped.reason] for skipped in corpus.skipped],
    }
    unfinished = _unfinished(stem)
    unfinished.write_text(json.dumps(index))
    os.replace(unfinished, stem.with_suffix(".json"))


def _load(stem: Path, tokenizer: Tokenizer) -> Corpus:
    index = json.loads(stem.with_suffix(".json").read_text())
    path = stem.with_suffix(".tokens")
    return Corpus(
        tokens=np.memmap(path, dtype=token_dtype(tokenizer.vocab_size), mode="r"),
        names=tuple(index["names"]),
        stops=np.array(index["stops"], dtype=np.int64),
        num_bytes=index["num_bytes"],
        tokenizer=tokenizer.name,
        fingerprint=index["fingerprint"],
        skipped=tuple(Skipped(*pair) for pair in index["skipped"]),
        path=path,
    )
