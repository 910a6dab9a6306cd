"""Calls of the cluster's API, tried again while they fail for a passing reason."""

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Self

from aiohttp import ClientError
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
from airflow.providers.common.compat.sdk import AirflowFailException
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import ConfigException, load_incluster_config

from batchllm_operator.operators.jobs.owner import WatchedJob

_CONFLICT, FORBIDDEN = 409, 403
_REQUEST_S: Final = 30.0
_SHORTEST_REQUEST_S: Final = 0.5  # one is sent even if there is no time to wait for its answer
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0


# At level DEBUG the client logs every answer; nothing masks the base64 of a Secret.
logging.getLogger("kubernetes_asyncio.client.rest").addFilter(
    lambda record: '"kind":"Secret' not in record.getMessage().replace(" ", "")
)


ANSWERLESS: Final = (ApiException, ClientError, OSError)  # what a call may raise


class ClusterCalls:
    """A connection to a Job's cluster, whose calls are repeated for `patience_s` each.

    So a restart of the API server goes unnoticed. After a failure the configuration is read again;
    else Airflow is asked once for its connection. It may be entered again.
    """

    def __init__(self, of: WatchedJob, log: logging.Logger | Any) -> None:
        self.of, self.log, self.patience_s = of, log, of.api_s
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
            self.log.debug("The connection to the cluster: %s", message_of(error))

    async def _connect(self) -> ApiClient:
        """The client; connecting goes on if the caller is cancelled, until `__aexit__`."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connected())
        return (await asyncio.shield(self._connecting))[1]

    async def _connected(self) -> tuple[Any, ApiClient]:
        try:
            if self._extras is None or self._trouble:
                hook = AsyncKubernetesHook(conn_id=self.of.kubernetes_conn_id)
                self._extras = await hook.get_conn_extras()
            connection = _hook(self.of, self._extras).get_conn()
            return connection, await connection.__aenter__()
        except (AirflowFailException, *ANSWERLESS):
            raise
        # Such as a half-written kubeconfig, or an Airflow that doesn't answer: none of it
        # affects the running pods.
        except Exception as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    async def call(
        self, api: type[Any], method: str, *args: Any, patience_s: float = math.inf, **options: Any
    ) -> Any:
        """Call a method of an API; raises one of `ANSWERLESS`, or `AirflowFailException`."""
        give_up_at = time.monotonic() + min(patience_s, self.patience_s)
        pause_s = FIRST_PAUSE_S
        while True:
            limit_s = max(_SHORTEST_REQUEST_S, min(_REQUEST_S, give_up_at - time.monotonic()))
            try:
                async with asyncio.timeout(limit_s):
                    answer = await getattr(api(await self._connect()), method)(*args, **options)
            except ANSWERLESS as error:
                left_s = give_up_at - time.monotonic()
                if left_s <= 0 or not is_passing(error, is_new=method.startswith("create")):
                    raise
                await self.__aexit__()
                if self._trouble != (text := message_of(error)):
                    self._trouble = text
                    self.log.warning("The cluster's API: %s; trying again", text)
                await asyncio.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._trouble = ""
                return answer

    async def call_if_there(self, api: type[Any], method: str, *args: Any, **options: Any) -> Any:
        """`call`; None if the object is gone, or isn't of the version that the call names."""
        try:
            return await self.call(api, method, *args, **options)
        except ApiException as error:
            is_absent = error.status == 404 and reason_of(error) == "NotFound"  # not a proxy's 404
            if error.status != _CONFLICT and not is_absent:
                raise
            return None


def _hook(of: WatchedJob, extras: Mapping[str, Any]) -> AsyncKubernetesHook:
    """The provider's hook for a connection's fields; as its synchronous one, it may skip the
    verification, and finds the cluster of this process. A cluster with two names is refused.
    """
    given = {name.removeprefix("extra__kubernetes__") for name, value in extras.items() if value}
    configuration, in_cluster = Configuration(), of.in_cluster
    configuration.verify_ssl = "disable_verify_ssl" not in given
    if in_cluster is not None:
        given -= {"in_cluster"}
    ways = sorted(given & {"in_cluster", "kube_config", "kube_config_path"})
    ways += ["config_file"] * bool(of.config_file) + ["in_cluster=True"] * bool(in_cluster)
    if len(ways) > 1:
        raise AirflowFailException(
            f"the operator and the Airflow connection {of.kubernetes_conn_id!r} name the"
            f" cluster in more than one way: {', '.join(ways)}; leave one (kubernetes_conn_id=None:"
            " no connection)"
        )
    if not ways and in_cluster is None:
        with suppress(ConfigException):
            load_incluster_config(client_configuration=Configuration())  # type: ignore[no-untyped-call]
            in_cluster = True
    if of.config_file:
        extras = {**extras, "kube_config_path": of.config_file}
    return AsyncKubernetesHook(
        conn_id=of.kubernetes_conn_id,
        in_cluster=in_cluster,
        cluster_context=of.cluster_context,
        client_configuration=configuration,
        connection_extras=dict(extras),
    )


def is_passing(error: BaseException, *, is_new: bool) -> bool:
    """Whether the same call may succeed later; only creating is independent of versions."""
    if not isinstance(error, ApiException):
        return True
    if error.status == _CONFLICT:  # concurrent changes of a quota
        return is_new and reason_of(error) == "Conflict"
    if error.status == FORBIDDEN:  # a quota is exhausted; a refusal by policy differs only in this
        return "exceeded quota" in message_of(error)
    return error.status in (0, 401, 429) or (error.status or 0) >= 500


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
