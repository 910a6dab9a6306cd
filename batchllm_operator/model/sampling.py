"""The sampling that a model's own files suggest, as vLLM's server takes it.

See `ModelConfig.get_diff_sampling_param` in vLLM. Its engine takes the tokens that end an answer
(`eos_token_id`) from the same file for every request, whatever a job's sampling is.
"""

import logging
from collections.abc import Mapping
from itertools import compress
from typing import Any, Final

from batchllm_operator.errors import SpecError
from batchllm_operator.model.files import ModelFiles
from batchllm_operator.spec import JobSpec, parse_spec

_NAMES: Final = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_USUAL_TEMPERATURE: Final = 1.0
"""vLLM's, of requests and models that don't say."""
_log = logging.getLogger(__name__)


def with_models_sampling(spec: JobSpec, files: ModelFiles | None) -> JobSpec:
    """The spec with the model's values in place of those that `sampling.from_model` leaves open.

    Other specs are returned as they are, with a warning of values of the model that aren't used.
    The fake engine without a model has no files. A SpecError refuses a value that no spec can have,
    or that doesn't go with other settings; a ModelError names a file that can't be read.
    """
    questions = [question for question in spec.questions if question.decodes]
    if not questions:
        return spec
    source, suggested = _suggested(files)
    where = f"sampling from {source} of model {spec.model.path}"
    is_open = [question.sampling.from_model for question in spec.questions]
    if any(is_open):
        spec = parse_spec(_filled(spec.model_dump(), suggested), source=where)
        for question in compress(spec.questions, is_open):
            chosen = {name: getattr(question.sampling, name) for name in _NAMES}
            _log.info("%s: %s", where, _as_text(chosen))
    ignored = {  # how long outputs are is the job's affair
        name: suggested[name]
        for sampling in (q.sampling for q in questions if not q.sampling.from_model)
        for name in _NAMES
        if name in suggested.keys() - sampling.model_fields_set
        and suggested[name] != getattr(sampling, name)
    }
    if ignored:
        _log.warning(
            "model %s: its %s suggests %s, which this job doesn't use; sampling: model uses it, and"
            " a value of your own under sampling says that you don't want it",
            spec.model.path,
            source,
            _as_text(ignored),
        )
    return spec


def _filled(fields: dict[str, Any], suggested: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec, or of one of its prompts, with the model's values."""
    given = fields["sampling"]
    if given["from_model"]:
        sampling = {"temperature": _USUAL_TEMPERATURE, **suggested, **given, "from_model": False}
        fields = {**fields, "sampling": sampling}
    prompts = fields.get("prompts", {})
    filled = {name: _filled(prompt, suggested) for name, prompt in prompts.items()}
    return {**fields, "prompts": filled} if filled else fields


def _suggested(files: ModelFiles | None) -> tuple[str, dict[str, Any]]:
    """The file that suggests values, and those by the spec's names."""
    source = "generation_config.json"
    if files is None:
        return source, {}
    content = files.read_json(source)
    if content is None:  # as older models have it
        source = "config.json"
        content = files.read_json(source) or {}
    if not isinstance(content, Mapping):
        raise SpecError(f"{files.where}: its {source} must be a mapping of names to values")
    names = {**{name: name for name in _NAMES}, "max_new_tokens": "max_tokens"}
    suggested = {names[name]: content[name] for name in names if content.get(name) is not None}
    if suggested.get("top_k") == -1:  # another way to say all
        suggested["top_k"] = 0
    return source, suggested


def _as_text(values: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
