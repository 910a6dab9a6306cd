import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import Connection

from batchllm_operator.errors import ExitCode
from batchllm_operator.operators import BatchLLMPlanOperator, command
from batchllm_operator.operators.command import BatchLLMCommandOperator
from batchllm_operator.operators.credentials import Credentials

KEY_ID, KEY, TOKEN = "AKIACANARY0KEYID", "canary/secret+key", "canary-session-token"
CANARIES = (KEY_ID, KEY, TOKEN)
KEYS = {"login": KEY_ID, "password": KEY}
VARIABLES = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY}
IN_EXTRA = {"aws_access_key_id": KEY_ID, "aws_secret_access_key": KEY}

PRIVATE_KEY = "-----BEGIN PRIVATE KEY-----\nMIIEcanaryADAN\n-----END PRIVATE KEY-----\n"
KEYFILE = {"type": "service_account", "client_email": "a@b.example", "private_key": PRIVATE_KEY}
GOOGLE: dict[str, Any] = {"conn_type": "google_cloud_platform"}
WASB: dict[str, Any] = {"conn_type": "wasb", "login": "lake"}
ADLS: dict[str, Any] = {"conn_type": "adls", "host": "lake"}
ACCOUNT = {"AZURE_STORAGE_ACCOUNT_NAME": "lake"}
ACCOUNT_KEY = {**ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
SAS = {**ACCOUNT, "AZURE_STORAGE_SAS_TOKEN": f"sv=1&sig={TOKEN}"}
CLIENT = {"AZURE_CLIENT_ID": KEY_ID, "AZURE_CLIENT_SECRET": KEY, "AZURE_TENANT_ID": "t"}

# Stands in for the command line: keeps its environment and arguments, and blurts secrets out.
BLURT = """
import json, os, sys
arguments = sys.argv[1:]
seen = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
json.dump({"env": seen, "argv": arguments}, open(os.environ["SEEN"], "w"))
result = {"result_version": 1, "command": "plan", "plan_uri": "s3://b/p", "num_shards": 1}
json.dump(result, open(arguments[arguments.index("--result") + 1], "w"))
print(seen)
print("batchllm: error: refused:", *seen.values(), file=sys.stderr)
sys.exit(int(os.environ["CODE"]))
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def lake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Define the connection `lake`, or another one."""

    def define(conn_id: str = "lake", **fields: Any) -> None:
        text = json.dumps({"conn_type": "aws", **fields})
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", text)

    return define


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        (KEYS, VARIABLES),
        ({"conn_type": "generic", **KEYS}, VARIABLES),
        ({"extra": IN_EXTRA}, VARIABLES),
        (
            {
                **KEYS,
                "extra": {
                    **dict.fromkeys(IN_EXTRA, "not used"),
                    "aws_session_token": TOKEN,
                    "region_name": "eu-west-1",
                    "endpoint_url": "http://minio:9000",
                },
            },
            {
                **VARIABLES,
                "AWS_SESSION_TOKEN": TOKEN,
                "AWS_DEFAULT_REGION": "eu-west-1",
                "AWS_ENDPOINT_URL": "http://minio:9000",
            },
        ),
        ({"extra": {"region_name": "eu-west-1"}}, {"AWS_DEFAULT_REGION": "eu-west-1"}),
        ({"extra": {"region_name": "", "role_arn": ""}}, {}),
        ({}, {}),
    ],
)
def test_fields_become_variables(
    lake: Any, fields: dict[str, Any], variables: dict[str, str]
) -> None:
    lake(**fields)
    credentials = Credentials.of("lake", None)
    assert credentials.added_to({}) == variables
    assert credentials.secrets == set(variables.values()) & set(CANARIES)
    assert not any(canary in repr(credentials) for canary in CANARIES)


def test_a_key_of_google_is_a_variable_and_its_lines_are_masked(lake: Any, tmp_path: Path) -> None:
    """And one in a file of the worker, which a pod gets, too."""
    path = tmp_path / "key.json"
    path.write_text(json.dumps(KEYFILE))
    of_file = {"key_path": str(path), "project": "p", "is_anonymous": False}
    for fields in ({"keyfile_dict": KEYFILE}, {"keyfile_dict": json.dumps(KEYFILE)}, of_file):
        lake(**GOOGLE, extra=fields)
        credentials = Credentials.of("lake", None)
        ((name, key),) = credentials.variables.items()
        assert (name, json.loads(key)) == ("GOOGLE_SERVICE_ACCOUNT_KEY", KEYFILE)
        assert credentials.masker(f"{key} MIIEcanaryADAN") == "*** ***"
        credentials.check_lasting()
        others = {"GOOGLE_APPLICATION_CREDENTIALS": "/other", "GOOGLE_BASE_URL": "http://here"}
        assert credentials.added_to(others) == {"GOOGLE_BASE_URL": "http://here", name: key}
    lake(**GOOGLE, extra={"project": "p"})
    assert Credentials.of("lake", None) == Credentials()  # pods and workers have their own


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({**WASB, "password": KEY}, ACCOUNT_KEY),
        ({**WASB, "extra": {"shared_access_key": KEY, "sas_token": "not used"}}, ACCOUNT_KEY),
        ({**WASB, "extra": {"account_key": KEY}}, ACCOUNT_KEY),
        ({**ADLS, "password": KEY}, ACCOUNT_KEY),
        ({**WASB, "extra": {"sas_token": f"?sv=1&sig={TOKEN}"}}, SAS),
        (
            {"conn_type": "wasb", "host": "https://lake.blob.core.windows.net/", "password": KEY},
            ACCOUNT_KEY,
        ),
        (
            {**WASB, "host": "http://azurite:1/lake", "password": KEY},
            {**ACCOUNT_KEY, "AZURE_STORAGE_ENDPOINT": "http://azurite:1/lake"},
        ),
        (
            {**ADLS, "login": KEY_ID, "password": KEY, "extra": {"tenant_id": "t"}},
            {**ACCOUNT, **CLIENT},
        ),
        (
            {**WASB, "extra": {"connection_string": f"AccountName=lake;AccountKey={KEY}"}},
            ACCOUNT_KEY,
        ),
        (
            {**ADLS, "extra": {"managed_identity_client_id": "id"}},
            {**ACCOUNT, "AZURE_CLIENT_ID": "id"},
        ),
    ],
)
def test_a_connection_to_azure_becomes_variables_of_one_identity(
    lake: Any, fields: dict[str, Any], variables: dict[str, str]
) -> None:
    lake(**fields)
    credentials = Credentials.of("lake", None)
    assert credentials.variables == variables
    secrets = {"AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_SECRET"}
    assert credentials.secrets == {variables[name] for name in secrets & variables.keys()}
    others = {"AZURE_STORAGE_ACCESS_KEY": "w", "AZURE_FEDERATED_TOKEN_FILE": "w"}
    kept = {} if credentials.secrets else others
    assert credentials.added_to({**others, "AZURE_AUTHORITY_HOST": "h"}) == {
        **kept,
        "AZURE_AUTHORITY_HOST": "h",
        **variables,
    }
    if "AZURE_STORAGE_SAS_TOKEN" in variables:
        with pytest.raises(AirflowFailException, match="fail when it expires"):
            credentials.check_lasting()


def test_a_role_is_assumed_by_amazons_provider_and_its_session_is_no_pods(
    lake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod would keep the session's token, which nothing renews there."""
    lake(**KEYS, extra={"role_arn": "arn:aws:iam::1:role/lake", "region_name": "eu-west-1"})
    hooks = "airflow.providers.amazon.aws.hooks.base_aws"
    monkeypatch.setitem(sys.modules, hooks, None)
    with pytest.raises(AirflowFailException, match="'lake': role_arn in extra needs Airflow's"):
        Credentials.of("lake", None)

    class AwsBaseHook:
        def __init__(self, conn_id: str) -> None:
            assert conn_id == "lake"

        def get_credentials(self) -> SimpleNamespace:
            return SimpleNamespace(access_key="ASIASESSION", secret_key="its-key", token=TOKEN)

    monkeypatch.setitem(sys.modules, hooks, SimpleNamespace(AwsBaseHook=AwsBaseHook))
    credentials = Credentials.of("lake", None)
    assert credentials.added_to({}) == {
        "AWS_ACCESS_KEY_ID": "ASIASESSION",
        "AWS_SECRET_ACCESS_KEY": "its-key",
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_DEFAULT_REGION": "eu-west-1",
    }
    assert credentials.secrets == {"ASIASESSION", "its-key", TOKEN}
    with pytest.raises(AirflowFailException, match="session token"):
        credentials.check_lasting()


def test_variables_of_the_worker_that_contradict_the_connection_are_left_out(lake: Any) -> None:
    lake(**KEYS, extra={"region_name": "r", "endpoint_url": "http://e"})
    worker = {
        "AWS_ACCESS_KEY_ID": "another",
        "AWS_SESSION_TOKEN": "of another key",
        "AWS_REGION": "another",
        "AWS_ENDPOINT_URL_S3": "http://another",
        "AWS_MAX_ATTEMPTS": "3",
    }
    region = {"AWS_DEFAULT_REGION": "r", "AWS_ENDPOINT_URL": "http://e"}
    kept = {**VARIABLES, **region, "AWS_MAX_ATTEMPTS": "3"}
    assert Credentials.of("lake", None).added_to(worker) == kept
    lake()
    assert Credentials.of("lake", None).added_to(worker) == worker


def test_longer_secrets_are_hidden_first_and_words_where_they_are_secrets(
    lake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked: list[str] = []
    monkeypatch.setattr("batchllm_operator.operators.credentials.mask_secret", masked.extend)
    lake(login="AKIA0CANARY0KEY", password="AKIA0CANARY0KEY2")
    longer_first = ("AKIA0CANARY0KEY2", "AKIA0CANARY0KEY")
    assert Credentials.of("lake", None).masker.anywhere == longer_first
    assert set(masked) == set(longer_first)
    lake(login="minioadmin", password="minioadmin-2")
    masker = Credentials.of("lake", None).masker
    assert masker("s3://minioadmin, secret_key=minioadmin-2") == "s3://minioadmin, secret_key=***"
    assert set(masked) == set(longer_first)  # words are in ids and paths, too


def test_fields_of_other_connections_become_variables(lake: Any) -> None:
    """An address or a name is no secret; a field of extra is one, whatever its name."""
    extra = {"token": TOKEN, "login": "hidden-login", "token.host": "hidden-host"}
    key = "-----BEGIN KEY-----\nMIIEvQIBADAN\n-----END KEY-----\n"
    lake(**KEYS)
    lake("catalog", conn_type="generic", host="https://c", login="l", password=key, extra=extra)
    fields = ("host", "login", "password", "extra.token", "extra.login", "extra.token.host")
    credentials = Credentials.of("lake", {field: f"catalog.{field}" for field in fields})
    values = ("https://c", "l", key, TOKEN, "hidden-login", "hidden-host")
    assert credentials.variables == {**VARIABLES, **dict(zip(fields, values, strict=True))}
    assert credentials.secrets == {KEY_ID, KEY, *values[2:]}
    assert credentials.masker("it is MIIEvQIBADAN") == "it is ***"  # line by line
    assert Credentials.of(None, None) == Credentials()


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("nowhere.password", r"no Airflow connection 'nowhere' \(connection_env\)"),
        ("lake", "must be <conn_id>.<field>"),
        ("lake.uri", "must be <conn_id>.<field>"),
        ("lake.host", "no such field, or an empty one"),
        ("lake.extra.token", "no such field, or an empty one"),
    ],
)
def test_a_field_that_is_not_there_fails_the_task(lake: Any, reference: str, reason: str) -> None:
    lake(**KEYS)
    with pytest.raises(AirflowFailException, match=reason):
        Credentials.of(None, {"VARIABLE": reference})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"conn_type": "http", "password": KEY}, "'lake' is of type 'http'"),
        ({"extra": '{"verify": "/etc/ca.pem"}'}, "'lake': verify in extra isn't supported"),
        ({"extra": '{"verify": false}'}, "'lake': verify in extra isn't supported"),
        ({"login": KEY_ID}, "'lake': an access key id"),
        ({"password": KEY}, "'lake': an access key id"),
        ({"login": KEY_ID, "extra": json.dumps(IN_EXTRA)}, "'lake': an access key id"),
        ({"extra": f'{{"aws_session_token": "{TOKEN}"}}'}, "'lake': an access key id"),
        ({**KEYS, "extra": f'{{"profile_name": "{TOKEN}"}}'}, "'lake': profile_name"),
        ({"extra": f'{{"service_config": {{"s3": "{TOKEN}"}}}}'}, "'lake': service_config"),
        ({"extra": f'{{"region_name": ["{TOKEN}"]}}'}, "'lake': the value for AWS_DEFAULT_REGION"),
        ({**KEYS, "extra": f"{{{TOKEN}"}, "'lake': extra isn't"),
        ({**GOOGLE, "extra": f'{{"keyfile_dict": "{TOKEN}"}}'}, "'lake': keyfile_dict or key_path"),
        ({**GOOGLE, "extra": f'{{"keyfile_dict": {{"k": "{TOKEN}"}}}}'}, "service account's key"),
        ({**GOOGLE, "extra": '{"key_path": "/absent.json"}'}, "'lake': key_path in extra: "),
        ({**GOOGLE, "extra": '{"impersonation_chain": "a@b"}'}, "workload identity"),
        ({**GOOGLE, "extra": '{"is_anonymous": true}'}, "'lake': is_anonymous in extra"),
        ({**WASB, "extra": f'{{"connection_string": "A={TOKEN}"}}'}, "no AccountKey or Shared"),
        (
            {**WASB, "extra": f'{{"account_key": ["{TOKEN}"]}}'},
            "AZURE_STORAGE_ACCOUNT_KEY isn't",
        ),
        ({**KEYS, "extra": f'["{TOKEN}"]'}, "'lake': extra isn't"),
    ],
)
def test_a_connection_that_cannot_be_used_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    reason: str,
) -> None:
    connection = Connection(conn_id="lake", **({"conn_type": "aws"} | fields))
    monkeypatch.setattr(Connection, "get", lambda conn_id: connection)
    with pytest.raises(AirflowFailException, match=reason) as caught:
        Credentials.of("lake", None)
    shown = "".join(traceback.format_exception(caught.value)) + "".join(capfd.readouterr())
    assert not any(canary in shown for canary in CANARIES)


def test_an_unknown_or_forbidden_connection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AirflowFailException, match="no Airflow connection 'nowhere'"):
        Credentials.of("nowhere", None)

    def get(conn_id: str) -> None:
        raise PermissionError(conn_id)  # a subclass of it

    monkeypatch.setattr(Connection, "get", get)
    with pytest.raises(AirflowFailException, match="may not read the Airflow connection 'lake'"):
        Credentials.of("lake", None)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ExitCode.OK, None),
        (ExitCode.INVALID, AirflowFailException),
        (ExitCode.FAILURE, AirflowException),
    ],
)
def test_only_the_commands_environment_holds_the_values(
    lake: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: ExitCode,
    error: type[Exception] | None,
) -> None:
    at = {"AWS_ENDPOINT_URL": "http://minio:9000"}
    lake(**KEYS, extra={"aws_session_token": TOKEN, "endpoint_url": at["AWS_ENDPOINT_URL"]})
    script, seen_path = tmp_path / "blurt.py", tmp_path / "seen.json"
    script.write_text(BLURT)
    monkeypatch.setattr(command, "_COMMAND", (sys.executable, str(script)))
    worker = dict(os.environ)
    env = {"SEEN": str(seen_path), "CODE": str(int(code)), "AWS_ACCESS_KEY_ID": "env's"}
    task = BatchLLMCommandOperator(task_id="task", env=env, lake_conn_id="lake")
    if error is None:
        shown = repr(task.run_command("plan"))
    else:
        with pytest.raises(error, match=r"refused: \*\*\* \*\*\* \*\*\*") as caught:
            task.run_command("plan")
        shown = "".join(traceback.format_exception(caught.value))
    seen = json.loads(seen_path.read_text())
    assert seen["env"] == {**VARIABLES, **at, "AWS_SESSION_TOKEN": TOKEN}
    assert os.environ == worker
    logged = "".join(capfd.readouterr())
    assert "refused: *** *** ***" in logged
    shown += logged + repr(seen["argv"]) + repr({f: getattr(task, f) for f in task.template_fields})
    assert not any(canary in shown for canary in CANARIES)


def test_the_connection_id_is_a_template() -> None:
    task = BatchLLMPlanOperator(task_id="p", spec_path="j.yaml", lake_conn_id="lake_{{ ds }}")
    run = SimpleNamespace(partition_key=None)
    task.render_template_fields({"ds": "2026-01-31", "dag_run": run})  # type: ignore[typeddict-item]
    assert task.lake_conn_id == "lake_2026-01-31"
