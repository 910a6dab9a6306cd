"""Attempts side by side, whose claims and parts lie on S3."""

from shards.test_attempts import (
    plan,
    plan_of_slow_requests,
    test_a_later_claim_fences_and_an_earlier_one_does_not,
    test_a_zombie_stops_when_another_has_taken_over,
    test_an_entry_that_comes_late_is_a_part_like_any_other,
    test_killed_between_a_parts_file_and_its_entry,
    test_numbers_are_won_once,
    test_processes_side_by_side,
    test_what_was_finished_before_the_claim_is_not_generated_again,
)
from support.lake_tables import ON_S3

pytestmark = ON_S3
