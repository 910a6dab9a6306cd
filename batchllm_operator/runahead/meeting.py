"""Meetings of the replicas of one worker, between their shards, for prefixes to compute together.

Replicas are processes of one machine, and each runs shards of its own. As long as shards with
marked prefixes are left, all meet before each shard, with empty engines. A replica without a shard
comes too, and helps. The others don't wait for a replica that has ended.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator.errors import RunaheadError
from batchllm_operator.runahead.groups import ChainLimits, RunaheadGroup

if TYPE_CHECKING:
    from batchllm_operator.runahead.phase import ChainedEngine

_log = logging.getLogger(__name__)
_MOST_WAIT_S: Final = 600.0
"""Longest wait for a replica: engines start, and shards end, at about the same time."""
_POLL_S: Final = 0.05
_MOST_OF_CACHE: Final = 0.5
"""Share of the KV blocks for the prefixes of one meeting."""


class Rounds:
    """The meetings of a replica, until no marked prefix is left or one fails.

    Args:
        folder: where replicas leave messages; empty when the first one starts.
        rank: of this replica.
        world_size: replicas.

    Attributes:
        is_over: whether replicas don't meet any more.
        measured: (rate of the link, prefill steps of the slowest replica), once they are measured.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._num_exchanges = 0
        self._done: set[tuple[int, ...]] = set()
        self.is_over = False
        self.measured: tuple[float, list[tuple[int, int, float]]] | None = None
        self._presence = os.open(folder / f"{rank}.lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._presence, fcntl.LOCK_EX)  # the system releases it with the process

    def meet(
        self,
        chain: ChainedEngine | None,
        groups: Sequence[RunaheadGroup],
        *,
        measure: bool = False,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[RunaheadGroup]:
        """Meet before a shard; returns the groups that all have computed, and that count for it.

        Args:
            chain: this replica's idle engine; None if it can't be in a chain.
            groups: the marked groups of this replica's next shard; empty without a shard.
            measure: whether the link's rate is to be measured.
            is_stopped: whether to wait no longer.

        Raises:
            EngineError: the engine can't go on: its cache has blocks whose KV never came.
        """
        own = None
        if chain is not None:
            own = {
                "limits": asdict(chain.limits),
                "fingerprint": chain.fingerprint(),
                "groups": [asdict(group) for group in groups],
                "measure": measure,
            }
        messages = self.exchange(own, is_stopped)
        if (reason := _reason_against(messages)) is not None:
            self._end(reason)
            return []
        assert messages is not None
        assert chain is not None
        try:
            return self._work(chain, messages)
        except RunaheadError as error:
            self._end(str(error))
            return []

    def close(self) -> None:
        """Tell the other replicas not to wait for this one."""
        if not self.is_over:
            self.is_over = True
            os.close(self._presence)

    def exchange(
        self, message: Any, is_stopped: Callable[[], bool] = lambda: False
    ) -> list[Any] | None:
        """Leave a message, JSON, and wait for those of all replicas; returns them by rank.

        None if a replica has ended, doesn't come in time, or this one is stopped meanwhile.
        """
        self._num_exchanges += 1
        paths = [self._folder / f"{self._num_exchanges}-{r}.json" for r in range(self._world_size)]
        unfinished = self._folder / f"{self._rank}.unfinished"
        unfinished.write_text(json.dumps(message), encoding="utf-8")
        unfinished.replace(paths[self._rank])
        until = time.monotonic() + _MOST_WAIT_S
        while True:
            gone = {rank for rank in range(self._world_size) if self._has_ended(rank)}
            missing = {rank for rank, path in enumerate(paths) if not path.exists()}
            if not missing:
                return [json.loads(path.read_bytes()) for path in paths]
            if gone & missing or is_stopped() or time.monotonic() > until:
                paths[self._rank].unlink()
                return None
            time.sleep(_POLL_S)

    def _has_ended(self, rank: int) -> bool:
        """Whether a replica was there, and isn't any more."""
        if rank == self._rank:
            return False
        try:
            with (self._folder / f"{rank}.lock").open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return False
        return True

    def _work(
        self, chain: ChainedEngine, messages: Sequence[Mapping[str, Any]]
    ) -> list[RunaheadGroup]:
        num_blocks = min(message["limits"]["num_blocks"] for message in messages)
        limits = ChainLimits(**{**messages[0]["limits"], "num_blocks": num_blocks})
        marked = self._new_groups(messages, limits)
        has_work = any(message["groups"] for message in messages)
        if any(message["measure"] for message in messages):
            chain.open(self._rank, self._world_size, self._folder / "chain")
            self._measure(chain)
        if not has_work:
            self.close()
        if not 0 < len(marked) < self._world_size:  # as many replicas compute as many prefixes
            return []
        chain.open(self._rank, self._world_size, self._folder / "chain")
        failure = chain.prefill([group for _, group in marked])
        if failure is not None:
            self._end(failure)
            return []
        ids = ", ".join(str(group.group_id) for _, group in marked)
        _log.info("prefixes computed together: groups %s", ids)
        self._done |= {tuple(group.prefix_token_ids) for _, group in marked}
        return [group for rank, group in marked if rank == self._rank]

    def _new_groups(
        self, messages: Sequence[Mapping[str, Any]], limits: ChainLimits
    ) -> list[tuple[int, RunaheadGroup]]:
        """Groups to compute together, by the rank whose shard has them; each prefix only once."""
        marked: dict[tuple[int, ...], tuple[int, RunaheadGroup]] = {}
        num_blocks = 0
        for rank, group in [
            (rank, RunaheadGroup(**{**fields, "split": tuple(fields["split"])}))
            for rank, message in enumerate(messages)
            for fields in message["groups"]
        ]:
            prefix = tuple(group.prefix_token_ids)
            if prefix in marked or prefix in self._done:
                continue
            if (reason := group.reason_against(self._world_size, limits)) is not None:
                _log.warning(
                    "replicas don't compute the prefix of group %d together: %s",
                    group.group_id,
                    reason,
                )
                continue
            num_blocks += group.num_blocks(limits.block_size)
            if not marked or num_blocks <= _MOST_OF_CACHE * limits.num_blocks:
                marked[prefix] = rank, group
        return list(marked.values())

    def _measure(self, chain: ChainedEngine) -> None:
        _log.info("measuring how fast replicas compute and pass on prefixes")
        _, steps = own = chain.measure()
        messages = self.exchange(own)
        if messages is None:
            raise RunaheadError("a replica has ended while it was measured")
        if not steps:
            _log.warning("the engine's steps are too short for prefixes to be split between them")
            return
        slowest = [  # a chain is as fast as its slowest replica
            (tokens, before, max(theirs[at][2] for _, theirs in messages))
            for at, (tokens, before, _) in enumerate(steps)
        ]
        self.measured = min(theirs for theirs, _ in messages), slowest

    def _end(self, reason: str) -> None:
        _log.warning("each replica computes prefixes by itself: %s", reason)
        self.close()


def _reason_against(messages: Sequence[Mapping[str, Any] | None] | None) -> str | None:
    """Why replicas with these messages can't form a chain; None if they can."""
    if messages is None:
        return "another replica has ended, or doesn't come"
    first = messages[0]
    for rank, message in enumerate(messages):
        if first is None or message is None:
            return f"replica {0 if first is None else rank} can't pass on KV"
        ours, theirs = first["fingerprint"], message["fingerprint"]
        for name in ours:  # in order: the first difference explains the others
            if ours[name] != theirs.get(name):
                return (
                    f"replicas 0 and {rank} differ in {name}: {ours[name]!r} and"
                    f" {theirs.get(name)!r}; KV can be passed on between equal engines only"
                )
    return None
