"""Replicas of one worker, as workers in processes of their own (ADR 33)."""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchllm_operator.child_processes import exit_code, start_command
from batchllm_operator.errors import ExitCode, IncompleteRunError, Interrupted

if TYPE_CHECKING:
    from batchllm_operator.shards.reports import WorkerReport

_log = logging.getLogger(__name__)


def run_replicas(
    args: argparse.Namespace, uri: str, environments: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Run a process for each replica, and return the sum of their results.

    A replica that fails leaves its shards to the others. The results are whole if they have
    run all of them.

    Args:
        args: of the command `run`, for the worker.
        environments: variables for each replica, beside those of this process.

    Raises:
        SystemExit: a replica was stopped or has failed, and work is left; it has said why.
    """
    owner = args.owner or secrets.token_hex(8)  # that of each replica begins with it
    with tempfile.TemporaryDirectory(prefix="batchllm-replicas-") as folder:
        paths = [Path(folder) / f"{rank}.json" for rank in range(len(environments))]
        commands = [
            _command(args, uri, owner, rank, path, len(environments))
            for rank, path in enumerate(paths)
        ]
        with _running(commands, environments) as processes:
            codes = [exit_code(process.wait()) for process in processes]
        results = [json.loads(path.read_bytes()) for path in paths if path.exists()]
    if any(codes):
        report = _check_whole(args, uri, owner, codes)
        if not results:  # no replica was left to write one
            return {"plan_uri": uri, **report.to_result()}
    return _total(args, uri, results)


def _command(
    args: argparse.Namespace, uri: str, owner: str, rank: int, result: Path, num_replicas: int
) -> list[object]:
    options: dict[str, object] = {
        "--plan": uri,
        "--worker": args.worker * num_replicas + rank,
        "--num-workers": args.num_workers * num_replicas,
        "--replica": rank,
        "--meeting": result.parent,
        "--owner": f"{owner}/{rank}",
        "--drain-s": args.drain_s,
        "--result": result,
        "--metrics-port": 0,
    }
    if args.num_gpus is not None:
        options["--num-gpus"] = args.num_gpus
    if args.metrics is not None:
        options["--metrics-port"] = args.metrics.beside(rank)
    return ["run", *(part for option in options.items() for part in option)]


@contextmanager
def _running(
    commands: Sequence[Sequence[object]], environments: Sequence[Mapping[str, str]]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of the commands, which get the signals of this one, and have ended at its end."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, more in zip(commands, environments, strict=True):
            processes.append(start_command(command, more))
        yield processes
    except BaseException as error:
        number = error.signal_number if isinstance(error, Interrupted) else None
        for process in processes:
            if number is not None:
                process.send_signal(number)
            else:
                process.kill()
        for process in processes:
            process.wait()
        raise


def _check_whole(
    args: argparse.Namespace, uri: str, owner: str, codes: Sequence[int]
) -> WorkerReport:
    """Raise `SystemExit` unless nothing is left, whatever has become of some replicas."""
    from batchllm_operator.inspect.verify import verify_worker

    failed = [rank for rank, code in enumerate(codes) if code]
    code = next(code for code in codes if code)
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        raise SystemExit(code)
    try:
        report = verify_worker(uri, args.worker, args.num_workers, owner)
    except IncompleteRunError:
        raise SystemExit(code) from None
    _log.warning("replicas %s have failed; others have done their work", failed)
    return report


def _total(
    args: argparse.Namespace, uri: str, results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The sum of the replicas' results, as that of one worker."""
    latest = max(results, key=lambda each: int(each["num_finished"]))
    own = {"plan_uri": uri, "worker": args.worker, "num_workers": args.num_workers}
    summed = (*_counts(latest), "shard_idxs")
    return {
        **own,
        **{name: latest[name] for name in ("num_shards", "num_finished", "others")},
        **{name: sum((each[name] for each in results), type(latest[name])()) for name in summed},
    }


def _counts(result: Mapping[str, Any]) -> list[str]:
    from batchllm_operator.stored_plan.counts import Counts

    return ["num_parts", *(name for name in Counts.model_fields if name in result)]
