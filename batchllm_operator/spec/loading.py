"""Reads job specs from YAML files, with errors that name fields and never repeat values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from batchllm_operator.errors import SpecError
from batchllm_operator.spec.addresses import TableAddress
from batchllm_operator.spec.model import SPEC_VERSION, JobSpec


class _SpecLoader(yaml.SafeLoader):
    """YAML's safe loader, but a field that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.value != "<<":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"field {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_spec(path: str | Path) -> JobSpec:
    """Read a job spec from a YAML file; relative paths in it start at the file's folder.

    Raises:
        SpecError: the file is absent, isn't YAML, or doesn't hold a valid spec; the
            message names the file and every offending field, never a value.
    """
    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _SpecLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"job spec {path}: can't be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise SpecError(f"job spec {path}: not YAML{where}: {problem}") from error
    except ValueError as error:  # such as a date that doesn't exist
        raise SpecError(f"job spec {path}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"job spec {path}: must be a mapping of fields, such as 'name: my_job'")
    return _resolve_paths(parse_spec(data, source=f"job spec {path}"), path.resolve().parent)


def parse_spec(data: Mapping[str, object], *, source: str) -> JobSpec:
    """Check `data` and make a `JobSpec` of it; `source` names it in errors.

    Raises:
        SpecError: naming every offending field.
    """
    version = data.get("spec_version")
    if isinstance(version, int) and version != SPEC_VERSION:
        raise SpecError(
            f"{source}: spec_version is {version}; this release reads version {SPEC_VERSION}"
        )
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(f"{source}: {_describe(error)}") from error
    except RecursionError as error:  # a YAML alias that holds itself
        raise SpecError(f"{source}: a field holds itself") from error


def parse_spec_json(text: str, *, source: str) -> JobSpec:
    """Check a spec that is given as JSON, such as `JobSpec.model_dump_json` writes it.

    Raises:
        SpecError: it isn't a JSON object, or not a valid spec.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{source}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"{source}: must be an object of fields")
    return parse_spec(data, source=source)


def _describe(error: ValidationError) -> str:
    """All faults on one line: field names and reasons, without input values."""
    faults = []
    for fault in error.errors(include_input=False, include_url=False, include_context=False):
        where = ".".join(str(part) for part in fault["loc"])
        reason = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            reason = "unknown field"
        faults.append(f"{where}: {reason}" if where else reason)
    return "; ".join(faults)


def _resolve_paths(spec: JobSpec, folder: Path) -> JobSpec:
    """Make local paths absolute, so that a plan means the same wherever it is read."""

    def resolve(uri: str) -> str:
        if uri.startswith("file://"):
            uri = uri.removeprefix("file://")
        if "://" in uri:
            return uri.rstrip("/")
        try:
            return str((folder / Path(uri).expanduser()).resolve())
        except RuntimeError as error:  # ~somebody
            raise SpecError(f"{uri}: there is no such home folder") from error

    def resolve_table(uri: str) -> str:
        return TableAddress.parse(uri).resolved(resolve).uri

    model = spec.model
    if model.path.startswith(("/", "./", "../", "~/")):
        model = model.model_copy(update={"path": resolve(model.path)})
    planner = spec.planner
    if planner.gpu_table is not None:
        planner = planner.model_copy(update={"gpu_table": resolve(planner.gpu_table)})
    output = {"uri": resolve_table(spec.output.uri)}
    if spec.output.staging_uri is not None:
        output["staging_uri"] = resolve(spec.output.staging_uri)
    return spec.model_copy(
        update={
            "input": spec.input.model_copy(update={"uri": resolve_table(spec.input.uri)}),
            "output": spec.output.model_copy(update=output),
            "model": model,
            "planner": planner,
        }
    )
