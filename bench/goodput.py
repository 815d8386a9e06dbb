"""`make bench`: how much of a run is training while a rank is killed every 15 s for 10 minutes (SIGKILL).

Which rank, and at which instant of its 15 s, is drawn.

Two shares are printed. Goodput as it is published: the time in steps that count, over all time ("effective training
time": The Llama 3 Herd of Models, 2024, section 3.3.4). And, which is stricter, the steps that count per second over
those of the same script when nobody disturbs it and nothing guards it (`shardwise run` without `--recover`): there the
standby that gets ready beside the ranks, and so makes their steps slower, is in it too. Both take turns, for the
machine's speed changes within minutes.

Writes the section of docs/recovery.md between its markers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from shardwise.testing.killer import Killer

PAGE = Path(__file__).parents[1] / "docs" / "recovery.md"
SCRIPT = Path(__file__).with_name("goodput_script.py")
BEGIN, END = "<!-- bench/goodput.py: begin -->", "<!-- bench/goodput.py: end -->"
PLAN, TARGET = "fsdp4", 0.95
WARM_STEPS = 20
ROUNDS = 5


@dataclass(frozen=True)
class Turn:
    """One contestant's run in one round."""

    seconds: float
    steps: int
    """That count, each once."""
    useful: float
    """Seconds in them."""
    kills: int
    recoveries: list[float]
    """Seconds of each."""


def turn(folder: Path, seconds: float, falls: list[float], *, guarded: bool) -> Turn:
    """Train for so long, with kills so many seconds after the beginning."""
    log, events = folder / "log", folder / "events"
    options = ["--recover", "--events", str(events)] if guarded else []
    command = [sys.executable, "-m", "shardwise", "run", *options, str(SCRIPT), PLAN, "--", str(log)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while len(steps_of(log)) < WARM_STEPS:
            if process.poll() is not None:
                raise SystemExit(f"bench: the run ended at its start\n{process.communicate()[1]}")
            time.sleep(0.2)
        begin = time.time()
        killer = Killer(process.pid, seed=7, mean_pause_s=1e-6, double=0.0, standbys=0.0)
        for number, after in enumerate(falls, 1):
            time.sleep(max(0.0, begin + after - time.time()))
            killer.run(number)
        time.sleep(max(0.0, begin + seconds - time.time()))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
    done = [took for at, took in steps_of(log).values() if begin < at <= begin + seconds]
    return Turn(seconds, len(done), sum(done), len(killer.blows), [json.loads(line)["seconds"] for line in lines])


def steps_of(log: Path) -> dict[int, tuple[float, float]]:
    """Step -> when it was done, and the seconds that it took: the last time, where it was done again."""
    if not log.exists():
        return {}
    words = [line.split() for line in log.read_text(encoding="utf-8").splitlines()]
    return {int(step): (float(at), float(took)) for step, at, took in words}


def row(name: str, turns: list[Turn], rate: float) -> str:
    """Of the table; `rate`: steps per second that nothing disturbs."""
    seconds, steps = sum(t.seconds for t in turns), sum(t.steps for t in turns)
    took = [each for t in turns for each in t.recoveries]
    recovery = f"{statistics.median(took):.2f} s, longest {max(took):.2f} s" if took else "-"
    useful = sum(t.useful for t in turns) / seconds
    met = ("yes" if useful >= TARGET else "**no**") if took else ""
    cells = (name, f"{seconds / 60:g} min", sum(t.kills for t in turns), f"{steps:,}", f"{steps / seconds:.2f}")
    shares = (f"{useful:.1%}", met, f"{steps / seconds / rate:.1%}")
    return f"| {' | '.join(map(str, (*cells, recovery, *shares)))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="with kills; half as long without, in turns")
    parser.add_argument("--every", type=float, default=15.0, help="seconds in which one kill falls")
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    draw = random.Random(7)
    length = 60 * options.minutes / ROUNDS
    alone, killed = list[Turn](), list[Turn]()
    for number in range(ROUNDS):
        falls = [(at + draw.random()) * options.every for at in range(round(length / options.every))]
        pairs = [(alone, length / 2, list[float](), False), (killed, length, falls, True)]
        for turns, seconds, blows, guarded in pairs if number % 2 == 0 else pairs[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                turns.append(turn(Path(folder), seconds, blows, guarded=guarded))
    rate = sum(t.steps for t in alone) / sum(t.seconds for t in alone)
    lines = [
        f"Measured {date.today()}: `{PLAN}` on {os.cpu_count()} cores, load average {load:.2f} before; {ROUNDS} rounds "
        f"in turns; a rank is killed in every {options.every:g} s, at a random instant of them.",
        "",
        "| | time | kills | steps that count | per second | a recovery, median | goodput: time in them | "
        f"at least {TARGET:.0%} | of the undisturbed rate |",
        "|---|---|---|---|---|---|---|---|---|",
        row("no `--recover`, nobody disturbs", alone, rate),
        row("`--recover`, kills", killed, rate),
    ]
    text = "\n".join(lines)
    print(text)
    if not options.print:
        before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, marker, after = rest.partition(END)
        if not begin or not marker:
            raise SystemExit(f"{PAGE}: the markers {BEGIN} and {END} are gone; put them back where the table belongs")
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
