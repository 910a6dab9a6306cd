"""What a plan's shards promise, against vLLM's scheduler without a model."""

import pytest
from support.benchmark_modules import load

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.vllm_scheduling import simulate

benchmark = load("shards")
MACHINE = Machine(MODEL_SHAPES["Mistral-7B"], find_gpu("H100"), num_blocks=3000)


@pytest.mark.parametrize("name", benchmark.SHAPES)
@pytest.mark.parametrize("policy", ["stock_sorted", "batchllm"])
def test_what_is_planned_is_achieved(name: str, policy: str) -> None:
    prompts = benchmark.SHAPES[name](benchmark.Tokens(0), 400)
    job = benchmark.Job.of(prompts, output_tokens=8)
    for shard in benchmark.cut(job, 3):
        _, cached = benchmark.found_in_cache(job, shard)
        run = simulate(job.workload(name, shard), POLICIES[policy], MACHINE)
        planned = int(cached.sum()) / run.num_prompt_tokens
        assert run.optimal_saving_ratio == pytest.approx(planned)
        assert run.saving_ratio == pytest.approx(planned, abs=0.01)
