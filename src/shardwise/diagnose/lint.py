"""`lint`: static checks for the classic mistakes of distributed training scripts.

One table of rules, in files by subject: `lint_ranks.py`, `lint_shards.py`, `lint_loops.py` and more. A script is
parsed, never run or imported; torch is not needed. To add a rule, write a predicate below the others of its subject,
then run `python -m shardwise.diagnose.lint > docs/lint.md`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.diagnose.linting.loops import LOOPS
from shardwise.diagnose.linting.names import end_of, line_of
from shardwise.diagnose.linting.random import RANDOM
from shardwise.diagnose.linting.ranks import RANKS
from shardwise.diagnose.linting.rows import ROWS
from shardwise.diagnose.linting.script import Script
from shardwise.diagnose.linting.shards import SHARDS
from shardwise.diagnose.linting.sums import SUMS
from shardwise.diagnose.linting.table import Facts, Hit, Rule
from shardwise.errors import DataError
from shardwise.findings import Finding, Severity, nearest

SECTIONS: Mapping[str, Mapping[str, Rule]] = {
    "What only some ranks reach": RANKS,
    "Sharded models": SHARDS,
    "Loops and data": {**LOOPS, **SUMS, **RANDOM, **ROWS},
}
"""The table by section."""

RULES: Mapping[str, Rule] = {rule_id: rule for rules in SECTIONS.values() for rule_id, rule in rules.items()}
"""The whole table: id -> rule."""

_IGNORE = re.compile(r"#\s*shardwise:\s*ignore\s*\[([^\]]*)\]")
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


@dataclass(frozen=True, kw_only=True)
class Located:
    """A finding and its place."""

    finding: Finding
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.finding}"

    def to_dict(self) -> dict[str, str | int]:
        """The row that `--json` prints: a finding's fields, `file` and `line`."""
        return {**self.finding.to_dict(), "file": self.file, "line": self.line}


def lint_files(paths: Iterable[str | Path]) -> list[Located]:
    """The findings of files, and of all `*.py` below directories, by file and line.

    Raises:
        DataError: a path that does not exist, a directory without `*.py`, a file that is no UTF-8 or no Python.
    """
    return [located for file in python_files(paths) for located in lint_text(read_script(file), str(file))]


def lint_text(text: str, file: str = "<text>") -> list[Located]:
    """The findings of one script, by line. Cost: some milliseconds per hundred lines.

    Raises:
        DataError: the text is no Python.

    >>> source = "import torch.distributed as dist; dist.get_rank() == 0 and dist.barrier()"
    >>> [(found.line, found.finding.id) for found in lint_text(source)]
    [(1, 'rank.collective')]
    """
    facts = Facts(Script(_parse(text, file), text))
    ignored = _ignored(text)
    found = list(_unknown_ignores(ignored, file))
    for rule in RULES.values():
        for hit in rule.test(facts):
            if not any(rule.id in ignored.get(line, ()) for line in _lines_of(hit)):
                found.append(_located(rule.id, hit, file))
    return sorted(set(found), key=lambda f: (f.line, f.finding.id))


def python_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files that paths name; of a directory all `*.py` below it, hidden and built ones left out."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = [f for f in sorted(path.rglob("*.py")) if not _is_skipped(f.relative_to(path))]
            if not below:
                raise DataError(f"no script to check: the directory {path} has no *.py file; name a script")
            files += below
        elif path.exists():
            files.append(path)
        else:
            beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
            hint = nearest(path.name, beside) if beside else f"the directory {path.parent} has no *.py file"
            raise DataError(f"cannot check {path}: there is no such file; {hint}")
    return list(dict.fromkeys(files))


def _is_skipped(path: Path) -> bool:
    return any(part in _SKIPPED or (part.startswith(".") and part not in (".", "..")) for part in path.parts)


def read_script(file: Path) -> str:
    """A file's text; DataError where it is no UTF-8 or cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"cannot check {file}: it is no UTF-8 text; found byte {error.object[error.start]:#04x} at {error.start}; "
            f"save it as UTF-8, or name a Python script"
        ) from None
    except OSError as error:
        raise DataError(f"cannot check {file}: {error.strerror}; name a file that can be read") from None


def _parse(text: str, file: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of the user's strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        said = getattr(error, "msg", None) or str(error) or type(error).__name__
        where = f", line {line}" if line else ""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise DataError(
            f"cannot check {file}{where}: it is no Python that {version} can parse; found: {said}; correct it first"
        ) from None


def _ignored(text: str) -> dict[int, tuple[str, ...]]:
    """Line -> ids that a comment there, or alone on the line before, silences."""
    found: dict[int, tuple[str, ...]] = {}
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            ids = tuple(word.strip() for word in match.group(1).split(",") if word.strip())
            alone = lines[token.start[0] - 1].strip().startswith("#")
            line = token.start[0] + alone
            found[line] = found.get(line, ()) + ids
    return found


def _unknown_ignores(ignored: Mapping[int, tuple[str, ...]], file: str) -> Iterator[Located]:
    for line, ids in ignored.items():
        for name in (name for name in ids if name not in RULES):
            finding = Finding(
                id="lint.ignore",
                severity="warning",
                what="a comment silences a rule that does not exist",
                evidence=f"ignore[{name}]",
                fix=nearest(name, list(RULES)),
            )
            yield Located(finding=finding, file=file, line=line)


def _lines_of(hit: Hit) -> range:
    return range(line_of(hit.node), end_of(hit.node) + 1)


def _located(rule_id: str, hit: Hit, file: str) -> Located:
    severity: Severity = hit.severity
    finding = Finding(id=rule_id, severity=severity, what=hit.what, evidence=hit.found, fix=hit.fix)
    return Located(finding=finding, file=file, line=line_of(hit.node))


def docs_text() -> str:
    """The text of docs/lint.md."""
    lines = [_HEAD.strip(), ""]
    for section, rules in SECTIONS.items():
        lines += [f"## {section}", "", "| id | what is found, and why it is wrong |", "|---|---|"]
        lines += [f"| `{rule.id}` | {rule.why} |" for rule in rules.values()] + [""]
    return "\n".join([*lines, _TAIL.strip()]) + "\n"


_HEAD = """
# Lint

`shardwise lint` reads a training script and names the classic mistakes, each with its line, the reason and what to do
instead. It parses the file, and neither runs nor imports it: no torch, no device, some milliseconds.

```console
$ shardwise lint train.py
$ shardwise lint src/ train.py --json
```

Exit code 0: nothing, or notes only; 1: an error or a warning; 2: no such file, no Python, no UTF-8. An *error* hangs,
fails or trains something else; a *warning* is wrong on data or hardware that is common; a *note* is right under a
condition that the script alone does not show. `--json` prints one object with `findings`, each
`{id, severity, what, evidence, fix, file, line}`.

A comment on the line, or alone on the line before, silences a rule by its id; an id that does not exist is a finding:

```text
if dist.get_rank(group) == 0:
    dist.barrier(leaders)  # shardwise: ignore[rank.collective]
```

It knows `torch.distributed`, DDP, FSDP (1 and 2), tensor parallelism, `torch.distributed.checkpoint`, Accelerate,
DeepSpeed, Horovod, Lightning, the Trainer of Hugging Face and Shardwise, however they are imported. It follows names
through assignments, functions and methods of one file: a rank test may be a variable, and a collective may hide in a
function.

Written by `python -m shardwise.diagnose.lint > docs/lint.md`; a test holds it current.
"""
_TAIL = """
## Limits

One file is one world: a model that is sharded in another file is not known to be. A file that imports nothing
distributed has no findings. The rules prefer silence to a false alarm: `shardwise verify` is the proof.
"""


if __name__ == "__main__":
    sys.stdout.write(docs_text())
