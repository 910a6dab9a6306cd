"""Which test files take longer than they may: `make test-times`.

    python scripts/test_times.py REPORT

REPORT is pytest's JUnit report of the family xunit1. Budgets are seconds of wall time on two idle
cores, in `tests/budgets.toml`; what the fixtures of a file take counts for the first test that uses
them. Exit code 1 if a file is over its budget, or a budget is for no file.
"""

import sys
import tomllib
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
BUDGETS: Final = ROOT / "tests" / "budgets.toml"
_NUM_SHOWN: Final = 20


def seconds_by_file(report: Path) -> dict[str, float]:
    """Seconds of each test file, by its path below tests/; the longest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for case in ET.parse(report).iter("testcase"):
        found[case.attrib["file"].removeprefix("tests/")] += float(case.attrib["time"])
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def main(report: str) -> int:
    table = tomllib.loads(BUDGETS.read_text())
    budgets: dict[str, float] = table["files"]
    default_s: float = table["default_s"]
    seconds = seconds_by_file(Path(report))
    over = {name for name, took in seconds.items() if took > budgets.get(name, default_s)}
    for rank, (name, took) in enumerate(seconds.items()):
        if rank < _NUM_SHOWN or name in over:
            budget = budgets.get(name, default_s)
            print(f"{took:7.1f} s of {budget:4g}  {name}{'  OVER' if name in over else ''}")
    gone = [name for name in budgets if not (ROOT / "tests" / name).is_file()]
    for name in gone:
        print(f"no such file: {name}")
    print(f"{len(seconds)} files, {sum(seconds.values()):.0f} s, {len(over)} over their budgets")
    return 1 if over or gone else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
