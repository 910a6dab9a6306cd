"""What plan refuses of inputs and outputs, where storage makes a difference: on S3."""

from plan.test_outer_columns import (
    test_an_outer_folder_is_a_table_by_itself,
    test_an_output_beside_folders_of_other_columns_is_refused,
)
from plan.test_output_contract import (
    lake,
    test_what_commit_refuses_of_a_key_plan_refuses,
)
from support.lake_tables import ON_S3

pytestmark = ON_S3
