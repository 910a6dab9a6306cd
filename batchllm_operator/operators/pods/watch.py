"""Watching one pod until it has ended, from a worker or from the triggerer."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from aiohttp import ClientError
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
from kubernetes_asyncio import client as async_client
from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.operators.pods.end import EndKind, PodEnd
from batchllm_operator.operators.pods.state import PodState, Stage

_NOT_FOUND: Final = 404
_FORBIDDEN: Final = 403
_REPEAT: Final = timedelta(minutes=10)
"""How often a state that lasts is told again."""
_GONE_MARGIN: Final = timedelta(seconds=60)
"""What a kubelet may take after the grace period to report a pod's end."""
_FIRST_LINES: Final = 2_000
"""Of a log that was written before the watch began."""
_LOG_LINE: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z ?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """How long a pod may take for what, in seconds."""

    queue_s: float
    """From its creation until it has a node."""
    start_s: float
    """From having a node until its main container runs."""
    stuck_s: float
    """As `start_s`, once it fails to pull an image or to find a Secret."""
    api_s: float
    """Without an answer of the API."""
    poll_s: float
    """Between two looks."""


@dataclass(frozen=True, slots=True)
class PodName:
    """Where a pod is found."""

    name: str
    namespace: str
    container: str
    """The main one, whose end is the pod's."""


class PodWatch:
    """Polls a pod, passes its log lines on, and says how it ended.

    Args:
        hook: makes a hook, which makes a connection; called again when that fails, so that
            expired tokens are read again.
        pod: which pod.
        limits: how long it may take.
        log: takes each new line of the pod's log, and what happens to the pod.
        deadline: when the task's `execution_timeout` is reached.
        log_since: the time of the last log line that was passed on before.
        is_abandoned: whether nobody waits for the end any more.
        now: the time, for tests.
    """

    def __init__(
        self,
        hook: Callable[[], AsyncKubernetesHook],
        pod: PodName,
        limits: WatchLimits,
        log: Callable[[str], None],
        *,
        deadline: datetime | None = None,
        log_since: str | None = None,
        is_abandoned: Callable[[], bool] = lambda: False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._make_hook = hook
        self._connection = AsyncExitStack()
        self._api: async_client.CoreV1Api | None = None
        self._pod, self._limits, self._log = pod, limits, log
        self._deadline, self._is_abandoned, self._now = deadline, is_abandoned, now
        self.log_since = log_since
        """The time of the last log line that was passed on, in the log's own format."""
        self._said, self._said_at = "", now()
        self._answered_at = now()
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Make `until_end` return soon; a signal handler or another thread may call it."""
        self._is_stopped = True
        if self._loop is not None and self._stopping is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def until_end(self) -> PodEnd:
        """Watch until the pod has ended, can't start, or can't be seen any more."""
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        async with aclosing(self):
            return await self._until_end(self._stopping)

    async def aclose(self) -> None:
        """Give up the connection; it is made again where it is needed."""
        self._api = None
        with suppress(ClientError, OSError):
            await self._connection.aclose()

    async def _until_end(self, stopping: asyncio.Event) -> PodEnd:
        while not self._is_stopped and not self._is_abandoned():
            if self._deadline is not None and self._now() >= self._deadline:
                return self._end(EndKind.TIMEOUT)
            if (end := await self._look()) is not None:
                return end
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), self._limits.poll_s)
        return self._end(EndKind.STOPPED)

    async def _look(self) -> PodEnd | None:
        """One look at the pod; None if there is reason for another."""
        try:
            api = await self._connected()
            pod = await api.read_namespaced_pod(
                self._pod.name, self._pod.namespace, _request_timeout=self._request_s
            )
        except (ApiException, ClientError, OSError, TimeoutError) as error:
            await self.aclose()  # the next look reads the configuration anew: a token has expired
            return self._without_answer(error)
        self._answered_at = self._now()
        state = PodState.of(pod, self._pod.container)
        if state.has_started:
            await self._pass_log_on(api)
        self._tell(state)
        return self._judge(state, pod)

    async def _connected(self) -> async_client.CoreV1Api:
        if self._api is None:
            hook = await asyncio.to_thread(self._make_hook)  # it may read a file
            connection = await self._connection.enter_async_context(hook.get_conn())
            self._api = async_client.CoreV1Api(connection)
        return self._api

    @property
    def _request_s(self) -> float:
        return max(5.0, self._limits.poll_s * 2)

    def _judge(self, state: PodState, pod: Any) -> PodEnd | None:
        if state.stage is Stage.ENDED:
            kind = EndKind.EXITED
            if state.is_disrupted:
                kind = EndKind.DISRUPTED
            elif state.is_being_deleted and state.exit_code != 0:
                kind = EndKind.GONE
            return self._end(kind, state)
        now = self._now()
        if state.is_being_deleted:  # the time stands for when its grace is over
            if now > pod.metadata.deletion_timestamp + _GONE_MARGIN:
                end = self._end(EndKind.DISRUPTED, state, "its node doesn't answer")
                return replace(end, is_unreachable=True)
            return None
        waited_s = (now - (state.since or now)).total_seconds()
        if state.stage is Stage.QUEUED and waited_s > self._limits.queue_s:
            return self._end(EndKind.QUEUE_LIMIT, state)
        if state.is_hopeless or (state.is_stuck and waited_s > self._limits.stuck_s):
            return self._end(EndKind.STUCK, state)
        if state.stage is Stage.STARTING and waited_s > self._limits.start_s:
            return self._end(EndKind.START_LIMIT, state)
        return None

    def _without_answer(self, error: Exception) -> PodEnd | None:
        """What an error of the API means: the pod is gone, or there is reason to wait."""
        status = error.status if isinstance(error, ApiException) else None
        if status == _NOT_FOUND:
            return self._end(EndKind.GONE)
        reason = error.reason if isinstance(error, ApiException) else str(error)
        text = f"{type(error).__name__}: {reason}".rstrip(": ")
        if self._said != text:
            self._said, self._said_at = text, self._now()
            hint = "; may this Airflow read pods and their logs?" if status == _FORBIDDEN else ""
            self._log(f"Can't see pod {self._pod.name} at the moment ({text}){hint}")
        if (self._now() - self._answered_at).total_seconds() > self._limits.api_s:
            return self._end(EndKind.API_LOST, message=text)
        return None

    async def _pass_log_on(self, api: async_client.CoreV1Api) -> None:
        """Log the lines that are new. A log that can't be read is no reason to stop."""
        arguments: dict[str, Any] = {"tail_lines": _FIRST_LINES}
        if self.log_since is not None:
            age = self._now() - datetime.fromisoformat(self.log_since[:19] + "+00:00")
            arguments = {"since_seconds": max(1, math.ceil(age.total_seconds()) + 2)}
        try:
            response: Any = await api.read_namespaced_pod_log(
                self._pod.name,
                self._pod.namespace,
                container=self._pod.container,
                timestamps=True,
                _preload_content=False,
                _request_timeout=self._request_s,
                **arguments,
            )
            data = await response.read()
        except (ApiException, ClientError, OSError, TimeoutError) as error:
            self._log(f"Can't read the log of pod {self._pod.name}: {type(error).__name__}")
            return
        for line in data.decode("utf-8", errors="replace").splitlines():
            self._pass_line_on(line)

    def _pass_line_on(self, line: str) -> None:
        match = _LOG_LINE.fullmatch(line)
        if match is None:
            self._log(line)
            return
        time = match[1] + (match[2] or ".0").ljust(10, "0")  # nanoseconds, comparable as text
        if self.log_since is None or time > self.log_since:
            self.log_since = time
            if match[3]:
                self._log(match[3])

    def _tell(self, state: PodState) -> None:
        """Log a state when it is new, or has lasted."""
        text = str(state) + (", being deleted" if state.is_being_deleted else "")
        if text != self._said or self._now() - self._said_at > _REPEAT:
            self._log(f"Pod {self._pod.name}: {text}")
            self._said, self._said_at = text, self._now()

    def _end(self, kind: EndKind, state: PodState | None = None, message: str = "") -> PodEnd:
        return PodEnd(
            kind,
            self._pod.name,
            self._pod.namespace,
            reason=state.reason if state else "",
            message=message or (state.message if state else ""),
            exit_code=state.exit_code if state else None,
        )
