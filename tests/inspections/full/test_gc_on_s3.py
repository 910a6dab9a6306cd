"""What `gc` removes from S3."""

from inspections.test_gc import (
    plan,
    test_a_folder_without_a_manifest_goes,
    test_a_plan_without_a_commit_goes_when_it_is_old,
    test_a_replaced_plan_goes_and_the_one_that_replaced_it_stays,
    test_of_a_published_plan_the_parts_and_shards_go,
    test_what_changes_between_looking_and_removing_stays,
)
from support.lake_tables import ON_S3

pytestmark = ON_S3
