"""`RunJob`: what the command line resolved, and how a rank of `shardwise train` is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.model.spec import ModelSpec, spec_from_dict
from shardwise.plan.plan import Plan
from shardwise.train.kept.rundir import RunDir
from shardwise.train.settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """What the command line resolved: all that a rank needs to know."""

    run: RunDir
    settings: RunSettings
    plan: Plan
    spec: ModelSpec | None
    quiet: bool = False
    """Show nothing while it goes on."""
    allow: tuple[str, ...] = ()
    """Changes of the maths that `--allow` names."""

    @classmethod
    def load(cls, path: Path, *, plan: Plan | None = None, quiet: bool = False, allow: tuple[str, ...] = ()) -> RunJob:
        """The job that `config.json` and `plan.toml` of a run's directory describe; or another plan for it."""
        run = RunDir(path)
        config = json.loads(run.config_json.read_text(encoding="utf-8"))
        settings = RunSettings.model_validate_json(json.dumps(config["settings"]))
        spec = spec_from_dict(config["spec"]) if config["spec"] is not None else None
        return cls(run=run, settings=settings, plan=plan or Plan.load(run.plan), spec=spec, quiet=quiet, allow=allow)

    @classmethod
    def read(cls, argv: Sequence[str]) -> RunJob:
        """The job that a rank's arguments name.

        Args:
            argv: the run's directory, then what `words` gave.
        """
        said = {name: value for name, _, value in (word.partition("=") for word in argv[1:])}
        allow = tuple(word.partition("=")[2] for word in argv[1:] if word.startswith("--allow="))
        plan = Plan.parse(said["--plan"]) if "--plan" in said else None
        return cls.load(Path(argv[0]), plan=plan, quiet="--quiet" in said, allow=allow)

    @staticmethod
    def words(run: RunDir, *, plan: Plan | None = None, quiet: bool, allow: Sequence[str]) -> tuple[str, ...]:
        """The arguments of a rank.

        Args:
            run: the run's directory.
            plan: another one than the directory's.
            quiet: show nothing.
            allow: changes of the maths.
        """
        own = (f"--plan={plan}",) if plan is not None else ()
        return (str(run.path), *(("--quiet",) if quiet else ()), *(f"--allow={key}" for key in allow), *own)
