"""The `batchllm` command: runs the stages, and turns errors into messages and exit codes."""

import argparse
import gc
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from types import FrameType
from typing import Any, Final

from batchllm_operator import __version__, standard_streams
from batchllm_operator.commands import arguments, reports, run_batch, stages, tools
from batchllm_operator.errors import (
    ERROR_MARK,
    BatchLLMError,
    ExitCode,
    Interrupted,
    MissingLibraryError,
    StorageError,
)
from batchllm_operator.named_file import parse_file, write_file
from batchllm_operator.secrets.masking import MaskedStream, Masker
from batchllm_operator.standard_streams import say

# Each command imports its stage when it runs, so that --help answers at once.

RESULT_VERSION: Final = 1
_log = logging.getLogger("batchllm_operator")

_AddArguments = Callable[[argparse.ArgumentParser], None]
_Run = Callable[[argparse.Namespace], Mapping[str, Any]]
"""Prints for the user, and returns the content for `--result`; or raises `UsageError`."""
_COMMANDS: Final[Mapping[str, tuple[_AddArguments, _Run]]] = {
    "job": (stages.add_job_arguments, stages.job),
    "plan": (stages.add_plan_arguments, stages.plan),
    "run": (stages.add_run_arguments, stages.run),
    "verify": (stages.add_verify_arguments, stages.verify),
    "commit": (stages.add_commit_arguments, stages.commit),
    "report": (reports.add_report_arguments, reports.report),
    "run-batch": (run_batch.add_run_batch_arguments, run_batch.run_batch),
    "simulate": (tools.add_simulate_arguments, tools.simulate),
    "status": (reports.add_status_arguments, reports.status),
    "failed": (reports.add_failed_arguments, reports.failed),
    "gc": (tools.add_gc_arguments, tools.gc),
    "schema": (tools.add_schema_arguments, tools.schema),
}
"""Commands by name, in the order of `--help`, which shows the first line of their docstrings."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, with credentials masked in all that is printed."""
    gc.set_threshold(200_000, 5, 5)  # imports make a million objects and no garbage
    standard_streams.open_streams()
    masker = Masker.of(os.environ)
    with (
        redirect_stdout(MaskedStream(sys.stdout, masker)),
        redirect_stderr(MaskedStream(sys.stderr, masker)),
    ):
        try:
            code = _main(argv)
        except SystemExit as stop:  # argparse has printed the reason
            code = stop.code if isinstance(stop.code, int) else ExitCode.FAILURE
        except Exception:  # noqa: BLE001  Python itself would print it unmasked
            say(traceback.format_exc())
            code = ExitCode.FAILURE
        return standard_streams.finish(code)


def _main(argv: Sequence[str] | None) -> int:
    args, unknown = _parser().parse_known_args(argv)
    if "others" in args:
        args.others = unknown
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr
    )
    _log.setLevel(logging.INFO)
    if not sys.warnoptions:  # warnings are for developers; -W and PYTHONWARNINGS enable them
        warnings.simplefilter("ignore")
    if args.die_with_parent is not None:
        from batchllm_operator.child_processes import die_with_parent

        try:
            die_with_parent(args.die_with_parent)
        except ProcessLookupError as error:
            say(f"{ERROR_MARK}{error}")
            return ExitCode.FAILURE
    try:
        if unknown and "others" not in args:
            raise arguments.UsageError(f"unrecognized arguments: {' '.join(unknown)}")
        with _stopping_on_signals():
            _write_result(args, args.command(args))
        return ExitCode.OK
    except arguments.UsageError as error:
        args.parser.print_usage(sys.stderr)
        say(f"{ERROR_MARK}{args.name}: {error}")
        return ExitCode.INVALID
    except BatchLLMError as error:
        if error.result:
            with suppress(StorageError):
                _write_result(args, error.result)
        say("; ".join([f"{ERROR_MARK}{error}", *getattr(error, "__notes__", [])]))
        return error.exit_code
    except ModuleNotFoundError as error:
        say(f"{ERROR_MARK}{MissingLibraryError.of(error, f'batchllm {args.name}')}")
        return ExitCode.INVALID
    except OSError as error:  # of the machine or the storage, where no stage expects it
        return standard_streams.code_of(error)
    except Interrupted as stop:
        say("; ".join([f"batchllm: {stop}", *getattr(stop, "__notes__", [])]))
        return 128 + stop.signal_number


def _write_result(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    if args.result is not None:
        body = {"result_version": RESULT_VERSION, "command": args.name, **result}
        write_file(args.result, (json.dumps(body, indent=1) + "\n").encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchllm",
        description="Offline LLM jobs over data-lake tables, planned by their shared prefixes.",
        epilog="Exit codes: " + ", ".join(f"{code.value} {code.name.lower()}" for code in ExitCode),
    )
    parser.add_argument("--version", action="version", version=f"batchllm {__version__}")
    parser.set_defaults(result=None, die_with_parent=None)
    commands = parser.add_subparsers(
        title="commands", dest="name", required=True, metavar="COMMAND"
    )
    for name, (add_arguments, run) in _COMMANDS.items():
        text = (run.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=run, parser=command)
        if name != "schema":  # Airflow's tasks start the others
            command.add_argument(
                "--result",
                type=parse_file,
                metavar="FILE",
                help="write counts and URIs there as JSON",
            )
            command.add_argument(
                "--die-with-parent",
                type=int,
                metavar="PID",
                help="end at once when the process that started this one, PID, ends (Linux)",
            )
        add_arguments(command)
    return parser


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Interrupted`; the second ends the process at once."""
    stops, begun = (signal.SIGINT, signal.SIGTERM), list[Interrupted]()

    def stop(number: int, frame: FrameType | None) -> None:
        for other in stops:  # another one that has come already is passed over
            signal.signal(other, lambda number, frame: None)
        signal.raise_signal(number)  # Python calls the handlers of all that have come
        for other in stops:
            signal.signal(other, signal.SIG_DFL)
        begun.append(Interrupted(number))
        raise begun[0]

    before = {number: signal.signal(number, stop) for number in stops}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # see child_processes.py
    try:
        yield
    except (ImportError, RuntimeError) as error:
        # What ends an import becomes one in numpy, the other in Python 3.11's classes.
        if begun and (isinstance(error, ImportError) or error.__cause__ is begun[0]):
            raise begun[0] from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
