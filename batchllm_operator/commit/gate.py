"""The gate before publishing: whether the answers are as the spec expects."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.answers.expectations import (
    Measured,
    Tally,
    Watched,
    tally,
    watched_column,
    watched_columns,
)
from batchllm_operator.commit.earlier import EarlierReports
from batchllm_operator.commit.quarantine import divide, num_rows, read_rows
from batchllm_operator.errors import ExpectationError, SpecError
from batchllm_operator.lake import LakeTable, Publication
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.shards.quarantine import QUARANTINED_FILE, quarantine_of, quarantined
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.lineage import planned_lineage
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_log = logging.getLogger(__name__)


def measure(
    plan: StoredPlan, table: LakeTable, data: Path | None, reports: EarlierReports
) -> tuple[Measured, ...]:
    """What the spec expects, as local files of rows have it; None for what is published."""
    spec, ds = plan.manifest.spec, plan.manifest.ds
    if not spec.expect:
        return ()
    if data is None:
        tallies = _tally_published(spec, table, ds, spec.expect, plan.publication)
    else:
        watched = watched_columns(spec, pq.read_schema(files_of(data)[0]))
        tallies = tally(watched, read_rows(data, _columns(watched)))
    drifting = [name for name, expected in spec.expect.items() if expected.drift is not None]
    before: dict[str, Tally] = {}
    if reports and drifting:
        before = _tally_published(spec, table, next(iter(reports)), drifting)
    earlier = _reported(reports)
    return tuple(
        each.model_copy(update={"earlier": earlier.get((each.column, each.what), {})})
        for name, own in tallies.items()
        for each in own.measured(name, before.get(name))
    )


def admit(
    plan: StoredPlan, table: LakeTable, data: Path, measured: tuple[Measured, ...], *, accept: bool
) -> Path:
    """The rows to publish, of local files; what the spec says is done where bounds aren't met.

    Raises `ExpectationError` if nothing is to be published, which `accept` allows.
    """
    spec, unmet = plan.manifest.spec, [each for each in measured if not each.is_met]
    where, of_all = plan.folder.uri, counted(len(measured), "expectation")
    said = f"plan {where}: {len(unmet)} of {of_all} not met: {'; '.join(map(str, unmet))}"
    kept, options = "what was generated is kept", {"add_columns": spec.output.add_columns}
    was_begun = plan.folder.exists(QUARANTINED_FILE)
    if was_begun and spec.on_unmet != "quarantine":  # by a commit that was stopped, then
        _, none = divide(plan, table, data, [])
        aside = quarantine_of(spec, table)
        aside.publish(plan.publication, none, replaces=None, again=True, **options)
    if spec.on_unmet == "quarantine":
        aside = quarantine_of(spec, table)
        if not unmet and not was_begun:
            return data
        rest, at_fault = divide(plan, table, data, unmet)
        num, num_apart = num_rows(data), num_rows(at_fault)
        if num_apart < max(1, num) and (accept or num_apart <= spec.max_failed_fraction * num):
            plan.folder.write_bytes(QUARANTINED_FILE, b"{}")
            aside.publish(plan.publication, at_fault, replaces=None, again=True, **options)
            _log.warning("%s; %s quarantined", said, counted(num_apart, "row"))
            return rest
        kept = f"{num_apart:,} of {counted(num, 'row')} are at fault, too many to quarantine"
    elif not unmet:
        return data
    elif accept:
        _log.warning("%s; accepted", said)
        return data
    elif spec.on_unmet == "branch":
        branch = table.publish_branch(plan.publication, data, **options)
        kept = f"the answers are on the table's branch {branch!r}"
    cure = f"`batchllm commit --plan {where} --accept`"
    if accept:  # every row is at fault
        cure = f"write on_unmet: fail in the spec, plan again, and {cure}"
    error = ExpectationError(
        f"{said}. Nothing was published; {kept}. To publish all the same: {cure}. To change the"
        " bounds: change expect in the spec, plan again (the plan stays the same), and commit"
    )
    values = [each.model_dump() for each in measured]
    error.result = {"expectations": values, "lineage": planned_lineage(plan.manifest)}
    raise error


def _columns(watched: Iterable[Watched]) -> list[str]:
    return sorted({place.column for each in watched for place in (each.place, each.status)})


def _tally_published(
    spec: JobSpec,
    table: LakeTable,
    partition: str,
    names: Iterable[str],
    own: Publication | None = None,
) -> dict[str, Tally]:
    """What a published partition has in some columns; without those that it lacks.

    With `own`, the publication that it holds, rows in quarantine count as well.
    """
    snapshot, watched = table.snapshot(partition), list[Watched]()
    for name in names:
        try:
            watched.append(watched_column(spec, name, snapshot.schema))
        except SpecError as error:
            _log.info("partition %s: not compared: %s", partition, error)
    places = [(table, snapshot)]
    if own is not None and (apart := quarantined(spec, table, own)) is not None:
        places.append(apart)
    names = _columns(watched)
    rows = (each.scan(held, names) for each, held in places)
    return tally(watched, chain.from_iterable(rows)) if watched else {}


def _reported(reports: EarlierReports) -> dict[tuple[str, str], dict[str, float]]:
    """What earlier partitions' reports have measured, by column and bounds."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for ds, report in reversed(reports.items()):
        for each in () if report is None else report.expectations:
            if each.value is not None:
                found.setdefault((each.column, each.what), {})[ds] = each.value
    return found
