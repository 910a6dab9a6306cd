"""What attempts leave on S3 for those who look at a job."""

from engine.test_device_profile import test_a_profile_is_found_by_its_subject
from run.test_live_progress import (
    test_a_drained_attempt_keeps_what_its_parts_hold,
    test_a_finished_attempt_says_what_its_report_says,
)
from run.test_run import (
    test_every_trace_of_every_attempt_is_published,
)
from shards.test_job_status import (
    plan,
    test_a_committed_plan_is_finished_whatever_was_removed,
    test_a_report_without_progress_is_of_a_finished_shard,
    test_the_latest_attempt_says_how_far_a_shard_is,
)
from support.lake_tables import ON_S3

pytestmark = ON_S3
