"""The real vLLM scheduler, as it is and with ours on top, over made-up workloads without a model.

Simulated is Mistral-7B on one H100 (`batchllm_operator.simulate`): steps, blocks, preemptions and
the time of scheduling are real, the time of a step is a roofline's. Workloads are the paper's
cases 1 and 2 and its microbenchmarks (Sec. 6), and some in which memory is short, outputs are
long, or nothing is shared. Each is run with vLLM's scheduler on rows as they come, on prompts in
the order of the plan, and with ours; ours also with estimates of output lengths that are wrong.
Where lengths have heavy tails, ours knows each of them, as no estimate could, or only their mean.

    python -m benchmarks.scheduler
    python -m benchmarks.scheduler --workloads case_1 --policies stock_sorted batchllm
    python -m benchmarks.scheduler --policies stock_sorted batchllm --workloads \
        lognormal log_t runaways runaways_alone  # 5 minutes
"""

import argparse
import gc
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.run import Run
from batchllm_operator.simulate.workload import Shape, Workload
from benchmarks.provenance import provenance
from benchmarks.workloads import WORKLOADS, case_1

MODEL, GPU = "Mistral-7B", "H100"
NUM_BLOCKS = 27_000  # of 16 tokens, beside the weights in 80 GB
BLOCK_SIZE, CHUNK_SIZE = 16, 8192


SMALL = "case_1_quarter_cache"
MOST_TOKENS = 4096  # of an output, where lengths have a tail


def runaways(generator: np.random.Generator, num: int) -> NDArray[np.float64]:
    """One output in fifty goes on to the limit."""
    usual = generator.lognormal(-0.125, 0.5, num)
    return np.where(generator.random(num) < 0.02, MOST_TOKENS, usual)


TAILS: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "lognormal": lambda generator, num: generator.lognormal(-0.5, 1.0, num),
    "log_t": lambda generator, num: np.exp(0.6 * generator.standard_t(3, num)),
    "runaways": runaways,
    "runaways_alone": runaways,
}
"""Draws output lengths, over those of the shape."""
SHAPES = {
    **WORKLOADS,
    SMALL: case_1(SMALL),
    **{name: Shape(name, 1500, 6, 1000, 200, 200) for name in TAILS},
    "runaways_alone": Shape("runaways_alone", 900, 1, 0, 300, 300),
}


def random_error(outputs: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Up to 30 % off, either way, each request on its own."""
    return np.rint(outputs * np.random.default_rng(seed).uniform(0.7, 1.3, len(outputs)))


ESTIMATES: dict[str, Callable[[NDArray[np.int64], int], NDArray[np.float64]]] = {
    "": lambda outputs, _: outputs.astype(np.float64),
    "_estimates_off": random_error,
    "_estimates_low": lambda outputs, _: np.rint(outputs * 0.7),
    "_estimates_high": lambda outputs, _: np.rint(outputs * 1.3),
    "_means": lambda outputs, _: np.full(len(outputs), round(outputs.mean())),
}


WRONG_ESTIMATES = {
    "case_1": ("_estimates_off", "_estimates_low", "_estimates_high"),
    "case_1_output_400": ("_estimates_off", "_estimates_low"),
    **dict.fromkeys(TAILS, ("_means",)),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Runs that are compared with each other: one after the other in one process."""

    workload: str
    variants: tuple[tuple[str, str], ...]
    """Policy and estimates of each."""
    seed: int


def run(job: Job) -> list[dict[str, Any]]:
    """A row for each variant of a job."""
    from batchllm_operator.simulate.vllm_scheduling import simulate  # imports vLLM: seconds

    workload = make(job.workload, job.seed)
    num_blocks = NUM_BLOCKS // 4 if job.workload in (SMALL, *TAILS) else NUM_BLOCKS
    machine = Machine(MODEL_SHAPES[MODEL], find_gpu(GPU), num_blocks, BLOCK_SIZE, CHUNK_SIZE)
    by_memory = memory_bound_steps(workload, num_blocks)
    bounds = {
        "memory_bound_steps": round(by_memory, 1),
        "bound_steps": round(max(by_memory, chunk_bound_steps(workload)), 1),
    }
    rows = []
    for policy_name, estimates in job.variants:
        estimated = ESTIMATES[estimates](workload.output_tokens, job.seed).astype(np.int64)
        policy = POLICIES[policy_name]
        gc.collect()
        gc.freeze()  # millions of objects of vLLM's that stay
        most = MOST_TOKENS if estimates and job.workload in TAILS else None
        known = replace(workload, estimated_tokens=estimated, max_output_tokens=most)
        result = simulate(known, policy, machine, seed=job.seed)
        row = {**result.row(), **bounds, **while_any_waits(result), "num_blocks": num_blocks}
        rows.append({**row, "policy": policy_name + estimates})
    return rows


def make(name: str, seed: int) -> Workload:
    """The requests of one of `SHAPES`."""
    workload = SHAPES[name].make(seed)
    if name not in TAILS:
        return workload
    draw = TAILS[name](np.random.default_rng(seed + 1), len(workload))
    outputs = np.clip(np.rint(draw * workload.output_tokens), 1, MOST_TOKENS).astype(np.int64)
    return replace(workload, output_tokens=outputs, estimated_tokens=outputs)


def while_any_waits(result: Run) -> dict[str, Any]:
    """Steps and predicted time until the last request has begun, and memory that is idle then."""
    line = result.timeline
    end = int(np.flatnonzero(line.num_waiting).max(initial=-1)) + 1
    used = line.num_used_blocks[:end].mean() if end else 0.0
    return {
        "waiting_steps": end,
        "waiting_s": round(float(line.step_s[:end].sum()), 3),
        "mean_used_blocks": round(float(used), 1),
    }


def memory_bound_steps(workload: Workload, num_blocks: int) -> float:
    """Steps that memory allows at best, and one output length to fill it.

    The blocks of each request, summed over the steps that it runs, with a shared prefix counted
    once for as long as its group takes if all of it runs at once, over the blocks that there are.
    """
    size = BLOCK_SIZE
    shared = np.where(workload.group_sizes > 1, workload.num_prefix_tokens // size, 0)
    outputs = workload.output_tokens
    block_steps = sum(
        int(np.ceil((length + np.arange(output)) / size).sum() - output * prefix)
        for length, output, prefix in zip(
            workload.tokens.lengths.tolist(), outputs.tolist(), shared.tolist(), strict=True
        )
    )
    _, firsts = np.unique(workload.group_ids, return_index=True)
    block_steps += int((shared[firsts] * outputs[firsts]).sum())
    return float(block_steps / num_blocks + outputs.max())


def chunk_bound_steps(workload: Workload) -> float:
    """Steps that the chunk size allows at best: all prefill after sharing, and one output."""
    num_tokens = workload.tokens.num_tokens * (1 - workload.optimal_saving_ratio(BLOCK_SIZE))
    return float(num_tokens / CHUNK_SIZE + workload.output_tokens.max())


_COMPARED = {
    "stock_sorted": ("steps", "predicted_s", "valley_steps", "sched_ms_per_step"),
    "stock_shuffled": ("predicted_s",),
    "batchllm_means": ("steps", "waiting_steps", "predicted_s"),
}


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Ours on one workload: against its bound, vLLM's own, and itself by mean lengths."""
    by_policy = {row["policy"]: row for row in rows}
    if (ours := by_policy.get("batchllm")) is None:
        return {}
    values = {"steps_vs_bound": ours["steps"] / ours["bound_steps"]}
    for policy in _COMPARED.keys() & by_policy.keys():
        for name in _COMPARED[policy]:
            value = ours[name] / max(by_policy[policy][name], 1e-9)
            values[f"{name}_vs_{policy.rpartition('_')[2]}"] = value
    return {name: round(values[name], 3) for name in sorted(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["stock_shuffled", "stock_sorted", "batchllm"],
        choices=list(POLICIES),
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    jobs = [
        Job(name, tuple((policy, "") for policy in args.policies), args.seed)
        for name in args.workloads
    ]
    if "batchllm" in args.policies:
        jobs += [
            Job(name, tuple(("batchllm", estimates) for estimates in wrong), args.seed)
            for name, wrong in WRONG_ESTIMATES.items()
            if name in args.workloads
        ]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        rows = [row for rows in pool.map(run, jobs) for row in rows]
    rows.sort(key=lambda row: (list(SHAPES).index(row["workload"]), row["policy"]))
    for row in rows:
        print(
            f"{row['workload']:28}{row['policy']:26}{row['steps']:6} steps"
            f" {row['saving_ratio']:7.4f} of {row['optimal_saving_ratio']:.4f}"
            f" {row['preemptions']:5} preempted {row['valley_steps']:5} valleys"
            f" {row['predicted_s']:8.2f} s {row['sched_ms_per_step']:6.2f} ms;"
            f" while any waits {row['waiting_steps']:6} steps"
            f" {1 - row['mean_used_blocks'] / row['num_blocks']:5.1%} idle",
            flush=True,
        )
    compared = {
        name: ratios([row for row in rows if row["workload"] == name]) for name in args.workloads
    }
    for name, values in compared.items():
        print(name, " ".join(f"{each}={value}" for each, value in values.items()))
    report = {
        "benchmark": "scheduler",
        "model": MODEL,
        "gpu": GPU,
        "rows": rows,
        "ratios": compared,
        **vars(args),
        **provenance(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
