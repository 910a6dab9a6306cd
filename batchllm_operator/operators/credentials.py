"""AWS credentials for a command, read from an Airflow connection when the task runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowNotFoundException
from airflow.sdk import Connection
from airflow.sdk.log import mask_secret

_KEY_PAIR: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_TOKEN: Final = "AWS_SESSION_TOKEN"

# What would contradict a variable of the connection's if the worker has it, and so is left out.
_CONTRADICTED: Final[Mapping[str, tuple[str, ...]]] = {
    "AWS_SECRET_ACCESS_KEY": (_TOKEN, "AWS_SECURITY_TOKEN"),
    "AWS_DEFAULT_REGION": ("AWS_REGION",),
    "AWS_ENDPOINT_URL": ("AWS_ENDPOINT_URL_S3",),
}

# What the Amazon provider also takes, and what would lead to another identity or endpoint than
# the connection means if it were passed over.
_UNSUPPORTED_EXTRAS: Final = ("profile_name", "role_arn", "service_config", "session_kwargs")

_MIN_SECRET_LEN: Final = 5  # as for Airflow: hiding a shorter one would spoil every line


@dataclass(frozen=True, slots=True)
class AwsCredentials:
    """Environment variables that give a child process a connection's credentials."""

    variables: Mapping[str, str] = field(repr=False)

    @classmethod
    def from_connection(cls, conn_id: str) -> AwsCredentials:
        """Read an Airflow connection of type `aws`; the Amazon provider isn't needed.

        Its fields are those of the Amazon provider: login and password (or
        `aws_access_key_id` and `aws_secret_access_key` in extra), and in extra
        `aws_session_token`, `region_name` and `endpoint_url`. What is absent or empty is left
        to the worker's environment. Airflow is told to mask the secret ones. Type `generic`
        will do too: that's what `airflow connections add --conn-type aws` stores where the
        Amazon provider isn't installed.

        Raises:
            AirflowFailException: there is no such connection, this task may not read it, it
                is of another type, or its fields don't fit together.
        """
        connection = _get_connection(conn_id)
        if connection.conn_type not in ("aws", "generic"):
            raise AirflowFailException(
                f"Airflow connection {conn_id!r} is of type {connection.conn_type!r}; aws_conn_id"
                " takes one of type 'aws'"
            )
        extra = _parse_extra(conn_id, connection.extra)
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
        credentials = cls({name: value for name, value in values.items() if value})
        credentials._check(conn_id)
        mask_secret(list(credentials.secrets))
        return credentials

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that must not be shown, those that contain others first."""
        names = (*_KEY_PAIR, _TOKEN)
        values = {self.variables[name] for name in names if name in self.variables}
        return tuple(
            sorted((v for v in values if len(v) >= _MIN_SECRET_LEN), key=len, reverse=True)
        )

    def added_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """A copy of `env` with these variables, and without those that contradict them."""
        contradicted = {each for name in self.variables for each in _CONTRADICTED.get(name, ())}
        kept = {name: value for name, value in env.items() if name not in contradicted}
        return kept | dict(self.variables)

    def _check(self, conn_id: str) -> None:
        for name, value in self.variables.items():
            if not isinstance(value, str):
                raise AirflowFailException(
                    f"Airflow connection {conn_id!r}: the value for {name} isn't a string"
                )
        given = [name for name in _KEY_PAIR if name in self.variables]
        if len(given) == 1 or (not given and _TOKEN in self.variables):
            raise AirflowFailException(
                f"Airflow connection {conn_id!r}: an access key id (login), its secret key"
                " (password) and a session token are no use without each other; give both keys,"
                " or none of the three to use the worker's own credentials"
            )


def _get_connection(conn_id: str) -> Any:
    """The connection, as a task gets it: from secrets backends, the environment or the API."""
    try:
        return Connection.get(conn_id)
    except AirflowNotFoundException:
        raise AirflowFailException(
            f"there is no Airflow connection {conn_id!r} (aws_conn_id)"
        ) from None
    except PermissionError:
        raise AirflowFailException(
            f"this task may not read the Airflow connection {conn_id!r} (aws_conn_id)"
        ) from None


def _parse_extra(conn_id: str, text: str | None) -> dict[str, Any]:
    """A connection's extra fields. Not by `extra_dejson`, which passes over broken JSON."""
    try:
        extra = json.loads(text or "{}")
    except ValueError:  # without its cause, which holds the text
        extra = None
    if not isinstance(extra, dict):
        raise AirflowFailException(f"Airflow connection {conn_id!r}: extra isn't a JSON object")
    for name in _UNSUPPORTED_EXTRAS:
        if extra.get(name):
            raise AirflowFailException(
                f"Airflow connection {conn_id!r}: {name} in extra isn't supported; give keys, or"
                " let the worker's own environment choose the role, profile or endpoint"
            )
    return extra
