"""The sampling that a model's own files suggest, as vLLM's server takes it.

See `ModelConfig.get_diff_sampling_param` in vLLM. Its engine takes the tokens that end an answer
(`eos_token_id`) from the same file for every request, whatever a job's sampling is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from batchllm_operator.errors import SpecError
from batchllm_operator.model.files import ModelFiles
from batchllm_operator.spec import JobSpec, parse_spec

_FILE: Final = "generation_config.json"
_CONFIG: Final = "config.json"
_NAMES: Final = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_MAX_TOKENS: Final = "max_new_tokens"
_USUAL_TEMPERATURE: Final = 1.0
"""vLLM's, of requests and models that don't say."""
_log = logging.getLogger(__name__)


def with_models_sampling(spec: JobSpec, files: ModelFiles | None) -> JobSpec:
    """The spec with the model's values in place of those that `sampling.from_model` leaves open.

    Other specs are returned as they are, with a warning of values of the model that aren't used.

    Args:
        files: the model's; None for the fake engine without a model.

    Raises:
        SpecError: a value isn't one that a spec can have, or doesn't go with other settings.
        ModelError: a file can't be read.
    """
    if spec.task != "generate":
        return spec
    source, found = _suggested(files)
    given = {name: getattr(spec.sampling, name) for name in spec.sampling.model_fields_set}
    if not spec.sampling.from_model:
        _warn(spec, source, {name: found[name] for name in found if name not in given})
        return spec
    sampling = {"temperature": _USUAL_TEMPERATURE, **found, **given, "from_model": False}
    where = f"sampling from {source} of model {spec.model.path}"
    chosen = parse_spec({**spec.model_dump(), "sampling": sampling}, source=where)
    _log.info("%s: %s", where, _listed({name: getattr(chosen.sampling, name) for name in _NAMES}))
    return chosen


def _suggested(files: ModelFiles | None) -> tuple[str, dict[str, Any]]:
    """The file that suggests values, and those by the spec's names."""
    if files is None:
        return _FILE, {}
    source, content = _FILE, files.read_json(_FILE)
    if content is None:  # as older models have it
        source, content = _CONFIG, files.read_json(_CONFIG) or {}
    if not isinstance(content, Mapping):
        raise SpecError(f"{files.where}: its {source} must be a mapping of names to values")
    found = {name: content[name] for name in _NAMES if content.get(name) is not None}
    if found.get("top_k") == -1:  # another way to say all
        found["top_k"] = 0
    if content.get(_MAX_TOKENS) is not None:
        found["max_tokens"] = content[_MAX_TOKENS]
    return source, found


def _warn(spec: JobSpec, source: str, found: Mapping[str, Any]) -> None:
    names = [name for name in _NAMES if name in found]  # how long outputs are is the job's affair
    ignored = {name: found[name] for name in names if found[name] != getattr(spec.sampling, name)}
    if ignored:
        _log.warning(
            "model %s: its %s suggests %s, which this job doesn't use; sampling: model uses it, and"
            " a value of your own under sampling says that you don't want it",
            spec.model.path,
            source,
            _listed(ignored),
        )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
