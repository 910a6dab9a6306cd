"""The command line: see the package's docstring."""

import argparse
import sys
import time

import helm_chart
from helm_chart.check import check
from helm_chart.readme import write_table


def main() -> int:
    """Run one subcommand and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="helm_chart",
        description=helm_chart.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["check", "readme"])
    if parser.parse_args().command == "readme":
        write_table()
        return 0
    start = time.monotonic()
    summary = check()
    for problem in summary.problems:
        print(f"helm: {problem}", file=sys.stderr)
    if summary.problems:
        return 1
    print(f"helm: {summary.text}, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
