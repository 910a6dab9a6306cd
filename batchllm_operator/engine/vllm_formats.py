"""Response formats as vLLM's structured outputs, and whether its backend takes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import yaml

from batchllm_operator.engine.vllm_logs import configure_logs, one_line
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import ChoiceFormat, JobSpec, JsonSchemaFormat, ResponseFormat

configure_logs()

from vllm import SamplingParams  # noqa: E402
from vllm.config import StructuredOutputsConfig  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.tokenizers import get_tokenizer  # noqa: E402

_log = logging.getLogger(__name__)
_CONFIG = "structured_outputs_config"


def structured_outputs(form: ResponseFormat | None) -> StructuredOutputsParams | None:
    """vLLM's parameter for a response format."""
    if form is None:
        return None
    if isinstance(form, JsonSchemaFormat):
        return StructuredOutputsParams(json=form.json_schema)
    if isinstance(form, ChoiceFormat):
        return StructuredOutputsParams(choice=list(form.choices))
    return StructuredOutputsParams(regex=form.regex)


def check_planned(spec: JobSpec) -> None:
    """Check a spec's response format without an engine, as far as its tokenizer can be loaded.

    Raises:
        SpecError: vLLM refuses it.
    """
    model = spec.model
    try:
        tokenizer = get_tokenizer(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:  # a plan doesn't need all of a model
        _log.info("response_format: is checked when the engine starts: %s", one_line(error))
        return
    given: Any = spec.engine.extra_args.get(_CONFIG) or {}
    try:
        config = StructuredOutputsConfig(**given)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"engine.extra_args.{_CONFIG}: vLLM refuses it: {one_line(error)}"
        ) from error
    params = SamplingParams(structured_outputs=structured_outputs(spec.response_format))
    check_params(params, SimpleNamespace(is_diffusion=False), config, tokenizer)


def check_engine(params: SamplingParams, engine: Any) -> None:
    """Check the structured outputs of `params` with an `LLMEngine`, and end it if they don't fit.

    Raises:
        SpecError: vLLM refuses them.
    """
    if params.structured_outputs is None:
        return
    config = engine.vllm_config
    try:
        given = config.structured_outputs_config
        check_params(params, config.model_config, given, engine.get_tokenizer())
    except SpecError:
        engine.engine_core.shutdown()
        raise


def check_params(params: SamplingParams, model_config: Any, config: Any, tokenizer: Any) -> None:
    """Check the structured outputs of `params`, as vLLM does for each request.

    Raises:
        SpecError: vLLM refuses them.
    """
    try:
        with _yaml_as_it_is():
            params.clone()._validate_structured_outputs(model_config, config, tokenizer)
    # Its backends are libraries with errors of their own.
    except Exception as error:
        raise SpecError(f"response_format: vLLM refuses it: {one_line(error)}") from error


@contextmanager
def _yaml_as_it_is() -> Iterator[None]:
    """Undo what lm-format-enforcer, which vLLM imports, does to PyYAML: dates become texts."""
    known = dict(yaml.SafeLoader.yaml_constructors)
    try:
        yield
    finally:
        yaml.SafeLoader.yaml_constructors.update(known)
