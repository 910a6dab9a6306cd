"""Arguments that commands share: a job spec, and a plan or the latest plan of a job."""

from __future__ import annotations

import argparse
import logging
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from batchllm_operator.spec import JobSpec

_log = logging.getLogger(__name__)


class UsageError(Exception):
    """Arguments don't go together; `cli` prints it after the command's name, with the usage."""


def number(
    kind: type[int] | type[float], least: float, most: float = math.inf
) -> Callable[[str], int | float]:
    """A type of arguments: numbers from `least` to `most`."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(f"{text} isn't at least {least:g}{limit}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text isn't one
    return parse


def add_job(
    command: argparse.ArgumentParser, ds: str = "the partition, such as 2026-01-31"
) -> None:
    """Add the arguments that `load_job` reads, and `--ds` with a help text."""
    which = command.add_mutually_exclusive_group()
    which.add_argument("--job", type=Path, metavar="FILE", help="job spec (YAML)")
    which.add_argument("--job-json", metavar="JSON", help="the job spec itself, paths absolute")
    command.add_argument("--ds", help=ds)


def add_only(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--only",
        type=lambda names: names.split(","),
        default=(),
        metavar="PROMPT[,PROMPT]",
        help="of a job's prompts, ask these again; take the other answers from the published"
        " partition",
    )
    command.add_argument(
        "--retry",
        metavar="URI",
        help="of a published plan: ask again only the rows that failed in it, and keep its"
        " other outputs; in place of --job and --ds",
    )


def load_job(args: argparse.Namespace, *, needs_ds: bool = False) -> JobSpec:
    """The job spec; a UsageError names all that is missing at once, a SpecError what is wrong."""
    missing = []
    if args.job is None and args.job_json is None:
        missing.append("--job FILE or --job-json JSON")
    if needs_ds and args.ds is None:
        missing.append("--ds DS")
    if missing:
        raise UsageError(f"give {', and '.join(missing)}")
    from batchllm_operator.spec import load_spec, parse_spec_json

    if args.job_json is not None:
        return parse_spec_json(args.job_json, source="--job-json")
    return load_spec(args.job)


def add_engine(command: argparse.ArgumentParser) -> None:
    """Add the argument that `is_on_spark` reads."""
    command.add_argument(
        "--on",
        choices=("local", "spark"),
        help="in place of the spec's planner.engine: one process, or Spark",
    )


def is_on_spark(args: argparse.Namespace, spec: JobSpec) -> bool:
    return (args.on or spec.planner.engine) == "spark"


def add_worker(command: argparse.ArgumentParser) -> None:
    """Add the arguments that say which of a plan's workers is meant, numbered from 0.

    A number from `--num-workers` on is that of a worker that came later: it has no run of its own.
    """
    command.add_argument(
        "--worker",
        type=number(int, 0),
        default=0,
        metavar="I",
        help="its number among them, from 0 (default: 0); one from N on only helps the others",
    )
    command.add_argument(
        "--num-workers",
        type=number(int, 1),
        default=1,
        metavar="N",
        help="workers that share the plan (default: 1); not part of the plan",
    )


def add_plan(command: argparse.ArgumentParser, *, required: bool = True) -> Any:
    """Add the arguments that name a plan; returns their mutually exclusive group."""
    which = command.add_mutually_exclusive_group(required=required)
    which.add_argument("--plan", metavar="URI", help="the last line that `plan` printed")
    which.add_argument(
        "--job", type=Path, metavar="FILE", help="job spec (YAML), for its newest plan; needs --ds"
    )
    command.add_argument("--ds", help="the partition")
    return which


def check_plan(args: argparse.Namespace) -> None:
    """Raise `UsageError` unless job and partition are given together."""
    if args.job is not None and args.ds is None:
        raise UsageError("--job needs --ds")
    if args.job is None and args.ds is not None:
        raise UsageError("--ds goes with --job")


def plan_uri(args: argparse.Namespace, which: Literal["newest", "published"] = "newest") -> str:
    """URI of the given plan, or of a plan of the job and partition.

    That one is logged, with a warning if the spec differs from it now.

    Raises:
        UsageError: see `check_plan`.
        SpecError: the spec or the partition's name is wrong.
        PlanError, TableError: there is no plan, or it is of another version; none is published.
    """
    check_plan(args)
    if args.plan is not None:
        return str(args.plan)
    from batchllm_operator.commit.commit_run import published_plan_uri
    from batchllm_operator.errors import PlanError
    from batchllm_operator.shards.job_status import newest_plan_uri
    from batchllm_operator.spec import load_spec
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

    spec = load_spec(args.job)
    uri = (newest_plan_uri if which == "newest" else published_plan_uri)(spec, args.ds)
    if uri is None:
        command = shlex.join(["batchllm", "plan", "--job", str(args.job), "--ds", args.ds])
        raise PlanError(f"job {spec.name}, partition {args.ds}: there is no plan; run `{command}`")
    manifest = StoredPlan.open(uri).manifest
    _log.info("%s plan of job %s, partition %s: %s", which, spec.name, manifest.ds, uri)
    now, then = spec.model_dump(mode="json"), manifest.spec.model_dump(mode="json")
    if changed := sorted(_changed(now, then)):
        _log.warning(
            "%s and that plan differ in %s: the file has changed, or another release made the"
            " plan. What the plan says counts; to have the file count, plan again",
            args.job,
            ", ".join(changed),
        )
    return uri


def _changed(now: Mapping[str, Any], then: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in now.keys() | then.keys():
        old, new = then.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changed(new, old, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}"
