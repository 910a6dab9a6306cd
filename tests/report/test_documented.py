"""docs/reports.md says what is there."""

from __future__ import annotations

import re
from pathlib import Path

from batchllm_operator.commit import report as run_report
from batchllm_operator.prefixes import sharing
from batchllm_operator.report import timelines
from batchllm_operator.shards import row_errors
from batchllm_operator.stored_plan.run_report import RunReport

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")


def test_fields_are_those_of_the_model() -> None:
    table = TEXT.split("## report.json")[1].split("## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    names = list(RunReport.model_fields)
    assert documented == names[names.index("committed_at") :]


def test_numbers_in_it_are_those_of_the_code() -> None:
    words = {3: "three", 10: "ten", 20: "twenty"}
    for number, phrase in (
        (timelines.NUM_BINS, "in at most {} bins"),
        (run_report._NUM_TIMELINES, "the {} shards that took longest"),
        (row_errors._NUM_KINDS, "the {} most frequent kinds"),
        (row_errors.NUM_EXAMPLES, "the keys of {} rows"),
        (sharing._NUM_GROUPS, "the {} groups that save most"),
    ):
        assert phrase.format(words.get(number, number)) in TEXT.replace("\n", " "), phrase
