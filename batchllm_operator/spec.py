"""The job spec: one YAML file that says what a job reads, asks, runs and writes.

This is where untrusted input enters, so it is pydantic: unknown fields are refused,
every value is checked once, and no error message repeats a value that may be secret.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from batchllm_operator.errors import SpecError

SPEC_VERSION: Final = 1

OUTPUT_COLUMNS: Final = (
    "generated_text",
    "finish_reason",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "error",
    "model",
    "run_id",
)
"""Columns that a job adds to the output table; keys and carried columns may not use these names."""

# What gives a secret away: names of settings that hold one, and the published
# shapes of common credentials. Matched values are never repeated in a message.
_SECRET_NAME = re.compile(
    r"(^|[_\-])(token|(secret|password|passwd|((api|access|private|secret)_?key)|credential)s?"
    r"|access_?key_id)$",
    re.IGNORECASE,
)
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_VALUE = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_\-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_template(template: str) -> str:
    for column in template_columns(template):
        if not column:
            raise ValueError("has an empty {}: name a column, or write {{}} for braces")
    return template


def template_columns(template: str) -> tuple[str, ...]:
    """Names of the columns that `template` places, in order of first use.

    A place is `{column}`; `{{` and `}}` are literal braces. Anything else that Python's
    format strings allow (attributes, indexes, conversions, formats) is refused: a
    template can place data and do nothing more.

    Raises:
        ValueError: the template isn't well formed.
    """
    columns: dict[str, None] = {}
    for _, name, format_spec, conversion in Formatter().parse(template):
        if name is None:
            continue
        if format_spec or conversion:
            raise ValueError(f"{{{name}}} may not carry a conversion or a format")
        if any(mark in name for mark in ".[]"):
            raise ValueError(f"{{{name}}} may not reach into a value; name a column")
        columns[name] = None
    return tuple(columns)


Columns = Annotated[
    tuple[str, ...], BeforeValidator(_as_list, json_schema_input_type=str | tuple[str, ...])
]
Template = Annotated[str, Field(min_length=1), AfterValidator(_check_template)]


class _Section(BaseModel):
    """A part of the spec: immutable, no unknown fields, no values in error messages."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )


class FilterTerm(_Section):
    """One condition on an input column; all conditions of a spec must hold."""

    column: str
    """Input column that is compared."""
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"] = "=="
    """Comparison; `in` and `not in` take a list."""
    value: str | int | float | bool | tuple[str | int | float | bool, ...]
    """What the column is compared with."""

    @model_validator(mode="after")
    def _check_list(self) -> FilterTerm:
        if (self.op in ("in", "not in")) != isinstance(self.value, tuple):
            raise ValueError("'in' and 'not in' take a list; the other comparisons one value")
        return self


class InputSpec(_Section):
    """The table that the job reads."""

    uri: str = Field(min_length=1)
    """Parquet dataset: a local path (relative to the spec file) or `s3://bucket/table`."""
    partition_column: str = Field(default="ds", min_length=1)
    """Hive-style partition column (`uri/ds=2026-01-31/...`) that `--ds` selects."""
    key: Annotated[Columns, Field(min_length=1)]
    """Column, or list of columns, that identifies a row within the partition."""
    filter: tuple[FilterTerm, ...] = ()
    """Conditions that a row must meet to take part."""


class PromptSpec(_Section):
    """How a row becomes a prompt."""

    system: str | None = None
    """Constant text that comes first in every prompt (braces are literal): the system
    message when `chat_template` is on, else put before the template as it is."""
    template: Template
    """Text with `{column}` places; `{{` and `}}` are literal braces. Put the columns
    that many rows share first: what comes first can be shared."""
    chat_template: bool = False
    """Wrap the prompt in the model's chat template, as one user message."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the input columns that the template places."""
        return template_columns(self.template)


class ModelSpec(_Section):
    """The model that generates."""

    path: str = Field(min_length=1)
    """Folder with the model (starting with `/`, `./`, `../` or `~/`; relative to the
    spec file) or the model's name on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository brings along. Off unless you vouch for it."""


class SamplingSpec(_Section):
    """How tokens are chosen. The default is greedy: the likeliest token each time."""

    max_tokens: int = Field(default=128, ge=1)
    """Most tokens generated for a row."""
    min_tokens: int = Field(default=0, ge=0)
    """Fewest tokens generated before a stop is honoured."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy; exact duplicate prompts are then generated once."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many likeliest tokens; 0 is all of them."""
    seed: int | None = None
    """Seed of each request's sampling; needed for repeatable outputs when not greedy."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """Above 1 discourages tokens that occurred before."""
    stop: Columns = ()
    """Strings at which generation ends; not part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids at which generation ends."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says; for benchmarks."""

    @property
    def is_greedy(self) -> bool:
        """Whether equal prompts give equal outputs, so that one may stand for all."""
        return self.temperature == 0.0


class OutputSpec(_Section):
    """The table that the job writes."""

    uri: str = Field(min_length=1)
    """Parquet dataset, partitioned like the input: a local path or `s3://bucket/table`.
    The job keeps plans, parts and reports under `_batchllm/` in it, which readers skip."""
    carry: Columns = ()
    """Input columns to carry over into the output, besides the key."""


class EngineSpec(_Section):
    """Settings of the inference engine. Unset ones are chosen for the device."""

    backend: Literal["vllm", "fake"] = "vllm"
    """`fake` makes up outputs without a model: for trying out the pipeline only."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of a prompt and its output together; unset: what the model allows."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of weights and activations."""
    block_size: int | None = Field(default=None, ge=1)
    """Tokens per KV-cache block."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Most requests that run at a time."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """The chunk size: the token budget of one engine step."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of the GPU's memory that the engine may take."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache, in place of a share of the memory."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one engine spans."""
    enforce_eager: bool | None = None
    """Skip compilation and CUDA graphs; unset: on for CPU, off for GPUs."""
    extra_args: Mapping[str, JsonValue] = Field(default_factory=dict)
    """Any other engine argument of vLLM, by its Python name."""


class PlannerSpec(_Section):
    """How the work is cut."""

    num_shards: int = Field(default=1, ge=1)
    """GPU tasks that share the job; fewer are made where there are fewer groups."""
    estimated_output_tokens: int | None = Field(default=None, ge=1)
    """Output length to plan with; unset: `sampling.max_tokens`."""
    part_rows: int = Field(default=500, ge=1)
    """Requests per output part: what a restart may have to generate again. Parts end
    where a group ends, unless the group alone is larger."""


class JobSpec(_Section):
    """A job: rows of a table in, one generated text for each row out."""

    spec_version: Literal[1]
    """Version of this format; 1."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,99}$")
    """The job's name: letters, digits, `_` and `-`. Plans and reports are filed under it."""
    input: InputSpec
    """The table that the job reads."""
    prompt: PromptSpec
    """How a row becomes a prompt."""
    model: ModelSpec
    """The model that generates."""
    sampling: SamplingSpec = SamplingSpec()
    """How tokens are chosen; greedy by default."""
    output: OutputSpec
    """The table that the job writes."""
    engine: EngineSpec = EngineSpec()
    """Settings of the inference engine."""
    planner: PlannerSpec = PlannerSpec()
    """How the work is cut."""
    on_empty: Literal["fail", "commit"] = "fail"
    """A partition without rows: `fail` (exit code 3), or `commit` an empty partition."""
    max_failed_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    """The commit is refused when a larger share of the rows has an error instead of a text."""

    @model_validator(mode="before")
    @classmethod
    def _check_secrets(cls, data: object) -> object:
        for where in _find_secrets(data):
            raise ValueError(
                f"{where} looks like a secret; specs are stored with every plan, so take"
                " credentials from the environment or an Airflow connection instead"
            )
        return data

    @model_validator(mode="after")
    def _check_columns(self) -> JobSpec:
        for column in self.kept_columns:
            if column in OUTPUT_COLUMNS:
                raise ValueError(
                    f"column {column!r} can't be a key or carried over: the job writes a column of"
                    " that name; rename it in a view of the input"
                )
            if column == self.input.partition_column:
                raise ValueError(f"column {column!r} is the partition column; it is always kept")
        return self

    @property
    def identity(self) -> str:
        """SHA-256 (hex) of all settings that outputs depend on.

        Settings that only say how fast or how strictly the job runs are left out, so
        that changing them keeps the parts that are already paid for.
        """
        neutral: dict[str, Any] = {
            "engine": {
                "max_num_seqs",
                "max_num_batched_tokens",
                "gpu_memory_utilization",
                "kv_cache_memory_bytes",
                "tensor_parallel_size",
                "enforce_eager",
                "block_size",
            },
            "on_empty": True,
            "max_failed_fraction": True,
        }
        canonical = json.dumps(
            self.model_dump(mode="json", exclude=neutral), sort_keys=True, separators=(",", ":")
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def kept_columns(self) -> tuple[str, ...]:
        """Input columns that the output table has, the key first, each once."""
        return tuple(dict.fromkeys((*self.input.key, *self.output.carry)))

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Input columns that the job reads, each once; the partition's only if it is placed."""
        return tuple(dict.fromkeys((*self.kept_columns, *self.prompt.columns)))


def _find_secrets(value: object, path: str = "") -> Iterator[str]:
    """Yield the dotted names of fields in `value` that hold something like a secret."""
    if isinstance(value, Mapping):
        for name, child in value.items():
            here = f"{path}.{name}" if path else str(name)
            if child is not None and _names_secret(str(name)) and not isinstance(child, Mapping):
                yield here
            else:
                yield from _find_secrets(child, here)
    elif isinstance(value, list | tuple):
        for idx, child in enumerate(value):
            yield from _find_secrets(child, f"{path}[{idx}]")
    elif isinstance(value, str) and (_SECRET_VALUE.search(value) or _has_user_info(value)):
        yield path


def _names_secret(name: str) -> bool:
    """Whether a setting of that name (in snake, kebab or camel case) holds a secret."""
    return _SECRET_NAME.search(_CAMEL_CASE.sub("_", name)) is not None


def _has_user_info(value: str) -> bool:
    """Whether `value` is a URI with a password or key in its authority or query."""
    if "://" not in value or any(c.isspace() for c in value):
        return False
    try:
        parts = urlsplit(value)
    except ValueError:  # broken; whoever opens it will say so
        return "@" in value
    names = (pair.partition("=")[0] for pair in parts.query.split("&"))
    return "@" in parts.netloc or any(map(_names_secret, names))


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

    model = spec.model
    if model.path.startswith(("/", "./", "../", "~/")):
        model = model.model_copy(update={"path": resolve(model.path)})
    return spec.model_copy(
        update={
            "input": spec.input.model_copy(update={"uri": resolve(spec.input.uri)}),
            "output": spec.output.model_copy(update={"uri": resolve(spec.output.uri)}),
            "model": model,
        }
    )
