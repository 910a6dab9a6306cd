"""Labels at the size of a GPU: vLLM's scheduler and ours over made-up rows, without a model.

Steps, blocks and preemptions are real, the time of a step is a roofline's (`batchllm simulate`).
"""

from __future__ import annotations

from typing import Any, Final

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.workload import Shape

MODEL, GPU = "Mistral-7B", "H200"
OUTPUTS: Final = {"label": 1, "text": 4, "json": 24}
"""Tokens of an answer: a label by one step, written out, or in JSON."""
DEGREE: Final = 16


def shapes(num_rows: int, output_tokens: int) -> list[Shape]:
    """Each document with several queries, and each query with several documents."""
    return [
        Shape("document_first", num_rows, DEGREE, 1500, 40, output_tokens, instruction_tokens=100),
        Shape("query_first", num_rows, DEGREE, 40, 1500, output_tokens, instruction_tokens=100),
    ]


def simulated(num_rows: int) -> list[dict[str, Any]]:
    """A row for each shape, answer and policy."""
    from batchllm_operator.simulate.vllm_scheduling import simulate  # imports vLLM: seconds

    machine = Machine.of(MODEL_SHAPES[MODEL], find_gpu(GPU))
    rows = []
    for answer, num_tokens in OUTPUTS.items():
        for shape in shapes(num_rows, num_tokens):
            workload = shape.make()
            for name in ("stock_shuffled", "stock_sorted", "batchllm"):
                run = simulate(workload, POLICIES[name], machine)
                logical = run.num_prompt_tokens
                computed = round(logical * (1 - run.saving_ratio))
                optimal = round(logical * (1 - run.optimal_saving_ratio))
                rows.append(
                    {
                        **run.row(),
                        "answer": answer,
                        "computed_tokens": computed,
                        "computed_of_optimal": round(computed / optimal, 4),
                        "steps_of_bound": round(run.steps / (computed / run.chunk_size), 4),
                    }
                )
    return rows


def targets(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What labels by one step under our scheduler must reach in both shapes."""
    ours = [row for row in rows if (row["answer"], row["policy"]) == ("label", "batchllm")]
    return {
        "steps at most 1.03 of computed tokens / chunk size": all(
            row["steps_of_bound"] <= 1.03 for row in ours
        ),
        "prefill at the optimum": all(row["computed_of_optimal"] == 1 for row in ours),
        "no preemption": all(row["preemptions"] == 0 for row in ours),
    }
