"""`shardwise lint`: the classic mistakes of distributed scripts, by line. Neither runs nor imports them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from shardwise.cli.output import console, print_json
from shardwise.diagnose.lint import Located, lint_text, python_files, read_script
from shardwise.errors import ExitCode

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def lint(
    paths: Annotated[list[str], typer.Argument(help="Scripts, and directories whose *.py files to read.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check scripts for the classic mistakes: exit 0 without alarms, 1 with an error or a warning, 2 on a bad file."""
    files = python_files(paths)
    found = [located for file in files for located in lint_text(read_script(file), str(file))]
    alarms = [located for located in found if located.finding.severity != "note"]
    if json:
        print_json({"files": [str(file) for file in files], "findings": [located.to_dict() for located in found]})
    else:
        _show(found, len(files))
    if alarms:
        raise typer.Exit(ExitCode.REFUSED)


def _show(found: list[Located], num_files: int) -> None:
    out = console()
    for located in found:
        finding = located.finding
        head = Text(f"{located.file}:{located.line}: ", "bold")
        head.append(finding.severity, _COLOURS[finding.severity]).append(f" {finding.id}: {finding.what}")
        out.print(head, soft_wrap=True)
        for label, text in (("found", finding.evidence), ("do", finding.fix)):
            if text:
                out.print(Text(f"    {label}: {text}"), soft_wrap=True)
    counts = [(s, sum(located.finding.severity == s for located in found)) for s in _COLOURS]
    said = ", ".join(f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts if count)
    out.print(f"{num_files} file{'s' * (num_files > 1)}: {said or 'nothing found'}")
