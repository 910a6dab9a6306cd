"""What pages show of the code: spec, commands, errors, report, metrics, chart, decisions."""

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, Final, NamedTuple

import yaml
from pydantic import ByteSize

from batchllm_operator import cli, errors
from batchllm_operator.metrics import ShardCollector
from batchllm_operator.spec import Decides, JobSpec
from batchllm_operator.spec.expect import Bounds
from batchllm_operator.spec.fields import MAX_COUNT, Section
from batchllm_operator.spec.question import QuestionSpec
from batchllm_operator.stored_plan.run_report import RunReport

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = ROOT / "docs" / "reference" / "examples.yaml"
CHANGES: Final = {
    Decides.OUTPUT | Decides.PLAN: "another plan; no output is reused",
    Decides.PLAN: "another plan",
    Decides(0): "finished parts are kept",
}
"""What comes of a change of a field, by what it decides."""
_BYTES: Final = 1 << 20
"""Sizes from here on have a unit."""


class SpecField(NamedTuple):
    """A field of the job spec."""

    section: str
    """The dotted path of its section, or "" at the top."""
    name: str
    schema: Mapping[str, Any]
    is_required: bool
    decides: Decides | None
    """None for a section."""

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}".lstrip(".")


# The job spec


def spec_fields() -> Iterator[SpecField]:
    """All fields of the job spec, sections after the fields of the section that has them.

    Those of `prompts` are the fields of other sections, where they are explained; `Bounds` are
    explained by the texts of the fields that have them.
    """
    schema = JobSpec.model_json_schema()
    classes = {cls.__name__: cls for cls in _subclasses(Section)}
    todo = [("", "JobSpec", schema)]
    while todo:
        section, name, described = todo.pop(0)
        required = described.get("required", ())
        fields = described["properties"].items()
        if not section:
            fields = sorted(fields, key=lambda item: item[0] not in required)
        for field, of_field in fields:
            marks = classes[name].model_fields[field].metadata
            decides = next((mark for mark in marks if isinstance(mark, Decides)), None)
            spec_field = SpecField(section, field, of_field, field in required, decides)
            yield spec_field
            for other in dict.fromkeys(re.findall(r"#/\$defs/(\w+)", str(of_field))):
                if other in classes and classes[other] not in (QuestionSpec, Bounds):
                    below = ".COLUMN" if "additionalProperties" in of_field else ""
                    todo.append((spec_field.path + below, other, schema["$defs"][other]))


def _subclasses(cls: type[Section]) -> Iterator[type[Section]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def spec() -> str:
    """A heading for each field, with type, default, what a change does, meaning and example."""
    texts = examples()
    lines, section = list[str](), None
    for field in spec_fields():
        if field.section != section:
            section = field.section
            lines += [f"## `{section}`" if section else "## At the top", ""]
        lines += [f"### {field.name} {{#{field.path}}}", "", _line_on(field), ""]
        lines += [field.schema.get("description", ""), ""]
        if field.decides is not None:
            text = next(text for text, example in texts.items() if has(example, field.path))
            lines += ["```yaml", text, "```", ""]
    return "\n".join(lines)


def examples() -> dict[str, Any]:
    """The examples of fields by their text."""
    items = EXAMPLES.read_text(encoding="utf-8").split("\n- ")[1:]
    texts = [dedent(f"  {item}").strip() for item in items]
    return {text: yaml.safe_load(text) for text in texts}


def has(example: object, path: str) -> bool:
    name, _, rest = path.partition(".")
    if name == "COLUMN" and isinstance(example, dict):
        return any(has(each, rest) for each in example.values())
    if isinstance(example, list):
        return any(has(each, path) for each in example)
    if not isinstance(example, dict) or name not in example:
        return False
    return not rest or has(example[name], rest)


def _line_on(field: SpecField) -> str:
    if "default" in field.schema and field.decides is not None:
        value = field.schema["default"]
        default = f"default `{_as_yaml(value)}`" if value is not None else "unset by default"
    else:
        default = "required" if field.is_required else "empty by default"
    change = f" · if it changes: {CHANGES[field.decides]}" if field.decides is not None else ""
    return f"*{type_of(field.schema)}* · {default}{change}"


def _as_yaml(value: object) -> str:
    if type(value) is int and value >= _BYTES:
        return ByteSize(value).human_readable().replace(".0", "")
    return yaml.safe_dump(value, default_flow_style=True).partition("\n...")[0].strip()


def type_of(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return "any value" if name == "JsonValue" else "section"
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(f"`{_as_yaml(each)}`" for each in choices)
    if "byte" in str(schema.get("title", "")).lower() and "pattern" in str(schema):
        return "number of bytes, or text such as `4GiB`"
    if forms := schema.get("anyOf", schema.get("oneOf")):
        kinds = (type_of(form) for form in forms if form.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    kind = str(schema.get("type", "any value"))
    if kind == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    if kind == "object":
        return f"mapping of names to {type_of(_values_of(schema))}"
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    known = {key: schema[key] for key in limits if abs(schema.get(key, MAX_COUNT)) < MAX_COUNT}
    words = {"string": "text", "boolean": "true or false"}.get(kind, kind)
    return " ".join([words, *(f"{limits[key]} {bound:,}" for key, bound in known.items())])


def _values_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    values = schema.get("additionalProperties", {})
    return values if isinstance(values, Mapping) else {}


# The others


def commands() -> str:
    """Each command of `batchllm` with its options, as argparse has them."""
    lines = []
    for name, command in command_parsers().items():
        usage = " ".join(command.format_usage().removeprefix("usage: ").split())
        lines += [f"## batchllm {name} {{#{name}}}", "", command.description or "", ""]
        lines += ["```text", usage, "```", "", "| option | |", "|---|---|"]
        for option in options_of(command):
            names = ", ".join(f"`{each}`" for each in option.option_strings) or f"`{option.dest}`"
            text = (option.help or "").replace("|", r"\|")
            choices = " or ".join(f"`{each}`" for each in option.choices or ())
            given = option.metavar or ()
            values = (given,) if isinstance(given, str) else given
            value = choices or " ".join(f"`{each}`" for each in values)
            lines.append(f"| {names} {value} | {text} |")
        lines.append("")
    return "\n".join(lines)


def command_parsers() -> Mapping[str, argparse.ArgumentParser]:
    """The parser of each command, by name."""
    actions = cli._parser()._actions
    [found] = [each for each in actions if isinstance(each, argparse._SubParsersAction)]
    return dict(found.choices)


def options_of(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """What a user may give; not what the package gives to itself."""
    hidden = (argparse.SUPPRESS, "show this help message and exit")
    return [each for each in command._actions if each.help not in hidden]


def error_classes() -> str:
    """All that errors.py defines, by its docstrings up to what programs read of an error."""
    lines = ["| error | code | cause, and what to do |", "|---|---|---|"]
    for name, each in vars(errors).items():
        if isinstance(each, type) and issubclass(each, BaseException) and each is not BaseException:
            code = getattr(each, "exit_code", None)
            text = " ".join((each.__doc__ or "").partition("\n    `kinds`")[0].split())
            lines.append(f"| `{name}` | {'130, 143' if code is None else code} | {text} |")
    return "\n".join(lines)


def report() -> str:
    """The fields of report.json that have a docstring."""
    lines = ["| field | meaning |", "|---|---|"]
    [of_class] = ast.parse(inspect.getsource(RunReport)).body
    for field, text in pairwise(of_class.body):  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            meaning = " ".join(ast.literal_eval(text.value).split())
            lines.append(f"| `{ast.unparse(field.target)}` | {meaning} |")
    return "\n".join(lines)


def decisions() -> str:
    """A link to each decision by its title."""
    pages = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    titles = (page.read_text(encoding="utf-8").partition("\n")[0] for page in pages)
    return "\n".join(
        f"- [{title.removeprefix('# ')}]({page.name})"
        for title, page in zip(titles, pages, strict=True)
    )


def metrics() -> str:
    """What a shard and its worker serve to Prometheus."""
    lines = ["| name | type | meaning |", "|---|---|---|"]
    for family in ShardCollector(job="", ds="", worker=0).collect():
        name = f"{family.name}{'_total' if family.type == 'counter' else ''}"
        name += "_info" if family.type == "info" else ""
        lines.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(lines)


def chart() -> str:
    """The table of values of the chart's README."""
    text = (ROOT / "helm" / "batchllm" / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- values")[2].partition("-->\n")[2]
    return table.partition("<!-- end of values")[0]


GENERATED: Final[Mapping[str, Callable[[], str]]] = {
    "spec": spec,
    "commands": commands,
    "errors": error_classes,
    "report": report,
    "decisions": decisions,
    "metrics": metrics,
    "chart": chart,
}
