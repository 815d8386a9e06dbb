"""`make bench`: how much of a run is training while a rank is killed every 15 s for 10 minutes (SIGKILL).

Which rank, and at which instant of its 15 s, is drawn.

Goodput is the time that the steps which count would have taken undisturbed, over the time that passed. The undisturbed
step is the median step of the same run: a fault makes one step in a hundred long, and the machine's own changes of
speed fall on both sides. The same number of a run that nobody disturbs shows what is not due to faults.

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
from datetime import date
from itertools import pairwise
from pathlib import Path

from shardwise.testing.killer import Killer

PAGE = Path(__file__).parents[1] / "docs" / "recovery.md"
SCRIPT = Path(__file__).with_name("goodput_script.py")
BEGIN, END = "<!-- bench/goodput.py: begin -->", "<!-- bench/goodput.py: end -->"
PLAN, TARGET = "fsdp4", 0.95
WARM_STEPS = 20


def run(folder: Path, seconds: float, every_s: float | None) -> tuple[int, dict[int, float], list[float]]:
    """Train for so long: blows that fell, step -> when it was done first, and seconds of each recovery."""
    log, events = folder / "log", folder / "events"
    command = [sys.executable, "-m", "shardwise", "run", "--recover", "--events", str(events)]
    process = subprocess.Popen([*command, str(SCRIPT), PLAN, "--", str(log)], stderr=subprocess.PIPE, text=True)
    try:
        while len(steps_of(log)) < WARM_STEPS:
            if process.poll() is not None:
                raise SystemExit(f"bench: the run ended at its start\n{process.communicate()[1]}")
            time.sleep(0.2)
        begin = time.time()
        end = begin + seconds
        killer = Killer(process.pid, seed=7, mean_pause_s=1e-6, double=0.0, standbys=0.0)
        draw = random.Random(7)
        falls = [(at + draw.random()) * every_s for at in range(int(seconds / every_s))] if every_s is not None else []
        for number, after in enumerate(falls, 1):
            time.sleep(max(0.0, begin + after - time.time()))
            killer.run(number)
        time.sleep(max(0.0, end - time.time()))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
    done = {step: at for step, at in list(steps_of(log).items())[WARM_STEPS - 1 :] if at <= end}
    return len(killer.blows), done, [json.loads(line)["seconds"] for line in lines]


def steps_of(log: Path) -> dict[int, float]:
    """Step -> when it was done: the last time, where it was done again."""
    if not log.exists():
        return {}
    words = [line.split() for line in log.read_text(encoding="utf-8").splitlines()]
    return {int(step): float(at) for step, at, _ in words}


def goodput(done: dict[int, float]) -> tuple[float, float]:
    """The share of the time that was training, and the median step in seconds.

    >>> goodput({1: 0.0, 2: 1.0, 3: 2.0, 4: 5.0})
    (0.6, 1.0)
    """
    times = [done[step] for step in sorted(done)]
    typical = statistics.median(b - a for a, b in pairwise(times))
    return (len(times) - 1) * typical / (times[-1] - times[0]), typical


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds in which one kill falls")
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    for name, minutes, every in (("nobody disturbs", 1.0, None), ("kills", options.minutes, options.every)):
        with tempfile.TemporaryDirectory() as folder:
            blows, done, seconds = run(Path(folder), 60 * minutes, every)
        share, typical = goodput(done)
        recovery = f"{statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s" if seconds else "-"
        met = ("yes" if share >= TARGET else "**no**") if every else ""
        cells = (
            name,
            f"{minutes:g} min",
            blows,
            f"{len(done):,} of {typical * 1e3:.0f} ms",
            recovery,
            f"{share:.1%}",
            met,
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    lines = [
        f"Measured {date.today()}: `{PLAN}` on {os.cpu_count()} cores, load average {load:.2f} before; a rank is "
        f"killed in every {options.every:g} s, at a random instant of them.",
        "",
        f"| | time | kills | steps, median | a recovery, median | goodput | at least {TARGET:.0%} |",
        "|---|---|---|---|---|---|---|",
        *rows,
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
