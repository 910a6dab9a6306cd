"""Checks `engine.extra_args` without starting an engine."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from batchllm_operator.engine.fake import ARGUMENTS as FAKE_ARGUMENTS
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.limits import shown
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings

INVARIANCE: Final = "VLLM_BATCH_INVARIANT"  # for kernels whose sums don't depend on the batch
_WHERE: Final = "engine.extra_args"
_PARSERS_BY_NAME: Final = "_REASONING_PARSERS_TO_REGISTER"
_PARSER_PLUGIN: Final = "reasoning_parser_plugin"
_BUILTINS: Final = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)}


def check_arguments(spec: JobSpec) -> None:
    """Refuse arguments that the engine would refuse, as far as that is known without starting it.

    vLLM's arguments are known where it is installed, even if it can't run there.

    Raises:
        SpecError: names each argument that is unknown or of another type, or one that can't be
            set here.
    """
    given = spec.engine.extra_args
    if spec.engine.backend == "fake":
        faults = list(_faults(given, FAKE_ARGUMENTS, "the fake engine"))
    else:
        _check_choices(spec)
        name, parsers = spec.model.reasoning_parser, vllm_reasoning_parsers()
        if name and parsers and name not in parsers and not given.get(_PARSER_PLUGIN):
            raise SpecError(unknown_parser(name, parsers))
        known = vllm_arguments() if given else None
        faults = list(_faults(given, known, "the installed vLLM")) if known else []
    if faults:
        raise SpecError("; ".join(faults))


def vllm_arguments() -> dict[str, Any] | None:
    """The types of vLLM's engine arguments by name (`Any` beyond builtins); None without vLLM.

    Reads the source: importing takes many seconds, and may fail for a GPU's build without a GPU.
    """
    return {
        field.target.id: _type(field.annotation)
        for statement in _statements("engine", "arg_utils.py")
        if isinstance(statement, ast.ClassDef) and statement.name == "EngineArgs"
        for field in statement.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    } or None


def vllm_reasoning_parsers() -> set[str]:
    """The names of vLLM's reasoning parsers; none if vLLM isn't installed."""
    return {
        key.value
        for statement in _statements("reasoning", "__init__.py")
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)
        if [ast.unparse(target) for target in statement.targets] == [_PARSERS_BY_NAME]
        for key in statement.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def _statements(*source: str) -> list[ast.stmt]:
    """Of a module of the installed vLLM; none if it is absent, or has another layout."""
    try:
        package = find_spec("vllm")
        folders = package.submodule_search_locations if package is not None else None
        return ast.parse(Path((folders or [""])[0], *source).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []


def _type(annotation: ast.expr) -> Any:
    match annotation:
        case ast.BinOp(left, ast.BitOr(), right):
            return _type(left) | _type(right)
        case ast.Subscript(ast.Name(name)) | ast.Name(name) if name in _BUILTINS:
            return _BUILTINS[name]
        case ast.Constant(None):
            return None
    return Any


def _faults(given: Mapping[str, Any], known: Mapping[str, Any], whose: str) -> Iterator[str]:
    """Describe each wrong argument, without its value."""
    for name, value in given.items():
        where = f"{_WHERE}.{shown(name)}"
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{where}: {whose} has no such argument{hint}"
        elif value is not None:
            try:
                TypeAdapter(known[name]).validate_python(value)
            except ValidationError as error:
                [fault, *_] = error.errors(include_input=False, include_url=False)
                yield f"{where}: {fault['msg']}"


def unknown_parser(name: str, known: Iterable[str]) -> str:
    """What to say of a reasoning parser that vLLM doesn't have."""
    return (
        f"model.reasoning_parser: the installed vLLM has no parser {shown(name)!r}; it has"
        f" {', '.join(sorted(known))}"
    )


def _check_choices(spec: JobSpec) -> None:
    """Refuse arguments that vLLM has, but that don't fit how we run it."""
    given, config = spec.engine.extra_args, spec.engine.extra_args.get("additional_config")
    AttentionSettings.from_additional_config(config)
    SchedulerSettings.from_additional_config(config)
    if spec.engine.scheduler == "batchllm" and given.get("scheduling_policy") == "priority":
        raise SpecError(
            f"{_WHERE}: scheduling_policy must be fcfs: requests run in the plan's order;"
            " with engine.scheduler: stock it may be another"
        )
    if given.get("data_parallel_size", 1) != 1:
        raise SpecError(
            f"{_WHERE}: data_parallel_size must be 1; for more engines, raise"
            " engine.replicas, or start more workers (run --worker I --num-workers N)"
        )
    attention = given.get("attention_config")
    in_config = attention if isinstance(attention, Mapping) else {}
    if spec.engine.attention == "batchllm" and (
        given.get("attention_backend")
        or any(in_config.get(name) for name in ("backend", "backend_per_kind"))
    ):
        raise SpecError(
            f"{_WHERE}: names an attention backend; that goes with engine.attention: stock"
        )
