"""What an engine did in each step, noted in the same way for every scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.vllm_plugin.scheduler.trace import in_valley

_COLUMNS: Final = {
    **dict.fromkeys(("begin_s", "done_s"), np.float64),
    **dict.fromkeys(("num_tokens", "num_requests", "num_waiting", "num_preempted"), np.int64),
    "kv_usage": np.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """One entry per step with tokens: arrays [num_steps]."""

    begin_s: NDArray[np.float64]
    """When it was put together, since the run began; that may be before the step before it ends."""
    done_s: NDArray[np.float64]
    """When its tokens had come back."""
    num_tokens: NDArray[np.int64]
    num_requests: NDArray[np.int64]
    """Requests with tokens in the step."""
    num_waiting: NDArray[np.int64]
    """Requests that the scheduler had left waiting then."""
    num_preempted: NDArray[np.int64]
    kv_usage: NDArray[np.float64]
    """Share of the KV blocks in use, after the step was put together."""
    end_s: float
    """When the last output was there."""

    def num_prefill_tokens(self, num_requests: int, num_output_tokens: int) -> int:
        """Tokens computed but for one that each output token costs.

        Those of prompts that weren't cached, and all that was computed again after a preemption,
        output tokens included.

        Args:
            num_requests: of the run; the step that ends a prompt gives its first output token.
            num_output_tokens: of all of them together.
        """
        return int(self.num_tokens.sum()) - (num_output_tokens - num_requests)

    def valley_steps(self, chunk_size: int) -> int:
        """Steps of less than half of the chunk size while requests wait."""
        return int(np.count_nonzero(in_valley(self.num_tokens, self.num_waiting, chunk_size)))

    @property
    def tecd_s(self) -> float:
        """Seconds until the cool-down: until no request waits and no prompt is left to compute.

        TECD of the paper (Sec. 6.3.2). From there on each step only has a token of each request
        that still runs. A run of nothing but that has a TECD of 0.
        """
        has_prefill = (self.num_tokens > self.num_requests) | (self.num_waiting > 0)
        return float(self.done_s[has_prefill].max(initial=0.0))

    def to_json(self) -> dict[str, Any]:
        """Columns by name, for a plot of tokens over time (the paper's Figs. 2 and 6)."""
        columns = {name: np.round(getattr(self, name), 4).tolist() for name in _COLUMNS}
        return columns | {"end_s": round(self.end_s, 4)}

    @classmethod
    def from_json(cls, columns: dict[str, Any]) -> Steps:
        """What `to_json` made."""
        arrays: Any = {name: np.array(columns[name], kind) for name, kind in _COLUMNS.items()}
        return cls(**arrays, end_s=float(columns["end_s"]))


class StepLog:
    """Listens to a scheduler, some microseconds a step.

    Args:
        scheduler: of vLLM's engine core in this process; its `schedule` and `update_from_output`
            are replaced.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._rows: list[list[Any]] = []
        self._open: dict[int, list[Any]] = {}  # by the identity of what was scheduled
        self._started_at = 0.0
        scheduler.schedule, scheduler.update_from_output = self._scheduled, self._updated

    def start(self) -> None:
        """Begin afresh, now."""
        self._rows.clear()
        self._open.clear()
        self._started_at = time.perf_counter()

    def stop(self) -> Steps:
        """What has been noted until now; a step that is still under way is done now."""
        end_s = time.perf_counter() - self._started_at
        for row in self._open.values():
            row[1] = end_s
        columns = list(zip(*self._rows, strict=True)) or [()] * len(_COLUMNS)
        return Steps.from_json({**dict(zip(_COLUMNS, columns, strict=True)), "end_s": end_s})

    def _scheduled(self, *args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter() - self._started_at
        output = self._schedule(*args, **kwargs)
        preempted = output.preempted_req_ids or ()
        if output.num_scheduled_tokens or preempted:
            row = [
                begin_s,
                begin_s,
                output.total_num_scheduled_tokens,
                len(output.num_scheduled_tokens),
                len(self._scheduler.waiting),
                len(preempted),
                float(self._scheduler.kv_cache_manager.usage),
            ]
            self._rows.append(row)
            if output.num_scheduled_tokens:
                self._open[id(output)] = row
        return output

    def _updated(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._update(output, *args, **kwargs)
        row = self._open.pop(id(output), None)
        if row is not None:
            row[1] = time.perf_counter() - self._started_at
        return result
