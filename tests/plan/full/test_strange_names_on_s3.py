"""Names that mean something to S3."""

from plan.test_strange_names import (
    lakes,
    test_partitions_of_any_name,
)
from support.lake_tables import ON_S3

pytestmark = ON_S3
