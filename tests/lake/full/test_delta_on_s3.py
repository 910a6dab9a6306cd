"""What is Delta's own, where storage makes a difference, on S3."""

from __future__ import annotations

from lake.test_delta import (
    folder,
    publish,
    table,
    test_files_go_if_not_all_could_be_put,
    test_files_that_a_commit_was_tried_with_stay,
    test_many_files_are_one_version,
    test_places_with_unusual_names,
    test_processes_that_race_for_partitions_of_a_new_table,
    test_publish_makes_a_table_that_any_reader_reads,
)
from lake.test_delta_features import (
    test_rows_that_a_vector_removes_are_left_out,
)
from support.lake_tables import IN_STORES

pytestmark = IN_STORES
