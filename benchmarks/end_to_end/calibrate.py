"""What measured runs say of the simulator's cost model, and how well it then predicts them.

Each run is simulated with the KV cache, chunk size and scheduler settings that it had; of a GPU's
data sheet, three numbers are fitted to all runs at once: the share of the peak FLOP/s that is
reached, the share of the peak bandwidth, and the overhead of a step. A workload's prediction
comes from a fit to all other workloads, so it is one. Neither planning nor the time until the first
step is part of it. The steps are those of the vLLM that is installed here, one after the other;
how many there are is shown beside how many were measured, for a time that is right by steps that
are wrong predicts nothing.

    python -m benchmarks.end_to_end.calibrate RESULT.json [...] --gpu H100 --gpu-table h100.toml
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from batchllm_operator.cost import GPU, ModelShape, StepWork, find_gpu, model_shape, step_seconds
from batchllm_operator.engine.device_profile import DeviceProfile
from batchllm_operator.progress import Progress
from batchllm_operator.simulate.machine import POLICIES as SIMULATED
from batchllm_operator.simulate.machine import Machine
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings
from benchmarks.end_to_end.models import model_config
from benchmarks.end_to_end.policies import POLICIES
from benchmarks.end_to_end.task import Task
from benchmarks.provenance import print_last_line, provenance

AIM: Final = 0.15  # most that a prediction may be off


@dataclass(frozen=True, slots=True, eq=False)
class RunWork:
    """What a run's steps do, and what it took."""

    rows: Sequence[Mapping[str, Any]]
    """Its repetitions."""
    steps: Sequence[StepWork]
    """As the simulator says."""
    model: ModelShape

    def median(self, name: str) -> float:
        """Of the repetitions."""
        return float(statistics.median(row[name] for row in self.rows))

    @property
    def measured_s(self) -> float:
        """Median, from the first step to the last output."""
        seconds = [row["generate_s"] - row["admission_s"] for row in self.rows]
        return float(statistics.median(seconds))

    @property
    def prefill_tokens(self) -> int:
        """Simulated, counted as measured ones are; see `Steps.num_prefill_tokens`."""
        num_decoded = sum(step.num_sampled for step in self.steps) - self.rows[0]["num_requests"]
        return sum(step.num_tokens for step in self.steps) - int(num_decoded)

    def predicted_s(self, gpu: GPU) -> float:
        """Seconds of all steps."""
        return sum(step_seconds(step, self.model, gpu) for step in self.steps)


def fit(runs: Sequence[RunWork], gpu: GPU) -> GPU:
    """The GPU with shares and overhead that predict the runs best, by relative error.

    Args:
        runs: measured ones, of one model on one kind of GPU.
        gpu: its data sheet; its shares and overhead are where the search starts.

    Raises:
        ValueError: there are fewer runs than numbers to fit.
    """
    if len(runs) < len(_FITTED):
        raise ValueError(f"{len(runs)} runs can't say {len(_FITTED)} numbers")

    def with_numbers(logarithms: NDArray[np.float64]) -> GPU:
        return replace(gpu, **dict(zip(_FITTED, np.exp(logarithms).tolist(), strict=True)))

    def errors(logarithms: NDArray[np.float64]) -> list[float]:
        guess = with_numbers(logarithms)
        return [float(np.log(run.predicted_s(guess) / run.measured_s)) for run in runs]

    begin = np.log([max(getattr(gpu, name), 1e-6) for name in _FITTED])
    highest = np.array([0.0, 0.0, 0.0])  # a share of one; a second for nothing
    found = least_squares(errors, np.minimum(begin, -1e-9), bounds=(-np.inf, highest))
    return with_numbers(found.x)


_FITTED: Final = ("achievable_compute", "achievable_bandwidth", "step_overhead_s")


def predictions(runs: Sequence[RunWork], gpu: GPU) -> list[dict[str, Any]]:
    """Each run's measured time and its prediction from a fit to all other workloads."""
    rows = []
    for workload in dict.fromkeys(run.rows[0]["workload"] for run in runs):
        others = [run for run in runs if run.rows[0]["workload"] != workload]
        if len(others) < len(_FITTED):
            continue
        fitted = fit(others, gpu)
        for run in runs:
            if run in others:
                continue
            predicted_s = run.predicted_s(fitted)
            rows.append(
                {
                    **{name: run.rows[0][name] for name in ("workload", "policy", "settings")},
                    "measured_s": round(run.measured_s, 4),
                    "predicted_s": round(predicted_s, 4),
                    "error": round(predicted_s / run.measured_s - 1, 4),
                    "measured_steps": run.median("num_steps"),
                    "simulated_steps": len(run.steps),
                    "measured_prefill_tokens": run.median("num_prefill_tokens"),
                    "simulated_prefill_tokens": run.prefill_tokens,
                }
            )
    return rows


def simulate_run(row: Mapping[str, Any], model: ModelShape, gpu: GPU) -> Sequence[StepWork]:
    """The steps of a measured run, from the simulator."""
    from batchllm_operator.simulate.vllm_scheduling import simulate  # imports vLLM: seconds

    shape = Task(row["policy"], row["settings"], model=row["model"]).shape(row["workload"])
    workload = shape.make(0, model_config(row["model"])["vocab_size"])
    machine = Machine(
        model,
        gpu,
        row["num_kv_blocks"],
        row["block_size"],
        max_num_batched_tokens=row["max_num_batched_tokens"],
        max_num_seqs=row["max_num_seqs"],
    )
    settings = SchedulerSettings(num_requests=len(workload), chunk_size=row["chunk_size"])
    if row["profile"] is not None:
        profile = DeviceProfile.model_validate(row["profile"])
        settings = replace(settings, step_cost=profile.step_cost)
    run = simulate(
        workload,
        SIMULATED[str(POLICIES[row["policy"]].simulated_as)],
        machine,
        settings=settings,
    )
    return run.works


def gpu_table(gpu: GPU, name: str) -> str:
    """A table that `planner.gpu_table` can name."""
    lines = [f"{each} = {value!r}" for each, value in gpu.numbers().items()]
    return "\n".join([f"[{json.dumps(name)}]", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], prog="python -m benchmarks.end_to_end.calibrate"
    )
    parser.add_argument("results", nargs="+", type=Path, help="of benchmarks.end_to_end --json")
    parser.add_argument("--gpu", default="H100", help="of the built-in table: the data sheet")
    parser.add_argument("--gpu-table", type=Path, help="write what was fitted here, as TOML")
    parser.add_argument("--json", type=Path, help="also write the last line here")
    args = parser.parse_args()
    rows = [row for path in args.results for row in json.loads(path.read_text())["runs"]]
    rows = [row for row in rows if POLICIES[row["policy"]].simulated_as]
    for name in ("model", "device", "code", "versions"):
        if len({json.dumps(row[name]) for row in rows}) != 1:
            sys.exit(f"these runs differ in {name}, or there are none")
    gpu, model_name = find_gpu(args.gpu), rows[0]["model"]
    model = model_shape(model_config(model_name), model_name)
    alike: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault((row["workload"], row["policy"], row["settings"]), []).append(row)
    runs = []
    with Progress("simulate", len(alike), unit="runs", announce=False) as progress:
        for repetitions in alike.values():
            works = simulate_run(repetitions[0], model, gpu)
            runs.append(RunWork(repetitions, works, model))
            progress.advance(1)
    predicted = predictions(runs, gpu)
    fitted = fit(runs, gpu)
    worst = max((abs(each["error"]) for each in predicted), default=None)
    report = {
        "benchmark": "calibrate",
        "model": model_name,
        "device": rows[0]["device"],
        **{name: rows[0][name] for name in ("code", "git_sha", "versions")},
        "simulated_with": provenance()["versions"],
        "gpu": args.gpu,
        "fitted": {name: getattr(fitted, name) for name in _FITTED},
        "rows": predicted,
        "largest_error": worst,
        "aim": AIM,
        "is_met": None if worst is None else worst <= AIM,
    }
    if args.gpu_table:
        args.gpu_table.write_text(gpu_table(fitted, args.gpu), encoding="utf-8")
    print_last_line(report, args.json)


if __name__ == "__main__":
    main()
