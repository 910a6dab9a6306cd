"""Run as a script: one replica of a chain, an engine that does what another process asks.

    python -m support.runahead_replica

Standard output is an end of a pipe. Through it come calls, `(method, arguments, options)`, or None
for the end. The answers are `("ok", result)` or `("error", class, message)`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.sampling_params import RequestOutputKind

from batchllm_operator.runahead.blocks import KVBlocks
from batchllm_operator.runahead.chain import Chain
from batchllm_operator.runahead.groups import TRANSFER_CONFIG, RunaheadGroup
from batchllm_operator.runahead.phase import ChainedEngine

_broadcast, _scatter = Chain._broadcast, KVBlocks.scatter


class Replica:
    """What can be asked."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._num_computed = 0
        self._released = threading.Event()

    def start(
        self,
        rank: int,
        world_size: int,
        store: str,
        model: str,
        timeout_s: float = 60.0,
        **changes: Any,
    ) -> None:
        """A new engine, in place of the last one."""
        self.stop()
        self.heal()
        self._place = rank, world_size, Path(store), timeout_s
        args: dict[str, Any] = {
            "model": model,
            "dtype": "float32",
            "kv_cache_memory_bytes": 1 << 27,
            "block_size": 32,
            "enforce_eager": True,
            "max_num_seqs": 16,
            "max_model_len": 1024,
            "max_num_batched_tokens": 512,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "enable_prefix_caching": True,
            "kv_transfer_config": dict(TRANSFER_CONFIG),
            **changes,
        }
        self._engine = LLMEngine.from_engine_args(EngineArgs(**args))
        self._chained = ChainedEngine(self._engine)
        self._num_computed = 0
        scheduler = self._engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._num_computed += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counted

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None
        ensure_kv_transfer_shutdown()  # of an engine that couldn't start, too
        cleanup_dist_env_and_memory()

    def fingerprint(self) -> dict[str, Any]:
        return self._chained.fingerprint()

    def open(self) -> None:
        rank, world_size, store, timeout_s = self._place
        self._chained.open(rank, world_size, store, timeout_s=timeout_s)

    def phase(self, groups: Sequence[tuple[int, list[int], tuple[int, ...]]]) -> str | None:
        """Why the chain has failed at groups of (id, prefix, split)."""
        self.open()
        return self._chained.prefill([RunaheadGroup(*group) for group in groups])

    def generate(self, prompts: Sequence[list[int]], max_tokens: int = 12) -> list[dict[str, Any]]:
        """Greedy tokens, their log-probabilities, and how much of each prompt was cached."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for idx, prompt in enumerate(prompts):
            self._engine.add_request(str(idx), {"prompt_token_ids": prompt}, params)
        found: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
                logprobs = [
                    each[token].logprob
                    for each, token in zip(output.outputs[0].logprobs, tokens, strict=True)
                ]
                found[output.request_id] = {
                    "tokens": tokens,
                    "logprobs": logprobs,
                    "num_cached": output.num_cached_tokens,
                }
        return [found[str(idx)] for idx in range(len(prompts))]

    def forget(self) -> bool:
        """Empty the prefix cache, and count from 0. Whether nothing held its blocks."""
        if not self._engine.reset_prefix_cache():
            self.generate([[300]], 1)  # some versions free what was sent in the next step only
            self._engine.reset_prefix_cache()
        is_empty = self._engine.reset_prefix_cache()
        self._num_computed = 0
        return bool(is_empty)

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

        self._engine.step = step

    def heal(self) -> None:
        self._released.set()
        Chain._broadcast, KVBlocks.scatter = _broadcast, _scatter  # type: ignore[method-assign]


def main() -> None:
    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over it: see VLLMEngine
    replica = Replica()
    pipe = os.dup(1)
    os.dup2(2, 1)  # what is printed is no answer
    with Connection(pipe) as calls:
        while (call := calls.recv()) is not None:
            method, args, options = call
            answer: tuple[Any, ...]
            try:
                answer = ("ok", getattr(replica, method)(*args, **options))
            except Exception as error:  # noqa: BLE001 (the test's to judge)
                answer = ("error", type(error).__name__, str(error))
            calls.send(answer)
        replica.stop()


if __name__ == "__main__":
    main()
