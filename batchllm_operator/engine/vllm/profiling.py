"""Measures a device by engine steps of growing size, and derives the scheduler's settings."""

import json
import logging
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from itertools import count
from typing import Any, Final

import numpy as np
import torch
import vllm
from vllm import PoolingParams, SamplingParams
from vllm.inputs import tokens_input
from vllm.platforms import current_platform

from batchllm_operator.engine.device_profile import DeviceProfile, step_sizes
from batchllm_operator.engine.protocol import EngineJob
from batchllm_operator.errors import EngineError, one_line
from batchllm_operator.progress import Progress
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings
from batchllm_operator.vllm_plugin.scheduler.scheduler import BatchLLMScheduler

_log = logging.getLogger(__name__)
_STEPS: Final = 4  # timed together
_REPETITIONS: Final = 3  # after one to warm up
_PROMPT_TOKENS: Final = 512  # at most, so that attention stays a small part
_VOLATILE: Final = {"use_tqdm_on_load", "disable_log_stats", "additional_config", "max_model_len"}


def scheduler_settings(
    spec: JobSpec,
    job: EngineJob,
    args: Mapping[str, Any],
    engine: Any,
    scheduler: BatchLLMScheduler,
) -> SchedulerSettings:
    """The scheduler's settings for a job on this device, which is measured unless that was done.

    Those that the user chose win.
    """
    settings = SchedulerSettings(num_requests=job.num_requests, step_cost=job.step_cost)
    if spec.engine.profile or (spec.engine.profile is None and not current_platform.is_cpu()):
        subject = profile_subject(args, spec.engine.attention)
        profile = job.profiles.find(DeviceProfile, subject) if job.profiles is not None else None
        if profile is None:
            try:
                profile = measure_device(engine, scheduler, subject)
            # A device that fails at made-up prompts would fail at the job's.
            except Exception as error:
                engine.engine_core.shutdown()
                raise EngineError(f"vLLM fails on this device: {one_line(error)}") from error
            if job.profiles is not None:
                job.profiles.keep(profile)
        _log.info("chunk size %d tokens (profile %s)", profile.chunk_size, profile.key[:8])
        settings = replace(settings, chunk_size=profile.chunk_size, step_cost=profile.step_cost)
    wanted = SchedulerSettings.from_additional_config(engine.vllm_config.additional_config)
    values = {field: getattr(wanted, field.name) for field in fields(wanted)}
    chosen = {field.name: value for field, value in values.items() if value != field.default}
    return replace(settings, **chosen)


def profile_subject(args: Mapping[str, Any], attention: str) -> dict[str, str]:
    """The subject of this device's profile with these engine arguments and attention."""
    chosen = {name: value for name, value in args.items() if name not in _VOLATILE}
    if attention == "batchllm":
        settings = AttentionSettings.from_additional_config(args.get("additional_config"))
        attention = f"batchllm {json.dumps(asdict(settings), sort_keys=True)}"
    return {
        "device": str(current_platform.get_device_name()),
        "cores": str(os.cpu_count()) if current_platform.is_cpu() else "",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "attention": attention,
        "arguments": json.dumps(chosen, sort_keys=True, default=str),
    }


def measure_device(
    engine: Any, scheduler: BatchLLMScheduler, subject: Mapping[str, str]
) -> DeviceProfile:
    """Time steps of several sizes with made-up prompts that share nothing.

    Takes some seconds. The engine (vLLM's `LLMEngine`, in this process) must be idle, and is left
    idle, with an empty prefix cache and the scheduler's settings changed.
    """
    config = engine.vllm_config
    limit = min(
        config.scheduler_config.max_num_batched_tokens,
        scheduler.num_plannable_tokens // 2,  # no preemption while measuring
    )
    prompt_tokens = max(1, min(_PROMPT_TOKENS, config.model_config.max_model_len - 1))
    vocabulary = config.model_config.get_vocab_size()
    generator, names = np.random.default_rng(0), count()
    params: Any = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    if config.model_config.runner_type == "pooling":
        (task, *_) = engine.get_supported_tasks()
        params = PoolingParams(task=task)

    def seconds(size: int) -> float:
        rest = _STEPS * size
        while rest:
            length = min(prompt_tokens, rest)
            tokens = generator.integers(0, vocabulary, length).tolist()
            engine.add_request(f"profile-{next(names)}", tokens_input(tokens), params)
            rest -= length
        started_at = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return (time.perf_counter() - started_at) / _STEPS

    steps = []
    sizes = step_sizes(max(limit, 1))
    with Progress("profile the device", len(sizes), unit="step sizes", announce=False) as progress:
        for size in sizes:
            scheduler.begin(SchedulerSettings(pace=False, chunk_size=size))
            times = [seconds(size) for _ in range(1 + _REPETITIONS)]
            steps.append((size, statistics.median(times[1:])))
            progress.advance(1)
    engine.reset_prefix_cache()
    return DeviceProfile(subject=dict(subject), steps=tuple(steps))
