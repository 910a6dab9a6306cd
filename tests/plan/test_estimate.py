"""The estimate in the manifest, and shards of equal predicted time."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answers_job import asking
from support.fake_job import DS, document_rows, fake_spec, job_fields, planned, write_table

from batchllm_operator.cost import MODEL_SHAPES, EngineLimits, Work, find_gpu, prompt_work
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.arrange import work_costs
from batchllm_operator.plan.estimate import Target, estimate_work, find_target
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report import format_plan
from batchllm_operator.spec import JobSpec, parse_spec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

TARGET = Target(find_gpu("H100"), MODEL_SHAPES["Mistral-7B"], EngineLimits())
CONFIG = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


@pytest.fixture
def targeted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Target], None]:
    """Plan jobs of the fake engine as if they had a model."""

    def set_target(target: Target) -> None:
        monkeypatch.setattr("batchllm_operator.plan.given.find_target", lambda spec: target)

    set_target(TARGET)
    return set_target


def model_spec(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    """A job with the vLLM engine and a model of which only the config is there."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    if config is not None:
        (model / "config.json").write_text(json.dumps(config))
    fields = job_fields(str(folder), model={"path": str(model)}, **changes)
    fields["engine"] = {**fields["engine"], "backend": "vllm"}
    return parse_spec(fields, source="test spec")


def written(plan: StoredPlan) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(plan.folder.read_bytes("manifest.json"))
    return body


def test_the_estimate_is_that_of_the_cost_model(tmp_path: Path, targeted: object) -> None:
    rows = document_rows(4, 3)
    rows.append({**rows[0], "row_key": "again"})
    plan = planned(tmp_path, rows, planner={"num_shards": 1})
    estimate, counts = plan.manifest.estimate, plan.manifest.counts
    assert estimate is not None
    assert estimate.num_saved_tokens == counts.num_logical_tokens - counts.num_planned_tokens
    assert estimate.num_output_tokens == 12 * 8
    assert estimate.gpu_s == pytest.approx(estimate.prefill_s + estimate.decode_s, rel=1e-5)
    assert estimate.cost_usd == pytest.approx(estimate.gpu_s / 3600 * TARGET.gpu.usd_per_hour)
    assert estimate.prefill_s < estimate.unshared_gpu_s
    assert written(plan)["estimate"]["gpu"]["name"] == "H100"
    assert StoredPlan.open(plan.folder.uri) == plan
    printed = format_plan(plan.manifest, "URI")
    assert "predicted for H100: " in printed
    assert "96 output tokens, at most 8 each" in printed
    assert "not measured" in printed
    saved = f"  saved against each row alone: {estimate.num_saved_tokens:,} prompt tokens, "
    (line,) = (line for line in printed.splitlines() if line.startswith(saved))
    share = estimate.saved_gpu_s / estimate.unshared_gpu_s
    assert 0 < share < plan.manifest.counts.planned_saving_ratio, "decoding saves nothing"
    assert line.endswith(f" of GPU time ({share:.1%}), under $0.01")


def test_a_job_that_classifies_is_predicted_without_decode(
    tmp_path: Path, targeted: object
) -> None:
    rows = document_rows(4, 3)
    write_table(tmp_path / "documents", rows)
    spec = asking(tmp_path, task="classify", labels=["yes", "no"], planner={"num_shards": 2})
    plan = plan_job(spec, DS)
    estimate = plan.manifest.estimate
    assert estimate is not None
    assert estimate.num_output_tokens == estimate.decode_s == estimate.attention_bytes == 0
    assert estimate.gpu_s == estimate.prefill_s < estimate.unshared_gpu_s
    num_tokens = sum(shard.num_prefill_tokens for shard in plan.manifest.shards)
    chunk = TARGET.limits.max_num_batched_tokens
    assert estimate.num_steps == pytest.approx(num_tokens / chunk, rel=1e-5)
    by_shard = [shard.predicted_gpu_s or 0.0 for shard in plan.manifest.shards]
    assert sum(by_shard) == pytest.approx(estimate.gpu_s, rel=1e-5)
    printed = format_plan(plan.manifest, "URI")
    assert " steps, without decode\n" in printed
    assert "assumed: no decode steps;" in printed


def test_without_a_model_there_is_no_estimate(tmp_path: Path) -> None:
    plan = planned(tmp_path, document_rows())
    assert plan.manifest.estimate is None
    assert written(plan)["estimate"] is None
    assert all(shard.predicted_gpu_s is None for shard in plan.manifest.shards)
    assert "predicted" not in format_plan(plan.manifest, "URI")


def test_tuning_changes_the_estimate_and_not_the_shards(
    tmp_path: Path, targeted: Callable[[Target], None]
) -> None:
    write_table(tmp_path / "documents", document_rows(9, 4))
    plans = []
    for limits in (EngineLimits(), EngineLimits(num_gpus=2, max_num_seqs=1, kv_cache_bytes=10**9)):
        targeted(dataclasses.replace(TARGET, limits=limits))
        plans.append(plan_job(fake_spec(tmp_path), DS))
    assert plans[0].folder == plans[1].folder
    assert plans[0].manifest.estimate != plans[1].manifest.estimate


def test_a_model_that_does_not_fit_has_balanced_shards_and_no_estimate(
    tmp_path: Path, targeted: Callable[[Target], None]
) -> None:
    small = dataclasses.replace(TARGET.gpu, memory_bytes=10e9)
    targeted(dataclasses.replace(TARGET, gpu=small))
    plan = planned(tmp_path, document_rows())
    assert plan.manifest.estimate is None
    assert [shard.predicted_gpu_s for shard in plan.manifest.shards] == [None, None]


# Balance


def predicted(plan: StoredPlan) -> npt.NDArray[np.float64]:
    times = [shard.predicted_gpu_s for shard in plan.manifest.shards]
    assert None not in times
    return np.array(times, dtype=np.float64)


@given(
    num_shards=st.integers(0, 12),
    num_replicas=st.integers(1, 4),
    limits=st.sampled_from(
        [
            EngineLimits(),
            EngineLimits(max_num_seqs=1),
            EngineLimits(max_num_batched_tokens=16, spreads_prefill=True),
            EngineLimits(kv_cache_bytes=1 << 28, num_gpus=2),
        ]
    ),
    seed=st.integers(0, 99),
)
def test_the_parts_of_any_estimate_add_up_to_it(
    num_shards: int, num_replicas: int, limits: EngineLimits, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    works, unshared = [], Work()
    for num in generator.integers(1, 6, num_shards):
        lengths, outputs = generator.integers(31, 5000, num), generator.integers(1, 300, num)
        works.append(prompt_work(lengths, outputs, generator.integers(0, 31, num)).total())
        unshared += prompt_work(lengths, outputs).total(generator.integers(1, 4, num))
    target = dataclasses.replace(TARGET, limits=limits)
    estimate, parts = estimate_work(target, works, unshared, num_replicas)
    assert estimate is not None
    assert len(parts) == num_shards
    assert all(part is not None and part > 0 for part in parts)
    assert math.fsum(part or 0.0 for part in parts) == pytest.approx(estimate.gpu_s, rel=1e-12)


def test_shards_are_even_in_time_where_tokens_are_not(tmp_path: Path, targeted: object) -> None:
    """A long prompt costs more than many short ones of as many tokens: attention is quadratic,
    and decoding reads its whole context."""
    rows = [
        {"row_key": f"long-{n}", "document": f"{n} " + "word " * 700, "query": "?"}
        for n in range(10, 14)
    ]
    rows += [
        {"row_key": f"short-{n}", "document": f"{n} is short", "query": "?"}
        for n in range(100, 700)
    ]
    write_table(tmp_path / "documents", rows)
    spec = fake_spec(tmp_path, planner={"num_shards": 3}, sampling={"max_tokens": 64})
    plan = plan_job(spec, DS)
    seconds = predicted(plan)
    assert seconds.max() / seconds.mean() < 1.05
    assert 1 <= plan.manifest.imbalance < 1.05
    assert f"the largest with {plan.manifest.imbalance:.2f} times" in format_plan(plan.manifest, "")


def test_a_cut_costs_no_more_than_the_prompt_before_it() -> None:
    """A long output holds the prefix for long; the prompt before it has a short one."""
    lengths, outputs = np.array([1001, 1001]), np.array([1, 30_000])
    costs, cut_costs = work_costs(TARGET, lengths, outputs, np.array([0, 992]))
    assert 0 < cut_costs[1] <= costs[0]
    assert cut_costs[0] == 0


# What a job is estimated for


def test_the_target_comes_from_the_model_folder(tmp_path: Path) -> None:
    target = find_target(model_spec(tmp_path, CONFIG))
    assert target is not None
    assert target.gpu == find_gpu("H100")
    assert target.model.num_parameters == 7_241_732_096
    assert target.limits == EngineLimits(spreads_prefill=True)


def test_settings_of_the_engine_reach_the_target(tmp_path: Path) -> None:
    engine = {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.7,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "extra_args": {"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"},
    }
    target = find_target(model_spec(tmp_path, CONFIG, engine=engine))
    assert target is not None
    assert target.limits == EngineLimits(2, 0.7, None, 64, 512, spreads_prefill=True)
    assert (target.model.bytes_per_weight, target.model.bytes_per_kv_element) == (1, 1)
    stock = find_target(model_spec(tmp_path, CONFIG, engine={"scheduler": "stock"}))
    assert stock is not None and not stock.limits.spreads_prefill
    wide = find_target(model_spec(tmp_path, CONFIG, engine={"dtype": "float32"}))
    assert wide is not None
    assert (wide.model.bytes_per_weight, wide.model.bytes_per_kv_element) == (4, 4)


@pytest.mark.parametrize("config", [None, {**CONFIG, "model_type": "mamba"}, {}])
def test_an_unknown_model_has_no_target(
    tmp_path: Path, config: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="batchllm_operator"):
        assert find_target(model_spec(tmp_path, config)) is None
    assert "isn't predicted: model" in caplog.text


@pytest.mark.parametrize("backend", ["vllm", "fake"])
def test_an_unknown_gpu_is_refused_before_anything_is_written(tmp_path: Path, backend: str) -> None:
    planner = {"target_gpu": "B9000"}
    spec = (
        model_spec(tmp_path, CONFIG, planner=planner)
        if backend == "vllm"
        else fake_spec(tmp_path, planner=planner)
    )
    with pytest.raises(SpecError, match=r"no GPU 'B9000'; it has A100, "):
        find_target(spec)
