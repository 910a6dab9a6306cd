"""Where versions of vLLM differ, found out by looking, not by their numbers.

What is relied on without a bridge is pinned by `tests/vllm_plugin/test_signatures.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


def make_request(
    request_id: str, prompt_token_ids: list[int], params: SamplingParams, block_hasher: Any
) -> Request:
    """A request as the engine hands it to a scheduler."""
    given = {
        "request_id": request_id,
        "prompt_token_ids": prompt_token_ids,
        "sampling_params": params,
        "pooling_params": None,
        "eos_token_id": None,  # before 0.27
        "block_hasher": block_hasher,
    }
    request: Request = _call(Request, given)
    return request


def make_model_output(request_ids: list[str], sampled: Sequence[list[int]]) -> ModelRunnerOutput:
    """What a model gives for a step: new tokens by request, none for those still prefilling."""
    given = {
        "req_ids": request_ids,
        "req_id_to_index": {request_id: idx for idx, request_id in enumerate(request_ids)},
        "sampled_token_ids": list(sampled),
        "logprobs": None,
        "prompt_logprobs_dict": {},
        "pooler_output": [],
    }
    output: ModelRunnerOutput = _call(ModelRunnerOutput, given)
    return output


def reads_prefix_cache(request: Request) -> bool:
    """Whether a request takes KV that others have computed (not with prompt logprobs)."""
    return not getattr(request, "skip_reading_prefix_cache", False)


def _call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Calls with those of the arguments that there are."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in given.items() if name in known})
