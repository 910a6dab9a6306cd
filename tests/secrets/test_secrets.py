"""Canaries: credentials of all kinds are in the environment while commands fail in all kinds of
ways, and none of them is in what is printed, logged or stored."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Batchllm, CommandOutcome
from support.fake_job import DS, document_rows, job_fields, write_job, write_table

from batchllm_operator.secrets import Masker
from batchllm_operator.secrets.finding import holds_credentials
from batchllm_operator.spec import JobSpec

CANARY = "C4n4ry"
REFUSED = "127.0.0.1:1"  # nobody listens there
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": f"AKID{CANARY}",
    "AWS_SECRET_ACCESS_KEY": f"secret/{CANARY}+",
    "AWS_SESSION_TOKEN": f"{CANARY}token==",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ENDPOINT_URL": f"http://{REFUSED}",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "HF_TOKEN": f"hf_{CANARY * 6}",
}


def catalog(**settings: str) -> dict[str, str]:
    """Variables of pyiceberg's catalog `lake`, with its storage's credentials."""
    storage = {"S3__SECRET_ACCESS_KEY": CANARY, "S3__SESSION_TOKEN": CANARY}
    found = {"TOKEN": f"{CANARY}.token", "CREDENTIAL": f"client:{CANARY}"} | storage | settings
    return {f"PYICEBERG_CATALOG__LAKE__{name}": value for name, value in found.items()}


@pytest.fixture
def job(tmp_path: Path, fresh_s3_client: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The spec file of a job that would succeed, in an environment full of credentials."""
    lake = tmp_path / "lake"
    write_table(lake / "documents", document_rows(2, 2))
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield write(tmp_path)
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in stored if CANARY.encode() in path.read_bytes()] == []
    assert [path for path in stored if CANARY in str(path)] == []


def write(folder: Path, **changes: Any) -> Path:
    return write_job(folder, folder / "lake", **changes)


def check_silent(outcome: CommandOutcome, code: int | None = None) -> None:
    assert outcome.code == code if code is not None else outcome.code != 0, outcome.err
    assert outcome.err, "an error is always explained"
    assert CANARY not in outcome.out + outcome.err
    assert CANARY.lower() not in (outcome.out + outcome.err).lower()
    assert "Traceback" not in outcome.err


POSTGRES = f"postgresql+psycopg2://user:{CANARY}@{REFUSED}/db"
REST = {"TYPE": "rest", "URI": f"http://{REFUSED}/"}
CATALOGS: dict[str, Mapping[str, str]] = {
    "Postgres that is away": catalog(TYPE="sql", URI=POSTGRES),
    "a port that is none": catalog(TYPE="sql", URI=f"postgresql://user:{CANARY}@host:x/db"),
    "no such driver": catalog(TYPE="sql", URI=f"mysql+nosuch://user:{CANARY}@{REFUSED}/db"),
    "no scheme": catalog(TYPE="sql", URI=f"user:{CANARY}@{REFUSED}/db"),
    "no database": catalog(TYPE="sql", URI=f"sqlite:////nosuch/x.db?password={CANARY}"),
    "a type that can't be guessed": catalog(URI=f"nosuch://user:{CANARY}@{REFUSED}/db"),
    "a type that is none": catalog(TYPE=f"x{CANARY}", URI=POSTGRES, HEADER__AUTHORIZATION=CANARY)
    | {"PYICEBERG_CATALOG__LAKE__TYPE": "nosuch"},
    "REST that is away": catalog(TYPE="rest", URI=f"http://user:{CANARY}@{REFUSED}/"),
    "an OAuth server that is away": catalog(
        **REST, OAUTH2_SERVER_URI=f"http://{REFUSED}/?client_secret={CANARY}"
    ),
    "a header that is none": catalog(**REST, HEADER__AUTHORIZATION=f"Bearer {CANARY}\n"),
    "Hive that isn't installed": catalog(TYPE="hive", URI=f"thrift://user:{CANARY}@{REFUSED}"),
    "no catalog": {},
}


def set_catalog(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # read at its import


CATALOG_USES = cycle([["plan"], ["plan", "--advise"], ["report"]])
FAILURES = [*zip(CATALOGS.values(), CATALOG_USES, strict=False)]


@pytest.mark.parametrize(("variables", "command"), FAILURES, ids=CATALOGS)
def test_a_catalog_that_fails(
    job: Path,
    batchllm: Batchllm,
    monkeypatch: pytest.MonkeyPatch,
    variables: Mapping[str, str],
    command: list[str],
) -> None:
    set_catalog(variables, monkeypatch)
    lake = {"uri": "iceberg://lake/ns.t"}
    output = {**lake, "staging_uri": str(job.parent / "jobs")}
    write(job.parent, **({"output": output} if command == ["report"] else {"input": lake}))
    check_silent(batchllm(*command, "--job", job, "--ds", DS))


ENDPOINTS = {
    "away": f"http://{REFUSED}",
    "with a password": f"http://user:{CANARY}@{REFUSED}",
    "that is none": f"user:{CANARY}@host",
    "without a host": f"http://:{CANARY}@",
    "with a port that is none": f"http://user:{CANARY}@host:port",
}


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
@pytest.mark.parametrize("table", ["s3://bucket/in", "delta+s3://bucket/in"])
def test_a_storage_that_fails(
    job: Path, batchllm: Batchllm, monkeypatch: pytest.MonkeyPatch, endpoint: str, table: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    write(job.parent, input={"uri": table})
    check_silent(batchllm("plan", "--job", job, "--ds", DS))
    write(job.parent, output={"uri": table})
    check_silent(batchllm("plan", "--job", job, "--ds", DS))
    check_silent(batchllm("report", "--job", job, "--ds", DS))
    check_silent(batchllm("verify", "--job", job, "--ds", DS, "--record", "pod"))
    check_silent(batchllm("gc", "--job", job, "--older-than", "0h"))


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_with_credentials_is_refused_by_name(
    job: Path, batchllm: Batchllm, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, f"http://user:{CANARY}@{REFUSED}")
    write(job.parent, input={"uri": "s3://bucket/in"})
    outcome = batchllm("plan", "--job", job, "--ds", DS)
    check_silent(outcome, 2)
    assert f"{name}: must be http" in outcome.err


def test_credentials_that_the_storage_refuses(
    job: Path, batchllm: Batchllm, monkeypatch: pytest.MonkeyPatch, s3_endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    write(job.parent, input={"uri": "s3://no-such-bucket/in"})
    check_silent(batchllm("plan", "--job", job, "--ds", DS), 2)
    for variable in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(variable, f"{CANARY}\n\u2603{CANARY}")
        check_silent(batchllm("plan", "--job", job, "--ds", DS))


URIS = [
    f"s3://key:{CANARY}@bucket/plan",
    f"s3:/key:{CANARY}@bucket/plan",
    f"s3a://{CANARY}@bucket/plan",
    f"s3://key:{CANARY}@bucket/a folder",
    f"https://host/plan?token={CANARY}",
    f"https://host/plan?X-Amz-Signature={CANARY}&x=1",
    f"file://user:{CANARY}@host/plan",
]
COMMANDS = [["run"], ["commit"], ["report"], ["verify"], ["simulate", "--shard", "0"]]


@pytest.mark.parametrize("uri", URIS)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_plans_uri_with_credentials(
    job: Path, batchllm: Batchllm, uri: str, command: list[str]
) -> None:
    outcome = batchllm(*command, "--plan", uri)
    check_silent(outcome, 2)
    assert "holds credentials" in outcome.err


@pytest.mark.parametrize("uri", [*URIS, f"delta+{URIS[0]}", f"iceberg://a:{CANARY}@lake/ns.t"])
@pytest.mark.parametrize("place", ["input", "output", "model", "staging"])
def test_a_spec_with_credentials_in_a_uri(
    job: Path, batchllm: Batchllm, uri: str, place: str
) -> None:
    field = "path" if place == "model" else "staging_uri" if place == "staging" else "uri"
    changes = {"output" if place == "staging" else place: {field: uri}}
    fields = job_fields(str(job.parent / "lake"), **changes)
    check_silent(batchllm("plan", "--job-json", json.dumps(fields), "--ds", DS), 2)
    write(job.parent, **changes)
    outcome = batchllm("plan", "--job", job, "--ds", DS)
    job.unlink()  # it holds them, by this test
    check_silent(outcome, 2)
    assert "looks like a secret" in outcome.err


def test_a_job_that_goes_well_stores_none(job: Path, batchllm: Batchllm, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--job", job, "--ds", DS, "--result", result, "--record", "pod"]
    outcomes = [batchllm("plan", *arguments)]
    plan = json.loads(result.read_text())["plan_uri"]
    for command in (["run"], ["commit"], ["report"]):
        outcomes.append(batchllm(*command, "--plan", plan, "--result", result))
    for outcome in outcomes:
        assert outcome.code == 0, outcome.err
        assert CANARY not in outcome.out + outcome.err
        assert "***" not in outcome.out + outcome.err


def test_damaged_plans_and_unknown_tables(job: Path, batchllm: Batchllm, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    assert batchllm("plan", "--job", job, "--ds", DS, "--result", result).code == 0
    plan = Path(json.loads(result.read_text())["plan_uri"])
    (plan / "manifest.json").write_bytes((plan / "manifest.json").read_bytes()[:-40])
    for command in COMMANDS:
        check_silent(batchllm(*command, "--plan", plan), 2)
    write(job.parent, input={"uri": "nosuch"})
    check_silent(batchllm("plan", "--job", job, "--ds", DS), 2)
    write(job.parent, model={"path": "nosuch/nosuch"}, engine={"backend": "vllm"})
    check_silent(batchllm("plan", "--job", job, "--ds", DS), 2)


def test_an_error_that_nobody_expects_is_printed_without_them(
    job: Path, batchllm: Batchllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    import batchllm_operator.plan.plan_job as stage

    def fail(*_: object) -> None:
        secret = os.environ["AWS_SECRET_ACCESS_KEY"]
        print(f"debug: {secret} and postgresql://user:{CANARY}@host/db")
        print(f"x?token={CANARY}", file=sys.stderr)
        raise RuntimeError(f"signed with {secret} for https://a:{CANARY}@host/?sig={CANARY}")

    monkeypatch.setattr(stage, "plan_job", fail)
    outcome = batchllm("plan", "--job", job, "--ds", DS)
    assert outcome.code == 1
    assert CANARY not in outcome.out + outcome.err
    assert "RuntimeError: signed with *** for https://***@host/?sig=***" in outcome.err
    assert "debug: *** and postgresql://***@host/db" in outcome.out


def test_values_of_the_environment_that_are_secrets() -> None:
    masker = Masker.of(
        {
            "AWS_SECRET_ACCESS_KEY": "abcdef",
            "PYICEBERG_CATALOG__LAKE__CREDENTIAL": "client:longest-of-all",
            "PYICEBERG_CATALOG__LAKE__URI": "postgresql://user:p%40ssword@host/db",
            "PYICEBERG_CATALOG__LAKE__ADLS__CONNECTION_STRING": "AccountKey=abc;x",
            "AIRFLOW_CONN_LAKE": '{"conn_type": "aws", "password": "canary/secret+key"}',
            "GCP_CREDENTIALS": (
                '{"project_id": "batchllm-production-lake", "private_key": "MIIEvQ/x",'
                ' "x": "p@ss-w0rd"}'
            ),
            "AIRFLOW_CONN_LAKE_SECRET": (
                '{"host": "warehouse.example.com", "schema": "analytics_warehouse",'
                ' "password": "swordfish", "extra": "{\\"secret_key\\": \\"nested/C4n4ry\\"}"}'
            ),
            "HTTPS_PROXY": "http://user:proxy-pw@proxy:3128",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "true",
            "PATH": "/usr/bin",
            "PWD": "/tmp/x1y2z3-w4",
            "TOKENIZERS_PARALLELISM": "false",
            "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
        }
    )
    assert set(masker.anywhere) == {
        *("client:longest-of-all", "p%40ssword", "p@ssword", "user:p%40ssword", "user:p@ssword"),
        *("AccountKey=abc;x", "canary/secret+key", "user:proxy-pw"),
        *("MIIEvQ/x", "p@ss-w0rd", "nested/C4n4ry"),
    }
    assert set(masker.in_place) == {"abcdef", "longest-of-all", "proxy-pw", "swordfish"}
    assert list(masker.anywhere) == sorted(masker.anywhere, key=lambda each: (-len(each), each))
    assert masker("client:longest-of-all, abcdef, canary/secret+key") == "***, abcdef, ***"


WORDS = ["airflow", "testing", "properties", "minio123", "minioadmin", "lake", "Postgres16"]
WORDS += ["password", "admin_2026", "/opt/airflow/lake/documents", "http://minio:9000"]
UNMISTAKABLE = ["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "AKIAIOSFODNN7EXAMPLE", "p@ssw0rd-1"]
UNMISTAKABLE += ["correct horse battery staple", "hunter22secret", "MIIEvQIBADAN", "C4n4rytoken=="]
UNMISTAKABLE += ["8d969eef6ecad3c29a3a629280e686cf", "/Jal+XUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"]


@pytest.mark.parametrize("word", WORDS)
def test_a_password_that_is_a_word_is_masked_only_where_it_stands_as_one(word: str) -> None:
    masker = Masker.of({"DB_PASSWORD": word}, {"SQL_ALCHEMY_CONN": f"db://me:{word}@h/{word}"})
    text = f'plan: /opt/{word}/lake/{word}-1, ["{word}", 1], {word}, s3://{word}/{word}: {word}'
    assert masker(text) == text
    as_secret = f"host=h password={word} x, password: {word} is wrong, {{'token': '{word}'}}"
    assert masker(as_secret) == "host=h password=*** x, password: *** is wrong, {'token': ***}"
    assert (
        masker(f"db://me:{word}@h, cannot parse you:{word}@h")
        == "db://***@h, cannot parse you:***@h"
    )


@pytest.mark.parametrize("secret", UNMISTAKABLE)
def test_a_secret_that_is_no_word_is_masked_anywhere(secret: str) -> None:
    masker = Masker.of({"X_TOKEN": secret})
    assert masker(f"a {secret} b{secret}c /x/{secret}/y") == "a *** b***c /x/***/y"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at s3://key:pw@bucket/x, twice s3://k@b", "at s3://***@bucket/x, twice s3://***@b"),
        ("postgresql+psycopg2://airflow:airflow@h/airflow", "postgresql+psycopg2://***@h/airflow"),
        ("db://me:a/b@h/x db://me:a@b@h/x", "db://***@h/x db://***@h/x"),
        ("postgres://u:1234/ab@h/db mysql://:12#x@h", "postgres://***@h/db mysql://***@h"),
        ("'mysql://u:p'q@h/d', \"db://u:p\"@h\"", "'mysql://***@h/d', \"db://***@h\""),
        ("db://m'e@h http://u:p'q@h", "db://***@h http://***@h"),
        ("token: ab$c9 is wrong, pass: x1y2z3", "token: *** is wrong, pass: ***"),
        ('pwd: \'lake\', "sig": "lake"', 'pwd: ***, "sig": ***'),
        (f"token: {'lake.' * 1000}x", "token: ***"),
        ("UID=sa;PWD=/x", "UID=sa;PWD=***"),
        ("http://h/?a=1&token=x&b=2", "http://h/?a=1&token=***&b=2"),
        ("url: /?client_secret=x", "url: /?client_secret=***"),
        ("'https://h/?X-Amz-Signature=abc'", "'https://h/?X-Amz-Signature=***'"),
        ("host=h password=testing dbname=x", "host=h password=*** dbname=x"),
        (
            "password='a b\\'c' x, connect(password=x, y=1)",
            "password=*** x, connect(password=***, y=1)",
        ),
        ("Server=h;UID=sa;PWD=x,y;AccountKey=ab==;", "Server=h;UID=sa;PWD=***;AccountKey=***;"),
        ('{"password": "a b", "x": 1}', '{"password": ***, "x": 1}'),
        ("{'AWS_SECRET_ACCESS_KEY': 'testing'}", "{'AWS_SECRET_ACCESS_KEY': ***}"),
        (r'"{\"api_key\": \"x\"}"', r'"{\"api_key\": ***}"'),
        ("user: me\npassword: testing\nhost: h", "user: me\npassword: ***\nhost: h"),
        (
            "s3.secret-access-key=x adls.sas-token.me=y",
            "s3.secret-access-key=*** adls.sas-token.me=***",
        ),
        ("Authorization: Bearer abc", "Authorization: ***"),
        ("b'Bearer C4n4ry\\n'", "b'Bearer ***\\n'"),
        ("Credential=a/b, Signature=c", "Credential=***, Signature=***"),
    ],
)
def test_secrets_that_stand_as_such(text: str, expected: str) -> None:
    assert Masker()(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b?versionId=3",
        "mail@host, 12:30 @ noon, a://b c@d",
        "http://host:9000/a@b",
        "/lake/ds=a%40b/token=5",
        "abfss://container@account.dfs.core.windows.net/x",
        "job.yaml: max_token: unknown field; did you mean max_tokens?",
        "engine.extra_args.hf_token: looks like a secret",
        "LLM(token=None, eos_token='</s>', image_token='<image>', max_token=16, hf_token=None)",
        "a basic authentication, a Bearer token",
        "columns are id, signature: string, token: int64",
        "id: int64\nsignature: string\ntoken: list<item: string>\nsas: timestamp[us]\npwd: string",
        "tests pass: all, pass: 5. pass: 97%, pass: 2.5s",
        "no password: airflow, secret: none",
        "PWD=/opt/airflow OLDPWD=/opt/x1y2z3 {'PWD': '/opt/airflow'}",
        "HTTPS://host:9000/a@b, ['s3://x/y','b@c'], {'u':'db://h','mail':'b@c'}",
        r"{\"u\":\"db://h\"\n,\"b@c\"",
    ],
)
def test_what_is_no_secret(text: str) -> None:
    assert Masker()(text) == text


def test_what_is_pasted_or_read_by_programs_is_never_changed(
    tmp_path: Path, batchllm: Batchllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a password that can't be a word is the name of a folder."""
    secret = "S3cr3t-Pa55word"
    lake = tmp_path / "airflow" / "testing" / secret / "lake"
    write_table(lake / "documents", document_rows(2, 2))
    write_job(tmp_path, lake)
    monkeypatch.setenv("SQL_ALCHEMY_CONN", "postgresql+psycopg2://airflow:airflow@h/airflow")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("DB_PASSWORD", "properties")
    monkeypatch.setenv("LAKE_TOKEN", secret)
    result = tmp_path / "result.json"
    outcome = batchllm("plan", "--job", tmp_path / "job.yaml", "--ds", DS, "--result", result)
    assert outcome.code == 0, outcome.err
    plan = json.loads(result.read_text())["plan_uri"]
    assert plan.startswith(f"{lake}/") and plan in outcome.out
    assert json.loads(batchllm("schema").out)["properties"]["name"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "additionalProperties")
    assert json.loads(batchllm("schema").out) == JobSpec.model_json_schema()


def test_keys_of_rows_are_printed_whatever_the_column_is_called(
    batchllm: Batchllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = SimpleNamespace(figures=dict)
    run_report = "batchllm_operator.commit.report"
    monkeypatch.setattr(f"{run_report}.load_report", lambda uri: report)
    monkeypatch.setattr(f"{run_report}.store_page", lambda folder, report: None)
    monkeypatch.setattr("batchllm_operator.report.format_summary", lambda report: "token=x1y2z3-4")
    outcome = batchllm("report", "--plan", "plan")
    assert (outcome.code, outcome.out) == (0, "token=x1y2z3-4\n"), outcome.err


BOMBS = ["://", "?token=", "&", ":/", "k0:0,", "x:", "token=", "token:", "token:lake ", "token=<"]


@pytest.mark.parametrize("bomb", [*BOMBS, "pass:a/", "token=\"'"])
def test_masking_takes_no_time_for_long_texts(bomb: str) -> None:
    """A second, where an expression that backtracks, or reads a text again, would take hours."""
    Masker()(bomb * 10**5)
    holds_credentials(f"s3://{bomb * 10**5}")
