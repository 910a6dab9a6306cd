"""The `batchllm` command with parts and ranges of some kilobytes: small tables have many."""

from __future__ import annotations

import sys

from batchllm_operator import cli
from batchllm_operator.spark import ranges, reading

if __name__ == "__main__":
    ranges.RANGE_BYTES = 12_000  # type: ignore[misc]
    reading.PART_BYTES = 500  # type: ignore[misc]
    sys.exit(cli.main())
