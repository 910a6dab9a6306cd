"""Credentials for a command, read from Airflow connections when the task runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowNotFoundException
from airflow.sdk import Connection
from airflow.sdk.log import mask_secret

from batchllm_operator.secrets import Masker

_KEY_PAIR: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_TOKEN: Final = "AWS_SESSION_TOKEN"
_GOOGLE_KEY: Final = "GOOGLE_SERVICE_ACCOUNT_KEY"
_AZURE_SECRETS: Final = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_CLIENT_SECRET",
)
_SECRETS: Final = frozenset({*_KEY_PAIR, _TOKEN, _GOOGLE_KEY, *_AZURE_SECRETS})
_EXPIRING: Final = ("SESSION_TOKEN", "AWS_SECURITY_TOKEN", "SAS_TOKEN")  # endings, of any client
_CONTRADICTED: Final[Mapping[str, str]] = {
    "AWS_SECRET_ACCESS_KEY": "AWS_SESSION_TOKEN|AWS_SECURITY_TOKEN",
    "AWS_DEFAULT_REGION": "AWS_REGION",
    "AWS_ENDPOINT_URL": "AWS_ENDPOINT_URL_S3",
    _GOOGLE_KEY: (
        "GOOGLE_(SERVICE_ACCOUNT(_PATH)?|APPLICATION_CREDENTIALS|BEARER_TOKEN|SKIP_SIGNATURE)"
    ),
    **dict.fromkeys(
        _AZURE_SECRETS,
        r"AZURE_(STORAGE_)?((ACCOUNT|ACCESS|MASTER|SAS)_KEY|SAS_TOKEN|TOKEN|CLIENT_SECRET"
        "|(CLIENT|TENANT|AUTHORITY)_ID|FEDERATED_TOKEN_FILE|CREDENTIAL_TYPE)",
    ),
}
"""Patterns of the worker's variables that are dropped with one of the connection's."""
_UNSUPPORTED_EXTRAS: Final[Mapping[str, Mapping[str, str]]] = {
    "aws": {
        "verify": "set AWS_CA_BUNDLE in env, for worker and pod",
        **dict.fromkeys(
            ("profile_name", "service_config", "session_kwargs"),
            "give keys or a role_arn, or let the worker's own environment choose profile or"
            " endpoint",
        ),
    },
    "google_cloud_platform": dict.fromkeys(
        (
            *("impersonation_chain", "key_secret_name", "credential_config_file"),
            *("idp_issuer_url", "is_anonymous"),
        ),
        "give keyfile_dict or key_path, or leave all out and give workers and pods an identity of"
        " their own (workload identity)",
    ),
}
"""Fields of the providers, by type, that change identity or endpoint, and what to do instead."""
_OPEN_FIELDS: Final = ("login", "host", "schema", "port")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Environment variables that give a command the credentials of connections.

    Airflow masks the secrets, except ordinary words, because it masks them anywhere in a text.
    """

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        mask_secret(list(self.masker.anywhere))

    @classmethod
    def of(cls, lake_conn_id: str | None, connection_env: Mapping[str, str] | None) -> Credentials:
        """Read all connections that an operator names.

        `connection_env` has for each environment variable the field of a connection, as
        `<conn_id>.<field>`: login, password, host, schema, port, `extra.<name>`. Values of password
        and extra count as secrets. Raises `AirflowFailException` if a connection or field is absent
        or wrong, or the task may not read it.
        """
        lake = cls()
        if lake_conn_id is not None:
            lake = cls.from_connection(lake_conn_id, _connection(lake_conn_id, "lake_conn_id"))
        variables, secrets = dict(lake.variables), set(lake.secrets)
        for name, reference in (connection_env or {}).items():
            value = variables[name] = _value(reference, f"connection_env[{name!r}]: {reference!r}")
            if reference.partition(".")[2] not in _OPEN_FIELDS:
                secrets.add(value)
        return cls(variables, frozenset(secrets))

    @classmethod
    def from_connection(cls, conn_id: str, connection: Any) -> Credentials:
        """The variables of a lake's clients, from a connection to a cloud, by its type.

        Its fields are those of Airflow's provider: see `_aws`, `_google`, `_azure`. Absent fields
        are left to the worker's environment. Raises `AirflowFailException` if the type is wrong, or
        fields contradict each other.
        """
        where, extra = f"Airflow connection {conn_id!r}", _extra(conn_id, connection)
        kind = "aws" if connection.conn_type == "generic" else connection.conn_type
        if kind not in _VARIABLES_OF:
            raise AirflowFailException(
                f"{where} is of type {kind!r}; lake_conn_id takes {', '.join(_VARIABLES_OF)}"
            )
        for name, advice in _UNSUPPORTED_EXTRAS.get(kind, {}).items():
            if extra.get(name) not in (None, "", {}, name == "verify"):
                raise AirflowFailException(f"{where}: {name} in extra isn't supported; {advice}")
        values = _VARIABLES_OF[kind](where, connection, extra)
        variables = {name: value for name, value in values.items() if value}
        for name, value in variables.items():
            if not isinstance(value, str):
                raise AirflowFailException(f"{where}: the value for {name} isn't a string")
        secrets = {variables[name] for name in variables.keys() & _SECRETS}
        if _GOOGLE_KEY in variables:  # the key as clients have it: JSON escapes its lines
            secrets.add(json.loads(variables[_GOOGLE_KEY])["private_key"])
        return cls(variables, frozenset(secrets - {""}))

    @property
    def masker(self) -> Masker:
        return Masker.of(secrets=self.secrets)

    def check_lasting(self) -> None:
        """Raise `AirflowFailException` for a token: it would expire while the pod runs."""
        for name in self.variables:
            if name.endswith(_EXPIRING):
                raise AirflowFailException(
                    f"{name} from an Airflow connection is a session token: the pod would keep it"
                    " as it is, and fail when it expires. Give the pods' service account a role of"
                    " its own instead (docs/operate/kubernetes.md, Airflow), use keys that need no"
                    " token, or say session_token_outlives_task=True if it does"
                )

    def added_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """A copy of `env` with these variables, and without those that contradict them."""
        patterns = [_CONTRADICTED[name] for name in self.variables if name in _CONTRADICTED]
        is_dropped = re.compile("|".join(patterns or ["(?!)"])).fullmatch
        return {n: v for n, v in env.items() if not is_dropped(n)} | dict(self.variables)


def _aws(where: str, connection: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Of login and password (or `aws_access_key_id` and `aws_secret_access_key` in extra), and in
    extra `aws_session_token`, `region_name`, `endpoint_url` and `role_arn`. The provider assumes
    the role, for a session that nothing renews; without one it isn't needed.
    """
    keys = (connection.login, connection.password)
    if not any(keys):
        keys = (extra.get("aws_access_key_id"), extra.get("aws_secret_access_key"))
    token = extra.get("aws_session_token")
    if extra.get("role_arn"):
        key_id, secret_key, token = _session(where, connection.conn_id)
        keys = (key_id, secret_key)
    if any((*keys, token)) and not all(keys):
        raise AirflowFailException(
            f"{where}: an access key id (login), its secret key (password) and a session token are"
            " no use without each other; give both keys, or none of the three to use the worker's"
            " own credentials"
        )
    return dict(zip(_KEY_PAIR, keys, strict=True)) | {
        _TOKEN: token,
        "AWS_DEFAULT_REGION": extra.get("region_name"),
        "AWS_ENDPOINT_URL": extra.get("endpoint_url"),
    }


def _session(where: str, conn_id: str) -> tuple[str, str, str | None]:
    """Key id, key and token of the role that a connection names."""
    try:
        from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook
    except ImportError as error:
        raise AirflowFailException(
            f"{where}: role_arn in extra needs Airflow's provider apache-airflow-providers-amazon,"
            f" which isn't installed here ({error}); give keys, or let the worker's own environment"
            " choose the role"
        ) from error
    found = AwsBaseHook(conn_id).get_credentials()
    return found.access_key, found.secret_key, found.token


def _google(where: str, connection: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Of the key of a service account in extra: `keyfile_dict`, or `key_path` on this worker."""
    key = extra.get("keyfile_dict")
    if not key and (path := extra.get("key_path")):
        try:
            key = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise AirflowFailException(f"{where}: key_path in extra: {error}") from error
    text = key if isinstance(key, str) else json.dumps(key)
    try:
        is_key = not key or isinstance(json.loads(text)["private_key"], str)
    except (KeyError, TypeError, ValueError):  # not chained: the cause may hold the text
        is_key = False
    if not is_key:
        raise AirflowFailException(
            f"{where}: keyfile_dict or key_path in extra isn't the JSON of a service account's key"
        )
    return {_GOOGLE_KEY: key and text}


def _azure(where: str, connection: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Of the account, in login or host, and the first of these: `connection_string` in extra;
    `tenant_id` with a client's id (login) and secret (password); `shared_access_key`; `sas_token`;
    the account's key (password, or `account_key`). Without: the worker's identity, perhaps named by
    `managed_identity_client_id`.
    """
    parts = (part.partition("=") for part in (extra.get("connection_string") or "").split(";"))
    tenant = client = secret = None
    if given := {name: value for name, _, value in parts if value}:
        names = ("AccountName", "BlobEndpoint", "AccountKey", "SharedAccessSignature")
        account, endpoint, key, sas = map(given.get, names)
        if not key and not sas:
            raise AirflowFailException(
                f"{where}: connection_string in extra has no AccountKey or SharedAccessSignature"
            )
    else:
        host = (connection.host or "").rstrip("/")
        endpoint = host if "://" in host and not host.endswith(".core.windows.net") else None
        account = host.rpartition("://")[2].partition(".")[0]
        key, sas, tenant = (extra.get(n) for n in ("shared_access_key", "sas_token", "tenant_id"))
        if tenant:
            client, secret, key, sas = connection.login, connection.password, None, None
        else:
            account = (connection.conn_type == "wasb" and connection.login) or account
            sas = None if key else sas
            key = key or (None if sas else connection.password or extra.get("account_key"))
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": account,
        "AZURE_STORAGE_ENDPOINT": endpoint,
        "AZURE_STORAGE_ACCOUNT_KEY": key,
        "AZURE_STORAGE_SAS_TOKEN": sas and sas.rpartition("?")[2],  # it may be a URL
        "AZURE_TENANT_ID": tenant or extra.get("workload_identity_tenant_id"),
        "AZURE_CLIENT_ID": client or extra.get("managed_identity_client_id"),
        "AZURE_CLIENT_SECRET": secret,
    }


_VARIABLES_OF: Final[Mapping[str, Callable[[str, Any, Mapping[str, Any]], dict[str, Any]]]] = {
    "aws": _aws,
    "google_cloud_platform": _google,
    "wasb": _azure,
    "adls": _azure,
}


def _value(reference: str, where: str) -> str:
    """The field of a connection that a reference names."""
    conn_id, _, name = reference.partition(".")
    connection = _connection(conn_id, "connection_env")
    if name.startswith("extra."):
        value = _extra(conn_id, connection).get(name.removeprefix("extra."))
    elif name in (fields := ("password", *_OPEN_FIELDS)):
        value = getattr(connection, name)
    else:
        raise AirflowFailException(
            f"{where}: must be <conn_id>.<field>; fields are {', '.join(fields)} and extra.<name>"
        )
    if value is None or value == "":
        raise AirflowFailException(f"{where}: the connection has no such field, or an empty one")
    return value if isinstance(value, str) else json.dumps(value)


def _connection(conn_id: str, wanted_by: str) -> Any:
    try:
        return Connection.get(conn_id)
    except AirflowNotFoundException:
        reason = f"there is no Airflow connection {conn_id!r}"
    except PermissionError:
        reason = f"this task may not read the Airflow connection {conn_id!r}"
    raise AirflowFailException(f"{reason} ({wanted_by})")


def _extra(conn_id: str, connection: Any) -> dict[str, Any]:
    """A connection's extra fields. `extra_dejson` would ignore broken JSON."""
    try:
        extra = json.loads(connection.extra or "{}")
    except ValueError:  # not chained: the cause holds the text
        extra = None
    if not isinstance(extra, dict):
        raise AirflowFailException(f"Airflow connection {conn_id!r}: extra isn't a JSON object")
    return extra
