"""Run as a script: one replica of a chain, which does what another process asks, and has faults.

    python -m support.runahead_replica

Standard output is an end of a pipe, for the calls of `benchmarks.runahead.replica.serve`.
"""

import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from support.benchmark_modules import load
from torch import Tensor
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.sampling_params import RequestOutputKind

from batchllm_operator.runahead.blocks import KVBlocks
from batchllm_operator.runahead.chain import Chain

replica = load("runahead.replica")
_broadcast, _scatter = Chain._broadcast, KVBlocks.scatter


class FaultyReplica:
    """What can be asked of the replica that was started last."""

    def __init__(self) -> None:
        self._replica: Any = None
        self._num_computed = 0
        self._released = threading.Event()

    def start(self, place: tuple[int, int, str], **args: Any) -> None:
        """A new engine, in place of the last one."""
        self.stop()
        self.heal()
        limits = {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 512}
        args = {"kv_cache_memory_bytes": 1 << 27, "timeout_s": 60.0, **limits, **args}
        self._replica = replica.Replica(place, **args)
        self._num_computed = 0
        scheduler = self._replica.engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._num_computed += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counted

    def stop(self) -> None:
        if self._replica is not None:
            self._replica.engine.engine_core.shutdown()
            self._replica = None
        ensure_kv_transfer_shutdown()  # of an engine that couldn't start, too
        cleanup_dist_env_and_memory()

    def prefill(self, groups: Sequence[Any]) -> Any:
        """Why the chain has failed at groups of (id, prefix, split)."""
        return self._replica.prefill(groups)

    def generate(self, prompts: Sequence[list[int]], max_tokens: int = 12) -> list[dict[str, Any]]:
        """Greedy tokens, their log-probabilities, and how much of each prompt was cached."""
        by_name = {str(idx): prompt for idx, prompt in enumerate(prompts)}
        kind = {"logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY}
        found: dict[str, Any] = {}
        for output in self._replica.outputs(by_name, max_tokens, **kind):
            tokens = list(output.outputs[0].token_ids)
            logprobs = zip(output.outputs[0].logprobs, tokens, strict=True)
            found[output.request_id] = {
                "tokens": tokens,
                "logprobs": [place[token].logprob for place, token in logprobs],
                "num_cached": output.num_cached_tokens,
            }
        return [found[name] for name in by_name]

    def forget(self) -> bool:
        """Empty the prefix cache, and count from 0. Whether nothing held its blocks."""
        if not self._replica.forget():
            self.generate([[300]], 1)  # some versions free what was sent in the next step only
            self._replica.forget()
        is_empty: bool = self._replica.forget()
        self._num_computed = 0
        return is_empty

    def take_num_computed(self) -> int:
        """Tokens that steps were given since this was last asked."""
        number, self._num_computed = self._num_computed, 0
        return number

    def send_late(self) -> None:
        """As where attention writes its own keys and values: a layer is sent after it."""
        connector: Any = get_kv_transfer_group()
        connector.writes_first = False

    def zero_received(self) -> None:
        """From now on zeros are written in place of the KV that comes."""

        def scatter(
            self: KVBlocks, layer_idx: int, block_ids: Sequence[int], payload: Tensor
        ) -> None:
            _scatter(self, layer_idx, block_ids, payload.zero_())

        KVBlocks.scatter = scatter  # type: ignore[method-assign]

    def fail_at_message(self, number: int, how: str) -> None:
        """At the so-manieth message, from 0: `die`, `stall` until `heal`, or `raise`."""
        count, released = iter(range(1 << 30)), self._released

        def broadcast(self: Chain, message: Tensor, owner: int) -> None:
            if next(count) < number:
                _broadcast(self, message, owner)
            elif how == "die":
                os._exit(9)
            elif how == "stall":
                released.wait()
            else:
                raise RuntimeError("a fault on purpose")

        released.clear()
        Chain._broadcast = broadcast  # type: ignore[method-assign]

    def break_step(self) -> None:
        """The engine's next steps raise."""

        def step() -> None:
            raise RuntimeError("a fault on purpose")

        self._replica.engine.step = step

    def heal(self) -> None:
        self._released.set()
        Chain._broadcast, KVBlocks.scatter = _broadcast, _scatter  # type: ignore[method-assign]


def main() -> None:
    target = FaultyReplica()
    pipe = os.dup(1)
    os.dup2(2, 1)  # what is printed is no answer
    with Connection(pipe) as calls:
        replica.serve(calls, target)
        target.stop()


if __name__ == "__main__":
    main()
