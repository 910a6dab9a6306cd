"""The `batchllm` command: composes the stages, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator import __version__, standard_streams
from batchllm_operator.commands import gc as gc_command
from batchllm_operator.commands import report as report_command
from batchllm_operator.commands import run as run_command
from batchllm_operator.commands import simulate as simulate_command
from batchllm_operator.commands import status as status_command
from batchllm_operator.commands.plan_argument import add_plan, check_plan, plan_uri
from batchllm_operator.errors import (
    ERROR_MARK,
    BatchLLMError,
    ExitCode,
    Interrupted,
    MissingLibraryError,
)
from batchllm_operator.named_file import parse_file, write_file
from batchllm_operator.standard_streams import say

if TYPE_CHECKING:
    from pydantic import BaseModel

    from batchllm_operator.spec import JobSpec

# Each command imports its stage when it runs, so that --help and schema answer at once.

RESULT_VERSION: Final = 1
_log = logging.getLogger("batchllm_operator")

Result = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `errors.ExitCode`).

    Libraries repeat in their messages what they were given; credentials are taken out of all that
    this process prints itself, tracebacks included.
    """
    standard_streams.open_streams()
    try:
        from batchllm_operator.spec.masking import MaskedStream, Masker
    except ModuleNotFoundError as error:  # installed without what it depends on
        say(f"{ERROR_MARK}{MissingLibraryError.of(error, 'batchllm')}")
        return ExitCode.INVALID
    masker = Masker.of(os.environ)
    with (
        redirect_stdout(MaskedStream(sys.stdout, masker)),
        redirect_stderr(MaskedStream(sys.stderr, masker)),
    ):
        try:
            code = _main(argv)
        except SystemExit as stop:  # argparse has said why
            code = stop.code if isinstance(stop.code, int) else ExitCode.FAILURE
        except Exception:  # noqa: BLE001  Python itself would print it past the masks
            say(traceback.format_exc())
            code = ExitCode.FAILURE
        return standard_streams.finish(code)


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.name == "verify":
        _check_verify(parser, args)
    elif args.name == "simulate":
        simulate_command.check_arguments(parser, args)
    if args.name in ("run", "commit", "report", "status", "simulate"):
        check_plan(parser, args)
    if args.name == "run":
        run_command.check_arguments(parser, args)
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr
    )
    _log.setLevel(logging.INFO)
    if not sys.warnoptions:  # libraries warn their developers; -W and PYTHONWARNINGS bring it back
        warnings.simplefilter("ignore")
    # And torch's C++, such as to which node vLLM binds memory; read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if getattr(args, "die_with_parent", None) is not None:
        from batchllm_operator.engine.lifeline import die_with_parent

        try:
            die_with_parent(args.die_with_parent)
        except ProcessLookupError as error:
            say(f"{ERROR_MARK}{error}")
            return ExitCode.FAILURE
    _stop_on_signals()
    try:
        result = args.command(args)
        if getattr(args, "result", None) is not None:
            _write_result(args.result, args.name, result)
        return ExitCode.OK
    except BatchLLMError as error:
        say(f"{ERROR_MARK}{error}")
        return error.exit_code
    except ModuleNotFoundError as error:
        say(f"{ERROR_MARK}{MissingLibraryError.of(error, f'batchllm {args.name}')}")
        return ExitCode.INVALID
    except OSError as error:  # the machine's or the storage's, met where no stage expects it
        return standard_streams.code_of(error)
    except Interrupted as stop:
        say(f"batchllm: {stop}; what was finished is kept: give the same command again to go on")
        return 128 + stop.signal_number


def _plan(args: argparse.Namespace) -> Result:
    from batchllm_operator.plan.stage import plan_job
    from batchllm_operator.report import format_plan
    from batchllm_operator.spec.masking import print_unmasked

    if args.advise:
        return _advise(args)
    spec = _load_job(args)
    plan = plan_job(spec, args.ds)
    counts, estimate = plan.manifest.counts, plan.manifest.estimate
    print_unmasked(format_plan(plan.manifest, plan.folder.uri))
    result = {
        "plan_uri": plan.folder.uri,
        "num_shards": len(plan.manifest.shards),
        "planned_saving_ratio": counts.planned_saving_ratio,
        "optimal_saving_ratio": counts.optimal_saving_ratio,
        "imbalance": plan.manifest.imbalance,
        "predicted_gpu_s": estimate.gpu_s if estimate else None,
        "predicted_cost_usd": estimate.cost_usd if estimate else None,
        **counts.model_dump(),
    }
    if args.record is not None:
        from batchllm_operator.inspect.verify import record_plan

        record_plan(spec, args.ds, args.record, result)
    return result


def _load_job(args: argparse.Namespace) -> JobSpec:
    from batchllm_operator.spec import load_spec, parse_spec_json

    if args.job_json is not None:
        return parse_spec_json(args.job_json, source="--job-json")
    return load_spec(args.job)


def _advise(args: argparse.Namespace) -> Result:
    from batchllm_operator.plan.advise import advise
    from batchllm_operator.report import format_advice

    advice = advise(_load_job(args), args.ds)
    print(format_advice(advice))
    return asdict(advice)


def _verify(args: argparse.Namespace) -> Result:
    from batchllm_operator.inspect.verify import verify_plan, verify_shard

    if args.record is not None:
        return verify_plan(_load_job(args), args.ds, args.record)
    uri = plan_uri(args)
    report = verify_shard(uri, args.shard, args.owner)
    print(
        f"shard {report.shard_idx}: complete, {report.num_rows:,} rows in {report.num_parts} parts"
    )
    return {"plan_uri": uri, **report.model_dump()}


def _commit(args: argparse.Namespace) -> Result:
    from batchllm_operator.commit.stage import commit_run
    from batchllm_operator.report import share
    from batchllm_operator.spec.masking import print_unmasked

    report = commit_run(plan_uri(args))
    print_unmasked(
        f"published in {report.table_uri}, partition {report.ds}; report: {report.report_uri}"
    )
    failed = share(report.num_rows_failed, report.num_rows_in)
    print(f"{report.num_rows_in:,} rows published, {report.num_rows_failed:,} failed ({failed})")
    return report.figures()


def _gc(args: argparse.Namespace) -> Result:
    return gc_command.run(_load_job(args), args)


def _schema(args: argparse.Namespace) -> Result:
    from batchllm_operator.spec.masking import print_unmasked

    schema = _schema_model(args.what).model_json_schema()
    print_unmasked(json.dumps(schema, indent=2))
    return schema


def _schema_model(what: str) -> type[BaseModel]:
    if what == "report":
        from batchllm_operator.artifacts.run_report import RunReport

        return RunReport
    if what == "progress":
        from batchllm_operator.artifacts.shard_progress import ShardProgress

        return ShardProgress
    from batchllm_operator.spec import JobSpec

    return JobSpec


def _demo_table(args: argparse.Namespace) -> Result:
    from batchllm_operator.demo.table import build_demo_table

    info = build_demo_table(args.folder, ds=args.ds)
    print(f"demo table: {info}")
    return {"folder": str(args.folder)}


def _demo_model(args: argparse.Namespace) -> Result:
    from batchllm_operator.demo.model import build_demo_model

    build_demo_model(args.folder)
    print(f"demo model: {args.folder}")
    return {"folder": str(args.folder)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchllm",
        description="Offline LLM jobs over data-lake tables, planned by their shared prefixes.",
        epilog="Exit codes: " + ", ".join(f"{code.value} {code.name.lower()}" for code in ExitCode),
    )
    parser.add_argument("--version", action="version", version=f"batchllm {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="name", required=True, metavar="COMMAND"
    )

    def add(
        name: str, run: Callable[[argparse.Namespace], Result], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=run)
        return command

    def add_stage(
        name: str, run: Callable[[argparse.Namespace], Result], text: str
    ) -> argparse.ArgumentParser:
        command = add(name, run, text)
        command.add_argument(
            "--result", type=parse_file, metavar="FILE", help="write counts and URIs there as JSON"
        )
        command.add_argument(
            "--die-with-parent",
            type=int,
            metavar="PID",
            help="end at once when the process that started this one, PID, ends (Linux)",
        )
        return command

    plan = add_stage("plan", _plan, "Plan a job for one partition of its input table.")
    _add_job(plan)
    plan.add_argument("--ds", required=True, help="the partition, such as 2026-01-31")
    plan.add_argument(
        "--record", metavar="NAME", help="keep the result in the output table too, for `verify`"
    )
    plan.add_argument(
        "--advise",
        action="store_true",
        help="only print what other orders of the template's columns would save, on a sample",
    )

    run_command.add_arguments(
        add_stage(
            "run",
            run_command.run,
            "Generate for one shard of a plan; resumes where it was stopped.",
        )
    )

    verify = add_stage(
        "verify", _verify, "Check that what a stage was to leave in the lake is there, whole."
    )
    add_plan(verify).add_argument(
        "--job-json", metavar="JSON", help="the job spec itself; with --record"
    )
    verify.add_argument("--shard", type=int, metavar="I", help="of the plan, from 0")
    verify.add_argument(
        "--owner",
        metavar="ID",
        help="as for `run`: if the shard isn't whole, and an attempt of another owner is at work on"
        " it, end with exit code 7",
    )
    verify.add_argument("--record", metavar="NAME", help="as for `plan`; needs the job and --ds")

    commit = add_stage("commit", _commit, "Check that every row is answered, and publish.")
    add_plan(commit)

    report_command.add_arguments(
        add_stage("report", report_command.run, "Print what a committed run did, or compare two.")
    )

    simulate_command.add_arguments(
        add_stage(
            "simulate",
            simulate_command.run,
            "Play a job through vLLM's scheduler step by step, without a model.",
        )
    )

    status_command.add_arguments(
        add_stage("status", status_command.run, "Print how far the run of a plan is, by shards.")
    )

    gc = add_stage(
        "gc", _gc, "List what a job has left behind and nobody needs any more; --yes removes it."
    )
    _add_job(gc)
    gc_command.add_arguments(gc)

    schema = add("schema", _schema, "Print the JSON schema of the job spec, or of another file.")
    schema.add_argument(
        "what",
        nargs="?",
        choices=("job", "report", "progress"),
        default="job",
        help="job spec, a run's report.json, or an attempt's progress.json (default job)",
    )

    table = add("demo-table", _demo_table, "Make a small table from installed packages' texts.")
    table.add_argument("folder", type=Path, metavar="DIR")
    table.add_argument("--ds", required=True, help="the partition to make")

    model = add("demo-model", _demo_model, "Make a tiny model with random weights.")
    model.add_argument("folder", type=Path, metavar="DIR")
    return parser


def _add_job(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("--job", type=Path, metavar="FILE", help="job spec (YAML)")
    which.add_argument("--job-json", metavar="JSON", help="the job spec itself, paths absolute")


def _check_verify(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Either a shard of a plan is verified, or a record of a job and partition."""
    given = {
        name
        for name in ("plan", "shard", "record", "ds", "job", "job_json")
        if getattr(args, name) is not None
    }
    of_shard = ({"plan", "shard"}, {"job", "ds", "shard"})
    of_plan = ({"record", "job", "ds"}, {"record", "job_json", "ds"})
    if given not in (*of_shard, *of_plan):
        parser.error(
            "verify: give --shard with --plan or with --job and --ds, or --record with --job or"
            " --job-json and --ds"
        )


def _write_result(path: Path, command: str, result: Result) -> None:
    body = {"result_version": RESULT_VERSION, "command": command, **result}
    write_file(path, (json.dumps(body, indent=1) + "\n").encode())


def _stop_on_signals() -> None:
    """Turn the first SIGINT or SIGTERM into `Interrupted`; the second ends the process at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)


if __name__ == "__main__":
    sys.exit(main())
