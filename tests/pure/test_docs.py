"""The pages: links lead somewhere, blocks are of kinds that some test runs, the generated page is current."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pages import ROOT, Block, all_blocks, blocks_of, pages
from reference import reference
from shardwise.errors import ExitCode

LANGUAGES = {"python", "console", "text", "toml", "json"}
BLOCKS = all_blocks()
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchor(heading: str) -> str:
    """The anchor that a heading gets on a rendered page."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(path: Path, text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in LINK.findall(prose):
        file, _, fragment = link.partition("#")
        if link.startswith(("https://", "http://")):
            continue
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            broken.append(link)
        elif fragment and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            broken += [] if fragment in map(anchor, headings) else [link]
    return broken


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


def test_negative_control_broken_links_are_found() -> None:
    assert broken_links(ROOT / "README.md", "[a](docs/none.md) [b](#none)") == ["docs/none.md", "#none"]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link).resolve() for link in LINK.findall(index)}
    found = {path for path in pages() if path.parent == ROOT / "docs"} - {ROOT / "docs" / "index.md"}
    assert sorted(path.name for path in found - linked) == []


def missing_files(text: str) -> list[str]:
    """Folders without a row in the page of the code, and files of a row that its folder does not have."""
    package = ROOT / "src" / "shardwise"
    table = text.partition("## Folders")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w/]+)` \| (.*) \|$", table, re.MULTILINE))
    named = [package / folder / file for folder, row in rows.items() for file in re.findall(r"`([\w*]+\.py)`", row)]
    folders = {path.parent.relative_to(package).as_posix() for path in package.glob("*/**/__init__.py")}
    lost = [path.relative_to(package).as_posix() for path in named if not list(path.parent.glob(path.name))]
    return sorted(folders ^ set(rows)) + lost


def test_the_page_of_the_code_names_every_folder_and_files_that_are_there() -> None:
    text = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    assert missing_files(text) == []
    lost = missing_files(text.replace("`kernels.py`", "`kernel.py`"))
    assert lost == ["plan/costs/kernel.py", "plan/eager/kernel.py"]
    assert missing_files(text.replace("\n| `cli` | ", "\n| `cly` | ")) == ["cli", "cly", "cly/main.py"]


def test_every_exit_code_is_on_its_page() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \| `(\w+)`", page, re.MULTILINE) == [(str(int(c)), c.name) for c in ExitCode]


def offence(block: Block) -> str:
    if block.language not in LANGUAGES:
        return f"unknown language {block.language!r}"
    if {key for key, _ in block.options} - {"world", "plan", "argv", "file"}:
        return f"unknown options {block.options}"
    try:
        if block.language == "python":
            ast.parse(block.text)
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.file and (ROOT / block.file).read_text(encoding="utf-8") != block.text:
            return f"{block.file} is another text: run `python tools/pages.py`"
    except (SyntaxError, tomllib.TOMLDecodeError) as error:
        return str(error)
    return ""


def test_there_are_blocks() -> None:
    assert len([block for block in BLOCKS if block.language == "python"]) > 15


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_is_of_a_kind_that_is_checked(block: Block) -> None:
    assert offence(block) == ""


@pytest.mark.parametrize(
    "text",
    [
        "```\n```\n",
        "```python\nx = = 1\n```\n",
        "```toml\nx\n```\n",
        "```python wrld=2\n```\n",
        "```python file=examples/digits.py\nx = 1\n```\n",
    ],
)
def test_negative_control_bad_blocks_are_found(text: str) -> None:
    (block,) = blocks_of("planted", text)
    assert offence(block)


def commands() -> list[tuple[str, str]]:
    """(block, line) of every `$ shardwise ...` on the pages."""
    lines = [(str(block), line) for block in BLOCKS if block.language == "console" for line in block.text.splitlines()]
    return [(block, line.partition("  #")[0]) for block, line in lines if line.startswith("$ shardwise ")]


@functools.cache
def help_of(verb: str) -> str:
    command = [Path(sys.executable).with_name("shardwise"), *verb.split(), "--help"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}).stdout


def unknown_flags(line: str) -> list[str]:
    words = shlex.split(line)[2:]
    verb = "" if words[0].startswith("-") else words[0]
    return [word for word in words if word.startswith("--") and word not in help_of(verb).split()] + (
        [] if "Usage" in help_of(verb) else [f"no verb {verb}"]
    )


@pytest.mark.parametrize(("block", "line"), commands())
def test_commands_on_the_pages_exist(block: str, line: str) -> None:
    assert unknown_flags(line) == []


@pytest.mark.parametrize("line", ["$ shardwise train --stepz 1", "$ shardwise trian"])
def test_negative_control_unknown_commands_are_found(line: str) -> None:
    assert unknown_flags(line)


def test_reference_is_current() -> None:
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_generating_the_reference_needs_no_torch() -> None:
    code = "import sys, reference; reference.reference(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "tools")
    assert ran.stdout.strip() == "False"
