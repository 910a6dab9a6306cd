"""Folders on S3."""

from __future__ import annotations

from lake.test_opening import test_an_iceberg_folder_needs_its_catalog
from storage.test_folder import (
    folder,
    test_a_create_that_failed_says_so,
    test_a_lost_answer_is_told_from_a_lost_race,
    test_a_missing_file_is_file_not_found,
    test_an_error_of_the_reader_is_not_blamed_on_the_storage,
    test_another_process_is_seen_at_once,
    test_awkward_names,
    test_exists,
    test_find_is_relative_sorted_and_has_sizes,
    test_many_files_are_read_hashed_and_removed,
    test_of_many_that_create_one_name_one_has_written_it,
    test_publish_file_creates_folders_and_replaces,
    test_the_uri_opens_the_same_folder,
    test_what_is_written_is_read,
)
from support.lake_tables import IN_STORES

pytestmark = IN_STORES
