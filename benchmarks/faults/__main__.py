"""What crashes, zombies and bad storage do to tables: `python -m benchmarks.faults`.

Each trial puts a new input into a lake that holds an older publication, runs plan, run and commit
with the fake engine while a fault of one kind happens, lets the job finish, and compares the
table, read by pyarrow, pyiceberg or delta-rs, with what the fake engine says of each row by
definition, computed here. Inputs are new, so that runs have work to do; but where plans and commits
are disturbed, one that there was may come back. Kinds:

    kill_plan, kill_run, kill_commit    kill -9 at a time uniform over the command's usual one
    kill_..._at_write                   kill -9 before one of its file operations
    stop_run                            one SIGINT or SIGTERM, one to three times
    zombie_run                          a run is paused, another takes its shards, the first goes on
    late_commit                         the same with commits, of an older plan and a newer one
    watched_commit                      a reader looks before each file operation of a commit
    damage                              staged parts and ledger entries are truncated or altered
    disk_full                           no room is left (a small tmpfs; else a limit on file sizes)
    s3_500, s3_slow_down, s3_timeout, s3_lost_response    a burst of requests to S3 fails so
    s3_kill                             kill -9 at a request, before or after S3 has done it

One worker runs the shards. With `--workers`, two to nine do, to which one to four things happen at
random moments, until one that is started last does the rest. Lost attempts are taken over 30 times
as fast as usual, on S3 10 times: all times by which workers judge each other, and spill, are
divided by that. Kinds:

    workers_kill                        one is killed, and mostly started again
    workers_kill_at_write               ... before one of its file operations
    workers_zombie                      one is paused, others take its shards, it goes on
    workers_drain                       SIGTERM: open parts are finished, unless a second one comes
    workers_twins                       another one has the same number, and often the same owner
    workers_renumbered                  all are killed, others start as another number of workers
    workers_many                        more workers than shards, one is killed or paused
    workers_clocks                      clocks differ by up to an hour, one is killed or paused
    workers_any                         any of these
    workers_s3_...                      as above, while workers are killed and others join

A sixth of the trials is on S3 (moto's server). While a commit runs, is killed or waits, another
thread reads the table all the time: a read with anything but the rows of one publication counts
as a half commit, and so does one that raised, on disk. On S3, where a reader may mix two versions
of a file, those are `reader_errors` only. Commands are the real ones,
`batchllm_operator.cli.main` in processes of their own, but forked from one that has imported
everything.

A row is finished once the run has taken its answer and asks the engine for the next one; a note of
that is written then, so that a row of which a signal or a kill interrupts the taking doesn't count.
Finished rows are spilled after every `job.SPILL_ROWS`, S, of them. `regenerated_fraction` is
the finished rows that were generated again in the trials with a kill of a run (on S3, of any
command), as a share of their rows, and `regenerated_rows_max` the most after one kill.
`overpaid_rows` are those beyond

    0        of a process that ends well, by a signal, or by two while it drains
    S - 1    of one that is killed, or gets a third signal: the S-th row is finished only once the
             spill is written. The fake engine answers in order, so all are of one shard.
    2 S + 3  of a shard that is taken over from a worker: the entry of S rows may be written just
             after the other has looked; the next S-th row is its end; it takes up to 4 more

and, but for the first, beyond those that the process finished while its other thread wrote a spill.
A worker may be taken over while it is paused, S3 fails or its owner's next try begins.
Exit code 1 if a row is lost, double or wrong, if a commit was seen by halves, if an older
plan's rows took a newer one's place, if a row was overpaid, if a job never came to its end, or if
a kind of fault never happened.
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.faults.series import Series
from benchmarks.faults.tables import FORMATS
from benchmarks.faults.trial import FATAL, Trial
from benchmarks.faults.worker_trial import WorkerTrial
from benchmarks.provenance import provenance

_SUMMED: Final = (
    *("kills", "faults", "lost_rows", "duplicate_rows", "half_commits", "wrong_rows", "reads"),
    *("reader_errors", "zombies_published", "overpaid_rows"),
)
_RUNS_KILLED: Final = (
    *("kill_run", "kill_run_at_write", "s3_kill"),
    *("workers_kill", "workers_kill_at_write", "workers_renumbered"),
)
Jobs = Sequence[tuple[str, range]]
"""Formats, and the numbers of their trials."""

_MANY: Final = 8
"""Trials of a kind, of which at least one has to meet its fault."""


def summary(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of some trials."""
    killed = [each for each in outcomes if each["kills"] and each["kind"] in _RUNS_KILLED]
    num_rows = sum(each["rows"] for each in killed)
    again = sum(each["regenerated_rows"] for each in killed)
    return {
        "trials": len(outcomes),
        **{name: sum(each[name] for each in outcomes) for name in _SUMMED},
        "stuck": sum(bool(each["stuck"]) for each in outcomes),
        "regenerated_fraction": round(again / num_rows, 5) if num_rows else 0.0,
        "regenerated_rows_max": max((each["regenerated_rows_max"] for each in outcomes), default=0),
    }


def idle_kinds(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """Kinds of which nothing ever happened, in many trials: they have tested nothing."""
    trials = Counter(each["kind"] for each in outcomes)
    met = {each["kind"] for each in outcomes if each["kills"] or each["faults"]}
    return sorted(kind for kind, count in trials.items() if count >= _MANY and kind not in met)


def work(
    root: Path, trial: type[Trial], seed: int, jobs: Jobs
) -> tuple[list[dict[str, Any]], bool]:
    """Run trials; returns their outcomes, and whether the series has come to its end."""
    outcomes = []
    series = Series(root, seed, trial)
    try:
        for table_format, numbers in jobs:
            for outcome in series.trials(table_format, numbers):
                outcomes.append({"format": table_format, **asdict(outcome)})
                print(_line(outcomes[-1]), file=sys.stderr, flush=True)
        return outcomes, True
    except Exception:  # noqa: BLE001 - what has been tried is told all the same
        traceback.print_exc()
        return outcomes, False
    finally:
        series.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=8, help="for each format")
    parser.add_argument("--formats", default=",".join(FORMATS), help="separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="that run trials")
    parser.add_argument(
        "--workers",
        action="store_true",
        help="trials of workers that come and go, in place of the others",
    )
    parser.add_argument("--root", type=Path, help="folder for lakes; those that failed stay there")
    parser.add_argument("--json", type=Path, help="also write every trial's outcome there")
    args = parser.parse_args()
    formats = args.formats.split(",")
    if unknown := sorted(set(formats) - set(FORMATS)):
        parser.error(f"--formats: there is no {', '.join(unknown)}")
    root = args.root or Path(tempfile.mkdtemp(prefix="batchllm-faults-"))
    started_at = time.monotonic()
    trial = WorkerTrial if args.workers else Trial
    outcomes, is_whole = run_trials(
        root, trial, args.seed, formats, args.trials, num_processes=args.processes
    )
    if args.json:
        args.json.write_text(json.dumps(outcomes, indent=1))
    kinds = Counter(each["kind"] for each in outcomes)
    by_format = {name: [o for o in outcomes if o["format"] == name] for name in formats}
    result = {
        "benchmark": "faults_of_workers" if args.workers else "faults",
        "seed": args.seed,
        **summary(outcomes),
        "by_format": {name: summary(found) for name, found in by_format.items()},
        "trials_by_kind": dict(sorted(kinds.items())),
        "idle_kinds": idle_kinds(outcomes),
        **provenance(),
        "wall_s": round(time.monotonic() - started_at, 1),
    }
    has_failed = not is_whole or any(result[name] for name in (*FATAL, "idle_kinds"))
    if has_failed:
        print(f"lakes are left in {root}", file=sys.stderr)
    elif args.root is None:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(result))
    return int(has_failed)


def run_trials(
    root: Path,
    trial: type[Trial],
    seed: int,
    formats: Sequence[str],
    num_trials: int,
    *,
    num_processes: int,
) -> tuple[list[dict[str, Any]], bool]:
    """All outcomes, and whether every series has come to its end."""
    num_processes = max(1, min(num_processes, num_trials))
    bounds = [num_trials * idx // num_processes for idx in range(num_processes + 1)]
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork")) as pool:
        all_series = [
            pool.submit(work, root / f"series-{idx}", trial, seed, [(f, part) for f in formats])
            for idx, part in enumerate(map(range, bounds, bounds[1:]))
        ]
        results = [series.result() for series in all_series]
    outcomes = [outcome for of_series, _ in results for outcome in of_series]
    return outcomes, all(is_whole for _, is_whole in results)


def _line(outcome: dict[str, Any]) -> str:
    shown = {name: value for name, value in outcome.items() if value and name != "format"}
    return f"{outcome['format']}: {shown}"


if __name__ == "__main__":
    sys.exit(main())
