"""What every lake table promises: Iceberg over a REST catalog."""
# ruff: noqa: F401, F403

from lake.test_tables import *  # isort: skip
from lake.test_rest_catalog import lake
