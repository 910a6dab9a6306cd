"""A replica's part in a chain: it prefills groups with the others, and measures how fast."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from batchllm_operator.errors import EngineError, SpecError
from batchllm_operator.runahead.chain import Chain
from batchllm_operator.runahead.connector import RunaheadConnector, Turn
from batchllm_operator.runahead.groups import KEY, ChainLimits, Part, RunaheadGroup

_MEASURED: Final = ((1, 0), (2, 0), (4, 0), (2, 2), (4, 4))
"""Prefill steps to measure: tokens, and cached tokens before them, in quarters of the largest."""


class ChainedEngine:
    """vLLM's engine as a replica of a chain.

    Args:
        engine: vLLM's `LLMEngine`, in this process, started with `TRANSFER_CONFIG`.
        idle: a context in which the engine computes prompts other than the job's.

    Raises:
        SpecError: the engine has no connector of ours, or isn't in this process.
    """

    def __init__(
        self, engine: Any, idle: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._engine, self._idle = engine, idle
        core = getattr(engine.engine_core, "engine_core", None)
        scheduling = getattr(getattr(core, "scheduler", None), "connector", None)
        working = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(scheduling, RunaheadConnector) or not isinstance(
            working, RunaheadConnector
        ):
            raise SpecError(
                "runahead: the engine must run in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0),"
                f" with kv_transfer_config naming {RunaheadConnector.__name__}"
            )
        self._scheduling, self._working = scheduling, working

    @property
    def limits(self) -> ChainLimits:
        return self._scheduling.limits

    def fingerprint(self) -> dict[str, Any]:
        return self._working.fingerprint()

    def open(self, rank: int, world_size: int, store: Path, **options: Any) -> None:
        """Open the chain; does nothing if it is open. See `Chain`."""
        if self._working.chain is None:
            blocks = self._working.blocks
            self._working.chain = Chain(rank, world_size, store, blocks, **options)

    def prefill(self, groups: Sequence[RunaheadGroup]) -> str | None:
        """Prefill this replica's chunk of each group, and receive the rest from the others.

        All replicas call this with the same groups, which they have checked. Afterwards the whole
        prefixes are in the prefix cache. If the chain fails, the prefix cache is empty instead.

        Returns:
            The reason why the chain has failed permanently; None if it works.

        Raises:
            EngineError: the chain has failed, and the prefix cache can't be emptied.
        """
        chain = self.chain
        try:
            with self._idle():
                for group in groups:
                    if chain.failure is None:
                        self._prefill(chain, group)
                # It may have blocks of which the KV never came.
                if chain.failure is not None and not self._engine.reset_prefix_cache():
                    raise EngineError("runahead: blocks of a failed chain stay in use")
        except BaseException as error:
            chain.fail(f"this replica has ended by {type(error).__name__}")
            raise
        return chain.failure

    def measure(self) -> tuple[float, list[tuple[int, int, float]]]:
        """The link's bytes per second, and steps by `time_prefill`; all replicas call it at once.

        There are no steps if the engine's are too short for prefixes to be split.

        Raises:
            RunaheadError: the link can't be timed.
        """
        limits = self.limits
        quarter = min(limits.max_chunk, (limits.max_model_len - 1) // 2) // 4
        quarter = min(quarter, limits.num_blocks * limits.block_size // 16)
        quarter -= quarter % limits.block_size
        sizes = [(chunk * quarter, before * quarter) for chunk, before in _MEASURED]
        bytes_per_s = self.chain.bytes_per_s()
        with self._idle():
            return bytes_per_s, time_prefill(self._engine, sizes if quarter else [])

    @property
    def chain(self) -> Chain:
        """This replica's place in the process group, once it is open."""
        assert self._working.chain is not None, "open() comes first"
        return self._working.chain

    def _prefill(self, chain: Chain, group: RunaheadGroup) -> None:
        tokens, block_size = list(group.prefix_token_ids), self.limits.block_size
        _, end = group.bounds(chain.rank)
        turn = self._scheduling.turn = Turn(group, chain.rank)
        try:
            self._add("chunk", tokens[:end])
            if turn.last_part == "fill":  # vLLM computes one token at least
                whole = group.num_whole(block_size)
                self._add("fill", [*tokens[:whole], tokens[min(whole, len(tokens) - 1)]])
            while turn.transfer is None:
                self._engine.step()
            turn.transfer.wait()
            while self._engine.has_unfinished_requests():
                self._engine.step()
        finally:
            self._scheduling.turn = None

    def _add(self, part: Part, tokens: list[int]) -> None:
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={KEY: {"runahead": part}},
        )
        self._engine.add_request(f"runahead-{part}", tokens_input(tokens), params)


def time_prefill(
    engine: Any, sizes: Sequence[tuple[int, int]], repetitions: int = 3
) -> list[tuple[int, int, float]]:
    """Time prefill steps of made-up prompts: (tokens, tokens before, median seconds) of each size.

    The engine must be idle, and is left idle with an empty prefix cache.

    Args:
        engine: vLLM's `LLMEngine`.
        sizes: tokens that fit a step, and cached tokens before them, in whole blocks.
        repetitions: of each size, after one to warm up.
    """
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    generator, steps = np.random.default_rng(0), []
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    for chunk, before in sizes:
        times = []
        for _ in range(1 + repetitions):
            tokens = generator.integers(0, vocabulary, before + chunk).tolist()
            engine.reset_prefix_cache()
            for end in filter(None, (before, before + chunk)):
                began = time.perf_counter()
                engine.add_request("timed", tokens_input(tokens[:end]), params)
                while engine.has_unfinished_requests():
                    engine.step()
            times.append(time.perf_counter() - began)
        steps.append((chunk, before, statistics.median(times[1:])))
    engine.reset_prefix_cache()
    return steps
