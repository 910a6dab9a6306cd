"""The requests of a shard that are still to be generated, read part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.stored_plan.shard_files import read_parts


class ShardWork:
    """The parts of a shard that are still to be generated, and the sizes of their groups.

    Args:
        file: the shard's file.
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
        self._turns = {group_id: turn for turn, group_id in enumerate(first)}
        self._part_with: dict[int, int] = {}  # group of `first` -> its first part
        self._part_idxs = self._in_turn(part_idxs) if first else list(part_idxs)
        found = self._group_ids_of(part_idxs)
        self._group_ids, self._sizes = np.unique(found, return_counts=True)

    @property
    def num_requests(self) -> int:
        return int(self._sizes.sum())

    @property
    def sizes(self) -> dict[int, int]:
        return dict(zip(self._group_ids.tolist(), self._sizes.tolist(), strict=True))

    def first_prompt(self, group_id: int) -> list[int]:
        """The token ids of the first request of a group of `first`.

        Raises:
            KeyError: the group isn't in `first`, or has no request left.
        """
        table = self._file.read_row_group(self._part_with[group_id])
        at = np.flatnonzero(table["group_id"].to_numpy() == group_id)
        found: list[int] = table["prompt_token_ids"][int(at[0])].as_py()
        return found

    def parts(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield each part's index and its requests without an output, with a column `group_size`.

        Parts without such requests are left out. `num_output_tokens` is missing if it is no
        estimate.
        """
        for part_idx, table in read_parts(self._file, self._part_idxs):
            table = self._missing(table)
            if not table.num_rows:
                continue
            if not self._has_estimates:
                table = table.drop_columns(["num_output_tokens"])
            if self._turns:
                turns = self._turns_of(table["group_id"].to_numpy())
                table = table.take(np.argsort(turns, kind="stable"))
            at = np.searchsorted(self._group_ids, table["group_id"].to_numpy())
            yield part_idx, table.append_column("group_size", pa.array(self._sizes[at]))

    def _in_turn(self, part_idxs: Sequence[int]) -> list[int]:
        """The parts in the order of their earliest group in `first`; those without one last."""
        last, turns = len(self._turns), {}
        for part_idx in part_idxs:
            here: list[int] = np.unique(self._group_ids_of([part_idx])).tolist()
            with_turn = [each for each in here if each in self._turns]
            turns[part_idx] = min((self._turns[each] for each in with_turn), default=last)
            for each in with_turn:
                self._part_with.setdefault(each, part_idx)
        return sorted(part_idxs, key=lambda idx: (turns[idx], idx))

    def _group_ids_of(self, part_idxs: Sequence[int]) -> npt.NDArray[np.int64]:
        columns = ["group_id", "request_idx"]
        table = self._missing(self._file.read_row_groups(list(part_idxs), columns=columns))
        group_ids: npt.NDArray[np.int64] = table["group_id"].to_numpy()
        return group_ids

    def _missing(self, table: pa.Table) -> pa.Table:
        """The requests without an output."""
        if not len(self._finished):
            return table
        return table.filter(pc.invert(pc.is_in(table["request_idx"], self._finished)))

    def _turns_of(self, group_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions of the groups in `first`; its length for all others."""
        last = len(self._turns)
        return np.array(
            [self._turns.get(each, last) for each in group_ids.tolist()], dtype=np.int64
        )
