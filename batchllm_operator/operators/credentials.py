"""Credentials for a command, read from Airflow connections when the task runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowNotFoundException
from airflow.sdk import Connection
from airflow.sdk.log import mask_secret

from batchllm_operator.secrets import Masker

_KEY_PAIR: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_TOKEN: Final = "AWS_SESSION_TOKEN"
_SESSION_TOKENS: Final = ("SESSION_TOKEN", "AWS_SECURITY_TOKEN")
"""Suffixes of variables that hold a session token, of any client."""

# Variables of the worker that would contradict one of the connection's, and so are dropped.
_CONTRADICTED: Final[Mapping[str, tuple[str, ...]]] = {
    "AWS_SECRET_ACCESS_KEY": (_TOKEN, "AWS_SECURITY_TOKEN"),
    "AWS_DEFAULT_REGION": ("AWS_REGION",),
    "AWS_ENDPOINT_URL": ("AWS_ENDPOINT_URL_S3",),
}

# Extras of the Amazon provider that change the identity or endpoint, so ignoring them is wrong.
_UNSUPPORTED_EXTRAS: Final = ("profile_name", "role_arn", "service_config", "session_kwargs")
_VERIFY: Final = "verify"

_FIELDS: Final = ("login", "password", "host", "schema", "port")
_OPEN_FIELDS: Final = ("login", "host", "schema", "port")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Environment variables that give a command the credentials of connections."""

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: frozenset[str] = field(default=frozenset(), repr=False)

    @classmethod
    def of(cls, aws_conn_id: str | None, connection_env: Mapping[str, str] | None) -> Credentials:
        """Read all connections that an operator names.

        Args:
            aws_conn_id: see `from_aws`.
            connection_env: for each environment variable, the field of a connection, as
                `<conn_id>.<field>`: login, password, host, schema, port, `extra.<name>`. Values
                of password and extra count as secrets.

        Raises:
            AirflowFailException: a connection or field is absent, or wrong.
        """
        aws = cls.from_aws(aws_conn_id) if aws_conn_id is not None else cls()
        variables, secrets = dict(aws.variables), set(aws.secrets)
        for name, reference in (connection_env or {}).items():
            value = variables[name] = _read_field(name, reference)
            if reference.partition(".")[2] not in _OPEN_FIELDS:
                secrets.add(value)
        return cls(variables, frozenset(secrets))._masked_by_airflow()

    @classmethod
    def from_aws(cls, conn_id: str) -> Credentials:
        """Read an Airflow connection of type `aws`; the Amazon provider isn't needed.

        Its fields are those of the Amazon provider: login and password (or `aws_access_key_id` and
        `aws_secret_access_key` in extra), and in extra `aws_session_token`, `region_name` and
        `endpoint_url`. Absent or empty fields are left to the worker's environment. Airflow masks
        the secrets. Without the Amazon provider Airflow stores such a connection as `generic`.

        Raises:
            AirflowFailException: there is no such connection, this task may not read it, its type
                is wrong, or its fields contradict each other.
        """
        return cls.from_connection(conn_id, _get_connection(conn_id))

    @classmethod
    def from_connection(cls, conn_id: str, connection: Any) -> Credentials:
        if connection.conn_type not in ("aws", "generic"):
            raise AirflowFailException(
                f"Airflow connection {conn_id!r} is of type {connection.conn_type!r}; aws_conn_id"
                " takes one of type 'aws'"
            )
        extra = _aws_extra(conn_id, connection.extra)
        key_id, key = connection.login, connection.password
        if not key_id and not key:
            key_id, key = extra.get("aws_access_key_id"), extra.get("aws_secret_access_key")
        values = {
            "AWS_ACCESS_KEY_ID": key_id,
            "AWS_SECRET_ACCESS_KEY": key,
            _TOKEN: extra.get("aws_session_token"),
            "AWS_DEFAULT_REGION": extra.get("region_name"),
            "AWS_ENDPOINT_URL": extra.get("endpoint_url"),
        }
        variables = {name: value for name, value in values.items() if value}
        _check_aws(conn_id, variables)
        names = [name for name in (*_KEY_PAIR, _TOKEN) if name in variables]
        return cls(variables, frozenset(variables[name] for name in names))._masked_by_airflow()

    @property
    def masker(self) -> Masker:
        return Masker.of(secrets=self.secrets)

    def _masked_by_airflow(self) -> Self:
        """Let Airflow mask the secrets, except ordinary words: it masks them anywhere in a text."""
        mask_secret(list(self.masker.anywhere))
        return self

    def check_lasting(self) -> None:
        """Raise `AirflowFailException` for a session token: it would expire while the pod runs."""
        for name in self.variables:
            if name.endswith(_SESSION_TOKENS):
                raise AirflowFailException(
                    f"{name} from an Airflow connection is a session token: the pod would keep it"
                    " as it is, and fail when it expires. Give the pods' service account a role of"
                    " its own instead (docs/kubernetes.md, Airflow), use keys that need no"
                    " token, or say session_token_outlives_task=True if it does"
                )

    def added_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """A copy of `env` with these variables, and without those that contradict them."""
        contradicted = {each for name in self.variables for each in _CONTRADICTED.get(name, ())}
        kept = {name: value for name, value in env.items() if name not in contradicted}
        return kept | dict(self.variables)


def _check_aws(conn_id: str, variables: Mapping[str, Any]) -> None:
    for name, value in variables.items():
        if not isinstance(value, str):
            raise AirflowFailException(
                f"Airflow connection {conn_id!r}: the value for {name} isn't a string"
            )
    given = [name for name in _KEY_PAIR if name in variables]
    if len(given) == 1 or (not given and _TOKEN in variables):
        raise AirflowFailException(
            f"Airflow connection {conn_id!r}: an access key id (login), its secret key"
            " (password) and a session token are no use without each other; give both keys,"
            " or none of the three to use the worker's own credentials"
        )


def _read_field(name: str, reference: str) -> str:
    """The value of variable `name` in `connection_env`, from the connection's field."""
    conn_id, _, field_name = reference.partition(".")
    connection = _get_connection(conn_id, "connection_env")
    where = f"connection_env[{name!r}]: {reference!r}"
    if field_name.startswith("extra."):
        value = _parse_extra(conn_id, connection.extra).get(field_name.removeprefix("extra."))
    elif field_name in _FIELDS:
        value = getattr(connection, field_name)
    else:
        raise AirflowFailException(
            f"{where}: must be <conn_id>.<field>; fields are {', '.join(_FIELDS)} and extra.<name>"
        )
    if value is None or value == "":
        raise AirflowFailException(f"{where}: the connection has no such field, or an empty one")
    return str(value)


def _get_connection(conn_id: str, wanted_by: str = "aws_conn_id") -> Any:
    try:
        return Connection.get(conn_id)
    except AirflowNotFoundException:
        raise AirflowFailException(
            f"there is no Airflow connection {conn_id!r} ({wanted_by})"
        ) from None
    except PermissionError:
        raise AirflowFailException(
            f"this task may not read the Airflow connection {conn_id!r} ({wanted_by})"
        ) from None


def _aws_extra(conn_id: str, text: str | None) -> dict[str, Any]:
    """An AWS connection's extra fields; those that only tune a client are ignored."""
    extra = _parse_extra(conn_id, text)
    if extra.get(_VERIFY, True) is not True:
        raise AirflowFailException(
            f"Airflow connection {conn_id!r}: verify in extra isn't supported; set AWS_CA_BUNDLE in"
            " env, for worker and pod"
        )
    for name in _UNSUPPORTED_EXTRAS:
        if extra.get(name):
            raise AirflowFailException(
                f"Airflow connection {conn_id!r}: {name} in extra isn't supported; give keys, or"
                " let the worker's own environment choose the role, profile or endpoint"
            )
    return extra


def _parse_extra(conn_id: str, text: str | None) -> dict[str, Any]:
    """A connection's extra fields. `extra_dejson` would ignore broken JSON."""
    try:
        extra = json.loads(text or "{}")
    except ValueError:  # not chained: the cause holds the text
        extra = None
    if not isinstance(extra, dict):
        raise AirflowFailException(f"Airflow connection {conn_id!r}: extra isn't a JSON object")
    return extra
