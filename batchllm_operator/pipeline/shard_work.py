"""What is left to generate of a shard, read part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.planner.plan import read_parts


class ShardWork:
    """The parts of a shard that are to be generated, and how large their groups are."""

    def __init__(
        self, file: pq.ParquetFile, part_idxs: Sequence[int], *, has_estimates: bool
    ) -> None:
        self._file, self._part_idxs, self._has_estimates = file, part_idxs, has_estimates
        group_ids = file.read_row_groups(list(part_idxs), columns=["group_id"])["group_id"]
        self._group_ids, self._sizes = np.unique(group_ids.to_numpy(), return_counts=True)

    @property
    def num_requests(self) -> int:
        """In all parts."""
        return int(self._sizes.sum())

    def parts(self) -> Iterator[tuple[int, pa.Table]]:
        """Each part's index and requests, with a column `group_size`.

        Without `num_output_tokens` where that is no estimate, or in plans of older releases.
        """
        for part_idx, table in read_parts(self._file, self._part_idxs):
            if not self._has_estimates and "num_output_tokens" in table.column_names:
                table = table.drop_columns(["num_output_tokens"])
            at = np.searchsorted(self._group_ids, table["group_id"].to_numpy())
            yield part_idx, table.append_column("group_size", pa.array(self._sizes[at]))
