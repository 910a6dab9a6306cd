"""vLLM's KV cache manager, asked only for slots that a request doesn't hold yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from vllm.v1.request import Request

_OF_RUNNING: Final = {"num_lookahead_tokens": 0}  # other arguments, for a request that runs


class HeldSlots:
    """Stands before vLLM's KV cache manager, which answers all but the two calls below.

    A decode mostly finds room in its request's last block, and fills none: nothing changes then,
    which vLLM finds out in some fifteen calls for each request of each step.
    """

    def __init__(self, manager: Any) -> None:
        [attention] = manager.coordinator.single_type_managers
        self._manager, self._size = manager, attention.block_size
        self._blocks, self._num_cached = attention.req_to_blocks, attention.num_cached_block

    @classmethod
    def before(cls, manager: Any) -> Any:
        """One before this manager, or the manager itself where blocks change as requests grow."""
        kinds = [type(each) for each in manager.coordinator.single_type_managers]
        return cls(manager) if kinds == [FullAttentionManager] else manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def allocate_slots(self, request: Request, num_new_tokens: int, **others: Any) -> Any:
        """The blocks that a request gets for its next tokens; None if there are too few."""
        end, name = request.num_computed_tokens + num_new_tokens, request.request_id
        if (
            others == _OF_RUNNING
            and end <= self._size * len(self._blocks[name])
            and min(end, request.num_tokens) < self._size * (self._num_cached.get(name, 0) + 1)
        ):
            return self._manager.empty_kv_cache_blocks
        return self._manager.allocate_slots(request, num_new_tokens, **others)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find the blocks that a request has filled."""
        if num_computed_tokens >= self._size * (self._num_cached.get(request.request_id, 0) + 1):
            self._manager.cache_blocks(request, num_computed_tokens)
