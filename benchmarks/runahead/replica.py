"""A replica of a chain, in a process of its own: an engine that does what another process asks.

Tests of chains run it, too, with faults added.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
Group = tuple[int, list[int], tuple[int, ...]]
"""Id, prefix and split."""


class Replica:
    """An engine in a chain: its methods are what can be asked.

    Args:
        place: rank, number of replicas, and the store of `Chain`.
        timeout_s: of the chain.
        args: of vLLM's engine; others are for a small model in fp32.
    """

    def __init__(self, place: tuple[int, int, str], timeout_s: float = 120.0, **args: Any) -> None:
        from vllm import EngineArgs, LLMEngine

        from batchllm_operator.engine.vllm.logs import without_llvmlite
        from batchllm_operator.runahead.groups import TRANSFER_CONFIG
        from batchllm_operator.runahead.phase import ChainedEngine

        given = {
            "dtype": "float32",
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "block_size": BLOCK_SIZE,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "kv_transfer_config": dict(TRANSFER_CONFIG),
            **args,
        }
        with without_llvmlite():
            self.engine: Any = LLMEngine.from_engine_args(EngineArgs(**given))
        self.chained, self._place, self._timeout_s = ChainedEngine(self.engine), place, timeout_s

    def open(self) -> None:
        rank, world_size, store = self._place
        self.chained.open(rank, world_size, Path(store), timeout_s=self._timeout_s)

    def prefill(self, groups: Sequence[Group]) -> str | None:
        """Prefill prefixes with the others; why the chain has failed, if it has."""
        from batchllm_operator.runahead.groups import RunaheadGroup

        self.open()
        return self.chained.prefill([RunaheadGroup(*group) for group in groups])

    def outputs(
        self, prompts: Mapping[str, list[int]], max_tokens: int, **sampling: Any
    ) -> Iterator[Any]:
        """vLLM's outputs of prompts by request, greedily, as they come."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
        for name, prompt in prompts.items():
            self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        while self.engine.has_unfinished_requests():
            yield from self.engine.step()

    def forget(self) -> bool:
        """Empty the prefix cache; whether nothing held its blocks."""
        return bool(self.engine.reset_prefix_cache())


class TimedReplica(Replica):
    """A replica of the benchmark, on a core of its own, with a model of drawn weights."""

    def __init__(self, place: tuple[int, int, str], core: int, sizes: Sizes, **args: Any) -> None:
        from benchmarks.drawn_weights import LOAD_FORMAT, register_loader

        os.sched_setaffinity(0, {core})
        register_loader()
        own = {"load_format": LOAD_FORMAT, "skip_tokenizer_init": True, "max_num_seqs": 64}
        super().__init__(place, max_model_len=sizes.max_model_len, **own, **args)
        self._sizes = sizes
        self.open()

    def prepare(self, chained: Sequence[Any], members: Sequence[tuple[int, int]]) -> None:
        """Make prompts and empty the cache; for the fields of `ReplicaWork`."""
        self._prompts = {f"{each[0]}-{each[1]}": self._sizes.prompt(*each) for each in members}
        self._groups = [(idx, self._sizes.prefix_tokens(idx), split) for idx, split in chained]
        if not self.forget():
            raise RuntimeError("something holds blocks of the prefix cache")

    def go(self, start_at: float) -> dict[str, Any]:
        """Do what was prepared.

        Args:
            start_at: when, by the clock that all processes of a machine share.

        Returns:
            Seconds from then to the end and to each group's first token here; each member's
            tokens; why the chain has failed.
        """
        from vllm.sampling_params import RequestOutputKind

        time.sleep(max(0.0, start_at - time.monotonic()))
        failure = self.prefill(self._groups) if self._groups else None
        tokens: dict[str, list[int]] = {}
        first_s: dict[str, float] = {}
        kind = {"detokenize": False, "output_kind": RequestOutputKind.DELTA}
        for output in self.outputs(self._prompts, self._sizes.output, **kind):
            new = list(output.outputs[0].token_ids)
            tokens.setdefault(output.request_id, []).extend(new)
            if new:
                group = output.request_id.partition("-")[0]
                first_s.setdefault(group, time.monotonic() - start_at)
        end_s = time.monotonic() - start_at
        return {"end_s": end_s, "first_s": first_s, "tokens": tokens, "failure": failure}

    def time_steps(self, sizes: list[tuple[int, int]], repetitions: int) -> list[float]:
        """Median seconds of a step of (tokens, tokens before them that are cached)."""
        from batchllm_operator.runahead.phase import time_prefill

        return [seconds for *_, seconds in time_prefill(self.engine, sizes, repetitions)]

    def link_bytes_per_s(self) -> float:
        """See `Chain.bytes_per_s`; all replicas are asked at once."""
        return self.chained.chain.bytes_per_s()


def serve(calls: Connection, target: Any) -> None:
    """Call a target's methods until the other end closes, or sends None.

    A call is (method, arguments, options), an answer ("ok", result) or ("error", class, message).
    """
    with suppress(EOFError):
        while (call := calls.recv()) is not None:
            method, arguments, options = call
            answer: tuple[Any, ...]
            try:
                answer = ("ok", getattr(target, method)(*arguments, **options))
            except Exception as error:  # noqa: BLE001  (the other process raises or judges it)
                answer = ("error", type(error).__name__, str(error))
            calls.send(answer)


def serve_timed(calls: Connection, arguments: Mapping[str, Any]) -> None:
    """Start a replica of the benchmark, say so, and serve."""
    replica = TimedReplica(**arguments)
    calls.send(("ok", "started"))
    serve(calls, replica)
