"""Text sources: what is read, in which order, what is held out, and the error of each bad file."""

from __future__ import annotations

import json
import time
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader

from shardwise import extras
from shardwise.errors import ConfigError, DataError
from shardwise.train.data import corpus, sources
from shardwise.train.data.corpus import TokenDataset, read_corpus, split, token_dtype, unigram_entropy
from shardwise.train.data.tokens import ByteTokenizer, check_vocab, load_tokenizer

BYTES = ByteTokenizer()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---------------------------------------------------------------- reading


def test_texts_follow_one_another_in_the_order_given(tmp_path: Path) -> None:
    b, a = write(tmp_path / "b.txt", "second"), write(tmp_path / "a.txt", "\ufefffirst ä\n")
    corpus = read_corpus([b, a], BYTES)
    assert BYTES.decode(corpus.tokens.tolist()) == "second\nfirst ä\n"
    assert corpus.names == (str(b), str(a)) and corpus.stops.tolist() == [7, 16]
    assert corpus.tokens.dtype == np.uint8 and corpus.num_bytes == 15


def test_globs_are_sorted_and_leave_out_empty_files_openly(tmp_path: Path) -> None:
    for name, text in (("z.md", "z\n"), ("sub/a.md", "a\n"), ("e.md", ""), ("x.txt", "x\n")):
        write(tmp_path / name, text)
    corpus = read_corpus(str(tmp_path / "**" / "*.md"), BYTES)
    assert BYTES.decode(corpus.tokens.tolist()) == "a\nz\n"
    assert [(Path(s.name).name, s.reason) for s in corpus.skipped] == [("e.md", "empty")]


def test_jsonl_and_parquet_give_a_document_per_row(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", '{"text": "one"}\n\n{"text": "two\\n", "id": 3}\n')
    pq.write_table(pa.table({"id": [1, 2], "body": ["three", "four"]}), tmp_path / "b.parquet")
    corpus = read_corpus(lines, BYTES)
    assert BYTES.decode(corpus.tokens.tolist()) == "one\ntwo\n"
    assert corpus.names == (f"{lines}:1", f"{lines}:3")
    table = read_corpus(tmp_path / "b.parquet", BYTES, text_field="body")
    assert BYTES.decode(table.tokens.tolist()) == "three\nfour\n" and table.num_documents == 2


def test_the_standard_library_is_read_in_two_seconds_and_always_the_same() -> None:
    start = time.process_time()
    corpus = read_corpus("stdlib", BYTES)
    assert time.process_time() - start < 2.0
    assert list(corpus.names) == sorted(corpus.names) and "argparse.py" in corpus.names
    assert not any("site-packages" in name or "test/" in name for name in corpus.names)
    assert 7_500_000 < corpus.num_bytes < 9_000_000
    small, again = (read_corpus("stdlib", BYTES, max_bytes=100_000) for _ in range(2))
    assert small.fingerprint == again.fingerprint != corpus.fingerprint
    assert small.names == corpus.names[: small.num_documents] and small.num_bytes >= 100_000


def test_the_cache_is_mapped_and_follows_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = write(tmp_path / "a.txt", "abc\n"), tmp_path / "cache" / "deep"
    plain, first = read_corpus(file, BYTES), read_corpus(file, BYTES, cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr("shardwise.train.data.corpus.read_documents", None)  # a second call reads no text
        second = read_corpus(file, BYTES, cache=cache)
    assert isinstance(second.tokens, np.memmap)
    assert plain.fingerprint == first.fingerprint == second.fingerprint
    assert (second.tokens.tolist(), second.names) == (plain.tokens.tolist(), plain.names)
    write(file, "abcdef\n")
    assert read_corpus(file, BYTES, cache=cache).num_tokens == 7
    bad = write(tmp_path / "bad.txt", b"\0")
    with pytest.raises(DataError):
        read_corpus([file, bad], BYTES, cache=cache)
    assert not list(cache.glob("*.part"))
    with pytest.raises(DataError, match="token cache .* cannot be made"):
        read_corpus(file, BYTES, cache=file / "below")


# ---------------------------------------------------------------- bad input: file and line


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"a\.txt: is empty"),
        ("a.jsonl", "", r"a\.jsonl: is empty"),
        ("a.jsonl", "\n\n", r"a\.jsonl: is empty"),
        ("a.txt", b"one\ntwo\0three", r"a\.txt, line 2: found a NUL byte at offset 7"),
        ("a.txt", b"one\ntwo\nth\xffree", r"a\.txt, line 3: found byte 0xff, which is no UTF-8 .* at offset 10"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl, line 2: found byte 0xff"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b', r"a\.jsonl, line 2: no JSON.*looks truncated"),
        ("a.jsonl", '{"text": "a"}\n{text}\n{"text": "b"}\n', r"a\.jsonl, line 2: no JSON: .* at column 2; needed"),
        ("a.jsonl", '["a"]\n', r"a\.jsonl, line 1: found a JSON list"),
        ("a.jsonl", '{"txet": "a"}\n', r"line 1: no key 'text'.*did you mean 'txet'"),
        ("a.jsonl", '{"text": null}\n', r"line 1: 'text' holds nothing"),
        ("a.json", "[1]", r"\.json is not read.*named \.jsonl"),
        ("a.parquet", "PAR1 and no more", r"a\.parquet: pyarrow cannot read it after row 0.*truncated"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, name: str, content: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_corpus(write(tmp_path / name, content), BYTES)


def test_bad_sources_are_named(tmp_path: Path) -> None:
    write(tmp_path / "data.txt", "x")
    write(tmp_path / "empty" / "a.txt", "")
    for source, message in (
        ([], "no source given"),
        (tmp_path, r"is a directory; .*\*\*/\*\.txt"),
        (tmp_path / "date.txt", "no such file.*did you mean 'data.txt'"),
        (tmp_path / "nowhere" / "a.txt", "no folder"),
        (str(tmp_path / "*.md"), "the pattern matches no file"),
        (str(tmp_path / "empty" / "*.txt"), "1 files hold no text at all"),
    ):
        with pytest.raises(DataError, match=message):
            read_corpus(source, BYTES)


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None]}), whole)
    with pytest.raises(DataError, match="row 2: 'text' holds nothing"):
        read_corpus(whole, BYTES)
    with pytest.raises(DataError, match="no column 'txt'.*did you mean 'text'"):
        read_corpus(whole, BYTES, text_field="txt")
    cut = write(tmp_path / "cut.parquet", whole.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut\.parquet: pyarrow cannot read it"):
        read_corpus(cut, BYTES)


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(extras, "import_module", missing)
    file = write(tmp_path / "a.parquet", "x")
    with pytest.raises(ConfigError, match=r"pyarrow is not installed.*pip install 'shardwise\[data\]'"):
        read_corpus(file, BYTES)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[tokenizers\]'"):
        load_tokenizer(file)


# ---------------------------------------------------------------- split and entropy


def test_whole_documents_are_held_out_and_nothing_is_lost(tmp_path: Path) -> None:
    for number in range(100):
        write(tmp_path / f"{number:03}.txt", f"{number:03}" * 5 + "\n")
    for cache in (None, tmp_path / "cache"):
        corpus = read_corpus(str(tmp_path / "*.txt"), BYTES, cache=cache)
        train, held_out = split(corpus, holdout=0.1)
        assert held_out.size == 160 and train.size == 1440
        lines = [BYTES.decode(part.tolist()).splitlines() for part in (train, held_out)]
        assert sorted(lines[0] + lines[1]) == [f"{number:03}" * 5 for number in range(100)]
        assert lines == [sorted(lines[0]), sorted(lines[1])] and not set(lines[0]) & set(lines[1])
        assert split(corpus, holdout=0.1)[1].tolist() == held_out.tolist()
        assert isinstance(train, np.memmap) == (cache is not None)
        assert split(corpus, holdout=0.2)[1].size == 320


def test_one_document_gives_its_end_and_too_little_is_refused(tmp_path: Path) -> None:
    corpus = read_corpus(write(tmp_path / "a.txt", "0123456789" * 10), BYTES)
    train, held_out = split(corpus, holdout=0.1)
    assert (train.size, held_out.size) == (91, 10)
    with pytest.raises(ConfigError, match="holdout=1.5"):
        split(corpus, holdout=1.5)
    with pytest.raises(DataError, match="too small to hold out"):
        split(corpus, holdout=0.001)


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(log(256))
    assert unigram_entropy(np.zeros(9, dtype=np.uint16)) == 0.0
    uneven = np.array([0] * 9 + [70_000], dtype=np.uint32)
    assert unigram_entropy(uneven) == pytest.approx(-0.9 * log(0.9) - 0.1 * log(0.1))
    assert unigram_entropy(np.concatenate([np.zeros(1 << 22), np.ones(1 << 22)]).astype(int)) == pytest.approx(log(2))


# ---------------------------------------------------------------- rows of tokens


@pytest.mark.parametrize("num_tokens", [2, 7, 8, 9, 10, 25])
@pytest.mark.parametrize("seq_len", [1, 4, 8])
def test_each_token_but_the_first_is_predicted_once(num_tokens: int, seq_len: int) -> None:
    stream = np.arange(100, 100 + num_tokens, dtype=np.uint16)
    data = TokenDataset(stream, seq_len)
    rows = [data[i] for i in range(len(data))]
    labels = torch.cat([row["labels"] for row in rows])
    inputs = torch.cat([row["input_ids"] for row in rows])
    assert labels[labels != -100].tolist() == stream[1:].tolist()
    assert inputs[labels != -100].tolist() == stream[:-1].tolist()
    assert all(row["labels"].shape == (seq_len,) and row["labels"].dtype == torch.int64 for row in rows)
    assert data.num_targets == num_tokens - 1
    assert (labels == -100).sum() < seq_len


def test_a_batch_is_its_rows_and_torchs_own_loader_reads_it() -> None:
    data = TokenDataset(torch.arange(30), 4)
    batch = data.get_batch([0, 7, 3])
    assert batch["input_ids"].is_contiguous() and batch["labels"].is_contiguous()
    for key in ("input_ids", "labels"):
        assert torch.equal(batch[key], torch.stack([data[i][key] for i in (0, 7, 3)]))
    assert torch.equal(next(iter(DataLoader(data, batch_size=3)))["labels"], data.get_batch([0, 1, 2])["labels"])
    alone = data[2]
    alone["labels"][0] = 77  # a row's labels are no view of its inputs
    assert alone["input_ids"].tolist() == [8, 9, 10, 11]
    assert torch.equal(data[-1]["labels"], data[7]["labels"])
    with pytest.raises(IndexError, match="row 8 of a TokenDataset with 8 rows"):
        data[8]


def test_what_is_no_array_of_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="1 tokens, so there is no next token"):
        TokenDataset(np.zeros(1, dtype=np.uint8), 4)
    with pytest.raises(DataError, match="float64 with shape"):
        TokenDataset(np.zeros((2, 2)), 4)
    with pytest.raises(ConfigError, match="seq_len=0"):
        TokenDataset(np.zeros(9, dtype=np.uint8), 0)


# ---------------------------------------------------------------- tokenizers


@pytest.fixture
def words(tmp_path: Path) -> Path:
    inner = Tokenizer(WordLevel({"<unk>": 0, "red": 1, "green": 2, "</s>": 300}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def test_a_tokenizer_file(tmp_path: Path, words: Path) -> None:
    tokenizer = load_tokenizer(words)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_id) == ("words", 301, 300)
    assert tokenizer.decode(tokenizer.encode("green red blue")) == "green red <unk>"
    corpus = read_corpus([write(tmp_path / "a.txt", "red green"), write(tmp_path / "b.txt", "red")], tokenizer)
    assert corpus.tokens.tolist() == [1, 2, 300, 1, 300] and corpus.tokens.dtype == np.uint16
    assert load_tokenizer(words).fingerprint == tokenizer.fingerprint


def test_a_vocabulary_larger_than_the_models_is_refused(words: Path) -> None:
    check_vocab(load_tokenizer(words), 301)
    with pytest.raises(
        ConfigError, match=r"tokens up to 300, the model's vocabulary holds 256; needed: vocab_size >= 301"
    ):
        check_vocab(load_tokenizer(words), 256)


def test_bad_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(DataError, match="is a directory"):
        load_tokenizer(tmp_path)
    for content in ("", "{", json.dumps({"a": 1}), b"\xff\x00"):
        with pytest.raises(DataError, match="not a file of the tokenizers library"):
            load_tokenizer(write(tmp_path / "bad.json", content))


def test_a_tokenizer_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gave tokens from 10 to 97; needed: 0 to 63"):
        read_corpus(write(tmp_path / "a.txt", "a"), ByteTokenizer(vocab_size=64))


def test_bytes_and_types() -> None:
    assert BYTES.decode(BYTES.encode("größe ✓").tolist()) == "größe ✓"
    assert BYTES.decode([0xC3]) == "\ufffd"
    assert [token_dtype(n).name for n in (256, 257, 65536, 65537)] == ["uint8", "uint16", "uint16", "uint32"]
    assert sources.STDLIB == "stdlib"


def test_containers_whose_processes_have_the_same_number_share_a_cache(tmp_path: Path) -> None:
    """One took the other's unfinished file away."""
    sinks = [corpus._Sink(tmp_path / "tokens", BYTES) for _ in range(2)]
    for sink in sinks:
        sink.add(np.arange(9, dtype=np.uint8))
    assert all(sink.close()[0].tolist() == list(range(9)) for sink in sinks)
    assert not list(tmp_path.glob("*.part"))
