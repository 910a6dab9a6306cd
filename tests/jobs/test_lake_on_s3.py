"""A job from and to tables on S3; the other formats and faults are in `full`."""

import pytest
from jobs.test_lake_formats import (
    lakes,
    test_a_commit_that_somebody_else_got_ahead_of,
    test_a_job_runs_from_table_to_table,
)

pytestmark = pytest.mark.parametrize(("lakes", "lake_uri"), [("parquet", "s3")], indirect=True)
