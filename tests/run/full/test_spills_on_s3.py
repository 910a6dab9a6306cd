"""Finished rows that a stop keeps, on S3."""

from run.test_spills import (
    plan,
    test_a_fenced_attempt_spills_nothing_more_and_its_spills_count,
    test_a_run_that_is_stopped_again_and_again_generates_no_row_twice,
    test_an_engine_that_fails_leaves_what_it_has_finished,
    test_rows_are_spilled_while_the_engine_finishes_nothing,
)
from support.lake_tables import ON_S3

pytestmark = ON_S3
