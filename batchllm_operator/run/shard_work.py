"""The requests of a shard that are still to be generated, read part by part."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


class ShardWork:
    """The parts of a shard that are still to be generated, and the sizes of their groups.

    Args:
        part_idxs: the parts, ascending.
        has_estimates: whether the engine gets the planned output lengths.
        first: groups to start with, in this order: their parts come first, and their requests
            first in these. All others follow in file order.
        finished: request_idxs in these parts that have an output, in any order.
    """

    def __init__(
        self,
        file: pq.ParquetFile,
        part_idxs: Sequence[int],
        *,
        has_estimates: bool,
        first: Sequence[int] = (),
        finished: Sequence[int] = (),
    ) -> None:
        self._file, self._has_estimates = file, has_estimates
        self._finished = pa.array(finished, pa.int64())
        table = file.read_row_groups(list(part_idxs), columns=["group_id", "request_idx"])
        parts = np.repeat(part_idxs, [self.num_requests_of(idx) for idx in part_idxs])
        table = self._unfinished(table.append_column("part_idx", pa.array(parts, pa.int64())))
        group_ids, counts = np.unique(table["group_id"].to_numpy(), return_counts=True)
        self._group_ids, self._counts = group_ids, counts
        self.sizes: dict[int, int] = dict(zip(group_ids.tolist(), counts.tolist(), strict=True))
        """Number of requests by group_id."""
        self._turns = {group_id: turn for turn, group_id in enumerate(first)}
        self._parts_of = {
            group_id: table.filter(pc.equal(table["group_id"], group_id))["part_idx"].to_pylist()
            for group_id in first
        }
        turns = {
            idx: turn for turn in reversed(range(len(first))) for idx in self._parts_of[first[turn]]
        }
        self._part_idxs = sorted(part_idxs, key=lambda idx: (turns.get(idx, len(first)), idx))

    def num_requests_of(self, part_idx: int) -> int:
        """All requests of a part, with those that have an output."""
        num_requests: int = self._file.metadata.row_group(part_idx).num_rows
        return num_requests

    def first_prompt(self, group_id: int) -> list[int]:
        """The token ids of the first request of a group of `first` that has a request left."""
        table = self._file.read_row_group(self._parts_of[group_id][0])
        at = pc.index(table["group_id"], group_id).as_py()
        token_ids: list[int] = table["prompt_token_ids"][at].as_py()
        return token_ids

    def parts(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield each part's index and its requests without an output, with a column `group_size`.

        Parts without such requests are left out. `num_output_tokens` is missing if it is no
        estimate.
        """
        last = len(self._turns)
        for part_idx in self._part_idxs:
            table = self._unfinished(self._file.read_row_group(part_idx))
            if not table.num_rows:
                continue
            if not self._has_estimates:
                table = table.drop_columns(["num_output_tokens"])
            if self._turns:
                turns = [self._turns.get(idx, last) for idx in table["group_id"].to_pylist()]
                table = table.take(np.argsort(turns, kind="stable"))
            at = np.searchsorted(self._group_ids, table["group_id"].to_numpy())
            yield part_idx, table.append_column("group_size", pa.array(self._counts[at]))

    def _unfinished(self, table: pa.Table) -> pa.Table:
        if not len(self._finished):
            return table
        return table.filter(pc.invert(pc.is_in(table["request_idx"], self._finished)))
