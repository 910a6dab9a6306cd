"""Forms of answers that vLLM's backends take or refuse, at plan and when an engine starts."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from support.fake_job import fake_spec

from batchllm_operator.demo.model import build_demo_model
from batchllm_operator.engine import EngineJob, EngineRequest, check_format
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec

vllm_answers = pytest.importorskip("batchllm_operator.engine.vllm_answers")
vllm_formats = pytest.importorskip("batchllm_operator.engine.vllm_formats")
XGRAMMAR = {"structured_outputs_config": {"backend": "xgrammar"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats") / "model"
    build_demo_model(folder)
    return folder


def spec_of(model: Path, form: dict[str, Any], **extra_args: Any) -> JobSpec:
    engine = {"backend": "vllm", "extra_args": extra_args}
    return fake_spec("/lake", response_format=form, model={"path": str(model)}, engine=engine)


def schema_of(**properties: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"type": "object", "properties": properties}}


@pytest.mark.parametrize(
    "form",
    [
        schema_of(name={"type": "string", "maxLength": 9}, stars={"type": "integer"}),
        {"type": "choice", "choices": ["yes", 'a "quoted" one']},
        {"type": "regex", "regex": "[0-9]{4}"},
    ],
)
@pytest.mark.parametrize("extra_args", [{}, XGRAMMAR])
def test_a_form_that_vllm_takes(
    model: Path, form: dict[str, Any], extra_args: dict[str, Any]
) -> None:
    check_format(spec_of(model, form, **extra_args))


@pytest.mark.parametrize(
    ("form", "extra_args"),
    [
        (schema_of(stars={"type": "integer", "multipleOf": 2}), XGRAMMAR),
        ({"type": "regex", "regex": "a(?=b)b"}, XGRAMMAR),
        ({"type": "regex", "regex": r"(a)\1"}, {}),
    ],
)
def test_a_form_that_vllm_refuses(
    model: Path, form: dict[str, Any], extra_args: dict[str, Any]
) -> None:
    with pytest.raises(SpecError, match="response_format: vLLM refuses it: "):
        check_format(spec_of(model, form, **extra_args))


def test_an_unknown_backend(model: Path) -> None:
    spec = spec_of(
        model, {"type": "regex", "regex": "a"}, structured_outputs_config={"backend": "none"}
    )
    with pytest.raises(SpecError, match=r"engine.extra_args.structured_outputs_config"):
        check_format(spec)


def test_a_plan_needs_no_model(tmp_path: Path) -> None:
    form = {"type": "regex", "regex": r"(a)\1"}
    check_format(spec_of(tmp_path / "nothing", form))


def test_an_engine_that_starts_refuses_it_once(model: Path) -> None:
    form = schema_of(stars={"type": "integer", "multipleOf": 2})
    params = vllm_answers.sampling_params(
        spec_of(model, form).sampling, form=spec_of(model, form).response_format
    )
    config = vllm_formats.StructuredOutputsConfig(backend="xgrammar")
    engine = Mock(get_tokenizer=lambda: vllm_formats.get_tokenizer(str(model)))
    engine.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(is_diffusion=False), structured_outputs_config=config
    )
    with pytest.raises(SpecError, match="response_format: vLLM refuses it"):
        vllm_formats.check_engine(params, engine)
    engine.engine_core.shutdown.assert_called_once()


@pytest.mark.parametrize(
    ("seed", "wanted"), [(None, None), (5, 5 + 2 * 1024), ((1 << 63) - 1, -(1 << 63) + 2047)]
)
def test_each_try_has_a_seed_of_its_own(seed: int | None, wanted: int | None) -> None:
    sampling = fake_spec("/lake").sampling.model_copy(update={"temperature": 1.0, "seed": seed})
    answers = vllm_answers.GeneratedAnswers(sampling, EngineJob(max_model_len=64))

    def request(num_tries: int) -> EngineRequest:
        return EngineRequest(0, [1], 0, 0, num_tries=num_tries)

    assert answers.params_of(request(0)).seed == seed
    assert answers.params_of(request(2)).seed == wanted


@pytest.mark.parametrize("trusted", [False, True])
def test_a_tokenizer_runs_code_of_its_own_only_if_the_spec_says_so(
    model: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Mock(side_effect=OSError("no tokenizer"))
    monkeypatch.setattr(vllm_formats, "get_tokenizer", load)
    spec = spec_of(model, {"type": "regex", "regex": "[0-9]+"})
    trusting = spec.model.model_copy(update={"trust_remote_code": trusted})
    vllm_formats.check_planned(spec.model_copy(update={"model": trusting}))
    assert load.call_args.kwargs["trust_remote_code"] is trusted


def test_dates_in_yaml_stay_dates(model: Path) -> None:
    check_format(spec_of(model, {"type": "regex", "regex": "[0-9]{4}"}))
    assert yaml.safe_load("2026-01-31") == date(2026, 1, 31)
