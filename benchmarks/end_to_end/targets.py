"""Rows of runs, put together: medians, ratios, and the targets for Mistral-7B on Hopper GPUs."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.end_to_end.policies import POLICIES

TARGET_DEVICES: Final = ("H100", "H200")
OURS: Final = ("batchllm", "batchllm_graphs", "batchllm_stock_attention")
"""With all that is ours, with full graphs of decode steps, and with vLLM's attention: a job
chooses."""
BASELINES: Final[Mapping[str, tuple[str, ...]]] = {
    "as_given": ("stock_as_given",),
    "sorted": ("stock_sorted", "stock_llm"),
}
"""The fastest of each counts."""
_LEAST_SPEEDUPS: Final[Mapping[str, Mapping[str, float]]] = {
    "case_1": {"as_given": 1.8, "sorted": 1.12},
    "case_2": {"as_given": 1.5, "sorted": 1.1},
    "micro_2000_200_degree_16": {"sorted": 1.4},
    "micro_2000_200_degree_4": {"sorted": 1.2},
    "micro_1000_1000_degree_16": {"sorted": 1.1},
    "micro_200_2000_degree_16": {"sorted": 1.0},
    "no_sharing": {"sorted": 0.98},
}
_SAME: Final = (
    *("model", "num_requests", "num_prompt_tokens", "num_output_tokens"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("attention", "cuda_graphs", "async_scheduling"),
)
_MEDIANS: Final = (
    *("requests_per_s", "total_s", "tecd_s", "plan_s", "saving_ratio"),
    *("num_steps", "valley_steps", "preemptions"),
)
_MOST_PLANNING: Final = 0.01  # of the whole


@dataclass(frozen=True, slots=True)
class Summary:
    """A policy on a workload with one engine setting: medians over repetitions."""

    workload: str
    policy: str
    settings: str
    repetitions: int
    num_requests: int
    requests_per_s: float
    least_requests_per_s: float
    most_requests_per_s: float
    total_s: float
    plan_s: float
    saving_ratio: float
    tecd_s: float | None = None
    """This and what follows: None where the engine's steps aren't known."""
    num_steps: float | None = None
    valley_steps: float | None = None
    preemptions: float | None = None

    def speed(self) -> str:
        """Requests/s with the spread of the runs, for a table."""
        spread = f"{self.least_requests_per_s:.2f} to {self.most_requests_per_s:.2f}"
        known = f"{spread}, {self.repetitions} runs" if self.repetitions > 1 else "one run"
        return f"{self.requests_per_s:.2f} ({known})"


def summarize(rows: Iterable[Mapping[str, Any]]) -> list[Summary]:
    """One for each workload, policy and setting, in the order in which they first come.

    Raises:
        ValueError: rows that would be put together differ in what was run.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["workload"], row["policy"], row["settings"]].append(row)
    summaries = []
    for key, alike in groups.items():
        for name in _SAME:
            if len({json.dumps(row[name]) for row in alike}) > 1:
                raise ValueError(f"{' '.join(key)}: rows differ in {name}")
        values = {name: [row[name] for row in alike] for name in _MEDIANS}
        medians: dict[str, Any] = {
            name: None if None in numbers else statistics.median(numbers)
            for name, numbers in values.items()
        }
        speeds = values["requests_per_s"]
        summary = Summary(
            *key,
            repetitions=len(alike),
            num_requests=alike[0]["num_requests"],
            least_requests_per_s=min(speeds),
            most_requests_per_s=max(speeds),
            **medians,
        )
        summaries.append(summary)
    return summaries


def measured_of(
    summaries: Iterable[Summary], workload: str, policies: Sequence[str]
) -> list[Summary]:
    """Those of some policies on a workload, with all their settings."""
    on_workload = (summary for summary in summaries if summary.workload == workload)
    return [summary for summary in on_workload if summary.policy in policies]


def best(summaries: Iterable[Summary], workload: str, policies: Sequence[str]) -> Summary | None:
    """The fastest of some policies, over all their settings; None if none was measured."""
    measured = measured_of(summaries, workload, policies)
    return max(measured, key=lambda summary: summary.requests_per_s, default=None)


def speedups(summaries: Sequence[Summary]) -> dict[str, dict[str, float]]:
    """For each workload, requests/s of each of ours over the best baseline; and of TECD."""
    compared: dict[str, dict[str, float]] = {}
    for workload in dict.fromkeys(each.workload for each in summaries):
        ratios: dict[str, float] = {}
        for policy in OURS:
            ours = best(summaries, workload, (policy,))
            for baseline, policies in BASELINES.items():
                stock = best(summaries, workload, policies)
                if ours is None or stock is None:
                    continue
                name = f"{policy}_vs_{baseline}"
                ratios[name] = round(ours.requests_per_s / stock.requests_per_s, 3)
                tecd_s = least_tecd_s(summaries, workload, policies)
                if ours.tecd_s and tecd_s:
                    ratios[f"{name}_tecd"] = round(tecd_s / ours.tecd_s, 3)
        compared[workload] = ratios
    return compared


def least_tecd_s(
    summaries: Iterable[Summary], workload: str, policies: Sequence[str]
) -> float | None:
    """The shortest TECD of some policies, over all their settings; None if none is known."""
    measured = measured_of(summaries, workload, policies)
    return min((each.tecd_s for each in measured if each.tecd_s is not None), default=None)


def targets(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """What was to be reached, what each of ours reached, and whether that meets it.

    A target is judged by what was measured: against the fastest baseline of those that were, and
    `baselines_missing` lists the others, but for the class `LLM`, a control. `is_met` is None where
    ours or all baselines are missing. It counts only on `TARGET_DEVICES` with Mistral-7B; the
    caller has to check that.
    """
    listed: list[dict[str, Any]] = []
    ratios = speedups(summaries)
    for workload, least in _LEAST_SPEEDUPS.items():
        for baseline, reach in least.items():
            stock = best(summaries, workload, BASELINES[baseline])
            lacking = _lacking(summaries, workload, BASELINES[baseline])
            for policy in OURS:
                ours = best(summaries, workload, (policy,))
                ratio = ratios.get(workload, {}).get(f"{policy}_vs_{baseline}")
                listed.append(
                    {
                        "measure": f"{workload}: requests/s over stock {baseline}",
                        "policy": policy,
                        "reach": reach,
                        "measured": ratio,
                        "repetitions": ours.repetitions if ours else 0,
                        "baseline": f"{stock.policy} {stock.settings}" if stock else None,
                        "baselines_missing": lacking,
                        "is_met": None if ratio is None else ratio >= reach,
                    }
                )
    for policy in OURS:
        ours_only = [summary for summary in summaries if summary.policy == policy]
        shares = [(each.plan_s / each.total_s, each.workload) for each in ours_only]
        share, worst = max(shares, default=(None, None))
        listed.append(
            {
                "measure": "planning, share of the whole",
                "policy": policy,
                "reach": _MOST_PLANNING,
                "measured": None if share is None else round(share, 5),
                "repetitions": len(ours_only),
                "baseline": worst,
                "baselines_missing": [],
                "is_met": None if share is None else share < _MOST_PLANNING,
            }
        )
    return listed


def _lacking(summaries: Sequence[Summary], workload: str, policies: Sequence[str]) -> list[str]:
    """Baselines, by policy and setting, that haven't been measured on a workload."""
    measured = measured_of(summaries, workload, policies)
    there = {(summary.policy, summary.settings) for summary in measured}
    return [
        f"{policy} {settings}"
        for policy in policies
        for settings in POLICIES[policy].settings
        if (policy, settings) not in there and policy != "stock_llm"
    ]
