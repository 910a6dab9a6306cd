"""One replica: an engine on one core, which runs what the benchmark's own process asks for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.runahead.work import Sizes

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Read when vLLM is imported: set it before a replica starts."""
BLOCK_SIZE = 32
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 16,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
"""Some three seconds for 4,096 tokens on one core."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Of one replica."""

    rank: int
    world_size: int
    store: str
    """See `Chain`."""
    core: int
    model: str
    """A folder with `MODEL` as its config.json."""
    max_step_tokens: int
    kv_cache_bytes: int
    sizes: Sizes


def serve(connection: Connection, settings: ReplicaSettings) -> None:
    """Answer until the other end closes: JSON objects in bytes, each with a `call`.

    An answer has `result`, or `error` if the call failed.
    """
    os.sched_setaffinity(0, {settings.core})
    replica = _Replica(settings)
    connection.send_bytes(b'{"result": "started"}')
    while True:
        try:
            request: dict[str, Any] = json.loads(connection.recv_bytes())
        except EOFError:
            return
        call = getattr(replica, request.pop("call"))
        try:
            answer = {"result": call(**request)}
        # Whatever it was, the benchmark's own process says it and ends everything.
        except Exception as error:  # noqa: BLE001
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.send_bytes(json.dumps(answer).encode())


class _Replica:
    def __init__(self, settings: ReplicaSettings) -> None:
        from vllm import EngineArgs, LLMEngine

        from batchllm_operator.runahead.groups import TRANSFER_CONFIG
        from batchllm_operator.runahead.phase import ChainedEngine
        from benchmarks.drawn_weights import LOAD_FORMAT, register_loader

        register_loader()
        self._sizes = settings.sizes
        args = EngineArgs(
            model=settings.model,
            load_format=LOAD_FORMAT,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=settings.kv_cache_bytes,
            max_model_len=settings.sizes.max_model_len,
            max_num_batched_tokens=settings.max_step_tokens,
            max_num_seqs=64,
            disable_log_stats=True,
            kv_transfer_config=dict(TRANSFER_CONFIG),
        )
        self._engine: Any = LLMEngine.from_engine_args(args)
        self._chain = ChainedEngine(self._engine)
        self._chain.open(settings.rank, settings.world_size, Path(settings.store))
        self._prompts: dict[tuple[int, int], list[int]] = {}
        self._groups: list[Any] = []

    def prepare(self, chained: Sequence[Any], members: Sequence[Any]) -> None:
        """Make prompts and empty the cache; for the fields of `ReplicaWork`."""
        from batchllm_operator.runahead.groups import RunaheadGroup

        self._prompts = {tuple(each): self._sizes.prompt(*each) for each in members}
        self._groups = [
            RunaheadGroup(group, self._sizes.prefix_tokens(group), tuple(split))
            for group, split in chained
        ]
        self._forget()

    def go(self, start_at: float) -> dict[str, Any]:
        """Do what was prepared.

        Args:
            start_at: when, by the clock that all processes of a machine share.

        Returns:
            Seconds from then to the end and to each group's first token here; each member's
            tokens; why the chain has failed.
        """
        time.sleep(max(0.0, start_at - time.monotonic()))
        failure = self._chain.prefill(self._groups) if self._groups else None
        for (group, member), prompt in self._prompts.items():
            self._add(f"{group}-{member}", prompt, self._sizes.output)
        tokens: dict[str, list[int]] = {}
        first_s: dict[str, float] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                new = list(output.outputs[0].token_ids)
                tokens.setdefault(output.request_id, []).extend(new)
                if new:
                    group = output.request_id.partition("-")[0]
                    first_s.setdefault(group, time.monotonic() - start_at)
        return {
            "end_s": time.monotonic() - start_at,
            "first_s": first_s,
            "tokens": tokens,
            "failure": failure,
        }

    def time_steps(self, sizes: list[tuple[int, int]], repetitions: int) -> list[float]:
        """Median seconds of a step of (tokens, tokens before them that are cached)."""
        from batchllm_operator.runahead.phase import time_prefill

        return [seconds for *_, seconds in time_prefill(self._engine, sizes, repetitions)]

    def link_bytes_per_s(self) -> float:
        """See `Chain.bytes_per_s`; all replicas are asked at once."""
        return self._chain.chain.bytes_per_s()

    def _add(self, request_id: str, prompt: list[int], output_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)

    def _forget(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("something holds blocks of the prefix cache")
