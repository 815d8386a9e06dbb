"""The pages of the documentation and the code blocks on them.

`python tools/pages.py` writes the files of examples/ into the blocks that show them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\S*) *([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: ```` ```python world=4 plan="dp2 tp2" ````."""

    page: str
    line: int
    language: str
    options: tuple[tuple[str, str], ...]
    text: str

    @property
    def world(self) -> int:
        """Number of processes that the block runs in."""
        return int(dict(self.options).get("world", 1))

    @property
    def plan(self) -> str:
        """Shorthand of the plan whose mesh the block is given; empty: no mesh."""
        return dict(self.options).get("plan", "")

    @property
    def argv(self) -> list[str]:
        """Name and arguments of the script that the block is; empty: it is no script."""
        return dict(self.options).get("argv", "").split()

    @property
    def file(self) -> str:
        """The file, from the root of the repository, that the block shows; empty: none."""
        return dict(self.options).get("file", "")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README, CHANGELOG and everything under docs/."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str, text: str) -> Iterator[Block]:
    r"""The fenced blocks of one page.

    >>> [block.language for block in blocks_of("p", "```python\nx = 1\n```\n")]
    ['python']
    """
    for match in FENCE.finditer(text):
        language, options, body = match.groups()
        pairs = tuple((key, value) for key, _, value in (word.partition("=") for word in shlex.split(options)))
        yield Block(page, text[: match.start()].count("\n") + 1, language, pairs, body)


def all_blocks() -> list[Block]:
    """The fenced blocks of all pages."""
    return [
        block
        for path in pages()
        for block in blocks_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]


def with_files(text: str) -> str:
    """A page whose blocks with `file=` hold what is in the file now."""
    for block in blocks_of("", text):
        if block.file:
            now = (ROOT / block.file).read_text(encoding="utf-8")
            text = text.replace(f"\n{block.text}```\n", f"\n{now}```\n", 1)
    return text


if __name__ == "__main__":
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := with_files(before)) != before:
            page.write_text(after, encoding="utf-8")
