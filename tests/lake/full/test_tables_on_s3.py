"""What every lake table promises, where storage makes a difference: in each store.

Iceberg's files are pyiceberg's to reach: on S3 only, and in whole jobs on Azure.
"""

from __future__ import annotations

import pytest
from lake.test_tables import (
    table,
    test_a_failed_commit_leaves_the_table_as_it_was,
    test_a_later_write_is_not_seen_or_is_an_error,
    test_a_lost_answer_of_a_commit_that_has_happened,
    test_a_table_that_is_not_there,
    test_a_vanished_snapshot,
    test_a_write_while_rows_are_read_is_not_seen_or_is_an_error,
    test_an_unknown_outcome_is_not_cleaned_up,
    test_another_partition_is_published_meanwhile,
    test_another_program_adds_rows_meanwhile,
    test_publish_replaces_its_partition_and_no_other,
    test_publishing_again_changes_nothing,
    test_rows_keep_the_order_of_files_and_of_rows_in_them,
    test_somebody_else_has_published,
    test_two_publishers_race,
    test_vanished_files,
)
from support.lake_tables import LAKES

CHOSEN = [(each, store) for each in LAKES for store in ("s3", "gs", "azure")]
CHOSEN = [each for each in CHOSEN if each not in (("iceberg", "gs"), ("iceberg", "azure"))]
pytestmark = pytest.mark.parametrize(("lake", "lake_uri"), CHOSEN, indirect=True)
