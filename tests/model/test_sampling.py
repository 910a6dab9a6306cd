"""The model's own sampling is named where it is ignored, and is what vLLM's server takes."""

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.fake_job import DS, document_rows, fake_spec, write_table
from support.prompts_job import several

from batchllm_operator.errors import SpecError
from batchllm_operator.model import ModelFiles, with_models_sampling
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec, SamplingSpec, parse_spec_json

OWN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0.1}
NAMES = (*OWN, "presence_penalty", "frequency_penalty")


def write_model(folder: Path, generation: object = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def job(folder: Path, sampling: Any = None, **changes: Any) -> JobSpec:
    fields = {"model": {"path": str(folder)}, "output": {"uri": f"{folder}-out"}, **changes}
    spec = fake_spec(folder, **fields)
    given = SamplingSpec() if sampling is None else sampling
    return JobSpec.model_validate({**spec.model_dump(), "sampling": given})


def chosen(folder: Path, sampling: Any, **changes: Any) -> JobSpec:
    return with_models_sampling(job(folder, sampling, **changes), ModelFiles(str(folder)))


def test_ignored_values_are_named_with_the_cure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "m", {**OWN, "eos_token_id": [1, 2], "max_new_tokens": 9})
    spec = job(folder)
    with caplog.at_level(logging.WARNING):
        assert with_models_sampling(spec, ModelFiles(str(folder))) is spec
    assert "temperature 0.7, top_p 0.8, top_k 20, min_p 0.1, repetition_penalty 1.05" in caplog.text
    assert "sampling: model" in caplog.text
    assert "max" not in caplog.text


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        (None, {}),
        ({"eos_token_id": 1}, {}),
        ({"temperature": 0.0, "top_p": 1.0, "top_k": 0}, {}),
        ({"temperature": 0.6}, {"temperature": 0.0}),
        (OWN, dict.fromkeys(OWN, 1)),
        (OWN, {"from_model": True}),
    ],
)
def test_nothing_is_said_of_values_that_are_used_or_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, generation: Any, sampling: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING):
        chosen(write_model(tmp_path / "m", generation), sampling)
    assert caplog.text == ""


@pytest.mark.parametrize(
    "generation",
    [
        {},
        OWN,
        {"temperature": 0.6, "do_sample": False, "max_new_tokens": 77},
        {"top_k": -1, "presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"temperature": None, "top_p": 0.95},
        {"repetition_penalty": 1.2, "bos_token_id": 3, "transformers_version": "4.40"},
    ],
)
def test_the_models_sampling_is_that_of_vllms_server(tmp_path: Path, generation: Any) -> None:
    model_config = pytest.importorskip("vllm.config.model").ModelConfig
    completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    folder = write_model(tmp_path / "m", generation)
    config = model_config.__new__(model_config)  # making one reads a whole model
    given: dict[str, Any] = dict.fromkeys(("hf_config_path", "_hf_config_revision", "revision"))
    given |= {"generation_config": "auto", "override_generation_config": {}, "hf_token": None}
    given |= {"model": str(folder), "trust_remote_code": False, "code_revision": None}
    for name, value in {**given, "config_format": "auto"}.items():
        object.__setattr__(config, name, value)
    defaults = config.get_diff_sampling_param()
    request = completion.CompletionRequest(prompt="x", max_tokens=8)
    expected = request.to_sampling_params(8, defaults)
    found = chosen(folder, "model").sampling
    same = {name: getattr(found, name) for name in NAMES}
    assert same == {name: max(getattr(expected, name), -2) for name in NAMES} | (
        {"top_k": 0} if generation.get("top_k") == -1 else {}
    )
    assert found.max_tokens == generation.get("max_new_tokens", SamplingSpec().max_tokens)


def test_values_of_the_spec_win(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {**OWN, "max_new_tokens": 9})
    given = {"from_model": True, "temperature": 0.0, "max_tokens": 50, "stop": "."}
    found = chosen(folder, given).sampling
    assert (found.temperature, found.max_tokens, found.stop) == (0.0, 50, (".",))
    assert (found.top_p, found.min_p) == (0.8, 0.1)


def test_each_prompt_has_its_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", OWN)
    prompts = {
        "drawn": {"template": "{document}", "sampling": "model"},
        "greedy": {"template": "{query}", "sampling": {"max_tokens": 4}},
        "judged": {"template": "{query}", "task": "classify", "labels": ["a", "b"]},
    }
    spec = with_models_sampling(several(tmp_path, prompts), ModelFiles(str(folder)))
    drawn, greedy, judged = (question.sampling for question in spec.questions)
    assert {name: getattr(drawn, name) for name in OWN} == OWN
    assert (greedy, judged) == (SamplingSpec(max_tokens=4), SamplingSpec(max_tokens=1))


def test_older_models_say_it_in_their_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", temperature=0.3, top_k=7)
    found = chosen(folder, "model").sampling
    assert (found.temperature, found.top_k, found.top_p) == (0.3, 7, 1.0)


def test_the_values_are_a_part_of_the_plan(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", OWN)
    write_table(folder / "documents", document_rows(1, 2))
    model = plan_job(job(folder, "model"), DS).manifest
    own = plan_job(job(folder, {**OWN, "from_model": False}), DS).manifest
    greedy = plan_job(job(folder), DS).manifest
    assert {name: getattr(model.spec.sampling, name) for name in OWN} == OWN
    assert model.plan_id == own.plan_id != greedy.plan_id


def test_what_is_open_stays_open_in_a_stored_spec(tmp_path: Path) -> None:
    """As in the JSON that a pod or a Spark task is given."""
    spec = job(tmp_path, {"from_model": True, "temperature": 0.0, "min_p": 0.0})
    folder = write_model(tmp_path / "m", OWN)
    for text in (spec.model_dump_json(), spec.model_dump_json(exclude_unset=True)):
        again = parse_spec_json(text, source="stored")
        assert again == spec
        assert again.sampling.model_fields_set == {"from_model", "temperature", "min_p"}
        found = with_models_sampling(again, ModelFiles(str(folder))).sampling
        assert (found.temperature, found.min_p, found.top_k) == (0.0, 0.0, 20)


@pytest.mark.parametrize(
    ("generation", "changes", "message"),
    [
        ({"temperature": 0.0}, {"sampling": {"n": 2}}, "n: greedy sampling"),
        ({"top_p": 3}, {}, r"generation_config\.json of model .*: sampling\.top_p"),
        ({"temperature": "hot"}, {}, r"sampling\.temperature"),
        ([], {}, "must be a mapping"),
    ],
)
def test_values_that_no_job_can_have_are_refused(
    tmp_path: Path, generation: Any, changes: dict[str, Any], message: str
) -> None:
    folder = write_model(tmp_path / "m", generation)
    with pytest.raises(SpecError, match=message):
        chosen(folder, {"from_model": True, **changes.get("sampling", {})})


def test_reused_outputs_need_greedy_sampling_whatever_the_model_says(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reuse_outputs needs greedy sampling"):
        job(tmp_path, "model", reuse_outputs=True)


def test_the_files_ends_of_answers_hold_for_every_sampling() -> None:
    """vLLM's engine adds them to each request's parameters, which must be able to take them."""
    answers = pytest.importorskip("batchllm_operator.engine.vllm.answers")
    params = answers.sampling_params(SamplingSpec(stop_token_ids=(5,)))
    params.update_from_generation_config({"eos_token_id": [7, 8]}, 7)
    assert sorted(params.stop_token_ids) == [5, 8]
    processor = pytest.importorskip("vllm.v1.engine.input_processor")
    assert "update_from_generation_config(" in inspect.getsource(processor)
