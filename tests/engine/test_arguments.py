"""What of `engine.extra_args` is refused before anything is planned or loaded."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from support.fake_job import fake_spec

from batchllm_operator.engine import EngineJob, arguments, check_arguments, start_engine
from batchllm_operator.errors import ExitCode, SpecError

with_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM isn't installed")


def check(extra_args: dict[str, Any], **engine: Any) -> None:
    engine = {"backend": "vllm", "extra_args": extra_args, **engine}
    check_arguments(fake_spec("/lake", engine=engine))


@with_vllm
def test_what_vllm_takes_passes() -> None:
    config = {"batchllm": {"pace": False}, "batchllm_attention": {"decode_graphs": True}}
    check(
        {
            "additional_config": config,
            "compilation_config": 3,
            "cpu_offload_gb": 4,
            "hf_overrides": {"anything": [1]},
            "kv_cache_dtype": "fp8",
            "max_logprobs": None,
            "quantization": "fp8",
            "served_model_name": ["a", "b"],
            "speculative_config": {"method": "ngram"},
        }
    )


@with_vllm
@pytest.mark.parametrize(
    ("extra_args", "reason"),
    [
        ({"no_such_argument": 1}, r"\.no_such_argument: the installed vLLM has no such argument"),
        ({"kv-cache-dtype": "fp8"}, "did you mean kv_cache_dtype"),
        ({"quantisation": "fp8", "enable_lora": "maybe"}, "quantization.*; .*enable_lora: "),
        ({"max_loras": "many"}, r"\.max_loras: .*integer"),
        ({"speculative_config": "ngram"}, r"\.speculative_config: .*dictionary"),
        ({"limit\nmm": 1}, r"limit\\nmm: "),
    ],
)
def test_what_vllm_lacks_is_named(extra_args: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as error:
        check(extra_args)
    assert error.value.exit_code == ExitCode.INVALID
    assert "many" not in str(error.value) and "ngram" not in str(error.value)


@with_vllm
def test_a_reasoning_parser_that_vllm_lacks_is_refused_with_those_it_has() -> None:
    def check_parser(name: str, **extra_args: Any) -> None:
        engine = {"backend": "vllm", "extra_args": extra_args}
        model = {"path": "x", "reasoning_parser": name}
        check_arguments(fake_spec("/lake", engine=engine, model=model))

    for name in ("qwen3", "deepseek_r1"):
        check_parser(name)
    check_parser("mine", reasoning_parser_plugin="mine.py")
    with pytest.raises(SpecError, match=r"has no parser 'qwen33'; it has .*deepseek_r1.* qwen3"):
        check_parser("qwen33")


@with_vllm
def test_names_that_are_read_from_the_source_are_vllms() -> None:
    from vllm import EngineArgs
    from vllm.reasoning import ReasoningParserManager

    assert sorted(arguments.vllm_reasoning_parsers()) == ReasoningParserManager.list_registered()
    assert [*(arguments.vllm_arguments() or ())] == [*signature(EngineArgs).parameters]


@with_vllm
def test_a_run_refuses_it_without_importing_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan may have been made where there is none."""
    monkeypatch.setitem(sys.modules, "batchllm_operator.engine.vllm.engine", None)
    for replicas in (1, 2):
        engine = {"backend": "vllm", "replicas": replicas, "extra_args": {"surprise": 1}}
        with pytest.raises(SpecError, match="surprise"):
            start_engine(fake_spec("/lake", engine=engine), EngineJob(100))


def test_where_vllm_is_absent_its_names_are_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_source = ModuleSpec("vllm", None, is_package=True)
    without_source.submodule_search_locations = [str(tmp_path)]
    for found in (None, ModuleSpec("vllm", None), without_source):
        monkeypatch.setattr(arguments, "find_spec", lambda name, found=found: found)
        check({"no_such_argument": 1})
        with pytest.raises(SpecError, match="data_parallel_size"):
            check({"data_parallel_size": 2})


OURS = {"attention": "batchllm"}
FAKE = {"backend": "fake"}


@pytest.mark.parametrize(
    ("engine", "extra_args", "reason"),
    [
        ({}, {"data_parallel_size": 2}, "start more workers"),
        ({}, {"scheduling_policy": "priority"}, "fcfs"),
        ({}, {"additional_config": {"batchllm": {"paec": True}}}, "paec: "),
        ({}, {"additional_config": {"batchllm": {"memory_threshold": "all"}}}, "memory_threshold"),
        ({}, {"additional_config": {"batchllm_attention": {"impl": "best"}}}, "impl: "),
        ({}, {"additional_config": {"batchllm_attention": {"grahps": True}}}, "grahps: "),
        # Stages are counted before vLLM is asked.
        *(
            ({}, {"pipeline_parallel_size": value}, "pipeline_parallel_size")
            for value in (0, "two", 1.5, True, None)
        ),
        (OURS, {"attention_backend": "FLASH_ATTN"}, "names an attention backend"),
        (OURS, {"attention_config": {"backend": "FLASH_ATTN"}}, "names an attention backend"),
        (
            OURS,
            {"attention_config": {"backend_per_kind": {"full_attention": "FLASH_ATTN"}}},
            "names an attention backend",
        ),
        (FAKE, {"dealy_s": 1}, r"\.dealy_s: the fake engine has no such .* did you mean delay_s"),
        (FAKE, {"delay_s": "long"}, r"\.delay_s: .*number"),
        (FAKE, {"max_in_flight": 0}, r"\.max_in_flight: "),
    ],
)
def test_what_does_not_go_with_how_the_engine_is_run(
    engine: dict[str, Any], extra_args: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        check(extra_args, **engine)


def test_stock_scheduling_and_attention_leave_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    check({"scheduling_policy": "priority"}, scheduler="stock")
    check({"attention_backend": "FLASH_ATTN"})
