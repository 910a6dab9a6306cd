"""Times prefill steps on one replica, for the predictions of later plans."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.inputs import TokensPrompt


def time_prefill(
    engine: Any, sizes: Sequence[tuple[int, int]], repetitions: int, num_warm_ups: int = 1
) -> list[tuple[int, int, float]]:
    """Time prefill steps of made-up prompts on this replica.

    The engine must be idle, and is left idle with an empty prefix cache.

    Args:
        engine: vLLM's `LLMEngine`.
        sizes: tokens of a step, at most those that a step may have, and tokens before
            them that are cached, in whole blocks.
        repetitions: of each, after `num_warm_ups`.

    Returns:
        (tokens, tokens before, median seconds) of each size.
    """
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    generator, found = np.random.default_rng(0), []
    for chunk, before in sizes:
        times = []
        for _ in range(num_warm_ups + repetitions):
            tokens = generator.integers(0, vocabulary, before + chunk).tolist()
            engine.reset_prefix_cache()
            for end in (before, before + chunk):
                began = time.perf_counter()
                if end:
                    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
                    prompt = TokensPrompt(prompt_token_ids=tokens[:end])
                    engine.add_request("timed", prompt, params)
                while engine.has_unfinished_requests():
                    engine.step()
            times.append(time.perf_counter() - began)
        found.append((chunk, before, statistics.median(times[num_warm_ups:])))
    engine.reset_prefix_cache()
    return found
