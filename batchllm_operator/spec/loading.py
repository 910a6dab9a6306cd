"""Reads job specs from YAML files, with errors that name fields but repeat no values."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from batchllm_operator.errors import SpecError
from batchllm_operator.spec.addresses import FOLDER
from batchllm_operator.spec.faults import describe
from batchllm_operator.spec.limits import MAX_FILE_BYTES, LimitError, check_tree, shown
from batchllm_operator.spec.model import SPEC_VERSION, JobSpec

_MAX_VERSION: Final = 1_000_000


class _SpecLoader(yaml.SafeLoader):
    """Refuses repeated fields, and files that are too large once aliases of aliases expand."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        check_tree(node, _child_nodes)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        counts = Counter(key.value for key in keys if key.value != "<<")
        for key in reversed(keys):
            if counts[key.value] > 1:
                reason = f"field {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
        return super().construct_mapping(node, deep)


def load_spec(source: str | Path | Mapping[str, Any] | JobSpec) -> JobSpec:
    """Read a job spec from a YAML file or its fields; a spec is returned as it is.

    Relative paths in it start at the file's folder, for a mapping at the working directory. They
    keep their symbolic links, which may lead elsewhere on the machines that run the plan.

    Raises:
        SpecError: the file is absent, isn't YAML, or doesn't hold a valid spec; the
            message names the file and every offending field, never a value.
    """
    if isinstance(source, JobSpec):
        return source
    data: object
    if isinstance(source, Mapping):
        name, folder, data = "job spec", Path.cwd(), source
    else:
        path = Path(source)
        name, folder = f"job spec {path}", path.absolute().parent
        data = _parse_yaml(_read_text(path, name), name)
    if not isinstance(data, Mapping):
        raise SpecError(f"{name}: must be a mapping of fields, such as 'name: my_job'")
    return parse_spec(_with_schema(data, folder, name), source=name, folder=folder)


def parse_spec(data: Mapping[str, object], *, source: str, folder: Path | None = None) -> JobSpec:
    """Validate `data` as a `JobSpec`; a SpecError names `source` and every offending field.

    Args:
        folder: where relative paths start; None leaves them, as a stored spec has none.
    """
    version = data.get("spec_version")
    if isinstance(version, int) and version != SPEC_VERSION and abs(version) < _MAX_VERSION:
        raise SpecError(
            f"{source}: spec_version is {version}; this release reads version {SPEC_VERSION}"
        )
    try:
        return JobSpec.model_validate(data, context={FOLDER: folder})
    except ValidationError as error:
        faults = describe(error, JobSpec)
    raise SpecError(f"{source}: {faults}")  # not chained: the cause may show a value


def parse_spec_json(text: str, *, source: str) -> JobSpec:
    """Validate a spec in JSON, as from `JobSpec.model_dump_json`; see `parse_spec`."""
    return parse_spec(_parse_object(text, source), source=source)


def _parse_object(text: str, source: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_unique_fields)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise SpecError(f"{source}: not JSON: {reason}") from error
    if not isinstance(data, dict):
        raise SpecError(f"{source}: must be an object of fields")
    return data


def _with_schema(data: Mapping[str, Any], folder: Path, source: str) -> Mapping[str, Any]:
    """The fields of a spec, or of one of its prompts, with schemas that lie in other files."""
    if isinstance(prompts := data.get("prompts"), dict):
        read = {
            name: _with_schema(each, folder, f"{source}: prompts.{shown(name)}")
            if isinstance(each, dict)
            else each
            for name, each in prompts.items()
        }
        return {**data, "prompts": read}
    form = data.get("response_format")
    if not isinstance(form, dict):
        return data
    name = form.get("json_schema")
    if not isinstance(name, str) or not name.endswith((".json", ".yaml", ".yml")):
        return data
    source = f"{source}: response_format.json_schema: {shown(name)}"
    try:
        text = _read_text(folder / Path(name).expanduser(), source)
    except RuntimeError:  # ~user
        raise SpecError(f"{source}: there is no such home folder") from None
    parse = _parse_object if name.endswith(".json") else _parse_yaml
    return {**data, "response_format": {**form, "json_schema": parse(text, source)}}


def _read_text(path: Path, source: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        fault = f"isn't text in UTF-8, from line {line} on; save it as UTF-8"
        raise SpecError(f"{source}: {fault}") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{source}: can't be read: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise SpecError(f"{source}: is larger than {MAX_FILE_BYTES:,} bytes")
    return text


def _parse_yaml(text: str, source: str) -> object:
    try:
        return yaml.load(text, _SpecLoader)  # noqa: S506 - a SafeLoader
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        fault = f"not YAML at line {line}: holds the character {text[error.position]!r}"
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reasons = (getattr(error, name, None) for name in ("context", "problem"))
        problem = ", ".join(filter(None, reasons)) or "not valid YAML"
        if mark and text[mark.index : mark.index + 1] == "\t":
            problem += "; indent with spaces"
        fault = f"not YAML{where}: {shown(problem)}"
    except LimitError as error:
        fault = str(error)
    except RecursionError:
        fault = "not YAML: nested too deeply"
    except (ValueError, KeyError, AttributeError):  # an invalid date; `!!bool perhaps`
        fault = "not YAML: a value isn't what its form or its tag says"
    raise SpecError(f"{source}: {fault}")  # not chained: the library's errors show lines


def _child_nodes(node: yaml.Node | None) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from chain.from_iterable(node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _unique_fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if a field is repeated."""
    for name, number in Counter(name for name, _ in pairs).items():
        if number > 1:
            raise ValueError(f"field {shown(name)!r} is given twice")
    return dict(pairs)
