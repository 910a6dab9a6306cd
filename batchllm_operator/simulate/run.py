"""The result of a simulated run: a row per step, and sums over them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchllm_operator.cost import StepWork
from batchllm_operator.prefixes import saving_ratio
from batchllm_operator.vllm_plugin.scheduler.trace import in_valley


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One entry per step: arrays [num_steps]."""

    num_decode_tokens: NDArray[np.int64]
    num_distinct_tokens: NDArray[np.int64]
    """Prompt tokens after their group's prefix."""
    num_prefix_tokens: NDArray[np.int64]
    """Prompt tokens of a group's prefix."""
    num_recomputed_tokens: NDArray[np.int64]
    """Those of all these that the same request had computed before it was preempted."""
    num_running: NDArray[np.int64]
    """Requests with tokens in the step."""
    num_waiting: NDArray[np.int64]
    """Requests that have arrived and hold no blocks, after the step was scheduled."""
    num_used_blocks: NDArray[np.int64]
    num_preempted: NDArray[np.int64]
    scheduling_s: NDArray[np.float64]
    """CPU time on this machine, so that other processes don't count."""
    idle_s: NDArray[np.float64]
    """Time before the step without any request."""
    step_s: NDArray[np.float64]
    """Predicted for the GPU."""

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """All tokens of each step."""
        return self.num_decode_tokens + self.num_distinct_tokens + self.num_prefix_tokens

    def to_table(self) -> pa.Table:
        """A column `step`, then one per attribute."""
        columns = {"step": np.arange(len(self.step_s))}
        columns |= {field.name: getattr(self, field.name) for field in fields(self)}
        return pa.table(columns)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One workload under one policy."""

    workload: str
    policy: str
    num_prompt_tokens: int
    chunk_size: int
    """Most tokens of a step."""
    optimal_saving_ratio: float
    timeline: Timeline
    works: Sequence[StepWork] = ()
    """What each step does, from which its time is predicted."""

    @property
    def steps(self) -> int:
        return len(self.timeline.step_s)

    @property
    def saving_ratio(self) -> float:
        """Tokens that are computed again after a preemption reduce it."""
        line = self.timeline
        processed = int(line.num_distinct_tokens.sum() + line.num_prefix_tokens.sum())
        return saving_ratio(processed, self.num_prompt_tokens)

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks."""
        return int(self.timeline.num_preempted.sum())

    @property
    def recomputed_tokens(self) -> int:
        return int(self.timeline.num_recomputed_tokens.sum())

    @property
    def mean_tokens_per_step(self) -> float:
        return float(self.timeline.num_tokens.mean())

    @property
    def valley_steps(self) -> int:
        """Steps of less than half of the chunk size while requests wait."""
        line = self.timeline
        return int(np.count_nonzero(in_valley(line.num_tokens, line.num_waiting, self.chunk_size)))

    @property
    def predicted_s(self) -> float:
        """Seconds on the GPU, idle ones included."""
        return float(self.timeline.step_s.sum() + self.timeline.idle_s.sum())

    @property
    def sched_ms_per_step(self) -> float:
        """Scheduling time per step, measured on this machine."""
        return float(self.timeline.scheduling_s.mean() * 1e3)

    def row(self) -> dict[str, str | int | float]:
        """The run's numbers by name."""
        return {
            "workload": self.workload,
            "policy": self.policy,
            "steps": self.steps,
            "saving_ratio": round(self.saving_ratio, 5),
            "optimal_saving_ratio": round(self.optimal_saving_ratio, 5),
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "mean_tokens_per_step": round(self.mean_tokens_per_step, 1),
            "valley_steps": self.valley_steps,
            "predicted_s": round(self.predicted_s, 3),
            "sched_ms_per_step": round(self.sched_ms_per_step, 3),
        }
