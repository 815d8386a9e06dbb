"""`shardwise`: one verb per file, imported when it is used; errors become one message and a documented exit code."""

from __future__ import annotations

import errno
import json
import os
import select
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shardwise.cli.letters import plain_letters
from shardwise.errors import ExitCode, ShardwiseError
from shardwise.records import say
from shardwise.version import __version__

VERBS = {
    "train": "Train a model; without arguments a small one on Python's own sources, in about a minute.",
    "run": "Run any script as the ranks of a world on this machine.",
    "plan": "Find the best plan for a model on a cluster: what fits, how fast, and why.",
    "estimate": "Memory and time of one given plan.",
    "explain": "Why a plan is what it is: each decision against its neighbours.",
    "probe": "Measure this machine into a cluster file for the planner.",
    "check": "Is a plan legal for a model and a number of ranks?",
    "ckpt": "Inspect, verify or compare checkpoints; convert those of other libraries, and export.",
    "lint": "Find the classic mistakes in training scripts, by line.",
    "verify": "Is a script under a plan the same training as on one process? Proven in numbers.",
    "schedule": "Show a pipeline schedule and its bubble.",
    "rules": "Infer tensor-parallel rules of a model from its forward; compare them with one process.",
}
"""Verb `x` is the function `x` of `shardwise.cli.x`; none of these files imports torch. Here is its line of help."""


READER_LEFT = 141
"""128 + SIGPIPE, as a shell says it of `cat` before a `head` that has read enough. Nothing was wrong: no `ExitCode`."""


class Verbs(TyperGroup):
    """A group whose commands are imported when they are run; its help page shows the lines of `VERBS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs in the order of the help page."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb's command once it is resolved; before that its name and line of help; None: no such verb."""
        if cmd_name in VERBS and cmd_name not in self.commands:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that a word names, imported; an unknown word raises with the nearest verbs."""
        for name in VERBS if args[0] not in VERBS else (args[0],):
            self.commands[name] = _command(name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a verb; Ctrl-C as an error, for typer would end without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise RuntimeError("interrupted") from stop


class Verb(TyperCommand):
    """A command that says of a word too many where it may belong, and of a value that does not do what was found."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Words and options; as its parent, to whose messages is added what is expected, or what was found."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's type, or that of typer's own copy of it
            text = str(getattr(error, "message", ""))
            if "unexpected extra argument" in text:
                words = [each.name for each in self.params if each.param_type_name == "argument"]
                options = [each.opts[0] for each in self.params if each.param_type_name == "option"][:3]
                vars(error)["message"] = (
                    f"{text}; needed: {' '.join(map(str, words)) or 'no word'}, and options, as {', '.join(options)}"
                )
            elif text.startswith("Input should be") and (found := _given_to(getattr(error, "param", None), given)):
                vars(error)["message"] = f"found {found!r}; {text[0].lower()}{text[1:]}"
            raise


def _given_to(option: Any, words: list[str]) -> str:
    """The last value that some words give an option; empty: none."""
    names = tuple(getattr(option, "opts", ()))
    pairs = [(word, after) for word, after in zip(words, [*words[1:], ""], strict=True) if word in names]
    joined = [word.partition("=") for word in words if word.partition("=")[0] in names and "=" in word]
    return next(iter([after for _, after in pairs][-1:] + [value for _, _, value in joined][-1:]), "")


def _command(name: str) -> TyperCommand:
    app = typer.Typer(add_completion=False)
    app.command(name, cls=Verb)(getattr(import_module(f"shardwise.cli.{name}"), name))
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand)
    return command


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


app = typer.Typer(cls=Verbs, add_completion=False, no_args_is_help=True)


@app.callback()
def shardwise(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Distributed PyTorch training: change the mesh, not the maths."""


def main(argv: list[str] | None = None) -> None:
    """The console script: run a verb and exit with its code (docs/exit-codes.md).

    Args:
        argv: words after `shardwise`; None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    words, rest = _split_script_words(words)
    plain_letters()
    try:
        verb = typer.main.get_command(app)  # typer shows a wrong option itself, but has no words for programs
        code = verb.main(args=words, prog_name="shardwise", obj=rest, standalone_mode="--json" not in words)
        sys.exit(code or ExitCode.OK)
    except ShardwiseError as error:
        _say(words, type(error).__name__, str(error), error.exit_code)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        sys.exit(_interrupted(words, error))
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # for any broken pipe typer and rich end with 1
            sys.exit(READER_LEFT if _has_no_reader() else _internal(words, end.__context__))
        raise
    except BaseException as error:  # a user's own need not be an Exception: pytest's skip is none
        if stop := _interruption(error):
            sys.exit(_interrupted(words, stop))
        if hasattr(error, "format_message"):  # typer's or click's: a missing argument, an option that does not exist
            _say(words, "UsageError", error.format_message(), ExitCode.USAGE)
            sys.exit(ExitCode.USAGE)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f": {error.filename}" if error.filename else ", where the output goes"
            _say(words, "UsageError", f"{error.strerror}{where}; free some space", ExitCode.USAGE)
            sys.exit(ExitCode.USAGE)
        sys.exit(_internal(words, error))


def _interrupted(words: list[str], stop: KeyboardInterrupt) -> ExitCode:
    _say(words, "KeyboardInterrupt", str(stop) or "interrupted before it was done", ExitCode.INTERRUPTED)
    return ExitCode.INTERRUPTED


def _internal(words: list[str], error: BaseException) -> ExitCode:
    path = _save_traceback()
    text = f"internal error: {type(error).__name__}: {error}; the traceback is in {path}; please report it"
    _say(words, type(error).__name__, text, ExitCode.INTERNAL)
    return ExitCode.INTERNAL


def _has_no_reader() -> bool:
    """Whether output or error output is a pipe that nobody reads any more, or rich has already put /dev/null there."""
    if not hasattr(select, "poll") or os.path.samestat(os.fstat(1), os.stat(os.devnull)):
        return True
    ends = select.poll()
    for descriptor in (1, 2):
        ends.register(descriptor, 0)  # errors are told without being asked for
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in ends.poll(0))


def _interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C that is behind an error: libraries that are being imported wrap it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _split_script_words(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """What stands after `--` belongs to the user's script, whatever it looks like."""
    if words[:1] in (["run"], ["verify"]) and "--" in words:
        at = words.index("--")
        return words[:at], tuple(words[at + 1 :])
    return words, ()


def _say(words: list[str], kind: str, message: str, code: ExitCode) -> None:
    """On stderr for people; one JSON object on stdout under --json."""
    if "--json" in words:
        with suppress(OSError):  # no place where it goes either: then on stderr
            typer.echo(json.dumps({"error": {"type": kind, "message": message, "exit_code": int(code)}}, indent=2))
            return
    say(f"shardwise: {message}")


def _save_traceback() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="shardwise-", suffix=".traceback", delete=False) as file:
        file.write(traceback.format_exc())
        return file.name
