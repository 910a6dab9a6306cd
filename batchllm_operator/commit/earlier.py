"""The reports of the job's earlier partitions."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Final, NamedTuple

from batchllm_operator.answers.expectations import Measured
from batchllm_operator.errors import PlanError
from batchllm_operator.lake import LakeTable
from batchllm_operator.stored_plan.bill import EarlierRun
from batchllm_operator.stored_plan.run_report import REPORT_FILE, RunReport
from batchllm_operator.stored_plan.stored_plan import (
    StoredPlan,
    earlier_publications,
    plan_folder,
)

_NUM_EARLIER: Final = 13
"""Two weeks with the partition's own."""
_log = logging.getLogger(__name__)


class EarlierReport(NamedTuple):
    """What of an earlier report is looked at."""

    run: EarlierRun
    expectations: tuple[Measured, ...]


EarlierReports = dict[str, EarlierReport | None]
"""By partition, the latest first; None where a partition has no readable report."""


def read_earlier(plan: StoredPlan, table: LakeTable) -> EarlierReports:
    """The reports of up to 13 partitions that the job has published before the plan's."""
    spec, found = plan.manifest.spec, EarlierReports()
    for published in islice(earlier_publications(table, spec, plan.manifest.ds), _NUM_EARLIER):
        try:
            report = RunReport.read(plan_folder(spec, published), REPORT_FILE)
        except PlanError as error:
            _log.info("partition %s: its report isn't compared: %s", published.partition, error)
            report = None
        known = None
        if report is not None:
            known = EarlierReport(report.as_earlier(), report.expectations)
        found[published.partition] = known
    return found
