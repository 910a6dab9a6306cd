"""Jobs from and to a table of each format, on S3."""

from __future__ import annotations

from jobs.test_lake_formats import (
    test_a_changed_input_replaces_the_partition_and_teaches_the_next,
    test_a_commit_that_somebody_else_got_ahead_of,
    test_a_job_runs_from_table_to_table,
    test_a_newer_plan_wins_whenever_the_older_one_publishes,
)
from support.lake_tables import IN_STORES

pytestmark = IN_STORES
