"""Jobs from and to tables in each store; the other formats and faults are in `full`."""

import pytest
from jobs.test_lake_formats import (
    test_a_commit_that_somebody_else_got_ahead_of,
    test_a_job_runs_from_table_to_table,
    test_two_workers_share_a_job_whose_parts_gc_removes,
)

pytestmark = pytest.mark.parametrize(
    ("lakes", "lake_uri"), [("parquet", store) for store in ("s3", "gs", "azure")], indirect=True
)
