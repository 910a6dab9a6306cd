"""What of a spec reaches vLLM, and what a user reads when vLLM refuses it."""

from typing import Any

import pytest
from support.demo_job import Demo
from support.fake_job import fake_spec

from batchllm_operator.engine import EngineJob
from batchllm_operator.errors import BatchLLMError, EngineError, SpecError
from batchllm_operator.spec import load_spec

SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "repetition_penalty"),
    *("stop", "stop_token_ids", "ignore_eos"),
)


def show(demo: Demo, **changes: Any) -> dict[str, dict[str, Any]]:
    """What of a spec is passed on to vLLM."""
    from batchllm_operator.engine.vllm.answers import sampling_params
    from batchllm_operator.engine.vllm.start import engine_args

    spec = load_spec(demo.write_spec("settings", **changes))
    params = sampling_params(spec.sampling)
    sampling = {name: getattr(params, name) for name in SAMPLING}
    return {"engine": engine_args(spec, 777), "sampling": sampling}


def test_every_setting_reaches_vllm(demo: Demo) -> None:
    sampling = {
        "max_tokens": 11,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 3,
        "repetition_penalty": 1.1,
        "stop": ["\\n"],
        "stop_token_ids": [5],
        "ignore_eos": True,
    }
    engine = {
        "dtype": "bfloat16",
        "block_size": 64,
        "max_num_seqs": 9,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 1 << 24,
        "gpu_memory_utilization": 0.5,
        "tensor_parallel_size": 2,
        "enforce_eager": False,
    }
    shown = show(
        demo,
        sampling=sampling,
        engine={**engine, "extra_args": {"kv_cache_dtype": "fp8"}},
        model={"revision": "v1", "trust_remote_code": True},
    )
    assert shown["sampling"] == sampling
    expected = {
        **engine,
        "model": str(demo.model),
        "revision": "v1",
        "trust_remote_code": True,
        "max_model_len": 777,
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": True,
        "scheduler_cls": "batchllm_operator.vllm_plugin.scheduler.scheduler.BatchLLMScheduler",
    }
    assert {name: shown["engine"][name] for name in expected} == expected


def test_defaults_suit_a_cpu(demo: Demo) -> None:
    engine = show(demo, engine={"kv_cache_memory_bytes": None})["engine"]
    assert (engine["enforce_eager"], engine["block_size"]) == (True, 32)
    assert engine["kv_cache_memory_bytes"] == 1 << 30
    stock = show(demo, engine={"scheduler": "stock"})["engine"]
    assert "scheduler_cls" not in stock


@pytest.mark.parametrize("kind", [AssertionError, AttributeError, KeyError])
@pytest.mark.parametrize(
    ("extra_args", "expected"), [({}, EngineError), ({"kv_cache_dtype": "fp8"}, SpecError)]
)
def test_a_fault_of_the_machine_is_not_the_specs(
    extra_args: dict[str, Any],
    expected: type[BatchLLMError],
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from batchllm_operator.engine.vllm import engine as vllm_engine

    def fail(**_: object) -> None:
        raise kind("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(vllm_engine, "EngineArgs", fail)
    monkeypatch.setattr(vllm_engine, "engine_args", lambda *_: {})
    spec = fake_spec("/lake", engine={"backend": "vllm", "extra_args": extra_args})
    with pytest.raises(expected, match="Torch not compiled"):
        vllm_engine.VLLMEngine(spec, EngineJob(100))
