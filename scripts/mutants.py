"""Plants small faults in a copy of the product, one at a time, and runs the tests named for each.

    python scripts/mutants.py                all of them
    python scripts/mutants.py NAME ...       these only
    python scripts/mutants.py --sample 15    as many, others each day

`tests/mutants.toml` lists them with tests of `make test`. A mutant is killed when one of its tests
fails. Before the first one, all tests named run on the unchanged copy: a test that fails there
proves nothing.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LIST: Final = ROOT / "tests" / "mutants.toml"
_PASSED, _FAILED = 0, 1  # pytest's exit codes


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: in `file`, `find` becomes `replace`."""

    name: str
    what: str
    """The fault in a sentence."""
    file: str
    find: str
    """Occurs once in the file."""
    replace: str
    tests: Sequence[str]


class StaleMutantError(Exception):
    """The product has changed: a mutant doesn't fit any more."""


def load() -> list[Mutant]:
    """The mutants of `tests/mutants.toml`.

    Raises:
        StaleMutantError: the text that one replaces isn't in its file exactly once.
    """
    mutants = [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.find) if path.is_file() else 0
        if count != 1:
            raise StaleMutantError(
                f"{mutant.name}: {mutant.file} has its text {count} times, not once"
            )
    return mutants


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="these mutants only")
    parser.add_argument("--sample", type=int, metavar="N", help="N mutants, chosen by the date")
    options = parser.parse_args(args)
    mutants = [mutant for mutant in load() if not options.names or mutant.name in options.names]
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    if options.sample is not None:
        today = random.Random(datetime.now(UTC).date().isoformat())
        mutants = today.sample(mutants, min(options.sample, len(mutants)))
    with _copy() as copy:
        tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        print(f"{len(mutants)} mutants; first their tests on the unchanged product", flush=True)
        if (code := _run(copy, list(tests), stop_early=False)) != _PASSED:
            print(f"these tests fail without any mutant (pytest's exit code {code})")
            return 1
        survivors = [mutant.name for mutant in mutants if not _is_killed(copy, mutant)]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed")
    return 1 if survivors else 0


def _is_killed(copy: Path, mutant: Mutant) -> bool:
    """Run the tests of a mutant over the product with it; print a row of the table."""
    begun_s = time.monotonic()
    with _planted(copy, mutant):
        code = _run(copy, mutant.tests, stop_early=True)
    verdict = {_FAILED: "killed", _PASSED: "SURVIVED"}.get(code, f"NOT TESTED ({code})")
    seconds = time.monotonic() - begun_s
    print(f"{mutant.name:<28} {verdict:<12} {seconds:6.1f} s  {mutant.what}", flush=True)
    return code == _FAILED


@contextmanager
def _copy() -> Iterator[Path]:
    """A copy of what git tracks or would, in a temporary folder."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="batchllm-mutants-") as folder:
        for name in filter(None, names.split("\0")):
            if (source := ROOT / name).is_file():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        yield Path(folder)


@contextmanager
def _planted(copy: Path, mutant: Mutant) -> Iterator[None]:
    path = copy / mutant.file
    before = path.read_text()
    path.write_text(before.replace(mutant.find, mutant.replace))
    if "@compiled" in before:  # callers in other files keep compiled copies of what has changed
        shutil.rmtree(copy / ".numba", ignore_errors=True)
    try:
        yield
    finally:
        path.write_text(before)
        if "@compiled" in before:
            shutil.rmtree(copy / ".numba", ignore_errors=True)


def _run(copy: Path, tests: Sequence[str], *, stop_early: bool) -> int:
    """Run tests over the copy; pytest's exit code. What they print is shown if none was to fail."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # a stale one would hide a change within a second
        "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "kernels")]),  # before the installed
        "NUMBA_CACHE_DIR": str(copy / ".numba"),
    }
    shown = None if not stop_early else subprocess.DEVNULL
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    if stop_early:
        command.append("-x")
    return subprocess.run(
        command, cwd=copy, env=environment, stdout=shown, stderr=shown, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
