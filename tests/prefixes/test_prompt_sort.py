"""Prompts on disk and in memory are sorted as lists are, however little is read at once."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.levels import examples
from support.prefix_prompts import layered_prompts

from batchllm_operator.prefixes import PromptStore, TokenTable, prompt_sort, sort_prompts
from batchllm_operator.prefixes.prompt_store import chunks


def check_sort(prompts: list[list[int]], folder: Path, batch: int = 3) -> None:
    """Check order, LCPs and progress."""
    order = sorted(range(len(prompts)), key=lambda idx: (prompts[idx], idx))
    ranked = [prompts[idx] for idx in order]
    shared = [
        next(n for n in range(len(prompt), -1, -1) if before[:n] == prompt[:n])
        for before, prompt in zip([[], *ranked], ranked, strict=False)
    ]
    with PromptStore(folder / "prompts") as store:
        for start in range(0, len(prompts), batch):
            store.append(TokenTable.from_lists(prompts[start : start + batch]))
        for source in (store, TokenTable.from_lists(prompts)):
            done: list[int] = []
            found = sort_prompts(source, done.append)
            assert found.prompt_idxs.tolist() == order
            assert found.num_shared_tokens.tolist() == shared
            assert sum(done) == len(prompts)
    assert [path.name for path in folder.iterdir()] == ["prompts"]


@settings(max_examples=examples(300))
@given(layered_prompts(20, 9), st.integers(1, 3), st.integers(1, 8), st.integers(1, 12))
@example([], 1, 1, 1)
@example([[]], 1, 1, 1)
@example([[], [], []], 1, 1, 1)
@example([[7] * 9] * 5, 1, 1, 1)
@example([[1, 2, 3], [1, 2], [1], [], [1, 2]], 1, 1, 1)
@example([[2**31 - 1, 0], [2**31 - 1], [0]], 1, 1, 1)
def test_the_order_is_that_of_lists(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
    first_window: int,
    round_prompts: int,
    chunk_tokens: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_sort, "_FIRST_WINDOW", first_window)
        patch.setattr(prompt_sort, "_ROUND_PROMPTS", round_prompts)
        patch.setattr(chunks, "__defaults__", (chunk_tokens,))
        check_sort(prompts, tmp_path_factory.mktemp("sort"))


def test_wide_and_deep_trees_with_the_usual_windows(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    instruction = generator.integers(0, 100, 70).tolist()
    prompts = []
    for _ in range(300):
        document = instruction + generator.integers(0, 100, generator.integers(0, 300)).tolist()
        for _ in range(generator.integers(1, 5)):
            prompts.append(document + generator.integers(0, 3, generator.integers(0, 90)).tolist())
    prompts += [prompts[5], prompts[5], instruction, instruction[:64], instruction[:10]]
    check_sort(prompts, tmp_path, batch=50)


def test_no_row_in_the_middle_costs_a_round_for_each_prompt() -> None:
    """Each prompt shares more with all the others than the one in the middle of them does."""
    prompts = [[1] * abs(2 * place - 2000) + [2 + place % 2] for place in range(2000)]
    rounds: list[int] = []
    sort_prompts(TokenTable.from_lists(prompts), rounds.append)
    assert len(rounds) < 100
