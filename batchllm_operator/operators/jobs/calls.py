"""Calls of the cluster's API, tried again while they fail for a passing reason."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from aiohttp import ClientError
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
from airflow.providers.common.compat.sdk import AirflowFailException
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import ConfigException, load_incluster_config

CONFLICT, FORBIDDEN, NOT_FOUND = 409, 403, 404
_REQUEST_S: Final = 30.0
_SHORTEST_REQUEST_S: Final = 0.5
"""A request is sent even if there is no time to wait for its answer."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0


def _has_no_secret(record: logging.LogRecord) -> bool:
    return '"kind":"Secret' not in record.getMessage().replace(" ", "")


# At level DEBUG the client logs every answer; nothing masks the base64 of a Secret.
logging.getLogger("kubernetes_asyncio.client.rest").addFilter(_has_no_secret)


class NoConnectionError(Exception):
    """The cluster's address and credentials can't be read right now."""


ANSWERLESS: Final = (ApiException, ClientError, OSError, NoConnectionError)
"""What a call of the API may raise; a `TimeoutError` is an `OSError`."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """How to reach a cluster, as for the operator; each process reads its own credentials."""

    kubernetes_conn_id: str | None
    in_cluster: bool | None
    cluster_context: str | None
    config_file: str | None  # path of the kubeconfig, which the triggerer must be able to read, too


class ClusterCalls:
    """A connection to a cluster, whose calls are repeated for `patience_s` each.

    So a restart of the API server goes unnoticed. After a failure the configuration is read again;
    else Airflow is asked once for its connection. It may be entered again.
    """

    def __init__(self, cluster: Cluster, *, log: logging.Logger | Any, patience_s: float) -> None:
        self._cluster, self._log, self.patience_s = cluster, log, patience_s
        self._extras: dict[str, Any] | None = None
        self._connecting: asyncio.Task[tuple[Any, ApiClient]] | None = None
        self._trouble = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is None:
            return
        # One that is cut off leaves open what it has just opened.
        await asyncio.wait([connecting], timeout=_SHORTEST_REQUEST_S)
        if connecting.cancel() or connecting.exception():
            return
        try:
            await connecting.result()[0].__aexit__(None, None, None)
        except ANSWERLESS as error:
            self._log.debug("The connection to the cluster: %s", message_of(error))

    async def _connect(self) -> ApiClient:
        """The client; connecting goes on if the caller is cancelled, until `__aexit__`."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connected())
        return (await asyncio.shield(self._connecting))[1]

    async def _connected(self) -> tuple[Any, ApiClient]:
        try:
            if self._extras is None or self._trouble:
                hook = AsyncKubernetesHook(conn_id=self._cluster.kubernetes_conn_id)
                self._extras = await hook.get_conn_extras()
            connection = _hook(self._cluster, self._extras).get_conn()
            return connection, await connection.__aenter__()
        except (AirflowFailException, *ANSWERLESS):
            raise
        # Such as a half-written kubeconfig, or an Airflow that doesn't answer: none of it
        # affects the running pods.
        except Exception as error:
            raise NoConnectionError(f"{type(error).__name__}: {error}") from error

    async def call(
        self, api: type[Any], method: str, *args: Any, patience_s: float = math.inf, **options: Any
    ) -> Any:
        """Call a method of a client's API.

        Raises:
            AirflowFailException: the cluster is configured in two ways.
            ApiException: the cluster refuses, or a change is based on an outdated version.
            ClientError, OSError, NoConnectionError: it hasn't answered in time.
        """
        give_up_at = time.monotonic() + min(patience_s, self.patience_s)
        pause_s = FIRST_PAUSE_S
        while True:
            limit_s = max(_SHORTEST_REQUEST_S, min(_REQUEST_S, give_up_at - time.monotonic()))
            try:
                async with asyncio.timeout(limit_s):
                    answer = await getattr(api(await self._connect()), method)(*args, **options)
            except ANSWERLESS as error:
                left_s = give_up_at - time.monotonic()
                if left_s <= 0 or not _is_passing(error, is_new=method.startswith("create")):
                    raise
                await self.__aexit__()
                if self._trouble != (text := message_of(error)):
                    self._trouble = text
                    self._log.warning("The cluster's API: %s; trying again", text)
                await asyncio.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._trouble = ""
                return answer


def _hook(cluster: Cluster, extras: Mapping[str, Any]) -> AsyncKubernetesHook:
    """The provider's hook for a connection's fields; as its synchronous one, it may skip the
    verification, and finds the cluster of this process. A cluster with two names is refused.
    """
    given = {name.removeprefix("extra__kubernetes__") for name, value in extras.items() if value}
    configuration, in_cluster = Configuration(), cluster.in_cluster
    configuration.verify_ssl = "disable_verify_ssl" not in given
    if in_cluster is not None:
        given -= {"in_cluster"}
    ways = sorted(given & {"in_cluster", "kube_config", "kube_config_path"})
    ways += ["config_file"] * bool(cluster.config_file) + ["in_cluster=True"] * bool(in_cluster)
    if len(ways) > 1:
        raise AirflowFailException(
            f"the operator and the Airflow connection {cluster.kubernetes_conn_id!r} name the"
            f" cluster in more than one way: {', '.join(ways)}; leave one (kubernetes_conn_id=None:"
            " no connection)"
        )
    if not ways and in_cluster is None:
        with suppress(ConfigException):
            load_incluster_config(client_configuration=Configuration())  # type: ignore[no-untyped-call]
            in_cluster = True
    if cluster.config_file:
        extras = {**extras, "kube_config_path": cluster.config_file}
    return AsyncKubernetesHook(
        conn_id=cluster.kubernetes_conn_id,
        in_cluster=in_cluster,
        cluster_context=cluster.cluster_context,
        client_configuration=configuration,
        connection_extras=dict(extras),
    )


def _is_passing(error: BaseException, *, is_new: bool) -> bool:
    """Whether the same call may succeed later; only creating is independent of versions."""
    if not isinstance(error, ApiException):
        return True
    if error.status == CONFLICT:  # concurrent changes of a quota
        return is_new and reason_of(error) == "Conflict"
    return is_over_quota(error) or error.status in (0, 401, 429) or (error.status or 0) >= 500


def is_over_quota(error: ApiException) -> bool:
    """Whether a ResourceQuota is exhausted; a refusal by policy differs in its text only."""
    return error.status == FORBIDDEN and "exceeded quota" in message_of(error)


def is_absent(error: ApiException) -> bool:
    """Whether the API says that there is no such object; a proxy's 404 doesn't."""
    return error.status == NOT_FOUND and reason_of(error) == "NotFound"


def reason_of(error: ApiException) -> str:
    """The API's reason for an error, such as `AlreadyExists`."""
    return str(_answer(error).get("reason", ""))


def message_of(error: BaseException) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {_answer(error).get('message') or error.reason}"
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _answer(error: ApiException) -> Mapping[str, Any]:
    """The `Status` in an error answer; empty if it isn't the API's, or isn't JSON."""
    try:
        body = json.loads(error.body or "")
    except (TypeError, ValueError):
        return {}
    return body if isinstance(body, dict) and body.get("kind") == "Status" else {}
