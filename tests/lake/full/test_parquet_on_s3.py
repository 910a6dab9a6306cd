"""What is Parquet's own, where storage makes a difference, on S3."""

from __future__ import annotations

from lake.test_parquet import (
    folder,
    table,
    test_a_partition_folder_without_data_is_an_empty_partition,
    test_a_reader_meanwhile_sees_a_whole_partition_each_time,
    test_a_visible_file_of_another_kind_is_named,
    test_empty_files_without_the_suffix_are_not_data,
    test_files_are_known_by_their_content_not_by_their_names,
    test_hidden_files_are_not_data,
    test_partitions_are_listed_by_name,
    test_publish_makes_a_partition_that_any_reader_reads,
    test_publishers_side_by_side,
    test_the_version_changes_with_the_content_only,
)
from support.lake_tables import IN_STORES

pytestmark = IN_STORES
