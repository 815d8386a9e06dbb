"""Draw the pictures of the pages: a pipeline schedule, and the loss of the run that `make demo` makes.

`python tools/images.py` takes as long as `make demo`; `python tools/images.py schedule` a second.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SHARDWISE = Path(sys.executable).with_name("shardwise")


def draw_schedule() -> None:
    subprocess.run([SHARDWISE, "schedule", "pp4 interleaved mb4", "--png", IMAGES / "schedule.png"], check=True)


def draw_loss() -> None:
    """The picture that `shardwise train` without arguments leaves in its run directory."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        subprocess.run([SHARDWISE, "train", "--no-sample", "--out", out], check=True)
        shutil.copyfile(out / "loss.png", IMAGES / "loss.png")


DRAW = {"schedule": draw_schedule, "loss": draw_loss}

if __name__ == "__main__":
    for name in sys.argv[1:] or DRAW:
        DRAW[name]()
