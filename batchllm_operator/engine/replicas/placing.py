"""Places requests on replicas: each on its group's, unless that leaves another replica idle."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from batchllm_operator.engine.protocol import EngineRequest


@dataclass(slots=True)
class _Seat:
    """One replica."""

    max_in_flight: int
    costs: dict[int, int] = field(default_factory=dict)
    """Tokens to compute for each of its requests, by request_idx."""
    num_tokens: int = 0
    """Sum of `costs`, and of members that will follow."""

    @property
    def has_room(self) -> bool:
        return len(self.costs) < self.max_in_flight

    @property
    def is_hungry(self) -> bool:
        """Whether it may run dry before other replicas have room again."""
        return 2 * len(self.costs) < self.max_in_flight


@dataclass(slots=True)
class _Group:
    """A group of which not all members have arrived."""

    rank: int
    """Where the next member goes."""
    num_left: int
    """Members yet to arrive, by the group's announced size."""
    member_cost: int
    """Tokens of the first member, which stand for the others'."""
    is_spread: bool
    sizes: list[int]
    """Members planned for each replica."""


class Placer:
    """Places requests on replicas, a group at a time.

    A group is *whole*, on the replica that had the least work when its first member arrived, or
    *spread*, its members on all replicas in turn. When a whole group has filled its replica and
    another is about to run dry, its remaining members move there: computing the prefix again is
    better than an idle replica.

    Args:
        max_in_flight: most requests of each replica.
        spread: groups to spread.
        default_output_tokens: for requests without an estimate.
    """

    def __init__(
        self, max_in_flight: Sequence[int], spread: AbstractSet[int], default_output_tokens: int
    ) -> None:
        self._seats = [_Seat(each) for each in max_in_flight]
        self._spread, self._default = spread, default_output_tokens
        self._groups: dict[int, _Group] = {}
        self._num_spread = 0

    def place(self, request: EngineRequest) -> tuple[int, EngineRequest] | None:
        """Choose a replica; returns its rank and the request to send, with its part of the group.

        None if all have to wait: ask again with the same request after an answer.
        """
        group = self._groups.get(request.group_id)
        if group is None:
            group = self._begin(request)
            if group is None:
                return None
        elif not self._seats[group.rank].has_room and not self._moves_on(group):
            return None
        rank = group.rank
        return rank, self._give(group, request)

    def answered(self, rank: int, request_idx: int) -> None:
        """Note that a replica has answered a request."""
        seat = self._seats[rank]
        seat.num_tokens -= seat.costs.pop(request_idx)

    def _begin(self, request: EngineRequest) -> _Group | None:
        seats, size = self._seats, request.group_size
        cost = len(request.prompt_token_ids) - request.num_prefix_tokens + self._output(request)
        if request.group_id in self._spread and size > 1:
            rank = self._num_spread % len(seats)
            if not seats[rank].has_room:
                return None
            self._num_spread += 1
            share, odd = divmod(size, len(seats))
            sizes = [share + ((at - rank) % len(seats) < odd) for at in range(len(seats))]
            group = _Group(rank, size, cost, True, sizes)
        else:
            with_room = [rank for rank, seat in enumerate(seats) if seat.has_room]
            if not with_room:
                return None
            rank = min(with_room, key=lambda each: seats[each].num_tokens)
            seats[rank].num_tokens += size * cost
            sizes = [size if at == rank else 0 for at in range(len(seats))]
            group = _Group(rank, size, cost, False, sizes)
        self._groups[request.group_id] = group
        seats[rank].num_tokens += request.num_prefix_tokens
        seats[rank].costs[request.request_idx] = request.num_prefix_tokens
        return group

    def _moves_on(self, group: _Group) -> bool:
        """Move a group whose replica is full to another one; False if none is about to run dry."""
        rank = min(range(len(self._seats)), key=lambda each: len(self._seats[each].costs))
        if not self._seats[rank].is_hungry:
            return False
        if not group.is_spread:
            rest = group.num_left * group.member_cost
            self._seats[group.rank].num_tokens -= rest
            self._seats[rank].num_tokens += rest
            group.sizes[rank] += group.num_left
        group.rank = rank
        return True

    def _give(self, group: _Group, request: EngineRequest) -> EngineRequest:
        seat = self._seats[group.rank]
        cost = len(request.prompt_token_ids) - request.num_prefix_tokens + self._output(request)
        seat.num_tokens += cost
        seat.costs[request.request_idx] = seat.costs.get(request.request_idx, 0) + cost
        if not group.is_spread and group.num_left > 0:
            seat.num_tokens -= group.member_cost
        group.num_left -= 1
        size = max(group.sizes[group.rank], 1)
        if group.is_spread:
            group.rank = (group.rank + 1) % len(self._seats)
        if group.num_left <= 0:
            self._groups.pop(request.group_id, None)
        return request if size == request.group_size else replace(request, group_size=size)

    def _output(self, request: EngineRequest) -> int:
        return request.num_output_tokens or self._default
