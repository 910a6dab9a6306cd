"""What runs cost: GPU time and its price."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from batchllm_operator.stored_plan.counts import Count, Frozen

# Bounded so that every readable report can be drawn.
Number = Annotated[float, Field(ge=0, le=1e24)]
_NotNegative = Annotated[float, Field(ge=0)]


class Bill(Frozen):
    """GPU time and its price, against what was predicted."""

    gpu_s: Number | None
    """GPU seconds that attempts have held, from their start to their last sign, with engine starts
    and dropped work; those that a worker's shards share count once. None if unknown, or without a
    GPU."""
    usd_per_hour: Number | None
    """Price of a GPU, from the table of GPUs; None if the spec names none."""
    gpu: str | None = None
    """The GPU of the price and the prediction."""
    start_gpu_s: Number | None = None
    """The part of `gpu_s` before engines took requests."""
    predicted_gpu_s: Number | None = None
    unshared_gpu_s: Number | None = None
    """Prediction if each row's prompt were computed alone."""

    def usd(self, gpu_s: float | None) -> float | None:
        """The price of GPU seconds; None if either is unknown."""
        if gpu_s is None or self.usd_per_hour is None:
            return None
        return gpu_s / 3600 * self.usd_per_hour

    @property
    def cost_usd(self) -> float | None:
        return self.usd(self.gpu_s)

    @property
    def predicted_cost_usd(self) -> float | None:
        return self.usd(self.predicted_gpu_s)

    @property
    def predicted_saved_gpu_s(self) -> float | None:
        """Predicted GPU seconds that the plan saves against each row's prompt computed alone."""
        if self.unshared_gpu_s is None or self.predicted_gpu_s is None:
            return None
        return self.unshared_gpu_s - self.predicted_gpu_s

    @property
    def predicted_saved_usd(self) -> float | None:
        return self.usd(self.predicted_saved_gpu_s)


class EarlierRun(Frozen):
    """What the report of an earlier partition says of its cost."""

    ds: str
    num_rows: Count
    num_failed_rows: Count
    achieved_saving: float | None = Field(le=1)
    """Share of the prompt tokens that weren't computed."""
    gpu_s: _NotNegative | None
    cost_usd: _NotNegative | None
    unshared_usd: _NotNegative | None
    """As estimated; see `RunReport.unshared_gpu_s`."""

    @property
    def usd_per_1000_rows(self) -> float | None:
        """None if the cost is unknown, or there are no rows."""
        if self.cost_usd is None or not self.num_rows:
            return None
        return 1000 * self.cost_usd / self.num_rows
