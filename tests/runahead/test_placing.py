"""Which replica a request goes to."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.engine.protocol import EngineRequest
from batchllm_operator.engine.replicas.placing import Placer


def group(
    group_id: int, size: int, *, first_idx: int = 0, prefix: int = 64, own: int = 8, output: int = 4
) -> list[EngineRequest]:
    """Requests of a group, numbered from `first_idx` on."""
    return [
        EngineRequest(
            request_idx=first_idx + member,
            prompt_token_ids=[group_id] * (prefix + own),
            group_id=group_id,
            num_prefix_tokens=prefix if size > 1 else 0,
            group_size=size,
            num_output_tokens=output,
        )
        for member in range(size)
    ]


def place_all(
    placer: Placer, requests: Iterable[EngineRequest], answered: int = 0
) -> dict[int, list[EngineRequest]]:
    """What each replica sees; whoever has to wait, waits until the first request is answered."""
    seen: dict[int, list[EngineRequest]] = defaultdict(list)
    in_flight: deque[tuple[int, int]] = deque()
    for request in requests:
        while (placed := placer.place(request)) is None:
            placer.answered(*in_flight.popleft())
        rank, told = placed
        seen[rank].append(told)
        in_flight.append((rank, request.request_idx))
    return seen


def ranks(seen: dict[int, list[EngineRequest]], group_id: int) -> list[int]:
    return sorted(rank for rank, told in seen.items() for each in told if each.group_id == group_id)


def test_a_whole_group_stays_on_one_replica() -> None:
    seen = place_all(Placer([32, 32], set(), 16), [*group(0, 6), *group(1, 6, first_idx=6)])
    assert ranks(seen, 0) == [0] * 6
    assert ranks(seen, 1) == [1] * 6
    assert {each.group_size for told in seen.values() for each in told} == {6}


def test_a_group_goes_to_the_replica_with_the_least_to_do() -> None:
    requests = [
        *group(0, 2, prefix=1000),
        *group(1, 2, first_idx=2, prefix=10),
        *group(2, 2, first_idx=4, prefix=10),
        *group(3, 2, first_idx=6, prefix=10),
    ]
    seen = place_all(Placer([32, 32], set(), 16), requests)
    assert [ranks(seen, each)[0] for each in range(4)] == [0, 1, 1, 1]


def test_members_that_are_to_come_count_as_work() -> None:
    """A group is placed by all of its work when its first member comes."""
    placer = Placer([32, 32], set(), 16)
    many, few = group(0, 20), group(1, 2, first_idx=20, prefix=200)
    assert placer.place(many[0]) is not None
    assert placer.place(few[0]) == (1, few[0])
    other = group(2, 2, first_idx=30)[0]
    assert placer.place(other) == (1, other)  # 20 x 12 tokens and a prefix outweigh the 200


def test_what_was_answered_no_longer_counts() -> None:
    placer = Placer([32, 32], set(), 16)
    first, second = group(0, 1, own=500)[0], group(1, 1, first_idx=1, own=50)[0]
    assert (placer.place(first), placer.place(second)) == ((0, first), (1, second))
    placer.answered(0, 0)
    third = group(2, 1, first_idx=2)[0]
    assert placer.place(third) == (0, third)


def test_a_spread_group_has_members_on_all_replicas_in_turn() -> None:
    seen = place_all(Placer([32, 32, 32], {0, 1}, 16), [*group(0, 7), *group(1, 4, first_idx=7)])
    assert [ranks(seen, 0).count(rank) for rank in range(3)] == [3, 2, 2]
    assert [ranks(seen, 1).count(rank) for rank in range(3)] == [1, 2, 1]  # the odd one elsewhere
    for told in seen.values():
        for group_id in (0, 1):
            members = [each for each in told if each.group_id == group_id]
            assert {each.group_size for each in members} == {len(members)}


def test_a_full_replica_makes_its_group_wait_while_others_have_enough_to_do() -> None:
    placer = Placer([4, 4], set(), 16)
    for request in group(0, 3, first_idx=100):  # replica 0, and group 1 on the other one
        assert placer.place(request) is not None
    large = group(1, 10)
    assert [placer.place(each) for each in large[:4]] == [(1, each) for each in large[:4]]
    assert placer.place(large[4]) is None
    placer.answered(1, 0)
    assert placer.place(large[4]) == (1, large[4])


def test_a_group_that_has_filled_its_replica_moves_on_to_one_that_runs_dry() -> None:
    seen = place_all(Placer([4, 4], set(), 16), group(0, 6))
    assert [each.request_idx for each in seen[0]] == [0, 1, 2, 3]
    assert [each.request_idx for each in seen[1]] == [4, 5]
    assert {each.group_size for each in seen[1]} == {2}


def test_it_moves_on_to_the_replica_with_the_fewest_requests() -> None:
    """Whatever they take: one that has few soon has none."""
    placer = Placer([4, 4, 4], set(), 16)
    large = group(0, 10)
    others = [group(1, 1, own=5000), *(group(each, 1, own=1) for each in (2, 3, 4))]
    requests = [large[0], *(each for (each,) in others)]
    requests = [replace(each, request_idx=100 + at) for at, each in enumerate(requests)]
    assert [rank for rank, _ in filter(None, map(placer.place, requests))] == [0, 1, 2, 2, 2]
    assert [rank for rank, _ in filter(None, map(placer.place, large[1:5]))] == [0, 0, 0, 1]


def test_outputs_count_as_they_are_estimated() -> None:
    placer = Placer([8, 8], set(), 16)
    requests = [group(0, 1, output=500), group(1, 1, output=1), group(2, 1)]
    requests_of = [replace(each, request_idx=at) for at, (each,) in enumerate(requests)]
    assert [rank for rank, _ in filter(None, map(placer.place, requests_of))] == [0, 1, 1]


def test_more_members_than_were_told_are_placed_all_the_same() -> None:
    requests = [*group(0, 2), *group(0, 2, first_idx=2)]
    seen = place_all(Placer([8, 8], {0}, 16), requests)
    assert sum(map(len, seen.values())) == 4


@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=8),
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
)
def test_every_request_is_placed_once_and_no_replica_has_more_than_it_holds(
    sizes: list[tuple[int, bool]], rooms: list[int]
) -> None:
    requests: list[EngineRequest] = []
    for group_id, (size, _) in enumerate(sizes):
        requests += group(group_id, size, first_idx=len(requests))
    placer = Placer(rooms, {at for at, (_, is_spread) in enumerate(sizes) if is_spread}, 16)
    held: list[list[int]] = [[] for _ in rooms]
    placed: list[int] = []
    for request in requests:
        while (found := placer.place(request)) is None:
            rank = max(range(len(held)), key=lambda each: len(held[each]))
            assert held[rank], "nobody has anything, and yet there is no room"
            placer.answered(rank, held[rank].pop(0))
        rank, told = found
        held[rank].append(told.request_idx)
        placed.append(told.request_idx)
        assert len(held[rank]) <= rooms[rank]
        assert told.group_size >= 1
    assert placed == [each.request_idx for each in requests]
    for rank, idxs in enumerate(held):
        for idx in idxs:
            placer.answered(rank, idx)
    assert all(seat.num_tokens == 0 and not seat.costs for seat in placer._seats)
    assert not placer._groups
