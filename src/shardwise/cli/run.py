"""`shardwise run`: any user script as the ranks of a world on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardwise.cli.options.auto import AUTO, auto_plan, this_machine
from shardwise.cli.options.devices import launched, local_devices, surroundings
from shardwise.cli.options.elastic import Asked, ElasticOption, FailuresOption, WaitOption, elastic_policy, plan_here
from shardwise.cli.options.nodes import ranks_per_host, supervised
from shardwise.cli.options.planning import BatchOption, OptimizerOption, SeqOption, question
from shardwise.cli.output import plan_json, print_json
from shardwise.errors import ExitCode, PlanError, UsageError
from shardwise.journal import add_record
from shardwise.launch.elastic.plan import Known
from shardwise.launch.environment import Launch
from shardwise.launch.forking.server import server_for
from shardwise.launch.job import Job, Nodes
from shardwise.launch.local import Outcome, run_local
from shardwise.launch.stopping import Stopping, catching, no_longer
from shardwise.plan.constraints import check, refuse
from shardwise.plan.plan import Plan
from shardwise.plan.repair import change
from shardwise.records import say

if TYPE_CHECKING:
    from shardwise.launch.recovery import Recovering, Recovery

CROWD = 4
"""More ranks on a core are remarked upon: as a rule somebody has given a plan for another machine."""
THRONG = 64
"""More of them on a core are refused until `--nproc` says it too: before its first step each takes tenths of a second
of its core, so that a machine is busy for a minute or more with what one that is given too much cannot end soon."""
_WordsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[PLAN] [ARGS]...", help="The plan, then words for the script.")
]
_RecoveriesOption = Annotated[int | None, typer.Option(min=1, help="Under --recover: how often in all; default 1000.")]
_EventsOption = Annotated[
    Path | None, typer.Option(help="Under --recover: append each recovery to this file, a line of JSON.")
]


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script.")],
    words: _WordsArgument = None,
    plan_option: Annotated[str | None, typer.Option("--plan", help="The plan, or auto; then no word is one.")] = None,
    model: Annotated[str, typer.Option(help="For the plan auto: as in `shardwise plan`.")] = "",
    seq: SeqOption = None,
    global_batch: BatchOption = None,
    optimizer: OptimizerOption = "adamw",
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes; default: the plan's, or one per device.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the rendezvous; 0: a free one.")] = 0,
    recover: Annotated[bool, typer.Option("--recover", help="Go on when a rank dies; needs steps().")] = False,
    max_recoveries: _RecoveriesOption = None,
    events: _EventsOption = None,
    elastic: ElasticOption = None,
    devices: Annotated[Path | None, typer.Option(help="Under --elastic: the file that lists the slots.")] = None,
    slot_failures: FailuresOption = None,
    elastic_wait: WaitOption = None,
    grace: Annotated[float | None, typer.Option(min=0.1, help="Seconds to finish and save after a signal.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Run a script in several processes: `shardwise run train.py "dp2 tp2" --nproc 4 -- --fast`.

    The first word after the script is the plan (shorthand, file, or auto); it is checked before anything starts, and
    the script gets it as its first argument. What stands after `--` goes to the script unread.
    """
    given, after = [*([plan_option] if plan_option is not None else ()), *(words or ())], tuple(ctx.obj or ())
    launch = launched(nproc_given=nproc is not None, command=shlex.join(["shardwise", "run", script, *given]))
    nodes = supervised(launch) if recover and launch is not None else Nodes()
    started = launch if not recover else None
    if model or given[:1] == [AUTO]:
        ranks, wanted = _world(nproc, None, started, nodes), {"seq": seq, "batch": global_batch, "optimizer": optimizer}
        given[:1] = [_auto(given[:1], model, ranks, started, nodes, **wanted)]
    plan = _plan(given[0]) if given else None
    asked = Asked.read(elastic, failures=slot_failures, wait_s=elastic_wait, devices=devices)
    world = _world(nproc, plan, started, nodes)
    if asked is not None and plan is not None and launch is not None:
        _check_ranks_per_host(elastic, launch, nproc, recover=recover)
        plan = plan_here(asked, plan, Known(device=local_devices()[0]), replace(launch, world=world), ranks=not recover)
        given[0] = str(plan)
    refuse(check(plan, world=world) if plan is not None else [])
    if asked is not None:
        asked.check(world, plan)
    job = Job(target=script, args=(*given, *after), nproc=ranks_per_host(nodes, world), nodes=nodes, port=port)
    job = replace(job, signal_grace_s=grace)
    tell = partial(_append, events, "recovery") if events is not None else None
    is_ours = recover or (asked is not None and launch is None)
    recovering = recovery(port=port, limit=max_recoveries or 1000, tell=tell) if is_ours else None
    _check_idle(recovering, max_recoveries=max_recoveries, events=None if nodes.index else events)
    if asked is not None and plan is not None and recovering is not None and launch is None:
        recovering = _elastic(asked, recovering, plan, job, events=events)
    if dry_run:
        return _show(job, plan, json=json)
    if started is not None:
        _become(job, started)
    code = start(job, recovering, said=nproc is not None)
    if json:
        print_json({"script": script, "world": world, "plan": plan_json(plan) if plan else None, "exit_code": code})
    raise typer.Exit(code)


def _become(job: Job, started: Launch) -> NoReturn:
    """Run the script here, in a process that a launcher has started as a rank.

    Raises:
        UsageError: a grace, which that launcher gives.
    """
    if job.signal_grace_s is not None:
        raise UsageError(
            f"--grace: found ranks that {started.launcher} started and ends, needed ranks that are started here; leave "
            "it out, and give that launcher the time"
        )
    from shardwise.launch.entry import main as become

    sys.exit(become(["--script", job.target, *job.args]))


def check_crowd(nproc: int, *, said: bool) -> None:
    """Remark upon more ranks than cores; refuse a plan for a cluster on a laptop.

    Args:
        nproc: processes that shall be started on this host.
        said: their number was given beside the plan.

    Raises:
        UsageError: too many for its cores, and nobody gave their number.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if nproc > THRONG * cores and not said:
        raise UsageError(
            f"{nproc} processes are to be started here: found {cores} cores, needed one for at most {THRONG} of them; "
            "give a plan for this machine, start this one on those that it is for (srun, torchrun), look at it with "
            f"--dry-run, or say --nproc {nproc} too if it is meant: they take turns"
        )
    if nproc > CROWD * cores:
        say(
            f"shardwise: {nproc} ranks on {cores} cores: they take turns, and each is a process with its own "
            "memory; Ctrl-C and a smaller plan if this is not meant"
        )


def start(job: Job, recovering: Recovering | None = None, *, said: bool = True) -> ExitCode:
    """Run a job here; the first failure goes to stderr. `said`: see `check_crowd`."""
    check_crowd(job.nproc, said=said)
    with catching() as stopping:
        if recovering is not None and job.nodes.count > 1:
            from shardwise.launch.hosts import run_on_hosts

            outcome = run_on_hosts(job, recovering, stopping)
        elif recovering is not None:
            from shardwise.launch.recovering import run_recovering

            outcome = run_recovering(job, recovering, stopping)
        else:
            outcome = _run_once(job, stopping)
    if stopping.first is not None:
        no_longer()
    if outcome.failure is not None:
        say(f"shardwise: {outcome.failure}" if not outcome.failure.traceback else str(outcome.failure))
    elif outcome.exit_code != ExitCode.OK and not job.nodes.index:  # of several hosts the first one says it
        say(f"shardwise: {_ending(outcome.exit_code, stopping)}")
    return outcome.exit_code


def _ending(code: ExitCode, stopping: Stopping) -> str:
    """Why a job has ended in which no rank failed."""
    names = {ExitCode.INTERRUPTED: "SIGINT", ExitCode.PREEMPTED: "SIGUSR1", ExitCode.TERMINATED: "SIGTERM"}
    if code in names:
        name = stopping.first.name if stopping.first is not None else names[code]
        saved = "a loop of steps() finishes its step and saves where it has a store; nothing outside of one is saved"
        return f"ended by {name} ({code:d}); {saved}"
    if code == ExitCode.KILLED:
        how = "by a second signal, or as the grace was over, or as a rank died, or as too few ranks were left to save"
        return f"ended at once {how} ({code:d}); go on from the last checkpoint"
    why = {
        ExitCode.NON_FINITE: ": a loss or gradient is not finite, under the policy `stop`, or more often in a row than "
        "`skip` leaves out (max_skips): then the weights may be; the next start goes on from before they were",
        ExitCode.SPIKE: ": a spike of the loss or of the gradient norm, under the policy `stop`",
    }
    return f"all ranks ended with status {code:d}{why.get(code, '')}"


def _run_once(job: Job, stopping: Stopping) -> Outcome:
    with server_for(job) as server:
        if server is not None:
            return run_local(job, server, stopping)
        from shardwise.launch.programs import run_programs

        return run_programs(job, stopping)


def _world(nproc: int | None, plan: Plan | None, launch: Launch | None, nodes: Nodes) -> int:
    """Ranks on all hosts; `launch`: who has started them."""
    if nproc is not None and launch is None:
        return nproc * nodes.count
    if launch is not None:
        return launch.world
    return plan.world if plan is not None else max(1, local_devices()[1]) * nodes.count


def _check_ranks_per_host(elastic: str | None, launch: Launch, nproc: int | None, *, recover: bool) -> None:
    if recover and nproc is None:
        raise UsageError(
            f"--recover --elastic {elastic}: found {launch.world} hosts and no --nproc, needed how many ranks each "
            "host has: the plan is for all hosts, who are not always there; add --nproc RANKS_PER_HOST"
        )


def _auto(plan: list[str], model: str, ranks: int, launch: Launch | None, nodes: Nodes, **wanted: Any) -> str:
    """The fastest plan for a script's model, which cannot be seen from here, on the devices that are; rank 0 says it.

    Raises:
        UsageError: another plan is given, or no model; or these devices have no known name.
        PlanError: as `auto_plan`.
    """
    if plan != [AUTO]:
        raise UsageError(f"--model {model}: found the plan `{' '.join(plan)}`; only `auto` needs a model")
    if not model:
        raise UsageError(
            "the plan `auto` needs the script's model, found no --model; add --model MODEL as in `shardwise plan`, "
            "with --seq and --global-batch; or give a plan"
        )
    around = surroundings(None, None)
    if around.device != "cpu" and around.cluster is None:
        raise UsageError(
            "the plan `auto` needs devices of a known name, found none; let `shardwise plan MODEL CLUSTER` find one"
        )
    hosts = launch.world // launch.local_world if launch is not None else nodes.count
    asked = question(model, this_machine(around.cluster, ranks, hosts), tokens=None, **wanted)
    found, _ = auto_plan(asked, compiles=around.compiles)
    if wanted["batch"]:
        found = change(found, batch__global_size=wanted["batch"])
    if launch is None or launch.rank == 0:
        typer.echo(f"plan auto: {found}", err=True)
    return str(found)


def recovery(*, port: int, limit: int = 1000, tell: Callable[..., None] | None = None) -> Recovering:
    """What `--recover` asks for.

    Args:
        port: of the rendezvous, as it was given.
        limit: recoveries in all.
        tell: gets the fields of each recovery.

    Raises:
        UsageError: a port is given.
    """
    if port:
        raise UsageError(
            f"--recover with --port {port}: every set of processes meets on a port of its own, and one stands by while "
            "another trains; leave --port out"
        )
    from shardwise.launch.recovery import Recovering

    def told(recovery: Recovery) -> None:
        say(f"shardwise: {recovery}")
        if tell is None:
            return
        try:
            tell(**recovery.to_dict())
        except OSError as error:  # as of a full disk: no reason to end the job
            say(f"shardwise: this recovery is not recorded: {error}")

    # a second copy of the model fits into a host's memory, and not beside the first one on an accelerator
    return Recovering(limit=limit, standby=local_devices()[0] == "cpu", tell=told)


def _elastic(asked: Asked, recovering: Recovering, plan: Plan, job: Job, *, events: Path | None) -> Recovering:
    """Recovery with another plan, which the script gets as its first argument, for another number of processes."""
    if asked.devices is None and asked.wait_s is not None:
        raise UsageError(
            "--elastic-wait: found no --devices, needed the file that is waited for to list more slots; name one with "
            "--devices, or leave --elastic-wait out"
        )
    given, *rest = job.args

    def arguments(now: Plan) -> tuple[str, ...]:
        return (given if now == plan else str(now), *rest)

    tell = partial(_append, events, "elastic") if events is not None else None
    known = Known(device=local_devices()[0])
    return elastic_policy(asked, recovering, plan, arguments, devices=asked.devices, known=known, tell=tell)


def _check_idle(recovering: Recovering | None, *, max_recoveries: int | None, events: Path | None) -> None:
    """Refuse options that would do nothing, and a record that cannot be written.

    Raises:
        UsageError: see above.
    """
    given = {"--max-recoveries": max_recoveries, "--events": events}
    idle = [name for name, value in given.items() if value is not None]
    if recovering is None and idle:
        raise UsageError(
            f"{', '.join(idle)}: found neither --recover nor an --elastic that starts processes here, needed one of "
            f"them: else nothing is recovered from; add --recover, or leave {' and '.join(idle)} out"
        )
    if events is None:
        return
    is_new = not events.exists()
    try:
        events.open("a", encoding="utf-8").close()
        if is_new:  # an empty record would say that there is one
            events.unlink()
    except OSError as error:
        raise UsageError(
            f"--events {events}: cannot be written ({error.strerror or error}), needed a file in a directory that is "
            "there; choose another one"
        ) from None


def _append(path: Path, event: str, **facts: Any) -> None:
    add_record(path, {"event": event, **facts})


def _plan(word: str) -> Plan:
    if word.endswith(".py"):
        raise PlanError(f"{word} stands where the plan does; the script is first: shardwise run {word} dp2")
    try:
        return Plan.load(word)
    except PlanError as error:
        raise PlanError(f"{error}\nwords for the script that are no plan stand after `--`") from None


def _show(job: Job, plan: Plan | None, *, json: bool) -> None:
    command = shlex.join(job.command())
    if json:
        print_json({"world": job.nproc, "plan": plan_json(plan) if plan else None, "command": command})
        return
    typer.echo(f"{job.nproc} processes of: {command}")
    if plan is not None:
        typer.echo(f"plan: {plan}")
