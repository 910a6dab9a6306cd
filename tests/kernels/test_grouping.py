"""Groups by equal block-table rows, and the gate."""

import pytest
import torch

from batchllm_kernels.prefix_attention import Gate, PagedBatch, SharedPrefix, find_shared_prefixes
from batchllm_kernels.prefix_attention.grouping import MAX_GATED_DEGREE, NEVER

OPEN = Gate({2: 1}, max_member_tokens=4)
SIZE = 16


def batch_of(tables: list[list[int]], context_lens: list[int], query_lens: list[int]) -> PagedBatch:
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    width = max(map(len, tables))
    table = torch.tensor([row + [0] * (width - len(row)) for row in tables])
    lens = torch.tensor(context_lens) + torch.tensor(query_lens)
    return PagedBatch(starts.int(), lens.int(), table.int())


@pytest.mark.parametrize(
    ("tables", "context_lens", "query_lens", "groups"),
    [
        pytest.param(
            [[1, 2, 9], [7, 8, 3], [1, 2, 4], [7, 8, 5], [6, 0, 0]],
            [40, 40, 40, 33, 20], [1] * 5, {(0, 2): 32, (1, 3): 32},
            id="equal rows",
        ),
        pytest.param(
            [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11], [1, 5, 6, 7, 12], [1, 5, 6, 7, 13]],
            [70] * 4, [1] * 4, {(0, 1): 64, (2, 3): 64},
            id="an instruction above the documents is shared by all, the documents by fewer",
        ),
        pytest.param(
            [[1, 2, third, 10 + third] for third in (3, 3, 4, 5, 6)],
            [48] * 5, [1] * 5, {(0, 1, 2, 3, 4): 32},
            id="two blocks of five save more than three of two",  # 2 * (1 - 1/5), 3 * (1 - 1/2)
        ),
        pytest.param(
            [[1, 2, 3]] * 2, [31, 40], [1] * 2, {(0, 1): 16}, id="only whole blocks count"
        ),
        pytest.param(
            [[1, 2, 3]] * 2, [0, 40], [4, 1], {}, id="only blocks from before this step count"
        ),
        pytest.param(
            [[1, 2, 3]] * 4, [40] * 4, [5, 4, 0, 4], {(1, 3): 32},
            id="long chunks and padding take no part",
        ),
        pytest.param(
            [[1, 2, 3]] * 5, [40] * 5, [1, 2, 1, 2, 3], {(0, 2): 32, (1, 3): 32},
            id="members have as many query tokens as each other",  # or take the room of several
        ),
        pytest.param(
            [[0, 0, 7], [3, 4, 7]], [48, 48], [1, 1], {},
            id="placeholders of a window before equal blocks are no prefix",
        ),
    ],
)  # fmt: skip
def test_groups_are_those_that_save_most(
    tables: list[list[int]],
    context_lens: list[int],
    query_lens: list[int],
    groups: dict[tuple[int, ...], int],
) -> None:
    batch = batch_of(tables, context_lens, query_lens)
    wanted = [SharedPrefix(*group) for group in groups.items()]
    assert find_shared_prefixes(batch, SIZE, OPEN) == wanted


def test_depths_that_the_gate_closes_are_not_asked_for() -> None:
    """Pairs share 4 blocks, all eight 2: pairs don't pass, so all of them share the 2."""
    tables = [[1, 2, 10 + pair, 20 + pair, 30 + member]
              for pair in range(4) for member in range(2)]  # fmt: skip
    batch = batch_of(tables, [70] * 8, [1] * 8)
    assert len(find_shared_prefixes(batch, SIZE, OPEN)) == 4
    gate = Gate({2: 128, 4: 32}, max_member_tokens=1)
    assert find_shared_prefixes(batch, SIZE, gate) == [SharedPrefix(tuple(range(8)), 32)]


@pytest.mark.parametrize(("tile_tokens", "is_shared"), [(1, False), (3, False), (4, True)])
def test_degree_counts_as_far_as_a_tile_holds_it(tile_tokens: int, is_shared: bool) -> None:
    """A prefix that is read again for every tile saves less, and nothing for single members."""
    gate = Gate({2: 1000, 4: 16}, max_member_tokens=4)
    batch = batch_of([[1, 2, 3]] * 8, [40] * 8, [1] * 8)
    assert bool(find_shared_prefixes(batch, SIZE, gate, tile_tokens)) == is_shared
    pairs = batch_of([[1, 2, 3]] * 8, [40] * 8, [2] * 8)
    assert not find_shared_prefixes(pairs, SIZE, gate, tile_tokens)


@pytest.mark.parametrize(
    ("degree", "num_blocks", "passes"),
    [(2, 63, False), (2, 64, True), (3, 64, True), (4, 15, False), (4, 16, True), (9, 16, True)],
)
def test_gate_by_degree_and_length(degree: int, num_blocks: int, passes: bool) -> None:
    gate = Gate({2: 1024, 4: 256}, max_member_tokens=1)
    tables = [[*range(num_blocks), 1000 + member] for member in range(degree)]
    batch = batch_of(tables, [num_blocks * SIZE] * degree, [1] * degree)
    assert bool(find_shared_prefixes(batch, SIZE, gate)) == passes


def test_gate_as_a_table() -> None:
    table = Gate({3: 100, 5: 10}, 1).min_prefix_by_degree()
    assert table[:7] == [NEVER, NEVER, NEVER, 100, 100, 10, 10]
    assert len(table) == MAX_GATED_DEGREE + 1


@pytest.mark.parametrize(("lengths", "tokens"), [({1: 10}, 1), ({2: 0}, 1), ({2: 10}, 0)], ids=str)
def test_gates_that_make_no_sense(lengths: dict[int, int], tokens: int) -> None:
    with pytest.raises(ValueError, match="for Gate"):
        Gate(lengths, tokens)
