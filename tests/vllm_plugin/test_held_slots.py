"""What vLLM's KV cache manager isn't asked would have changed nothing."""

from typing import Any
from unittest.mock import patch

import pytest
from support.engine_steps import EngineSteps

from batchllm_operator.vllm_plugin.scheduler.held_slots import HeldSlots
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings

NO_PACE = SchedulerSettings(pace=False)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("call", ["allocate_slots", "cache_blocks"])
def test_slots_at_hand_are_those_vllm_would_have_given(call: str, lag: int) -> None:
    """Also beside chunks of prompts, preemptions, and outputs that are known a step late."""
    num_calls = num_asked = 0
    ours = getattr(HeldSlots, call)

    def compared(slots: Any, *given: Any, **by_name: Any) -> Any:
        nonlocal num_calls, num_asked
        asked, manager = getattr(slots._manager, call), slots._manager
        with patch.object(manager, call, wraps=asked) as watched:
            found = ours(slots, *given, **by_name)
        num_calls, num_asked = num_calls + 1, num_asked + watched.called
        if not watched.called:
            before = (dict(slots._num_cached), manager.block_pool.get_num_free_blocks())
            assert asked(*given, **by_name) is found
            assert before == (dict(slots._num_cached), manager.block_pool.get_num_free_blocks())
        return found

    with patch.object(HeldSlots, call, compared):
        engine = EngineSteps(num_blocks=24, chunk=96, lag=lag, settings=NO_PACE)
        engine.add_group(0, 2, prefix=128, distinct=16, output=150, estimate=1)
        engine.add_group(1, 1, prefix=0, distinct=80, output=150, estimate=1)
        engine.run()
    assert engine.preempted and num_asked < num_calls / 4
