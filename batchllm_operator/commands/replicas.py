"""Replicas of one worker, as workers in processes of their own (ADR 33)."""

from __future__ import annotations

import argparse
import logging
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from batchllm_operator.child_processes import exit_code, start_command
from batchllm_operator.errors import ExitCode, IncompleteRunError, Interrupted

if TYPE_CHECKING:
    from batchllm_operator.shards.reports import WorkerReport

_log = logging.getLogger(__name__)


def run_replicas(
    args: argparse.Namespace, uri: str, environments: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Run a process for each replica; returns what they have done, as the result of one worker.

    A replica that fails leaves its shards to the others. If work is left then, `SystemExit` has its
    exit code, as it has said why.

    Args:
        args: of the command `run`, for the worker.
        environments: variables for each replica, beside those of this process.
    """
    owner = args.owner or secrets.token_hex(8)  # that of each replica begins with it
    num_replicas = len(environments)
    with (
        tempfile.TemporaryDirectory(prefix="batchllm-replicas-") as meeting,
        _ending_together() as processes,
    ):
        for rank, environment in enumerate(environments):
            options: dict[str, object] = {
                "--plan": uri,
                "--worker": args.worker * num_replicas + rank,
                "--num-workers": args.num_workers * num_replicas,
                "--replica": rank,
                "--meeting": meeting,
                "--owner": f"{owner}/{rank}",
                "--drain-s": args.drain_s,
                "--metrics-port": 0 if args.metrics is None else args.metrics.beside(rank),
            }
            if args.num_gpus is not None:
                options["--num-gpus"] = args.num_gpus
            command = ["run", *(part for option in options.items() for part in option)]
            processes.append(start_command(command, environment))
        codes = [exit_code(process.wait()) for process in processes]
    return {"plan_uri": uri, **_report(args, uri, owner, codes).to_result()}


@contextmanager
def _ending_together() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that get the signals of this one, and have ended at its end."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    except BaseException as error:
        for process in processes:
            if isinstance(error, Interrupted):
                process.send_signal(error.signal_number)
            else:
                process.kill()
        for process in processes:
            process.wait()
        raise


def _report(args: argparse.Namespace, uri: str, owner: str, codes: Sequence[int]) -> WorkerReport:
    """What the replicas have done, as of one worker."""
    from batchllm_operator.inspect.verify import verify_worker
    from batchllm_operator.run.shard_queue import ShardQueue
    from batchllm_operator.shards.reports import find_committed
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

    failed = {rank: code for rank, code in enumerate(codes) if code}
    if not failed:
        plan = StoredPlan.open(uri)
        if find_committed(plan) is not None:  # the shards' reports may have been removed
            return verify_worker(uri, args.worker, args.num_workers, owner)
        queue = ShardQueue(plan, args.worker, args.num_workers, owner=owner)
        queue.next_shard()  # looks at the lake
        return queue.report(queue.reports())
    code = next(iter(failed.values()))
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        raise SystemExit(code)
    try:
        report = verify_worker(uri, args.worker, args.num_workers, owner)
    except IncompleteRunError:
        raise SystemExit(code) from None
    _log.warning("replicas %s have failed; others have done their work", list(failed))
    return report
