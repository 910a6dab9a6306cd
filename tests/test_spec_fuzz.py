"""Whatever a spec's reader is given: it is a spec, or refused by one clear line."""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.fake_job import DS, document_rows, fake_spec, write_table
from support.levels import examples

from batchllm_operator.errors import BatchLLMError, SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import JobSpec, load_spec, parse_spec, parse_spec_json
from batchllm_operator.spec.limits import MAX_FILE_BYTES

FULL: dict[str, Any] = {
    "spec_version": 1,
    "name": "daily",
    "input": {
        "uri": "s3://lake/documents",
        "partition_column": "date",
        "key": ["a", "b"],
        "filter": [
            {"column": "lang", "value": "en"},
            {"column": "n", "op": "not in", "value": [1, 2.5, "x", True]},
        ],
    },
    "prompt": {"system": "Answer.", "template": "{doc}: {query}", "chat_template": True},
    "model": {"path": "./model", "revision": "main", "trust_remote_code": False},
    "sampling": {"max_tokens": 64, "temperature": 0.0, "seed": 7, "stop": ["#"], "top_k": 4},
    "output": {"uri": "delta+s3://lake/out", "staging_uri": "s3://lake/jobs", "carry": ["query"]},
    "engine": {"max_model_len": 2048, "extra_args": {"a": {"b": [1, "x"]}}},
    "planner": {
        "num_shards": 4,
        "estimated_output_tokens": {"column": "n"},
        "memory_budget_bytes": "4GiB",
    },
    "on_empty": "commit",
    "max_failed_fraction": 0.01,
    "reuse_outputs": True,
}
CANARY = "swordfish"

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [
            *("\ud800", "\0", "../..", "/", "~", "~nobody/x", "{", "{}", "{a.b}", "{{{a}}}", "%s"),
            *("iceberg://", "delta+", "delta+delta+", "iceberg://c/a..b", "file://", "://"),
            *("s3://", "s3://[", "s3://a:b@c", "9" * 5000, "1e999GiB", "-1", "\u0661", "nan"),
            "a\nb",
            *(10**400, -(10**400), 1 << 63, float("inf"), float("nan")),
        ]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a spec something can be put in the place of what is there."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, name))


PLACES = list(places(FULL))


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """A spec with one to three things wrong, or only odd."""
    fields = copy.deepcopy(FULL)
    for path in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        parent: Any = fields
        try:
            for name in path[:-1]:
                parent = parent[name]
            match draw(st.sampled_from(["changed", "changed", "without", "more"])):
                case "changed":
                    parent[path[-1]] = draw(values)
                case "without":
                    del parent[path[-1]]
                case "more":
                    parent[draw(st.text())] = draw(values)
        except (KeyError, IndexError, TypeError):  # an earlier change has taken the place away
            continue
    return fields


def read(reader: Any, *args: Any, **kwargs: Any) -> JobSpec | None:
    """The spec, as it survives being stored; None if it is refused as it should be."""
    try:
        spec = reader(*args, **kwargs)
    except SpecError as error:
        message = str(error)
        assert message.isprintable(), "one line, whatever the spec holds"
        assert len(message) < 10_000
        return None
    assert isinstance(spec, JobSpec)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert len(spec.identity) == 64
    assert spec.input_columns
    return spec


@given(fields=specs())
@settings(max_examples=examples(400))
@example(FULL)
def test_fields_of_any_kind(fields: dict[str, Any]) -> None:
    spec = read(parse_spec, fields, source="job")
    assert (read(parse_spec_json, json.dumps(fields), source="job") is None) == (spec is None)


@given(text=st.text() | st.binary(max_size=60).map(lambda data: data.decode("latin-1")))
@settings(max_examples=examples(150))
def test_text_that_is_hardly_json(text: str) -> None:
    assert read(parse_spec_json, text, source="--job-json") is None


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs") / "job.yaml"


ODD_YAML = [
    *(b"!!bool x", b"!!timestamp x", b"!!int x", b"!!float x", b"!!set {a}", b"!!binary '@'"),
    *(b"!!omap [a: 1]", b"!!python/object/apply:os.system [x]", b"<<: *a", b"2026-99-99"),
    *(b"&a [*a]", b"&a {<<: *a}", b"? {a: b}", b"0x" + b"f" * 5000, b"1:60:60", b"\\0"),
]
WHOLE = yaml.safe_dump(FULL).encode()


@given(data=st.data())
@settings(max_examples=examples(200))
def test_a_file_with_a_part_changed(job_file: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(WHOLE)))
    end = data.draw(st.integers(start, min(len(WHOLE), start + 20)))
    piece = data.draw(
        st.binary(max_size=12)
        | st.text(alphabet="{}[]:-&*!|>?'\"%@` \n\t#,<=0a~.", max_size=12).map(str.encode)
        | st.sampled_from(ODD_YAML)
    )
    job_file.write_bytes(WHOLE[:start] + piece + WHOLE[end:])
    read(load_spec, job_file)


def _aliases(first: str, following: str) -> str:
    """Ten levels of ten references each to the level before."""
    lines = [f"a0: &a0 {first}"]
    for level in range(1, 11):
        lines.append(f"a{level}: &a{level} {following % ','.join([f'*a{level - 1}'] * 10)}")
    return "\n".join(lines)


BOMBS = {
    "lists in lists": ("a: " + "[" * 100_000, "too deeply"),
    "mappings in lists": ("a: " + "[{a: " * 1_500, "too deeply"),
    "indented": ("".join(" " * depth + "a:\n" for depth in range(700)), "too deeply"),
    "aliases of aliases": (_aliases("[x,x,x,x,x,x,x,x,x,x]", "[%s]"), "more than 500,000 values"),
    "merges of merges": (_aliases("{x: 1}", "{<<: [%s]}"), "more than 500,000 values"),
    "a list in itself": ("a: &a [*a]", "holds itself"),
    "a merge of itself": ("a: &a {<<: *a}", "holds itself"),
    "large": ("a: " + "x" * MAX_FILE_BYTES, "larger than"),
}


@pytest.mark.parametrize(("text", "reason"), BOMBS.values(), ids=BOMBS)
def test_a_file_that_would_take_all_memory_or_time(job_file: Path, text: str, reason: str) -> None:
    job_file.write_text(text)
    with pytest.raises(SpecError, match=reason):
        load_spec(job_file)


@pytest.mark.parametrize("path", ["/dev/zero", "\0", "x" * 5000, "/dev/null", "\ud800"])
def test_a_path_that_is_no_file_of_a_spec(path: str) -> None:
    with pytest.raises(SpecError, match=r"^job spec "):
        load_spec(path)


@pytest.mark.parametrize("depth", [65, 300, 900, 5_000, 100_000])
@pytest.mark.parametrize("kind", ["[]", "{}"])
def test_json_that_is_too_deep(depth: int, kind: str) -> None:
    value = "[" * depth + "]" * depth if kind == "[]" else '{"a":' * depth + "1" + "}" * depth
    others = {name: section for name, section in FULL.items() if name != "engine"}
    whole = json.dumps(others)[:-1] + f', "engine": {{"extra_args": {{"a": {value}}}}}}}'
    with pytest.raises(SpecError, match="deep"):
        parse_spec_json(whole, source="--job-json")


def test_a_json_field_that_is_given_twice() -> None:
    """The last would win, unseen; YAML files are refused for it, too."""
    whole = json.dumps(FULL)[:-1] + ', "name": "other"}'
    with pytest.raises(SpecError, match="'name' is given twice"):
        parse_spec_json(whole, source="--job-json")


def test_patterns_take_no_time_for_long_texts() -> None:
    """A second at most for a megabyte, where a pattern that backtracks would take years."""
    many = 2 * 10**4
    bombs = ["-" * 10 * many, "-----BEGIN " * many, "-----BEGIN " + "A " * many, "sk-" * many]
    bombs += ["a_" * many + "secret", "aA" * many, "{a}" * (many // 10), "hf_" * many]
    for bomb in bombs:
        fields = copy.deepcopy(FULL)
        fields["prompt"]["system"] = bomb
        fields["engine"]["extra_args"] = {bomb: 1}
        read(parse_spec, fields, source="job")
    fields = copy.deepcopy(FULL)
    fields["input"]["uri"] = "s3://b/t?" + "&a=b" * many
    read(parse_spec, fields, source="job")
    fields["prompt"]["template"] = "{a:" * many + "}" * many
    assert read(parse_spec, fields, source="job") is None


@pytest.mark.parametrize(
    "text",
    [
        f"name: 'x\nengine: {{extra_args: {{x: '{CANARY}",
        f"name: [x\nmodel: {CANARY}\n  path: {CANARY}",
        f"sampling: {{max_tokens: !!int {CANARY}}}",
        f"sampling: {{max_tokens: !!float {CANARY}, x: !!bool {CANARY}}}",
        f"planner: {{memory_budget_bytes: 3{CANARY}}}",
        f"planner: {{memory_budget_bytes: {CANARY}}}",
        f"model: !x {CANARY}",
        f"engine: {{extra_args: {{hf_token: {CANARY}}}}}\nsampling: {{max_tokens: {CANARY}}}",
    ],
)
def test_no_value_of_a_broken_file_is_repeated(job_file: Path, text: str) -> None:
    """Nor by the causes, which Airflow logs with it."""
    job_file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(job_file)
    error: BaseException | None = caught.value
    while error is not None:
        assert CANARY not in f"{error!s} {error!r}"
        error = error.__cause__ or error.__context__


def test_a_message_stays_short_and_on_one_line() -> None:
    fields = copy.deepcopy(FULL)
    fields["sampling"]["stop_token_ids"] = ["x"] * 1000
    fields["a\nbatchllm: error: b\x1b[31m"] = 1
    fields["x" * 100_000] = 1
    with pytest.raises(SpecError, match="and 982 more") as caught:
        parse_spec(fields, source="job")
    assert len(str(caught.value)) < 5_000
    assert str(caught.value).isprintable()


# Numbers that no machine can mean, as far as the commit


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = tmp_path_factory.mktemp("lake")
    rows = [{**row, "n": number} for number, row in enumerate(document_rows(2, 2))]
    write_table(lake / "documents", rows)
    return lake


BIG = [(1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 70, 10**400]
NUMBERS = """
sampling: max_tokens min_tokens top_k seed temperature repetition_penalty stop_token_ids
engine: max_model_len block_size max_num_seqs max_num_batched_tokens kv_cache_memory_bytes
engine: tensor_parallel_size
planner: num_shards part_rows estimated_output_tokens memory_budget_bytes
input: filter
"""


@pytest.mark.parametrize("line", NUMBERS.strip().splitlines())
def test_numbers_that_are_too_large(lake: Path, line: str) -> None:
    section, _, names = line.partition(": ")
    for name, number in itertools.product(names.split(), BIG):
        value: Any = {"stop_token_ids": [number], "filter": [{"column": "n", "value": number}]}
        changes = {section: {name: value.get(name, number)}, "on_empty": "commit"}
        try:
            plan = plan_job(fake_spec(lake, **changes), DS)
            run_worker(plan)
        except BatchLLMError as error:
            assert len(str(error)) < 1_000


def test_a_model_path_that_is_too_long(lake: Path) -> None:
    spec = fake_spec(lake, model={"path": "/" + "x" * 5000}, engine={"backend": "vllm"})
    with pytest.raises(BatchLLMError, match="File name too long"):
        plan_job(spec, DS)
