"""The commands beside a job's stages: `gc`, `schema`, `simulate`."""

import argparse
import json
import re
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from batchllm_operator.amounts import byte_size, counted
from batchllm_operator.commands.arguments import (
    UsageError,
    add_job,
    add_plan,
    check_plan,
    load_job,
    number,
    plan_uri,
)
from batchllm_operator.secrets.masking import print_unmasked

_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_SCHEMAS: Final = {
    "job": "batchllm_operator.spec:JobSpec",
    "report": "batchllm_operator.stored_plan.run_report:RunReport",
    "progress": "batchllm_operator.shards.attempts:ShardProgress",
}
_MADE_UP: Final[Mapping[str, tuple[str, int | float, int, str]]] = {
    "num_requests": ("--requests", 3000, 1, "made-up requests"),
    "share_degree": ("--degree", 7.0, 1, "requests per document"),
    "prefix_tokens": ("--prefix-tokens", 1100, 0, "tokens of a document"),
    "distinct_tokens": ("--distinct-tokens", 400, 1, "tokens of a request besides"),
    "output_tokens": ("--output-tokens", 100, 1, "tokens of an output"),
    "instruction_tokens": ("--instruction-tokens", 30, 0, "tokens that all requests begin with"),
}
"""Options by field of the shape, with their defaults (the paper's case 1) and least values."""
_POLICIES: Final = (
    *("static", "dynamic", "continuous", "chunked_prefill"),
    *("stock_shuffled", "stock_sorted", "batchllm_stock_attention", "batchllm"),
)


def add_gc_arguments(command: argparse.ArgumentParser) -> None:
    add_job(command, ds="only this partition")
    command.add_argument(
        "--older-than",
        type=parse_age,
        default="7d",
        metavar="AGE",
        help="only what hasn't changed for so long, such as 36h, 7d or 2w (default: 7d): longer"
        " than any part, and any commit, takes",
    )
    command.add_argument("--yes", action="store_true", help="remove it; without, only list it")


def parse_age(text: str) -> float:
    """Seconds of an age such as `36h`; raises `argparse.ArgumentTypeError` for another text."""
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} isn't an age: write a number and s, m, h, d or w, such as 7d"
        )
    return float(int(match[1]) * _UNIT_S[match[2]])


def gc(args: argparse.Namespace) -> Mapping[str, Any]:
    """List what a job has left behind and no longer needs; --yes removes it."""
    spec = load_job(args)
    from batchllm_operator.inspect.gc import find_garbage, remove_garbage
    from batchllm_operator.progress import duration

    now = time.time()
    garbage, kept = find_garbage(spec, before=now - args.older_than, ds=args.ds)
    if args.yes:
        garbage, changed = remove_garbage(garbage)
        kept += changed
    for files in garbage:
        age_s = max(0.0, now - files.modified_at)  # below 0 where the storage's clock is ahead
        days = age_s / _UNIT_S["d"]
        age = f"{days:,.1f} days" if days >= 1 else duration(age_s)
        print(
            f"{'removed' if args.yes else 'would remove'} {counted(len(files.files), 'file')},"
            f" {byte_size(files.num_bytes)}, {age} old: {files.folder.uri}"
            f" ({files.what})"
        )
    for plan in kept:
        print(f"kept: {plan.folder.uri}: {plan.why}")
    num_files = sum(len(files.files) for files in garbage)
    num_bytes = sum(files.num_bytes for files in garbage)
    if garbage:
        print(
            f"{counted(num_files, 'file')}, {byte_size(num_bytes)} in all"
            + ("" if args.yes else "; to remove them, add --yes")
        )
    else:
        print("no file is both old enough and no longer needed")
    return {
        "is_removed": args.yes,
        "num_files": num_files,
        "num_bytes": num_bytes,
        "num_folders": len(garbage),
        "num_kept": len(kept),
    }


def add_schema_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        nargs="?",
        choices=_SCHEMAS,
        default="job",
        help="job spec, a run's report.json, or an attempt's progress.json (default job)",
    )


def schema(args: argparse.Namespace) -> Mapping[str, Any]:
    """Print the JSON schema of the job spec, or of another file."""
    content: dict[str, Any] = resolve_name(_SCHEMAS[args.what]).model_json_schema()
    print_unmasked(json.dumps(content, indent=2))
    return content


def add_simulate_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command, required=False)  # without a plan: made-up requests
    command.add_argument("--shard", type=int, metavar="I", help="of the plan (default: 0)")
    for name, (option, default, least, text) in _MADE_UP.items():
        kind = number(type(default), least)
        command.add_argument(
            option, dest=name, type=kind, metavar="N", help=f"{text} (default: {default})"
        )
    command.add_argument(
        "--policies",
        nargs="+",
        choices=(*_POLICIES, "all"),
        metavar="NAME",
        help=f"of {', '.join(_POLICIES)}; or all (default: stock_shuffled stock_sorted batchllm)",
    )
    command.add_argument(
        "--gpu", metavar="NAME", help="such as H100 (default: the plan's, or H100)"
    )
    command.add_argument("--gpu-table", type=Path, metavar="FILE", help="GPUs of your own (TOML)")
    command.add_argument(
        "--model",
        metavar="NAME",
        help="Mistral-7B, Llama-3-8B, Qwen2-7B, or a folder or hub id (default: the plan's, or"
        " Mistral-7B)",
    )
    count = number(int, 1)
    command.add_argument("--num-gpus", type=count, metavar="N", help="that the engine spans")
    command.add_argument("--num-blocks", type=count, metavar="N", help="of the KV cache")
    command.add_argument("--chunk-size", type=count, metavar="N", help="most tokens of a step")
    command.add_argument(
        "--arrivals-per-s",
        type=number(float, 1e-9),
        metavar="X",
        help="for policy dynamic (default: 100)",
    )
    command.add_argument(
        "--seed", type=number(int, 0), metavar="N", help="of all that is random (default: 0)"
    )
    command.add_argument(
        "--estimate-error",
        type=number(float, 0, 1),
        metavar="SHARE",
        help="let estimated output lengths be off by up to this, such as 0.3 (default: 0)",
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="write timelines there (Parquet)")


def simulate(args: argparse.Namespace) -> Mapping[str, Any]:
    """Play a job through vLLM's scheduler step by step, without a model."""
    sizes = _made_up_sizes(args)
    from batchllm_operator.inspect.simulations import (
        SimulationOptions,
        make_folder,
        shape_to_simulate,
        shard_to_simulate,
        simulate_policies,
        write_timeline,
    )
    from batchllm_operator.simulate.summary import (
        format_attention,
        format_runs,
        predict_attention,
        relative_times,
    )
    from batchllm_operator.simulate.workload import Shape

    given = {field.name: getattr(args, field.name) for field in fields(SimulationOptions)}
    options = SimulationOptions(**{key: value for key, value in given.items() if value is not None})
    if args.out is not None:
        make_folder(args.out)
    if sizes is not None:
        defaults: dict[str, Any] = {name: default for name, (_, default, *_) in _MADE_UP.items()}
        shape = Shape("made-up requests" if sizes else "the paper's case 1", **defaults | sizes)
        workload, machine = shape_to_simulate(shape, options)
    else:
        workload, machine = shard_to_simulate(plan_uri(args), args.shard or 0, options)
    runs = []
    for run in simulate_policies(workload, machine, options):
        runs.append(run)
        if args.out is not None:
            write_timeline(run, args.out)
    print(format_runs(workload, machine, runs))
    attention = predict_attention(runs, machine)
    if attention:
        print("", format_attention(attention, machine), sep="\n")
    return {
        "model": machine.model.name,
        "gpu": machine.gpu.name,
        "num_gpus": machine.num_gpus,
        "num_blocks": machine.num_blocks,
        "block_size": machine.block_size,
        "chunk_size": machine.max_num_batched_tokens,
        "out": None if args.out is None else str(args.out),
        "runs": [
            {**run.row(), "relative_time": round(relative, 4)}
            for run, relative in zip(runs, relative_times(runs), strict=True)
        ],
        "attention": attention,
    }


def _made_up_sizes(args: argparse.Namespace) -> dict[str, Any] | None:
    """The sizes that are given of made-up requests; None if those of a plan are simulated."""
    check_plan(args)
    sizes = {name: value for name in _MADE_UP if (value := getattr(args, name)) is not None}
    if args.plan is None and args.job is None:
        if args.shard is not None:
            raise UsageError("--shard needs --plan, or --job and --ds")
        return sizes
    for name in sizes:
        raise UsageError(f"{_MADE_UP[name][0]} is for made-up requests, not for a plan")
    return None
