"""What is left to generate of a shard, read part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.artifacts.shard_files import read_parts


class ShardWork:
    """The parts of a shard that are to be generated, and how large their groups are.

    Args:
        file: of the shard.
        part_idxs: of it, ascending.
        has_estimates: whether planned output lengths are worth telling.
        first: groups to begin with, in this order: their parts come first, and in these their
            requests. All others follow in the file's order.
    """

    def __init__(
        self,
        file: pq.ParquetFile,
        part_idxs: Sequence[int],
        *,
        has_estimates: bool,
        first: Sequence[int] = (),
    ) -> None:
        self._file, self._has_estimates = file, has_estimates
        self._turns = {group_id: turn for turn, group_id in enumerate(first)}
        self._part_with: dict[int, int] = {}  # of each group of `first`, its first part
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
        """The token ids of a request of a group of `first`.

        Raises:
            KeyError: the group is none of these, or has no request.
        """
        table = self._file.read_row_group(self._part_with[group_id])
        at = np.flatnonzero(table["group_id"].to_numpy() == group_id)
        found: list[int] = table["prompt_token_ids"][int(at[0])].as_py()
        return found

    def parts(self) -> Iterator[tuple[int, pa.Table]]:
        """Each part's index and requests, with a column `group_size`.

        Without `num_output_tokens` where that is no estimate, or in plans of older releases.
        """
        for part_idx, table in read_parts(self._file, self._part_idxs):
            if not self._has_estimates and "num_output_tokens" in table.column_names:
                table = table.drop_columns(["num_output_tokens"])
            if self._turns:
                turns = self._turns_of(table["group_id"].to_numpy())
                table = table.take(np.argsort(turns, kind="stable"))
            at = np.searchsorted(self._group_ids, table["group_id"].to_numpy())
            yield part_idx, table.append_column("group_size", pa.array(self._sizes[at]))

    def _in_turn(self, part_idxs: Sequence[int]) -> list[int]:
        """The parts in the order of the first group in each that has a turn; those without last."""
        last, turns = len(self._turns), {}
        for part_idx in part_idxs:
            here: list[int] = np.unique(self._group_ids_of([part_idx])).tolist()
            with_turn = [each for each in here if each in self._turns]
            turns[part_idx] = min((self._turns[each] for each in with_turn), default=last)
            for each in with_turn:
                self._part_with.setdefault(each, part_idx)
        return sorted(part_idxs, key=lambda idx: (turns[idx], idx))

    def _group_ids_of(self, part_idxs: Sequence[int]) -> npt.NDArray[np.int64]:
        column = self._file.read_row_groups(list(part_idxs), columns=["group_id"])["group_id"]
        group_ids: npt.NDArray[np.int64] = column.to_numpy()
        return group_ids

    def _turns_of(self, group_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """When a group's requests have their turn; of those that aren't to come first, last."""
        last = len(self._turns)
        return np.array(
            [self._turns.get(each, last) for each in group_ids.tolist()], dtype=np.int64
        )
