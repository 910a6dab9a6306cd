"""The gate before publishing: whether the answers are as the spec expects."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
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
from batchllm_operator.errors import ExpectationError, SpecError
from batchllm_operator.lake import LakeTable
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_BATCH_ROWS: Final = 1 << 14
_log = logging.getLogger(__name__)


def measure(
    plan: StoredPlan, table: LakeTable, data: Path | None, reports: EarlierReports
) -> tuple[Measured, ...]:
    """What the spec expects, as local files of rows have it; None for what the table holds."""
    spec, ds = plan.manifest.spec, plan.manifest.ds
    if not spec.expect:
        return ()
    if data is None:
        tallies = _tally_published(spec, table, ds, spec.expect)
    else:
        files = files_of(data)
        watched = watched_columns(spec, pq.read_schema(files[0]))
        tallies = tally(watched, _read(files, _columns(watched)))
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


def check(plan: StoredPlan, measured: tuple[Measured, ...], *, accept: bool) -> None:
    """Raise `ExpectationError` if the answers aren't as expected; with `accept`, only log it."""
    unmet = [str(each) for each in measured if not each.is_met]
    if not unmet:
        return
    where, num = plan.folder.uri, counted(len(measured), "expectation")
    said = f"plan {where}: {len(unmet)} of {num} not met: {'; '.join(unmet)}"
    if not accept:
        raise ExpectationError(
            f"{said}. Nothing was published; what was generated is kept. To publish all the same:"
            f" `batchllm commit --plan {where} --accept`. To change the bounds: change expect in"
            " the spec, plan again (the plan stays the same), and commit"
        )
    _log.warning("%s; accepted", said)


def _read(files: Iterable[Path], columns: list[str]) -> Iterator[pa.RecordBatch]:
    for path in files:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=columns)


def _columns(watched: Iterable[Watched]) -> list[str]:
    return sorted({place.column for each in watched for place in (each.place, each.status)})


def _tally_published(
    spec: JobSpec, table: LakeTable, partition: str, names: Iterable[str]
) -> dict[str, Tally]:
    """What a published partition has in some columns; without those that it lacks."""
    snapshot, watched = table.snapshot(partition), list[Watched]()
    for name in names:
        try:
            watched.append(watched_column(spec, name, snapshot.schema))
        except SpecError as error:
            _log.info("partition %s: not compared: %s", partition, error)
    return tally(watched, table.scan(snapshot, _columns(watched))) if watched else {}


def _reported(reports: EarlierReports) -> dict[tuple[str, str], dict[str, float]]:
    """What earlier partitions' reports have measured, by column and bounds."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for ds, report in reversed(reports.items()):
        for each in () if report is None else report.expectations:
            if each.value is not None:
                found.setdefault((each.column, each.what), {})[ds] = each.value
    return found
