"""Calls of the cluster's API, tried again while they fail for a passing reason."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import ConfigException, load_incluster_config

from batchllm_operator.operators.jobs.api_errors import (
    ANSWERLESS,
    NoConnectionError,
    is_conflict,
    is_passing,
    message_of,
)

_REQUEST_S: Final = 30.0
_SHORTEST_REQUEST_S: Final = 0.5
"""A request is sent even if there is no time to wait for its answer."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
_PREFIX: Final = "extra__kubernetes__"
"""Of the names of a connection's fields, in its older form."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """How to reach a cluster; each process reads its own credentials."""

    kubernetes_conn_id: str | None
    """This and the next two: as for the operator."""
    in_cluster: bool | None
    cluster_context: str | None
    config_file: str | None
    """Path of the kubeconfig, which the triggerer must be able to read, too."""

    def hook(self, extras: dict[str, Any] | None = None) -> AsyncKubernetesHook:
        """The provider's hook; it reads the connection's fields unless `extras` has them."""
        config_dict = None
        if self.config_file is not None:
            config_dict = yaml.safe_load(Path(self.config_file).read_text(encoding="utf-8"))
        return AsyncKubernetesHook(
            conn_id=self.kubernetes_conn_id,
            in_cluster=self.in_cluster,
            cluster_context=self.cluster_context,
            config_dict=config_dict,
            connection_extras=extras,
        )


class ClusterCalls:
    """A connection to a cluster, whose calls are repeated for `patience_s` each.

    Passing reasons are no connection, 429, 5xx and an expired token: a restart of the API server
    goes unnoticed. After a failure the configuration is read again. An asynchronous context
    manager.

    Attributes:
        extras: fields of the Airflow connection. None until they are read; if they are given,
            Airflow is asked for them only after a failure.
    """

    def __init__(self, cluster: Cluster, *, log: logging.Logger | Any, patience_s: float) -> None:
        self._cluster, self._log, self._patience_s = cluster, log, patience_s
        self.extras: dict[str, Any] | None = None
        self._connection: Any = None
        self._client: ApiClient | None = None
        self._trouble = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._disconnect()

    async def _connect(self) -> ApiClient:
        if self._client is None:
            try:
                extras = None if self._trouble else self.extras
                hook = await asyncio.to_thread(self._cluster.hook, extras)  # it may read a file
                self.extras = await hook.get_conn_extras()
                _complete(hook, self.extras)
                connection = hook.get_conn()
                self._client = await connection.__aenter__()
            except ANSWERLESS:
                raise
            # Such as a half-written kubeconfig, or an Airflow that doesn't answer: none of it
            # affects the running pods.
            except Exception as error:
                raise NoConnectionError(f"{type(error).__name__}: {error}") from error
            self._connection = connection
        return self._client

    async def _disconnect(self) -> None:
        connection, self._connection, self._client = self._connection, None, None
        if connection is not None:
            try:
                await connection.__aexit__(None, None, None)
            except ANSWERLESS as error:
                self._log.debug("The connection to the cluster: %s", message_of(error))

    async def call(
        self, api: type[Any], method: str, *args: Any, patience_s: float = math.inf, **options: Any
    ) -> Any:
        """Call a method of a client's API.

        With `_preload_content=False` the answer isn't read, and so not logged.

        Raises:
            ApiException: the cluster refuses, its error has lasted too long, or a change is based
                on an outdated version.
            ClientError, OSError, NoConnectionError: it hasn't answered in time.
        """
        give_up_at = time.monotonic() + min(patience_s, self._patience_s)
        pause_s = FIRST_PAUSE_S
        while True:
            limit_s = max(_SHORTEST_REQUEST_S, min(_REQUEST_S, give_up_at - time.monotonic()))
            try:
                async with asyncio.timeout(limit_s):
                    answer = await getattr(api(await self._connect()), method)(*args, **options)
                    if options.get("_preload_content") is False:
                        await _check_unread(answer)
            except ANSWERLESS as error:
                left_s = give_up_at - time.monotonic()
                is_stale = is_conflict(error) and not method.startswith("create")
                if is_stale or not is_passing(error) or left_s <= 0:
                    raise
                await self._disconnect()
                if self._trouble != (text := message_of(error)):
                    self._trouble = text
                    self._log.warning("The cluster's API: %s; trying again", text)
                await asyncio.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._trouble = ""
                return answer


def _complete(hook: AsyncKubernetesHook, extras: Mapping[str, Any]) -> None:
    """Do what the provider's synchronous hook does, and its asynchronous one doesn't.

    Certificates aren't verified if the connection says so; and this process's own cluster is used
    if nothing else is configured, in place of a kubeconfig.
    """
    given = {name.removeprefix(_PREFIX) for name, value in extras.items() if value}
    if "disable_verify_ssl" in given:
        hook.client_configuration = Configuration()
        hook.client_configuration.verify_ssl = False
    if hook.in_cluster is not None or hook.config_dict is not None:
        return
    if given & {"in_cluster", "kube_config", "kube_config_path"}:
        return
    try:
        load_incluster_config(client_configuration=Configuration())  # type: ignore[no-untyped-call]
    except ConfigException:
        return
    hook.in_cluster = True


async def _check_unread(answer: Any) -> None:
    """Release an answer; raises `ApiException` for an error, as the client does if it reads it."""
    if answer.status < 300:
        answer.release()
        return
    error = ApiException(status=answer.status, reason=answer.reason)
    error.body = await answer.text()
    raise error
