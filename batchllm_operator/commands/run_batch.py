"""The command `run-batch`, with the arguments of `vllm run-batch`."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchllm_operator.amounts import counted
from batchllm_operator.commands.arguments import UsageError


def add_run_batch_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        *("-i", "--input-file"),
        required=True,
        metavar="FILE",
        help="JSON lines: a path, s3://... or https://...; so may the output be",
    )
    command.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="the answers, a line for each"
    )
    command.add_argument(
        "--error-file", metavar="FILE", help="for lines of errors, in place of the output"
    )
    command.add_argument(
        "--model",
        required=True,
        help="a folder or a name on the hub; any other engine argument of vLLM may follow",
    )
    command.add_argument(
        "--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="adapters, by model name"
    )
    command.add_argument(
        "--engine",
        type=_parse_object,
        default={},
        metavar="JSON",
        help='fields of a spec\'s engine, such as {"attention": "batchllm"}',
    )
    command.add_argument(
        "--work",
        metavar="FOLDER",
        help="for what the same command goes on from (default: the output's name and .work)",
    )
    command.set_defaults(others=[])  # the rest is vLLM's


def run_batch(args: argparse.Namespace) -> Mapping[str, Any]:
    """Answer a batch file of OpenAI's API, as `vllm run-batch` does; resumes."""
    adapters = {}
    for module in args.lora_modules:
        name, _, path = module.partition("=")
        if not name or not path:
            raise UsageError(f"--lora-modules: {module} isn't NAME=PATH")
        adapters[name] = str(Path(path).absolute()) if Path(path).is_dir() else path
    from batchllm_operator.batch_file.run_batch import BatchFiles
    from batchllm_operator.batch_file.run_batch import run_batch as answer

    if args.work is None and args.output_file.startswith(("http://", "https://")):
        raise UsageError("--work: needed where the output is an address on the web")
    work = args.work or f"{args.output_file}.work"
    if "://" not in work:
        work = str(Path(work).absolute())
    files = BatchFiles(args.input_file, args.output_file, args.error_file, work)
    result = answer(files, args.model, args.others, args.engine, adapters)
    lines, errors = counted(result["num_lines"], "line"), f"{result['num_errors']:,}"
    print(f"{lines}, {errors} with an error: {args.output_file}; {work} may be removed")
    return result


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"isn't JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("isn't an object")
    return value
