"""Predicts the cost of a plan on a GPU: a roofline model, as pure functions.

Prefill is bound by compute, decoding by memory traffic (paper, Sec. 2; Williams et al.,
*Roofline*). An engine step lasts as long as the slower of the two for its matrices, plus its
attention. With C FLOP/s and B bytes/s that the GPU reaches:

    prefill_s = prefill matrices + pairs * FLOP per pair / C
    decode_s  = max(decode tokens * FLOP per token / C, steady steps * weights_s - hidden)
              + attention_bytes / B
              + steady steps * overhead
              + ramp steps * (weights_s + overhead)

    prefill matrices = max(prefill tokens * FLOP per token / C, prefill steps * weights_s)
    prefill steps    = prefill tokens / chunk
    weights_s        = step weight bytes / B

A *pair* is a prefilled token and a token that it attends to. `attention_bytes` is the KV that
decoding reads, 2 * n_bytes * n_layers * n_kvheads * d_head for each token of each context.
The number of steady steps is the maximum of three bounds: by KV memory, the sum of (KV tokens *
steps that they are held) / (tokens that fit); by `max_num_seqs`; and all tokens / chunk. A shared
prefix is held once, by the prompt that computes it. The ramp is one output length per engine, in
which memory fills and drains. *Hidden* are weights that are read while prefill computes. vLLM's own
scheduler fills steps with prefill and only decodes in between, which hides prefill steps *
weights_s. Ours spreads prefill over all steps (`EngineLimits.spreads_prefill`), which hides as much
as the prefill matrices take.

Not counted: loading the model, communication between GPUs (they divide all work evenly), sampling,
preemption, idle steps, and reads of KV during prefill, which compute hides. The first output token
counts as decoded, though prefill yields it. Without any decode tokens, the overhead of the steps is
part of `prefill_s`. All numbers are for the whole job, in seconds of one
GPU. `batchllm simulate` simulates each step, with the same constants (`step_time`).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.cost.gpu import GPU
from batchllm_operator.cost.model_shape import ModelShape
from batchllm_operator.errors import PlanError

BLOCK_SIZE: Final = 16
"""Tokens of a KV block: vLLM's default on GPUs."""
_S_PER_HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of the work; `max_output_tokens` is the longest output."""

    num_prefill_tokens: int = 0
    """Computed tokens, after sharing."""
    num_pairs: int = 0
    """Sum over prefilled tokens of the tokens each attends to, itself included."""
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    """Sum over decoded tokens of the tokens whose KV each reads."""
    num_held_token_steps: int = 0
    """Sum over KV tokens of the decode steps for which each is held."""
    max_output_tokens: int = 0

    def __add__(self, other: Work) -> Work:
        """The sum of both."""
        *counts, longest = zip(astuple(self), astuple(other), strict=True)
        return Work(*[*map(sum, counts), max(longest)])


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Settings of the engine that bound a step."""

    num_gpus: int = 1
    """GPUs of one engine."""
    memory_share: float | None = None
    """Share of the GPU's memory for weights and KV; unset: the GPU's `achievable_memory`."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache on each GPU, in place of a share."""
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    spreads_prefill: bool = False
    """Whether prefill is spread over all steps, or takes as few as possible."""


@dataclass(frozen=True, slots=True)
class Rates:
    """GPU seconds per unit of each count of `Work`; linear, so parts add up."""

    s_per_prefill_token: float
    s_per_pair: float
    s_per_decode_token: float
    s_per_context_token: float
    s_per_held_token_step: float
    s_per_ramp_step: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time and price of `Work` on one kind of GPU."""

    prefill_s: float
    decode_s: float
    attention_bytes: float
    num_steps: float
    """Engine steps of all engines together."""
    gpu_s: float
    cost_usd: float


def kv_capacity_tokens(model: ModelShape, gpu: GPU, limits: EngineLimits) -> int:
    """Tokens whose KV fits into one engine's memory beside the weights.

    Raises `PlanError`: not even one fits.
    """
    if limits.kv_cache_bytes is not None:
        kv_bytes = float(limits.kv_cache_bytes) * limits.num_gpus
    else:
        share = limits.memory_share or gpu.achievable_memory
        kv_bytes = gpu.memory_bytes * share * limits.num_gpus - model.weight_bytes
    capacity = int(kv_bytes // model.kv_bytes_per_token)
    if capacity < 1:
        raise PlanError(
            f"model {model.name}: {model.weight_bytes / 1e9:.1f} GB of weights leave no room for KV"
            f" in {limits.num_gpus} x {gpu.name}; raise engine.tensor_parallel_size (simulate:"
            " --num-gpus)"
        )
    return capacity


@dataclass(frozen=True, slots=True)
class _Steps:
    """A job's steps without the ramp, and the times of their matrices."""

    bound: Literal["memory", "seqs", "tokens"]
    num: float
    capacity: int
    """KV tokens that an engine has room for."""
    weights_s: float
    """Time of reading all weights once."""
    prefill_s: float
    decode_s: float
    """Compute time, without the weights."""
    unhidden_weights_s: float
    """Time of weight reads that prefill doesn't hide."""

    @classmethod
    def of(cls, work: Work, model: ModelShape, gpu: GPU, limits: EngineLimits) -> _Steps:
        num_prefill, num_decode = work.num_prefill_tokens, work.num_decode_tokens
        capacity = kv_capacity_tokens(model, gpu, limits)
        num_by_bound: dict[Literal["memory", "seqs", "tokens"], float] = {
            "memory": work.num_held_token_steps / capacity,
            "seqs": num_decode / limits.max_num_seqs,
            "tokens": (num_prefill + num_decode) / limits.max_num_batched_tokens,
        }
        bound, num = max(num_by_bound.items(), key=lambda pair: pair[1])
        weights_s = model.step_weight_bytes / gpu.bytes_per_s
        prefill_steps_s = num_prefill / limits.max_num_batched_tokens * weights_s
        prefill_s = max(num_prefill * model.flop_per_token / gpu.flop_per_s, prefill_steps_s)
        hidden_s = prefill_s if limits.spreads_prefill else prefill_steps_s
        decode_flop = model.flop_per_token + model.flop_per_sampled_token
        decode_s = num_decode * decode_flop / gpu.flop_per_s
        unhidden_s = num * weights_s - hidden_s
        return cls(bound, num, capacity, weights_s, prefill_s, decode_s, unhidden_s)


def rates(work: Work, model: ModelShape, gpu: GPU, limits: EngineLimits) -> Rates:
    """The rates of a job; its total `work` decides what bounds its steps.

    Raises `PlanError`: as `kv_capacity_tokens`.
    """
    steps, chunk = _Steps.of(work, model, gpu, limits), limits.max_num_batched_tokens
    overhead_s = gpu.step_overhead_s * limits.num_gpus
    token_s, step_s = 0.0, overhead_s
    if steps.decode_s > steps.unhidden_weights_s:
        token_s = (model.flop_per_token + model.flop_per_sampled_token) / gpu.flop_per_s
    elif steps.num:
        step_s += steps.unhidden_weights_s / steps.num
    by_tokens_s = step_s / chunk if steps.bound == "tokens" else 0.0
    by_seqs_s = step_s / limits.max_num_seqs if steps.bound == "seqs" else 0.0
    return Rates(
        s_per_prefill_token=by_tokens_s
        + max(model.flop_per_token / gpu.flop_per_s, steps.weights_s / chunk),
        s_per_pair=model.flop_per_pair / gpu.flop_per_s,
        s_per_decode_token=token_s + by_seqs_s + by_tokens_s,
        s_per_context_token=model.kv_bytes_per_token / gpu.bytes_per_s,
        s_per_held_token_step=step_s / steps.capacity if steps.bound == "memory" else 0.0,
        s_per_ramp_step=steps.weights_s + overhead_s,
    )


def predict(
    work: Work,
    model: ModelShape,
    gpu: GPU,
    limits: EngineLimits | None = None,
    *,
    num_engines: int = 1,
) -> Prediction:
    """GPU seconds and price of `work`, by this module's formulas.

    Args:
        num_engines: engines that share the work; each has its own ramp, and the limits.

    Raises `PlanError`: the model leaves no room for KV.
    """
    limits = limits or EngineLimits()
    steps = _Steps.of(work, model, gpu, limits)
    num_ramp = work.max_output_tokens * num_engines
    overhead_s = gpu.step_overhead_s * limits.num_gpus
    attention_bytes = work.num_context_tokens * model.kv_bytes_per_token
    prefill_s = steps.prefill_s + work.num_pairs * model.flop_per_pair / gpu.flop_per_s
    decode_s = 0.0
    if work.num_decode_tokens:
        decode_s = (
            max(steps.decode_s, steps.unhidden_weights_s)
            + attention_bytes / gpu.bytes_per_s
            + steps.num * overhead_s
            + num_ramp * (steps.weights_s + overhead_s)
        )
    else:
        prefill_s += steps.num * overhead_s
    return Prediction(
        prefill_s=prefill_s,
        decode_s=decode_s,
        attention_bytes=attention_bytes,
        num_steps=steps.num + num_ramp,
        gpu_s=prefill_s + decode_s,
        cost_usd=(prefill_s + decode_s) / _S_PER_HOUR * gpu.usd_per_hour,
    )


@dataclass(frozen=True, slots=True, eq=False)
class WorkArrays:
    """Counts as in `Work`, with one entry per prompt: int64 arrays."""

    num_prefill_tokens: NDArray[np.int64]
    num_pairs: NDArray[np.int64]
    num_decode_tokens: NDArray[np.int64]
    num_context_tokens: NDArray[np.int64]
    num_held_token_steps: NDArray[np.int64]

    def total(self, weights: NDArray[np.int64] | None = None) -> Work:
        """The sum, with each entry taken `weights` times (once by default)."""
        longest = int(self.num_decode_tokens.max()) if len(self.num_decode_tokens) else 0
        counts = (getattr(self, field.name) for field in fields(self))
        sums = (int(c.sum() if weights is None else (c * weights).sum()) for c in counts)
        return Work(*[*sums, longest])

    def nanoseconds(self, rate: Rates) -> NDArray[np.float64]:
        """GPU time of each entry, in whole ns, so that sums don't depend on their order."""
        seconds = (
            self.num_prefill_tokens * rate.s_per_prefill_token
            + self.num_pairs * rate.s_per_pair
            + self.num_decode_tokens * rate.s_per_decode_token
            + self.num_context_tokens * rate.s_per_context_token
            + self.num_held_token_steps * rate.s_per_held_token_step
        )
        return np.asarray(np.rint(seconds * 1e9), dtype=np.float64)


def prompt_work(
    lengths: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    prefix_tokens: NDArray[np.int64] | int = 0,
) -> WorkArrays:
    """The work of each prompt without that of the `prefix_tokens` it shares.

    A prompt of P shared and D distinct tokens with o output tokens prefills D, over
    D * P + D * (D + 1) / 2 pairs; its o tokens read contexts of P + D + 1, ..., P + D + o; and its
    own tokens are held for o steps as they grow.

    Args:
        lengths: [num_prompts] int64, P + D.
        output_tokens: [num_prompts] int64, o.
        prefix_tokens: [num_prompts] int64, or one for all, P.
    """
    distinct = lengths - prefix_tokens
    grown = output_tokens * (output_tokens + 1) // 2
    return WorkArrays(
        num_prefill_tokens=distinct,
        num_pairs=distinct * prefix_tokens + distinct * (distinct + 1) // 2,
        num_decode_tokens=output_tokens,
        num_context_tokens=output_tokens * lengths + grown,
        num_held_token_steps=output_tokens * distinct + grown,
    )
