"""Response formats as vLLM's structured outputs, and whether its backend can compile them."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

from vllm import SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.structured_output.request import get_structured_output_key

from batchllm_operator.answers.subschemas import parts, resolved
from batchllm_operator.engine.limited import first_failure
from batchllm_operator.errors import SpecError, one_line
from batchllm_operator.spec import ChoiceFormat, JobSpec, JsonSchemaFormat, ResponseFormat
from batchllm_operator.spec.limits import shown

_log = logging.getLogger(__name__)
_CONFIG: Final = "structured_outputs_config"
_BACKENDS: Final[Mapping[str, tuple[str, str]]] = {
    "xgrammar": ("backend_xgrammar", "XgrammarBackend"),
    "guidance": ("backend_guidance", "GuidanceBackend"),
    "outlines": ("backend_outlines", "OutlinesBackend"),
    "lm-format-enforcer": ("backend_lm_format_enforcer", "LMFormatEnforcerBackend"),
}
"""Modules and classes of vLLM, which imports them when a first request needs them."""
_OTHER: Final = "guidance"  # compiles most of what xgrammar, vLLM's first choice, can't
_PLACES: Final = {"json_schema": "json_schema", "choice": "choices", "regex": "regex"}
_LIMIT_S: Final = 30.0  # of CPU for compiling a format; those that work take less than one
_PART_LIMIT_S: Final = 10.0  # for a part of a schema, when the whole has failed
# What a regular expression has that can't be a group.
_LITERAL: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_LOOKS_AROUND: Final = re.compile(r"\(\?<?[=!]")


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
    """Compile a spec's response format without an engine, if its tokenizer can be loaded.

    Takes at most a minute or two, in a process of its own.

    Raises:
        SpecError: vLLM's backend refuses it, or can't compile it within limits of time and memory;
            names the property.
    """
    form, model = spec.response_format, spec.model
    if form is None:
        return
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
    compiler = _Compiler(tokenizer, config)
    failure = first_failure([partial(compiler.compile, form)], _LIMIT_S, one_line)
    if failure is None:
        return
    where, reason = _PLACES[form.type], failure[1]
    if isinstance(form, JsonSchemaFormat):
        part = _faulty_part(form.schema_fields, compiler)
        where, reason = (f"{where}: {part[0]}", part[1]) if part else (where, reason)
    advice = _advice(form, tokenizer, config)
    raise SpecError(f"response_format.{where}: vLLM can't compile it: {reason}{advice}")


def _advice(form: ResponseFormat, tokenizer: Any, config: StructuredOutputsConfig) -> str:
    """What compiles a format that vLLM's choice of a backend can't."""
    other = replace(config, backend=_OTHER)
    attempt = partial(_Compiler(tokenizer, other).compile, form)
    if config.backend == "auto" and first_failure([attempt], _PART_LIMIT_S, one_line) is None:
        return f"; backend {_OTHER} can: engine.extra_args: {{{_CONFIG}: {{backend: {_OTHER}}}}}"
    return f"; simplify it, or choose another backend by engine.extra_args.{_CONFIG}"


class _Compiler:
    """Compiles response formats as vLLM's engine does for the first request."""

    def __init__(self, tokenizer: Any, config: StructuredOutputsConfig) -> None:
        self._tokenizer, self._config = tokenizer, config

    def compile(self, form: ResponseFormat) -> None:
        """Compile a format. Raises whatever vLLM and its backends raise."""
        params = SamplingParams(structured_outputs=structured_outputs(form))
        model_config: Any = SimpleNamespace(is_diffusion=False)
        params._validate_structured_outputs(model_config, self._config, self._tokenizer)
        outputs: Any = params.structured_outputs
        backend = self._backend(str(outputs._backend))
        if outputs._backend == "xgrammar" and isinstance(form, JsonSchemaFormat):
            _check_patterns(form.schema_fields)
        grammar = backend.compile_grammar(*get_structured_output_key(outputs))
        grammar.fill_bitmask(backend.allocate_token_bitmask(1), 0)  # some compile only now
        matcher = getattr(grammar, "ll_matcher", None)  # guidance's, which raises nothing
        if matcher is not None and (fault := matcher.get_error()):
            raise ValueError(fault)

    @cache  # noqa: B019  for the parts of a schema, in a process that ends with them
    def _backend(self, name: str) -> Any:
        module, kind = _BACKENDS[name]
        backend = getattr(import_module(f"vllm.v1.structured_output.{module}"), kind)
        config = SimpleNamespace(
            structured_outputs_config=self._config, model_config=None, speculative_config=None
        )
        vocab_size = self._tokenizer.max_token_id + 1
        return backend(config, tokenizer=self._tokenizer, vocab_size=vocab_size)


def _check_patterns(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if a pattern looks ahead or behind, which xgrammar ignores."""
    for _, part in parts(schema, definitions=True):
        _check_patterns(part)
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _LOOKS_AROUND.search(_LITERAL.sub("", pattern)):
        raise ValueError(
            f"xgrammar ignores that the pattern {shown(pattern)!r} looks ahead or behind"
        )


def _faulty_part(schema: Mapping[str, Any], compiler: _Compiler) -> tuple[str, str] | None:
    """The innermost part of a schema that fails alone, and the reason; None if none does."""
    path, reason, part = list[str](), "", resolved(schema)
    while True:
        inside = [("", {"type": "boolean"}), *parts(part)]  # the first: does the backend work?
        attempts = [partial(compiler.compile, _alone(inner)) for _, inner in inside]
        failure = first_failure(attempts, _PART_LIMIT_S, one_line)
        if failure is None or failure[0] == 0:
            break
        idx, reason = failure
        step, part = inside[idx]
        path.append(step)
    return (f"{'.'.join(path)}: {shown(json.dumps(part))}", reason) if path else None


def _alone(part: Any) -> JsonSchemaFormat:
    schema = {"type": "object", "properties": {"value": part}, "required": ["value"]}
    return JsonSchemaFormat(type="json_schema", json_schema=json.dumps(schema))
