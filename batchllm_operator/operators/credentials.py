"""Credentials for a command, read from Airflow connections when the task runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowNotFoundException
from airflow.sdk import Connection
from airflow.sdk.log import mask_secret

from batchllm_operator.secrets import Masker

_KEY_PAIR: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_TOKEN: Final = "AWS_SESSION_TOKEN"
_SESSION_TOKENS: Final = ("SESSION_TOKEN", "AWS_SECURITY_TOKEN")  # endings, of any client
_CONTRADICTED: Final[Mapping[str, tuple[str, ...]]] = {
    "AWS_SECRET_ACCESS_KEY": (_TOKEN, "AWS_SECURITY_TOKEN"),
    "AWS_DEFAULT_REGION": ("AWS_REGION",),
    "AWS_ENDPOINT_URL": ("AWS_ENDPOINT_URL_S3",),
}
"""The worker's variables that are dropped with one of the connection's."""
_UNSUPPORTED_EXTRAS: Final = {
    "verify": "set AWS_CA_BUNDLE in env, for worker and pod",
    **dict.fromkeys(
        ("profile_name", "service_config", "session_kwargs"),
        "give keys or a role_arn, or let the worker's own environment choose profile or endpoint",
    ),
}
"""Fields of the Amazon provider that change identity or endpoint, and what to do instead."""
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
    def of(cls, aws_conn_id: str | None, connection_env: Mapping[str, str] | None) -> Credentials:
        """Read all connections that an operator names.

        `connection_env` has for each environment variable the field of a connection, as
        `<conn_id>.<field>`: login, password, host, schema, port, `extra.<name>`. Values of password
        and extra count as secrets. Raises `AirflowFailException` if a connection or field is absent
        or wrong, or the task may not read it.
        """
        aws = cls()
        if aws_conn_id is not None:
            aws = cls.from_connection(aws_conn_id, _connection(aws_conn_id, "aws_conn_id"))
        variables, secrets = dict(aws.variables), set(aws.secrets)
        for name, reference in (connection_env or {}).items():
            value = variables[name] = _value(reference, f"connection_env[{name!r}]: {reference!r}")
            if reference.partition(".")[2] not in _OPEN_FIELDS:
                secrets.add(value)
        return cls(variables, frozenset(secrets))

    @classmethod
    def from_connection(cls, conn_id: str, connection: Any) -> Credentials:
        """The `AWS_*` variables of a connection.

        Its fields are the Amazon provider's: login and password (or `aws_access_key_id` and
        `aws_secret_access_key` in extra), and in extra `aws_session_token`, `region_name`,
        `endpoint_url`, and `role_arn`. The provider assumes the role, for a session that nothing
        renews; without one it isn't needed. Absent fields are left to the worker's environment.
        Raises `AirflowFailException` if the type is wrong, or fields contradict each other.
        """
        where, extra = f"Airflow connection {conn_id!r}", _extra(conn_id, connection)
        wrong = ""
        if connection.conn_type not in ("aws", "generic"):
            wrong = f" is of type {connection.conn_type!r}; aws_conn_id takes one of type 'aws'"
        for name, advice in _UNSUPPORTED_EXTRAS.items():
            if extra.get(name) not in (None, "", {}, True):
                wrong = wrong or f": {name} in extra isn't supported; {advice}"
        keys = (connection.login, connection.password)
        if not any(keys):
            keys = (extra.get("aws_access_key_id"), extra.get("aws_secret_access_key"))
        token = extra.get("aws_session_token")
        if extra.get("role_arn") and not wrong:
            key_id, secret_key, token = _session(conn_id)
            keys = (key_id, secret_key)
        values = dict(zip(_KEY_PAIR, keys, strict=True)) | {
            _TOKEN: token,
            "AWS_DEFAULT_REGION": extra.get("region_name"),
            "AWS_ENDPOINT_URL": extra.get("endpoint_url"),
        }
        variables = {name: value for name, value in values.items() if value}
        for name, value in variables.items():
            if not isinstance(value, str):
                wrong = wrong or f": the value for {name} isn't a string"
        secrets = variables.keys() & {*_KEY_PAIR, _TOKEN}
        if secrets and not secrets >= {*_KEY_PAIR}:
            wrong = wrong or (
                ": an access key id (login), its secret key (password) and a session token are no"
                " use without each other; give both keys, or none of the three to use the worker's"
                " own credentials"
            )
        if wrong:
            raise AirflowFailException(where + wrong)
        return cls(variables, frozenset(variables[name] for name in secrets))

    @property
    def masker(self) -> Masker:
        return Masker.of(secrets=self.secrets)

    def check_lasting(self) -> None:
        """Raise `AirflowFailException` for a session token: it would expire while the pod runs."""
        for name in self.variables:
            if name.endswith(_SESSION_TOKENS):
                raise AirflowFailException(
                    f"{name} from an Airflow connection is a session token: the pod would keep it"
                    " as it is, and fail when it expires. Give the pods' service account a role of"
                    " its own instead (docs/operate/kubernetes.md, Airflow), use keys that need no"
                    " token, or say session_token_outlives_task=True if it does"
                )

    def added_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """A copy of `env` with these variables, and without those that contradict them."""
        dropped = {other for name in self.variables for other in _CONTRADICTED.get(name, ())}
        return {n: v for n, v in env.items() if n not in dropped} | dict(self.variables)


def _session(conn_id: str) -> tuple[str, str, str | None]:
    """Key id, key and token of the role that a connection names."""
    try:
        from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook
    except ImportError as error:
        raise AirflowFailException(
            f"Airflow connection {conn_id!r}: role_arn in extra needs Airflow's provider"
            f" apache-airflow-providers-amazon, which isn't installed here ({error}); give keys, or"
            " let the worker's own environment choose the role"
        ) from error
    found = AwsBaseHook(conn_id).get_credentials()
    return found.access_key, found.secret_key, found.token


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
    return str(value)


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
