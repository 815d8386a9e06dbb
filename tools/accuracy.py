"""`make accuracy [ROWS=file.csv] [OUT=accuracy.json]`: the planner against published measurements.

Writes the numbers to OUT, the page docs/planner-accuracy.md with its pictures, and plan/accuracy.toml, from which the
planner says how far its estimates are off.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from published.bands import write_bands
from published.page import write_page
from published.rows import read
from published.score import predict_all, report
from shardwise.errors import ConfigError, ExitCode, ShardwiseError

PAGE = Path(__file__).parents[1] / "docs" / "planner-accuracy.md"
BANDS = Path(__file__).parents[1] / "src" / "shardwise" / "plan" / "accuracy.toml"


def main(arguments: list[str] | None = None) -> int:
    """Read, predict, write; the exit code."""
    parser = argparse.ArgumentParser(prog="accuracy", description=__doc__)
    parser.add_argument("rows", type=Path, help="a .csv of measurements")
    parser.add_argument("--out", type=Path, default=Path("accuracy.json"), help="where the numbers go")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes")
    parser.add_argument(
        "--bands", type=Path, help="where plan/accuracy.toml goes; beside another page than the usual one"
    )
    given = parser.parse_args(arguments)
    try:
        if given.out.is_dir() or not given.out.resolve().parent.is_dir():
            raise ConfigError(f"{given.out}: cannot be written; needed a file in a folder that exists")
        rows, skipped = read(given.rows)
    except ShardwiseError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return int(error.exit_code)
    results, refused = predict_all(rows)
    numbers = report(results, len(rows) + sum(skipped.values()), {**skipped, **refused})
    try:
        given.out.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        write_page(given.page, results, numbers)
        write_bands(given.bands or (BANDS if given.page == PAGE else given.page.with_name(BANDS.name)), results)
    except OSError as error:
        why = f"cannot be written ({error.strerror}); check the folder and its free space"
        print(f"accuracy: {error.filename}: {why}", file=sys.stderr)
        return int(ExitCode.USAGE)
    print(json.dumps({key: value for key, value in numbers.items() if key != "by_source"}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
