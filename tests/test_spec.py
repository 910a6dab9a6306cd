"""The job spec: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchllm_operator.errors import ExitCode, SpecError
from batchllm_operator.spec import (
    Decides,
    JobSpec,
    SamplingSpec,
    TableAddress,
    load_spec,
    parse_spec,
    template_columns,
)
from batchllm_operator.spec.fields import Section
from batchllm_operator.spec.question import QuestionSpec
from batchllm_operator.storage import Folder

AWS_KEY = "AKIA" + "IOSFODNN7EXAMPLE"
HF_TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ"
MINIMAL: dict[str, Any] = {
    "spec_version": 1,
    "name": "snippets",
    "input": {"uri": "s3://lake/documents", "key": "id"},
    "prompt": {"template": "{document}"},
    "model": {"path": "org/model"},
    "output": {"uri": "s3://lake/snippets"},
}


def changed(**changes: Any) -> dict[str, Any]:
    """`MINIMAL` with values put at dotted names (`__` for a dot)."""
    data = copy.deepcopy(MINIMAL)
    for name, value in changes.items():
        *sections, field = name.split("__")
        section = data
        for each in sections:
            section = section.setdefault(each, {})
        section[field] = value
    return data


def parse(**changes: Any) -> JobSpec:
    return parse_spec(changed(**changes), source="job.yaml")


def refusal(data: dict[str, Any]) -> str:
    """The message with which `data` is refused."""
    with pytest.raises(SpecError) as caught:
        parse_spec(data, source="job spec /jobs/job.yaml")
    message = str(caught.value)
    assert message.startswith("job spec /jobs/job.yaml: ")
    assert "\n" not in message
    assert caught.value.exit_code == ExitCode.INVALID
    return message


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused_file(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


# What is accepted


FULL = """
spec_version: 1
name: daily_snippets
input:
  uri: s3://lake/documents
  partition_column: date
  key: [doc_id, query_id]
  filter:
    - {column: lang, value: en}
    - {column: score, op: ">=", value: 0.5}
    - {column: source, op: not in, value: [a, b]}
prompt:
  system: "Answer in JSON: {\\"a\\": 1}"
  template: "Document: {document}\\nQuery: {query}"
  chat_template: true
model: {path: Qwen/Qwen2.5-0.5B-Instruct, revision: main}
sampling: {max_tokens: 64, temperature: 0.7, top_p: 0.9, top_k: 40, seed: 7, stop: "###"}
output: {uri: s3://lake/snippets, carry: [query]}
engine: {max_model_len: 2048, dtype: bfloat16, extra_args: {swap_space: 4, kv_transfer: [1, x]}}
planner: {num_shards: 4, estimated_output_tokens: 32, part_rows: 100}
on_empty: commit
max_failed_fraction: 0.01
"""


def test_a_file_becomes_a_spec(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, FULL))
    assert spec.input.partition_column == "date"
    assert spec.input.key == ("doc_id", "query_id")
    assert [(t.column, t.op, t.value) for t in spec.input.filter] == [
        ("lang", "==", "en"),
        ("score", ">=", 0.5),
        ("source", "not in", ("a", "b")),
    ]
    assert spec.prompt.columns == ("document", "query")
    assert spec.input_columns == ("doc_id", "query_id", "query", "document")
    assert spec.sampling.stop == ("###",)
    assert not spec.sampling.is_greedy
    assert spec.engine.extra_args == {"swap_space": 4, "kv_transfer": [1, "x"]}
    assert spec.on_empty == "commit"


def test_a_spec_survives_being_stored(tmp_path: Path) -> None:
    """A plan keeps the spec as JSON; people may dump it to YAML again."""
    spec = load_spec(write(tmp_path, FULL))
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    again = load_spec(write(tmp_path, yaml.safe_dump(spec.model_dump(mode="json"))))
    assert again == spec
    assert again.identity == spec.identity


@pytest.mark.parametrize(("given", "expected"), [("on", "on"), ("off", "off"), ("'on'", "on")])
def test_a_switch_may_be_written_bare(tmp_path: Path, given: str, expected: str) -> None:
    """YAML reads a bare `on` as true."""
    replicas = "engine: {replicas: 2, max_model_len: 2048,"
    text = FULL.replace("engine: {max_model_len: 2048,", replicas)
    text = text.replace("planner: {", f"planner: {{runahead: {given}, ")
    assert load_spec(write(tmp_path, text)).planner.runahead == expected


@pytest.mark.parametrize(
    ("given", "expected"), [(3_000_000, 3_000_000), ("4GiB", 4 << 30), ("1.5 GB", 1_500_000_000)]
)
def test_a_memory_budget_is_bytes_or_a_size(given: int | str, expected: int) -> None:
    assert parse(planner={"memory_budget_bytes": given}).planner.memory_budget_bytes == expected


def test_output_lengths_come_from_one_place() -> None:
    field = "planner__estimated_output_tokens"
    column = parse(**{field: {"column": "expected"}})
    assert column.input_columns == ("id", "document", "expected")
    assert JobSpec.model_validate_json(column.model_dump_json()) == column
    assert parse(**{field: {"learned": True}}).planner.learns_output_tokens
    assert not parse(**{field: 5}).planner.learns_output_tokens
    for wrong in ({}, {"learned": False}, {"column": "a", "learned": True}, {"columns": "a"}):
        assert "planner.estimated_output_tokens" in refusal(changed(**{field: wrong}))
    for value in (0, "x", 1.5, [1]):
        message = refusal(changed(**{field: value}))
        assert message.count("planner.estimated_output_tokens: ") == 1


def test_a_minimal_spec_is_greedy_vllm_and_leaves_the_shards_to_the_plan() -> None:
    spec = parse()
    assert spec.sampling.is_greedy
    assert spec.engine.backend == "vllm"
    assert spec.planner.num_shards is None
    assert spec.input.partition_column == "ds"
    assert spec.on_empty == "fail"
    assert spec.input.key == ("id",)  # one column needs no list


# What is refused


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        ("max_token", 16, "max_token: unknown field; did you mean sampling.max_tokens?"),
        ("sampling__max_token", 16, "sampling.max_token: unknown field; did you mean max_tokens?"),
        ("sampling__maxTokens", 16, "did you mean max_tokens?"),
        ("engine__tensor_parallel", 2, "did you mean tensor_parallel_size?"),
        ("planner__max_tokens", 2, "did you mean sampling.max_tokens?"),
        ("uri", "in", "did you mean input.uri or output.uri?"),
        ("planner__estimated_output_tokens", {"columns": "a"}, "did you mean column?"),
        ("input__filter", [{"col": "a", "value": 1}], "input.filter[0].col: unknown field; di"),
        ("model__name", "m", "unknown field; known are path, revision, trust_remote_code"),
        ("engine__api_key", "swordfish", "engine.api_key: unknown field; credentials come from"),
        ("hf_token", "swordfish", "hf_token: unknown field; credentials come from"),
        ("hf_token", HF_TOKEN, "hf_token looks like a secret"),
        ("engine__extra_args", {"a": [{"hf_token": "x"}]}, "extra_args.a[0].hf_token looks like"),
        (HF_TOKEN, 1, "a field's name looks like a secret"),
    ],
)
def test_an_unknown_field_is_no_secret_and_the_nearest_name_is_given(
    where: str, value: Any, expected: str
) -> None:
    message = refusal(changed(**{where: value}))
    assert expected in message
    assert "swordfish" not in message and HF_TOKEN not in message


@pytest.mark.parametrize("section", ["name", "input", "prompt", "model", "output", "spec_version"])
def test_a_missing_field_is_named(section: str) -> None:
    data = changed()
    del data[section]
    message = refusal(data).lower()
    assert section in message
    assert "required" in message


def test_all_faults_are_named_at_once() -> None:
    message = refusal(changed(sampling__max_tokens=0, planner__num_shards="two", typo=1))
    assert all(name in message for name in ("sampling.max_tokens", "planner.num_shards", "typo"))


BAD_VALUES: dict[str, list[Any]] = {
    "name": ["../up", "", "x" * 101],
    "input__uri": ["", *(f"iceberg://{name}" for name in ("", "lake", "a/in", "/ns.in", "a/ns."))],
    "input__key": [[], "generated_text", "error", "model", "run_id", "ds"],
    "input__partition_timezone": ["", "Europe/Bonn", "../UTC", "/etc/localtime"],
    "input__filter": [
        [{"column": "a", "op": "in", "value": "b"}],
        [{"column": "a", "value": ["b"]}],
        [{"column": "a", "op": "~", "value": "b"}],
    ],
    "prompt__template": [
        "",
        *["{a!r}", "{a:>3}", "{a:{b}}", "{}", "{a", "a}", "{a!}"],
        "text {} text",
    ],
    "model__path": [""],
    "sampling__temperature": [float("nan")],
    "sampling__top_p": [0, 1.1],
    "engine__dtype": ["int3"],
    "engine__gpu_memory_utilization": [1.5],
    "planner__memory_budget_bytes": [0, -1, "much", "1 furlong", "1,5GiB", "2GiB each"],
    "output__uri": ["iceberg://lake/ns/in", "delta+", "delta+delta+x", "delta+iceberg://a/ns.in"],
    "output__carry": [["generated_text"], ["model"], ["run_id"]],
    "output__target_file_bytes": [1000],
    "on_empty": ["ignore"],
    "max_failed_fraction": [1.01, float("nan")],
    "spec_version": [0, "1.5", "two", 1.5, [1]],
}


@pytest.mark.parametrize(
    ("where", "value"), [(where, value) for where in BAD_VALUES for value in BAD_VALUES[where]]
)
def test_a_bad_value_names_its_field(where: str, value: Any) -> None:
    assert where.replace("__", ".") in refusal(changed(**{where: value}))


@pytest.mark.parametrize(
    ("where", "value", "reason"),
    [
        ("name", None, "name: has no value; it must be text"),
        ("name", 2026, "name: must be text; put it in quotes"),
        ("name", "a/b", "name: must be letters, digits, _ and -"),
        ("spec_version", True, "spec_version: must be a number, not true or false"),
        ("sampling__max_tokens", True, "sampling.max_tokens: must be a number, not true or false"),
        ("sampling__max_tokens", "2e9", "sampling.max_tokens: must be a whole number"),
        ("sampling__max_tokens", 1.5, "sampling.max_tokens: must be a whole number"),
        ("sampling__temperature", -1, "sampling.temperature: must be at least 0"),
        ("sampling__temperature", float("inf"), "sampling.temperature: must be a finite number"),
        ("sampling__seed", 2**63, "sampling.seed: must be at most 9223372036854775807"),
        ("max_failed_fraction", "5%", "max_failed_fraction: must be a number without a unit"),
        ("engine__gpu_memory_utilization", "90 %", "must be a number without a unit, such as 0.05"),
        ("planner__link_bytes_per_s", "1e9x", "planner.link_bytes_per_s: must be a number"),
        ("sampling__stop", 5, "sampling.stop: must be text or a list of texts"),
        ("sampling__stop_token_ids", [1, "x"], "sampling.stop_token_ids[1]: must be a whole nu"),
        ("planner__num_shards", 0, "planner.num_shards: must be at least 1"),
        ("planner__memory_budget_bytes", True, "must be a number, not true or false"),
        ("planner__memory_budget_bytes", "1,5GiB", "must be a number of bytes, or text like 4GiB"),
        ("planner__estimated_output_tokens", "x", "a whole number, {column: NAME} or {learned: tr"),
        ("engine", None, "engine: has no value; it must be a section of fields: backend, "),
        ("engine__backend", "tgi", "engine.backend: must be 'vllm' or 'fake'"),
        ("engine__extra_args", [1], "engine.extra_args: must be a mapping of names to values"),
        ("engine__extra_args", {"a": {"b": date(2026, 1, 1)}}, "extra_args.a.b: must be text"),
        ("input__filter", 3, "input.filter: must be a list"),
        ("input__filter", [{"column": "a", "value": None}], "filter[0]: 'is null' and 'is not n"),
        ("input__filter", [{"column": "a", "op": "is null", "value": 1}], "take no value; the o"),
        ("input__filter", [{"value": 1}], "filter[0]: names either a column, op and value, or an"),
        ("input__filter", [{"any": [{"column": "a"}]}], "filter[0].any[0]: 'is null' and"),
        ("input__filter", [{"column": "a", "any": [{"column": "a", "value": 1}]}], "names either"),
        ("input__uri", " s3://b/t", "input.uri: begins or ends with a space"),
        ("output__carry", ["ds"], "output.carry: column 'ds' is the partition column"),
        ("output__carry", ["error"], "that name; give it another name there, such as {error: sou"),
        ("output__carry", {"a": "error"}, "column 'error' can't be a key or carried over"),
        ("output__carry", {"a": "x", "b": "x"}, "two columns of the output would be named 'x'"),
        ("output__carry", {"a": "id"}, "two columns of the output would be named 'id'"),
        ("output__carry", {"a": ""}, "output.carry: must be a name, a list of names, or a mapp"),
        ("output__carry", 3, "output.carry: must be a name, a list of names, or a mapping of nam"),
        ("spec_version", 2, "spec_version is 2; this release reads version 1"),
        ("prompt__template", "{a", "prompt.template: has a { or } without its other half"),
        ("prompt__truncate", {"x": "front"}, "truncate.x: must be 'end', 'middle' or 'start'"),
        ("labels", {"yes": "", "no": " no"}, "labels.yes: must not be empty"),
        ("label_values", {"yes": float("nan")}, "label_values.yes: must be a finite number"),
        ("sampling", "modell", "sampling: must be model, which takes what the model suggests"),
        ("prompt__chat_template", "perhaps", "prompt.chat_template: must be true or false"),
        ("sampling", {"min_tokens": 9, "max_tokens": 4}, "min_tokens is above max_tokens"),
        ("sampling", {"stop": ""}, "sampling.stop"),
        ("input__key", ["id", "id"], "input.key: names a column twice"),
        ("planner__gpu_table", "\0", "planner.gpu_table: holds a NUL character"),
        ("planner__num_shards", 100_001, "planner.num_shards"),
        ("sampling__stop_token_ids", [-1], "sampling.stop_token_ids[0]"),
        ("input__filter", [{"column": "n", "value": 1 << 63}], "must fit into 64 bits"),
        ("input__filter", [{"column": "n", "op": "in", "value": [1, -(1 << 70)]}], "into 64 bits"),
        ("engine__extra_args", {"model": "other"}, "'model' has a field of its own"),
        ("engine__extra_args", {"max_num_seqs": 3}, "engine.max_num_seqs"),
        ("engine__extra_args", {"trust_remote_code": True}, "model.trust_remote_code"),
        ("engine__replicas", 0, "engine.replicas"),
        ("engine", {"batch_invariant": True, "attention": "batchllm"}, "attention: stock; ours"),
        ("planner__runahead", "on", "a chain takes two at least"),
        ("planner", {"link_bytes_per_s": 1e9}, "link_bytes_per_s goes with runahead: on"),
    ],
)
def test_a_bad_value_is_refused_in_plain_words(where: str, value: Any, reason: str) -> None:
    message = refusal(changed(**{where: value}))
    assert reason in message
    assert "Input should" not in message and "constrained" not in message
    assert message.count(f"{where.replace('__', '.')}: ") <= 1, "once, whatever kinds were tried"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("null: x", "null"),
        ("true: x", "true"),
        ("2026-01-31: x", "2026-01-31"),
        ("input: {~: x}", "input.null"),
        ("input: {no: x}", "input.false"),
        ("engine: {extra_args: {null: 1}}", "engine.extra_args.null"),
        ("engine: {extra_args: {a: {on: 1}}}", "engine.extra_args.a.true"),
    ],
)
def test_a_name_that_is_no_text_is_told_as_yaml_has_it(text: str, name: str) -> None:
    message = refusal(yaml.safe_load(text))
    assert f"; {name}: names of fields must be text; put it in quotes" in message
    assert message.count("must be text") == 1


def test_a_column_that_is_named_twice_is_kept_once() -> None:
    spec = parse(input__key="id", output__carry=["q", "id", "q"], prompt__template="{q}{d}")
    assert spec.kept_columns == {"id": "id", "q": "q"}
    assert spec.input_columns == ("id", "q", "d")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just text\n", "3\n"])
def test_a_file_that_is_not_a_mapping(tmp_path: Path, text: str) -> None:
    assert "mapping" in refused_file(write(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "name: 'unclosed\n",
        "name: \x01\n",
        "\tname: x\n",
        "name: *nowhere\n",
        "name: !!python/object/apply:os.system [true]\n",
        "spec_version: 1\nname: 2026-99-99\n",
        "? [a, b]\n: c\n",
        "1: x\n",
    ],
)
def test_odd_yaml_is_one_clear_error(tmp_path: Path, text: str) -> None:
    refused_file(write(tmp_path, text))
    path = write(tmp_path, "spec_version: 1\nname: x\ninput: {uri: [}\n")
    assert "line 3" in refused_file(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refused_file(tmp_path / "absent.yaml")
    assert "directory" in refused_file(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xfa")
    refused_file(binary)


# Templates


@pytest.mark.parametrize(
    ("template", "columns"),
    [
        ("{doc}", ("doc",)),
        ("{doc} {query} {doc}", ("doc", "query")),
        ('{{"answer": "{query}"}}', ("query",)),
        ("{{{doc}}}", ("doc",)),
        ("{{doc}}", ()),
        ("{a column} {naïve} {0}", ("a column", "naïve", "0")),
        ("{q.id} {a[0]} {a..b} {.x}", ("q.id", "a[0]", "a..b", ".x")),
        ("no places", ()),
    ],
)
def test_templates(template: str, columns: tuple[str, ...]) -> None:
    assert template_columns(template) == columns
    spec = parse(prompt__template=template, prompt__constant=not columns)
    assert spec.prompt.columns == columns


@pytest.mark.parametrize(
    "prompt",
    [
        {"template": "Summarize the document."},
        {"template": "Summarize {{document}}."},
        {"system": "Summarize {document}.", "template": "Go."},
        {"template": "Summarize.", "chat_template": True},
        {"turns": [{"role": role, "template": "{{x}}"} for role in ("user", "assistant")]},
    ],
)
def test_a_prompt_without_a_column_is_refused_unless_it_is_asked_for(
    prompt: dict[str, Any],
) -> None:
    fields = {**changed(), "prompt": prompt}
    assert "places no column" in refusal(fields)
    fields["prompt"] = {**prompt, "constant": True}
    assert parse_spec(fields, source="test spec").prompt.columns == ()


# Secrets

SECRETS: dict[str, dict[str, Any]] = {
    "AWS key as a value": changed(engine__extra_args={"x": AWS_KEY}),
    "AWS key inside text": changed(prompt__system=f"use {AWS_KEY} to log in"),
    "hub token as a value": changed(model__revision=HF_TOKEN),
    "hub token by its name": changed(engine__extra_args={"hf_token": "swordfish"}),
    "in a list": changed(sampling__stop=["a", HF_TOKEN]),
    "in a filter": changed(input__filter=[{"column": "c", "value": HF_TOKEN}]),
    "deep inside": changed(engine__extra_args={"a": {"b": [{"password": "swordfish"}]}}),
    "user info in a URI": changed(input__uri="s3://user:swordfish@bucket/table"),
    "user info without a password": changed(input__uri="s3://swordfish@bucket/table"),
    "query parameter": changed(output__uri="s3://b/t?x=1&secret_access_key=swordfish"),
    "presigned": changed(input__uri="https://h/t?X-Amz-Security-Token=swordfish"),
    "api_key": changed(engine__api_key="swordfish"),
    "AWS_SECRET_ACCESS_KEY": changed(AWS_SECRET_ACCESS_KEY="swordfish"),
    "secret_key": changed(engine__extra_args={"secret_key": "swordfish"}),
    "camel case": changed(engine__extra_args={"hfToken": "swordfish"}),
    "a number": changed(engine__extra_args={"password": 8675309}),
    "a list of them": changed(engine__extra_args={"api_keys": ["swordfish"]}),
    "private key": changed(prompt__system="-----BEGIN RSA PRIVATE KEY-----\nswordfish"),
    "GitHub": changed(model__path="ghp_" + "swordfish0" * 4),
    "OpenAI": changed(model__path="sk-" + "swordfish0" * 4),
    "with other faults": changed(engine__extra_args={"token": "swordfish"}, typo=1, name="a b"),
    "in an unknown section": changed(credentials={"token": "swordfish"}),
    "broken URI": changed(input__uri="s3://user:swordfish@[bucket/table"),
}

SPARK_SECRETS = {
    "spark.authenticate.secret": "swordfish",
    "spark.ssl.keyPassword": "swordfish",
    "spark.executorEnv.AWS_SECRET_ACCESS_KEY": "swordfish",
    "spark.hadoop.fs.s3a.secret.key": "swordfish",
    "spark.hadoop.fs.s3a.access.key": "swordfish",
    "spark.hadoop.fs.azure.account.key.x.dfs.core.windows.net": "swordfish",
    "spark.kubernetes.authenticate.submission.oauthToken": "swordfish",
    "spark.sql.catalog.c.credential": "client:swordfish",
    "spark.remote": "sc://host:443/;use_ssl=true;token=swordfish",
    "spark.sql.catalog.c.uri": "jdbc:postgresql://u:swordfish@host/db",
    "spark.sql.catalog.d.uri": "jdbc:sqlserver://host:1433;user=u;password=swordfish",
    "spark.sql.catalog.e.uri": "jdbc:mysql://host/db?user=u&password=swordfish",
    "spark.driver.extraJavaOptions": "-Xss4m -Djavax.net.ssl.trustStorePassword=swordfish",
}
SECRETS |= {
    name: changed(planner__spark={"conf": {name: value}}) for name, value in SPARK_SECRETS.items()
}


@pytest.mark.parametrize("data", SECRETS.values(), ids=SECRETS)
def test_a_secret_is_refused_and_not_repeated(data: dict[str, Any]) -> None:
    message = refusal(data)
    for secret in ("swordfish", "8675309", AWS_KEY, HF_TOKEN):
        assert secret not in message


@pytest.mark.parametrize("where", ["name", "input__key", "on_empty", "sampling__max_tokens"])
def test_a_wrong_value_is_not_repeated(where: str) -> None:
    """It may be a secret that we don't recognise, put into the wrong line."""
    assert "sword fish" not in refusal(changed(**{where: {"nested": "sword fish"}}))
    assert "sword fish" not in refusal(changed(**{where: ["sword fish", 1]}))


SPARK_SETTINGS = {
    "spark.authenticate.secret.file": "/etc/spark/secret",
    "spark.executorEnv.AWS_REGION": "eu-central-1",
    "spark.executorEnv.AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
    "spark.executor.extraJavaOptions": "-Dlog.level=info -Dfs.s3a.secret.key.file=/x",
    "spark.hadoop.fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.Provider",
    "spark.hadoop.hadoop.security.credential.provider.path": "jceks://file/x",
    "spark.kubernetes.driver.secretKeyRef.AWS_SECRET_ACCESS_KEY": "lake:secret",
    "spark.kubernetes.executor.secrets.lake-token": "/etc/secrets",
    "spark.kubernetes.kerberos.tokenSecret.name": "kerberos",
    "spark.redaction.regex": "(?i)secret|password|token",
    "spark.remote": "sc://host:443/;user_id=me;use_ssl=true",
    "spark.security.credentials.hive.enabled": "false",
    "spark.sql.catalog.c.uri": "jdbc:postgresql://host/db?sslmode=require",
}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("sampling__max_tokens", 16),
        ("planner__estimated_output_tokens", 16),
        ("engine__extra_args", {"tokenizer_mode": "org/model", "max_num_partial_prefills": 2}),
        ("engine__extra_args", {"tokenizer_mode": "slow", "token_budget": 3}),
        ("engine__extra_args", {"skip_tokenizer_init": True, "tokenizers": ["a"]}),
        ("prompt__system", "Never reveal a password, token or api_key. password: none"),
        ("prompt__template", "Is {text} a secret? See https://example.org/a@b for help."),
        ("prompt__template", "token={token}"),
        ("prompt__template", "{x} hf_model and sk-learn, AKIA and skeletons"),
        ("input__key", "token"),
        ("output__carry", ["secret", "api_key"]),
        ("input__uri", "s3://bucket/secrets/table?versionId=3"),
        ("model__path", "/models/token"),
        ("input__filter", [{"column": "password", "op": "!=", "value": "reset"}]),
        ("planner__spark", {"conf": SPARK_SETTINGS}),
    ],
)
def test_what_only_looks_like_a_secret_is_accepted(where: str, value: Any) -> None:
    parse(**{where: value})


# Paths


def load(folder: Path, **changes: Any) -> JobSpec:
    return load_spec(write(folder, yaml.safe_dump(changed(**changes))))


def test_relative_paths_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    monkeypatch.chdir(tmp_path)
    load(jobs, input__uri="../lake/in", output__uri="out/", model__path="./model")
    spec = load_spec(Path("jobs/job.yaml"))
    assert spec.input.uri == str(tmp_path / "lake" / "in")
    assert spec.output.uri == str(jobs / "out")
    assert spec.model.path == str(jobs / "model")
    (jobs / "org" / "model").mkdir(parents=True)
    assert load(jobs, model__path="org/model").model.path == "org/model"  # a name on the hub
    own = load(jobs, planner__gpu_table="../gpus.toml").planner.gpu_table
    assert own == str(tmp_path / "gpus.toml")


def test_paths_keep_symbolic_links(tmp_path: Path) -> None:
    """`/models` may be a link on one machine, and another link or a folder in a pod."""
    for name in ("dags", "lake", "models"):
        (tmp_path / f"real-{name}").mkdir()
        (tmp_path / name).symlink_to(tmp_path / f"real-{name}")
    load(
        tmp_path / "dags",
        **{"input__uri": "../lake/in", "output__uri": f"delta+file://{tmp_path}/lake/out"},
        **{"output__staging_uri": "staging/", "planner__gpu_table": "../dags/./gpus.toml"},
        **{
            "model__path": f"{tmp_path}/models/./base/",
            "model__adapters": {"b": "owner/b", "a": "../models/a"},
        },
        **{"model__adapter_column": "adapter"},
    )
    spec = load_spec(tmp_path / "dags" / "job.yaml")
    assert spec.input.uri == f"{tmp_path}/lake/in"
    assert spec.output.uri == f"delta+{tmp_path}/lake/out"
    assert spec.output.staging_uri == f"{tmp_path}/dags/staging"
    assert spec.planner.gpu_table == f"{tmp_path}/dags/gpus.toml"
    assert spec.model.path == f"{tmp_path}/models/base"
    adapters = [("a", f"{tmp_path}/models/a"), ("b", "owner/b")]
    assert list(spec.model.adapters.items()) == adapters, "by name"


def test_a_parent_of_a_link_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "disk" / "models").mkdir(parents=True)
    (tmp_path / "models").symlink_to("disk/models")
    spec = load(tmp_path, model__path="./models/../base", input__uri="models/../../in")
    assert spec.model.path == f"{tmp_path}/disk/base"
    assert spec.input.uri == f"{tmp_path}/in"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://bucket/table/", "s3://bucket/table"),
        ("s3a://bucket/table", "s3a://bucket/table"),
        ("/lake/table/", "/lake/table"),
        ("file:///lake/table", "/lake/table"),
        ("delta+../lake/in", "delta+{folder}/lake/in"),
        ("delta+/lake/in/", "delta+/lake/in"),
        ("delta+file:///lake/in", "delta+/lake/in"),
        ("delta+s3://bucket/in/", "delta+s3://bucket/in"),
        ("iceberg://lake/ns.in", "iceberg://lake/ns.in"),
        ("iceberg://lake/a.b.in/", "iceberg://lake/a.b.in"),
    ],
)
def test_addresses_of_tables(tmp_path: Path, uri: str, expected: str) -> None:
    (tmp_path / "jobs").mkdir()
    spec = load(tmp_path / "jobs", input__uri=uri)
    assert spec.input.uri == expected.format(folder=tmp_path)


STORAGES = ["gcs://b/t", "hdfs://n:8020/t", "abfs://c@a.dfs.core.windows.net/t", "adl://c/t"]
STORAGES += ["wasbs://c@a.blob.core.windows.net/t", "http://h/t", "https://h/t", "dbfs:/t"]
STORAGES += ["GCS:b", "hdfs:n/t", "wasb:c/t", "adl:c", "https:h/t"]
STORAGES += ["s3n://b/t", "memory://t", "C:/t", "jdbc:postgresql://h/db"]


@pytest.mark.parametrize("prefix", ["", "delta+"])
@pytest.mark.parametrize("uri", STORAGES)
def test_storages_that_do_not_work_are_said_to(uri: str, prefix: str) -> None:
    scheme = uri.partition(":")[0]
    reason = f"{scheme}:// isn't a storage that works here; write "
    fields = {"input__uri": prefix + uri, "output__uri": prefix + uri}
    if not prefix:
        fields |= {"output__staging_uri": uri, "model__path": uri, "planner__gpu_table": uri}
    for where, value in fields.items():
        message = refusal(changed(**{where: value}))
        assert where.replace("__", ".") in message
        if where.endswith("uri"):
            assert reason in message and "s3://BUCKET/" in message
        assert "secret" not in message and value not in message


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("S3://b/t", "write s3:// in small letters"),
        ("ICEBERG://lake/ns.t", "write iceberg:// in small letters"),
        ("iceberg:/lake/ns.t", "isn't an address of a folder; write"),
        ("s3:/b/t", "names no bucket"),
        ("s3a:b/t", "names no bucket"),
        ("iceberg:lake/ns.t", "isn't an address of a folder; write"),
        ("file:lake/t", "names another machine, or lacks a slash; write file:///FOLDER"),
        ("s3://", "names no bucket"),
        ("delta+s3:///t", "names no bucket"),
        ("gs:b/t", "names no bucket"),
        ("GS://b/t", "write gs:// in small letters"),
        ("az://c@a/t", "names no bucket"),
        ("abfss:c@a/t", "names no container and account"),
        ("abfss://c/t", "names no container and account"),
        ("file://host/t", "names another machine, or lacks a slash; write file:///FOLDER"),
    ],
)
def test_addresses_that_are_written_wrong(uri: str, reason: str) -> None:
    assert f"input.uri: {reason}" in refusal(changed(input__uri=uri))


@pytest.mark.parametrize("uri", ["/lake/a::b", "in::out", "s3://b/a::b", "delta+/lake/a::b/t"])
def test_an_address_is_one_address(uri: str) -> None:
    """fsspec would open what is before `::`."""
    for where in ("input__uri", "output__uri"):
        assert "uri: holds ::," in refusal(changed(**{where: uri}))
    uri = uri.removeprefix("delta+")
    assert "staging_uri: holds ::," in refusal(changed(output__staging_uri=uri))
    with pytest.raises(SpecError, match=f"{uri}: holds ::,"):
        Folder.open(uri)


def test_an_iceberg_output_needs_a_folder_for_the_job(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"output: an Iceberg table's folder.*staging_uri"):
        parse(output__uri="iceberg://lake/ns.out")
    spec = load(tmp_path, output__uri="iceberg://lake/ns.out", output__staging_uri="jobs/")
    assert spec.output.staging_folder == str(tmp_path / "jobs")
    assert load(tmp_path, output__uri="delta+out").output.staging_folder == str(tmp_path / "out")
    assert load(tmp_path, output__uri="out").output.staging_folder == str(tmp_path / "out")
    with pytest.raises(SpecError, match=r"output\.staging_uri: is a folder"):
        parse(output__staging_uri="delta+out")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("/lake/a", "/lake/a", True),
        ("/lake/a", "delta+/lake/a", True),
        ("s3://b/lake", "delta+s3://b/lake/out", True),
        ("s3a://b/lake", "s3://b/lake/", True),
        ("/lake/a", "/lake/ab", False),
        ("iceberg://c/ns.t", "iceberg://c/ns.t", True),
        ("iceberg://c/ns.t", "iceberg://c/ns.u", False),
        ("iceberg://c/ns.t", "/lake/a", False),
        ("{folder}/link/in", "{folder}/lake/in", True),
        ("delta+{folder}/link/in/out", "{folder}/lake/in", True),
        ("file://{folder}/link/out", "{folder}/lake/in", False),
    ],
)
def test_tables_that_overlap(tmp_path: Path, one: str, other: str, expected: bool) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "link").symlink_to("lake")
    first, second = (TableAddress.parse(uri.format(folder=tmp_path)) for uri in (one, other))
    assert first.overlaps(second) == second.overlaps(first) == expected


def test_the_home_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    spec = load(tmp_path, input__uri="~/in", model__path="~/model")
    assert (spec.input.uri, spec.model.path) == ("/home/someone/in", "/home/someone/model")
    with pytest.raises(SpecError, match=r"job\.yaml: input\.uri: .* ~nosuchuser"):
        load(tmp_path, input__uri="~nosuchuser/in")


# Several prompts

SUMMARY = {"template": "{document}", "sampling": {"max_tokens": 96}}
RELEVANT = {"template": "{query}", "task": "classify", "labels": {"yes": " yes", "no": " no"}}


def asking(prompts: object, **changes: Any) -> dict[str, Any]:
    fields = {**changed(**changes), "prompts": prompts}
    del fields["prompt"]
    return fields


def test_each_prompt_is_a_question_with_fields_of_its_own() -> None:
    spec = parse_spec(asking({"summary": SUMMARY, "relevant": RELEVANT}), source="test spec")
    relevant, summary = spec.questions
    assert (relevant.task, list(relevant.labels)) == ("classify", ["no", "yes"])
    assert (summary.sampling.max_tokens, relevant.sampling.max_tokens) == (96, 1)
    assert summary.prompt == parse(prompt__template="{document}").prompt
    assert "label" in relevant.answer_columns and "label" not in summary.answer_columns
    assert spec.output_columns == ("relevant", "summary", "model", "run_id")
    assert spec.input_columns == ("id", "query", "document")
    assert spec.questions[0].questions == (relevant,)
    assert parse_spec(json.loads(spec.model_dump_json()), source="stored") == spec
    assert parse().questions == (parse(),)
    assert spec.questions is spec.questions
    assert {each.name for each in spec.model_copy(update={"name": "b"}).questions} == {"b"}


def test_prompts_decide_the_plan_whatever_their_order() -> None:
    prompts = {"summary": SUMMARY, "relevant": RELEVANT}
    spec = parse_spec(asking(prompts), source="test spec")
    other = parse_spec(asking(dict(reversed(prompts.items()))), source="test spec")
    assert other.identity == spec.identity != parse().identity
    longer = {**prompts, "summary": {"template": "{document}"}}
    assert parse_spec(asking(longer), source="test spec").identity != spec.identity


@pytest.mark.parametrize(
    ("prompts", "changes", "reason"),
    [
        ({}, {}, "prompt: is missing, and required, or several prompts"),
        ([SUMMARY], {}, "prompts: must be a mapping of names"),
        ({"a": None}, {}, "prompts.a: has no value; it must be a section"),
        ({"a b": SUMMARY}, {}, "prompts.a b: its name must be letters, digits and _"),
        ({"1": SUMMARY}, {}, "no digit first"),
        ({1: SUMMARY}, {}, "prompts.1: names of fields must be text"),
        ({"a": SUMMARY, "A": SUMMARY}, {}, "two names differ by case only"),
        ({"ds": SUMMARY}, {}, "prompts.ds: is the name of another column of the output"),
        ({"model": SUMMARY}, {}, "prompts.model: is the name of another column"),
        ({"id": SUMMARY}, {}, "input.key: column 'id' can't be a key or carried over"),
        ({"a": SUMMARY}, {"input__key": "error"}, "column 'error' can't be a key"),
        ({"a": SUMMARY}, {"sampling": {"max_tokens": 9}}, "sampling: each of prompts has its own"),
        ({"a": SUMMARY}, {"retry_invalid": 1}, "retry_invalid: each of prompts has its own"),
        ({"a": {**SUMMARY, "task": "embed", "sampling": {}}}, {}, "prompts.a.task: embed takes"),
        ({"template": {"templat": "{a}"}}, {}, "prompts.template.templat: unknown field; did you"),
        ({"a": {"template": "x"}}, {}, "prompts.a: template: places no column"),
        ({"a": {**SUMMARY, "sampling": {"top_p": 2}}}, {}, "prompts.a.sampling.top_p: must be at"),
        ({"a": {**SUMMARY, "labels": ["x", "y"]}}, {}, "prompts.a.labels, label_values and"),
        ({"a": {**SUMMARY, "retry_invalid": 1}}, {}, "prompts.a.retry_invalid: needs a resp"),
        ({"a": {**SUMMARY, "sampling": {"temperature": 1}}}, {"reuse_outputs": True}, "greedy"),
    ],
)
def test_bad_prompts_are_refused(prompts: Any, changes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(asking(prompts, **changes))


def test_prompt_and_prompts_are_not_given_together() -> None:
    assert "not both" in refusal({**changed(), "prompts": {"a": SUMMARY}})


def test_properties_of_a_prompts_answers_may_have_the_names_of_keys() -> None:
    schema = {"type": "object", "properties": {"id": {"type": "string"}}}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    spec = parse_spec(asking({"a": {**SUMMARY, **form}}), source="test spec")
    assert spec.questions[0].answer_columns[1] == "id"


def test_a_prompts_schema_may_lie_in_a_file(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"price": {"type": "number"}}}
    (tmp_path / "price.json").write_text(json.dumps(schema))
    form = {"response_format": {"type": "json_schema", "json_schema": "price.json"}}
    path = write(tmp_path, yaml.safe_dump(asking({"a": {**SUMMARY, **form}})))
    assert load_spec(path).questions[0].answer_columns[1] == "price"
    (tmp_path / "price.json").unlink()
    with pytest.raises(SpecError, match=r"prompts\.a: response_format\.json_schema: price\.json"):
        load_spec(path)


# Identity

NEUTRAL = {
    *("output.staging_uri", "output.add_columns", "output.target_file_bytes"),
    *("engine.block_size", "engine.max_num_seqs", "engine.max_num_batched_tokens"),
    *("engine.gpu_memory_utilization", "engine.kv_cache_memory_bytes", "engine.enforce_eager"),
    *("engine.tensor_parallel_size", "engine.replicas", "engine.scheduler", "engine.attention"),
    *("engine.profile", "planner.engine", "planner.spark.conf", "planner.target_gpu"),
    *("planner.gpu_table", "planner.memory_budget_bytes", "planner.runahead"),
    *("planner.link_bytes_per_s", "on_empty", "max_failed_fraction", "expect"),
    *("limits.output_tokens", "limits.gpu_hours", "limits.cost", "on_unmet"),
}
OF_OUTPUT = {
    *("task", "labels", "response_format", "request"),
    *("embedding.normalize", "embedding.dimensions"),
    *("prompt.chat_template_kwargs", "prompt.tools"),  # a reasoning parser reads these
    *("model.trust_remote_code", "model.reasoning_parser"),
    *("engine.backend", "engine.dtype", "engine.batch_invariant", "engine.extra_args"),
    *(f"sampling.{name}" for name in SamplingSpec.model_fields),
}


def leaves(section: Section, path: str = "") -> Iterator[str]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def replaced(section: Section, path: str) -> Any:
    """The section with another value of a field, which needn't be a valid one."""
    name, _, rest = path.partition(".")
    others = {"prompts": {"one": QuestionSpec(template="{document}")}}
    value = replaced(getattr(section, name), rest) if rest else others.get(name, 123_456)
    return section.model_copy(update={name: value})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_each_field_decides_what_it_says() -> None:
    spec = parse()
    for path in leaves(spec):
        other = replaced(spec, path)
        assert (other.identity == spec.identity) == (path in NEUTRAL), path
        outputs = other.settings(Decides.OUTPUT), spec.settings(Decides.OUTPUT)
        assert (outputs[0] == outputs[1]) == (path not in OF_OUTPUT), path


def test_names_of_columns_decide_the_plan_but_no_output() -> None:
    form = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {}}}}
    plain = parse(response_format=form)
    prefixed = parse(response_format={**form, "prefix_columns": "x_"})
    assert plain.identity != prefixed.identity
    assert plain.settings(Decides.OUTPUT) == prefixed.settings(Decides.OUTPUT)


def test_a_field_that_does_not_say_what_it_decides_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Careless\.new_field: mark it as OfOutput, OfPlan or"):

        class Careless(Section):
            new_field: int = 1


def test_identity_does_not_depend_on_how_the_file_is_written() -> None:
    explicit = parse(sampling={"max_tokens": 128, "temperature": 0}, input__key=["id"])
    assert explicit.identity == parse().identity
    reordered = dict(reversed(changed().items()))
    assert parse_spec(reordered, source="x").identity == parse().identity
    args = {"a": 1, "b": {"c": 2, "d": 3}}
    turned = {"b": {"d": 3, "c": 2}, "a": 1}
    assert parse(engine__extra_args=args).identity == parse(engine__extra_args=turned).identity


# The JSON schema


def schema_models() -> Iterator[dict[str, Any]]:
    schema = JobSpec.model_json_schema()
    yield schema
    yield from (model for model in schema["$defs"].values() if "properties" in model)


def test_every_section_of_the_schema_is_documented_and_closed() -> None:
    """A field by itself, or by the section that it refers to."""
    sections = JobSpec.model_json_schema()["$defs"]
    assert len(list(schema_models())) > 10
    for model in schema_models():
        assert model["description"]
        assert model["additionalProperties"] is False
        for name, field in model["properties"].items():
            section = sections.get(field.get("$ref", "").rsplit("/")[-1], {})
            assert field.get("description") or section.get("description"), (model["title"], name)


@pytest.mark.parametrize(
    ("section", "field"),
    [("InputSpec", "key"), ("OutputSpec", "carry"), ("SamplingSpec", "stop")],
)
def test_the_schema_allows_one_name_or_a_list(section: str, field: str) -> None:
    """Editors check specs against the schema while they are written."""
    described = JobSpec.model_json_schema()["$defs"][section]["properties"][field]
    kinds = {choice.get("type") for choice in described.get("anyOf", [described])}
    assert kinds == {"string", "array", *(["object"] if field == "carry" else [])}


def test_a_field_given_twice_is_named_but_may_be_merged(tmp_path: Path) -> None:
    path = write(tmp_path, "spec_version: 1\nname: a\nsampling:\n  top_k: 1\n  top_k: 2\n")
    with pytest.raises(SpecError, match=r"line 5.*'top_k' is given twice"):
        load_spec(path)
    merged = yaml.safe_dump(changed()) + "sampling:\n  <<: {top_k: 1, seed: 3}\n  top_k: 2\n"
    sampling = load_spec(write(tmp_path, merged)).sampling
    assert (sampling.top_k, sampling.seed) == (2, 3)
