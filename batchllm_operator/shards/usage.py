"""What the attempts at a plan have used of what its spec allows."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

from batchllm_operator.shards.attempts import ShardProgress
from batchllm_operator.stored_plan.manifest import PlanManifest


class Usage(NamedTuple):
    """Sums over attempts, with dropped work and rows that were generated again."""

    num_output_tokens: int = 0
    gpu_s: float = 0.0

    @classmethod
    def of(cls, attempts: Iterable[ShardProgress]) -> Self:
        """Of attempts, each up to its last sign."""
        return cls.total(cls(each.num_generated_tokens, each.gpu_s) for each in attempts)

    @classmethod
    def total(cls, usages: Iterable[Self]) -> Self:
        sums = cls()
        for tokens, seconds in usages:
            sums = cls(sums.num_output_tokens + tokens, sums.gpu_s + seconds)
        return sums

    def reached(self, manifest: PlanManifest) -> Iterator[str]:
        """For each limit of the spec that is reached, its name, what is used, and how to go on."""
        limits, hours = manifest.spec.limits, self.gpu_s / 3600
        price = 0.0 if manifest.estimate is None else manifest.estimate.gpu.usd_per_hour
        for name, used, most, sign in (
            ("output_tokens", self.num_output_tokens, limits.output_tokens, ""),
            ("gpu_hours", hours, limits.gpu_hours, ""),
            ("cost", hours * price, limits.cost, "$"),
        ):
            if most is not None and used >= most:
                yield (
                    f"limits.{name}: the run has used {sign}{_shown(used)} of {sign}{most:,.15g};"
                    " to go on, raise it in the spec, plan again and run"
                )


def _shown(used: float) -> str:
    """A number with two decimals, or three digits of a small one, which they would hide."""
    if isinstance(used, int):
        return f"{used:,}"
    return f"{used:,.2f}" if used >= 1 else f"{used:.3g}"
