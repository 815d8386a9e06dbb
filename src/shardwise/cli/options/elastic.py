"""What `--elastic MIN:MAX` asks for, of `run` and of `train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options.auto import AUTO, this_machine
from shardwise.cli.options.config import Configuration
from shardwise.cli.options.derive import Derived, Surroundings, workload_optimizer
from shardwise.errors import UsageError
from shardwise.launch.elastic.plan import Known
from shardwise.launch.elastic.slots import Elastic, Transition, parse_span
from shardwise.launch.environment import Launch
from shardwise.launch.variables import variables
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.records import say

if TYPE_CHECKING:
    from shardwise.hardware.cluster import Cluster
    from shardwise.launch.recovery import Recovering

ElasticOption = Annotated[
    str | None, typer.Option("--elastic", help="MIN:MAX processes; goes on with those that are left.")
]
WaitOption = Annotated[
    float | None,
    typer.Option("--elastic-wait", min=0, help="Seconds to wait for more slots below the minimum; default 300."),
]
FailuresOption = Annotated[
    int | None, typer.Option("--slot-failures", min=1, help="Failures after which a slot is left out; default 2.")
]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The words of the command line."""

    least: int
    most: int
    failures: int | None = None
    """None: not said; 2."""
    wait_s: float | None = None
    """None: not said; 300."""
    devices: Path | None = None
    """Of `run`."""

    @classmethod
    def read(
        cls, span: str | None, *, failures: int | None, wait_s: float | None, devices: Path | None = None
    ) -> Asked | None:
        """None without `--elastic`.

        Raises:
            UsageError: no MIN:MAX; or an option that means nothing without `--elastic`.
        """
        least, most = parse_span(span) if span is not None else (1, 1)
        asked = cls(least=least, most=most, failures=failures, wait_s=wait_s, devices=devices)
        if span is None:
            asked.refuse_slots("no --elastic", "--elastic MIN:MAX, which they belong to; add it")
        return asked if span is not None else None

    def refuse_slots(self, found: str, needed: str) -> None:
        """Refuse what is said of slots where there are none.

        Raises:
            UsageError: an option that would do nothing.
        """
        options = {"--devices": self.devices, "--slot-failures": self.failures, "--elastic-wait": self.wait_s}
        idle = [name for name, value in options.items() if value is not None]
        if idle:
            raise UsageError(f"{', '.join(idle)}: found {found}, needed {needed}, or leave {' and '.join(idle)} out")

    def start(self, configuration: Configuration, around: Surroundings) -> Configuration:
        """Plan for as many processes as there can be, where nobody says how many, nor a plan.

        Under a launcher too: what is derived, as the global batch, must not depend on who happens to be there.
        """
        given = any(configuration.value(key) is not None for key in ("train.nproc", "plan.shorthand", "plan.file"))
        auto = configuration.value("plan.shorthand") == AUTO and configuration.value("train.nproc") is None
        if given and not auto:
            return configuration
        here = self.most if around.launched_world is not None else around.num_devices
        most = min(self.most, here or self.most)
        return configuration.derive({"train.nproc": (most, "the most of --elastic that there are devices for")})

    def check(self, world: int, plan: Plan | None) -> None:
        """Refuse a start without a plan, or with a number of processes that is out of bounds.

        Raises:
            UsageError: no plan; fewer than the minimum, or more than the maximum.
        """
        if plan is None:
            raise UsageError(
                "--elastic: found no plan; needed: the plan as the first word after the script, which gets another one "
                "in its place for another number of processes; write `shardwise run --elastic 2:4 train.py dp4`"
            )
        if not self.least <= world <= self.most:
            raise UsageError(
                f"--elastic {self.least}:{self.most}: found {world} processes to start with, which is not between "
                "them; needed: a plan for as many as shall train at first; give another plan, or other bounds"
            )


def elastic_policy(
    asked: Asked,
    recovering: Recovering,
    plan: Plan,
    arguments: Callable[[Plan], tuple[str, ...]],
    *,
    devices: Path | None,
    known: Known,
    tell: Callable[..., None] | None = None,
    chosen: Callable[[Plan], None] | None = None,
) -> Recovering:
    """`recovering` with another number of processes when some are lost or come back.

    Args:
        asked: bounds.
        recovering: what `--recover` means here.
        plan: the run's own.
        arguments: the target's arguments under a plan.
        devices: the file that lists the slots; None: there is none.
        known: model, devices and workload.
        tell: gets the fields of each transition.
        chosen: gets the plan of those who train, once they have finished a step.
    """

    def told(transition: Transition) -> None:
        say(f"shardwise: {transition}")
        if tell is not None:
            tell(**transition.to_dict())

    def note(text: str) -> None:
        say(f"shardwise: {text}")

    failures = 2 if asked.failures is None else asked.failures
    elastic = Elastic(
        least=asked.least,
        most=asked.most,
        own=plan,
        known=known,
        arguments=arguments,
        devices=devices,
        failures=failures,
        wait_s=300.0 if asked.wait_s is None else asked.wait_s,
        tell=told,
        chosen=chosen,
        note=note,
    )
    # what fails twice in one step may be a device: it is left out, and only what still fails then is the script's
    return replace(
        recovering,
        elastic=elastic,
        raised_in_a_row=max(recovering.raised_in_a_row, failures),
        killed_in_a_row=max(recovering.killed_in_a_row, failures),
    )


def plan_here(asked: Asked, plan: Plan, known: Known, launch: Launch, *, ranks: bool = True) -> Plan:
    """The plan for the processes that a launcher has started, in place of the run's own.

    Args:
        asked: the bounds.
        plan: the run's own.
        known: model, devices and workload.
        launch: who has started them, and how many ranks there are.
        ranks: they are the ranks themselves; else each starts those of its host, which meet in a store of theirs.

    Raises:
        LaunchError: see `shardwise.launch.elastic.nodes.plan_of_world`.
        UsageError: options that speak of slots.
    """
    from shardwise.launch.elastic.nodes import plan_of_world

    asked.refuse_slots(
        f"{launch.world} processes that {launch.launcher} started",
        "processes started here, by `shardwise`: slots are of one host; start without a launcher",
    )
    elastic = Elastic(least=asked.least, most=asked.most, own=plan, known=known, arguments=lambda _: ())
    return plan_of_world(elastic, launch, variables() if ranks else {})


def known_of(derived: Derived, cluster: Cluster | None) -> Known:
    """What `shardwise train` knows of a run.

    Args:
        derived: its settings.
        cluster: the devices of this machine; None on a CPU, or where they have no known name.
    """
    settings = derived.settings
    device = settings.train.device
    named = this_machine(cluster, derived.plan.world) if device == "cpu" or cluster is not None else None
    workload = Workload(
        seq_len=int(settings.data.seq_len or 1),
        global_batch=int(settings.train.global_batch or 1),
        optimizer=workload_optimizer(settings.optimizer),
    )
    origin = derived.configuration.origin("plan.shorthand")
    planned = settings.plan.file is None and (origin.kind == "derived" or settings.plan.shorthand == AUTO)
    return Known(spec=derived.spec, cluster=named, workload=workload, device=device, planned=planned)
