"""Forms of answers that vLLM's backends take or refuse, at plan and when an engine starts."""

import json
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from demo_model import build_demo_model
from support.fake_job import fake_spec

from batchllm_operator.engine import EngineJob, EngineRequest, check_format
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec

vllm_answers = pytest.importorskip("batchllm_operator.engine.vllm.answers")
vllm_formats = pytest.importorskip("batchllm_operator.engine.vllm.formats")
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


HARD = {"type": "string", "pattern": "^(a|aa)+b{1,300}(.*c.{300})$"}
"""Passes vLLM's checks, but xgrammar can't compile it."""
VALUES = [f"value {i} of the list" for i in range(20_000)]
"""xgrammar compiles them for hours."""


@pytest.mark.parametrize(
    ("form", "extra_args", "place"),
    [
        (schema_of(stars={"type": "integer", "multipleOf": 2}), XGRAMMAR, "json_schema: .*stars: "),
        ({"type": "regex", "regex": "a(?=b)b"}, XGRAMMAR, "regex: "),
        ({"type": "regex", "regex": r"(a)\1"}, {}, "regex: "),
        (schema_of(id={"type": "integer"}, code=HARD), {}, "json_schema: properties.code: "),
        (
            schema_of(id={}, a={"type": "object", "properties": {"b": {}, "c": HARD}}),
            {},
            "json_schema: properties.a.properties.c: ",
        ),
        (schema_of(a={"anyOf": [{}, HARD]}), {}, "json_schema: properties.a.anyOf.1: "),
        (schema_of(a={"type": "array", "items": HARD}), {}, "json_schema: properties.a.items: "),
        (schema_of(a={"type": "string", "pattern": "^(?!b)a"}), {}, "json_schema: properties.a: "),
    ],
)
def test_a_form_that_vllm_cannot_compile_is_refused_by_its_property(
    model: Path, form: dict[str, Any], extra_args: dict[str, Any], place: str
) -> None:
    with pytest.raises(SpecError, match=rf"^response_format\.{place}.*vLLM can't compile it: "):
        check_format(spec_of(model, form, **extra_args))


def test_a_form_behind_references_is_refused_by_the_property_that_uses_it(model: Path) -> None:
    form = schema_of(a={"type": "integer"}, b={"type": "array", "items": {"$ref": "#/$defs/code"}})
    form["json_schema"]["$defs"] = {"code": HARD, "unused": {}}
    with pytest.raises(SpecError, match=r"properties\.b\.items: .*can't compile it"):
        check_format(spec_of(model, form))


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ({"type": "choice", "choices": VALUES}, r"choices: vLLM"),
        (schema_of(a={"type": "integer"}, b={"enum": VALUES}), r"json_schema: properties\.b: "),
    ],
)
def test_a_form_that_never_compiles_is_refused_in_time_with_a_backend_that_can(
    model: Path, form: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_formats, "_LIMIT_S", 4.0)
    monkeypatch.setattr(vllm_formats, "_PART_LIMIT_S", 4.0)
    spec = spec_of(model, form)
    with pytest.raises(SpecError, match=rf"{place}.*more than 4 s; backend guidance can: "):
        check_format(spec)
    guidance = {"structured_outputs_config": {"backend": "guidance"}}
    check_format(spec_of(model, form, **guidance))


def test_letters_of_all_languages_are_a_pattern_that_vllm_takes(model: Path) -> None:
    check_format(spec_of(model, schema_of(name={"type": "string", "pattern": r"^\p{L}+$"})))
    check_format(spec_of(model, {"type": "regex", "regex": r"\p{L}+"}))


def test_an_unknown_backend(model: Path) -> None:
    spec = spec_of(
        model, {"type": "regex", "regex": "a"}, structured_outputs_config={"backend": "none"}
    )
    with pytest.raises(SpecError, match=r"engine.extra_args.structured_outputs_config"):
        check_format(spec)


def test_a_plan_needs_no_model(tmp_path: Path) -> None:
    form = {"type": "regex", "regex": r"(a)\1"}
    check_format(spec_of(tmp_path / "nothing", form))


def test_an_engine_compiles_the_form_before_it_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_engine = pytest.importorskip("batchllm_operator.engine.vllm.engine")
    monkeypatch.setattr(vllm_engine.VLLMEngine, "_start", Mock(side_effect=AssertionError))
    with pytest.raises(SpecError, match=r"properties\.code: .*can't compile it"):
        vllm_engine.VLLMEngine(spec_of(model, schema_of(code=HARD)), EngineJob(max_model_len=64))


@pytest.mark.parametrize(
    ("seed", "wanted"), [(None, None), (5, 5 + 2 * 1024), ((1 << 63) - 1, -(1 << 63) + 2047)]
)
def test_each_try_has_a_seed_of_its_own(seed: int | None, wanted: int | None) -> None:
    spec = fake_spec("/lake", sampling={"temperature": 1.0, "seed": seed})
    answers = vllm_answers.VLLMAnswers(spec)

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


def test_dates_in_yaml_stay_dates(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stock vLLM in another test of this process may have changed it already.
    dates = yaml.SafeLoader.construct_yaml_timestamp
    monkeypatch.setitem(yaml.SafeLoader.yaml_constructors, "tag:yaml.org,2002:timestamp", dates)
    check_format(spec_of(model, {"type": "regex", "regex": "[0-9]{4}"}))
    assert yaml.safe_load("2026-01-31") == date(2026, 1, 31)


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
def test_parameters_of_a_request_are_those_that_vllm_makes_of_it(url: str) -> None:
    request = json.dumps({"url": url, "stop": ["\n"], "logit_bias": {"5": 1.0}})
    params = vllm_answers.VLLMAnswers(fake_spec("/lake", request=request)).params
    assert (params.stop, params.logit_bias) == (["\n"], {5: 1.0})
