"""Watches one pod until its end, from a worker or from the triggerer."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from aiohttp import ClientError, ClientSSLError
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
from kubernetes_asyncio import client as async_client
from kubernetes_asyncio.client.exceptions import ApiException

from batchllm_operator.operators.pods.api_errors import (
    FORBIDDEN,
    NOT_FOUND,
    UNAUTHORIZED,
    status_of,
)
from batchllm_operator.operators.pods.end import EndKind, PodEnd
from batchllm_operator.operators.pods.pod_log import LogReader
from batchllm_operator.operators.pods.state import ENDING_MARGIN_S, EVICTED, PodState, Stage

_REPEAT: Final = timedelta(minutes=10)
_LONGEST_PAUSE_S: Final = 60.0
_TALKATIVE: Final = 6
"""How many times longer a watch goes on before it pauses if the pod gives signs."""
_LAST_LINES: Final = 100
"""Lines of a disrupted pod's log that its end carries, each cut at `_LINE_LENGTH`: Airflow's
database keeps them until the task goes on."""
_LINE_LENGTH: Final = 500
_LAST_READS: Final = 3
"""Reads of a pod that has ended, while its log can't be read."""
_FAREWELL_S: Final = 0.05
"""Time for a connection that was being opened when the watch was stopped to close."""
_ANSWERLESS: Final = (ApiException, ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """Time limits of a pod, in seconds."""

    queue_s: float
    """From its creation until it has a node."""
    start_s: float
    """From having a node until its main container runs."""
    stuck_s: float
    """As `start_s`, once it fails to pull an image or to find a Secret."""
    api_s: float
    """Without an answer from the API."""
    poll_s: float
    silence_s: float | None = None
    """Without a line in its log, until the watch pauses. None if it never does."""


@dataclass(frozen=True, slots=True)
class PodName:
    """Identifies a pod and its main container."""

    name: str
    namespace: str
    container: str
    """The main container, whose end is the pod's."""
    uid: str = ""


class NoConnectionError(Exception):
    """The cluster's address and credentials can't be read right now."""


class PodWatch:
    """Polls a pod, passes its log lines on, and returns how it ended.

    Args:
        hook: creates a hook, which opens a connection; called again when the cluster refuses
            access, so that expired tokens are read again.
        pod: the pod to watch.
        limits: its time limits.
        log: receives each new line of the pod's log, and the pod's changes of state.
        deadline: when the task's `execution_timeout` is reached.
        is_abandoned: whether the pod's end is no longer awaited.
        masked: masks secrets in the pod's texts.
        log_ns: where an earlier watch has stopped in the log: `PodEnd.log_ns`.
    """

    def __init__(
        self,
        hook: Callable[[], AsyncKubernetesHook],
        pod: PodName,
        limits: WatchLimits,
        log: Callable[[str], None],
        *,
        deadline: datetime | None = None,
        is_abandoned: Callable[[], bool] = lambda: False,
        masked: Callable[[str], str] = lambda text: text,
        log_ns: int = -1,
    ) -> None:
        self._make_hook = hook
        self._connection = AsyncExitStack()
        self._api: async_client.CoreV1Api | None = None
        self._pod, self._limits, self._log = pod, limits, log
        self._deadline, self._is_abandoned = deadline, is_abandoned
        self._masked = masked
        self._log_from_ns = log_ns
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._reader = LogReader(pod.name, pod.namespace, pod.container, self._hear, log_ns)
        self._said, self._said_at = "", datetime.now(UTC)
        self._began_at = self._heard_at = self._answered_at = time.monotonic()
        self._num_failures = self._num_last_reads = 0
        self._deleting_since: float | None = None
        self._last_state: PodState | None = None
        self._watching: asyncio.Task[PodEnd] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Make `until_end` return soon, even if the API doesn't answer.

        A signal handler or another thread may call it.
        """
        self._is_stopped = True
        if self._watching is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                self._watching.get_loop().call_soon_threadsafe(self._watching.cancel)

    async def until_end(self) -> PodEnd:
        """Watch until the pod has ended, can't start, or can no longer be read, or pause."""
        async with aclosing(self):
            self._watching = asyncio.create_task(self._until_end())
            try:
                return await self._watching
            except asyncio.CancelledError:
                if not self._is_stopped:
                    raise
                await self.aclose()
                await asyncio.sleep(_FAREWELL_S)
                return self._end(EndKind.STOPPED)

    async def aclose(self) -> None:
        self._api = None
        with suppress(ClientError, OSError):
            await self._connection.aclose()

    async def _until_end(self) -> PodEnd:
        while not self._is_stopped and not self._is_abandoned():
            if self._deadline is not None and datetime.now(UTC) >= self._deadline:
                return self._end(EndKind.TIMEOUT)
            if (end := await self._look()) is not None:
                return end
            if self._is_pause_due():
                return self._end(EndKind.PAUSED)
            await asyncio.sleep(self._pause_s())
        return self._end(EndKind.STOPPED)

    def _hear(self, line: str) -> None:
        self._heard_at = time.monotonic()
        text = self._masked(line)
        self._last_lines.append(text[:_LINE_LENGTH])
        self._log(text)

    def _is_pause_due(self) -> bool:
        """Not while a time is taken that another watch would begin anew."""
        silence_s = self._limits.silence_s
        if silence_s is None or self._num_failures or self._deleting_since is not None:
            return False
        now = time.monotonic()
        longest_s = _TALKATIVE * silence_s
        return now - self._heard_at >= silence_s or now - self._began_at >= longest_s

    def _pause_s(self) -> float:
        """Longer after failures, with jitter: many watches wait for one API server."""
        poll_s = self._limits.poll_s
        if not self._num_failures:
            return poll_s
        longest_s = min(poll_s * 2.0**self._num_failures, max(_LONGEST_PAUSE_S, poll_s))
        return random.uniform(poll_s, min(longest_s, max(poll_s, self._limits.api_s / 4)))

    async def _look(self) -> PodEnd | None:
        """Read the pod once; None if the watch goes on."""
        try:
            api = await self._connected()
            pod = await api.read_namespaced_pod(
                self._pod.name, self._pod.namespace, _request_timeout=self._request_s
            )
        except (*_ANSWERLESS, NoConnectionError) as error:
            if isinstance(error, ClientSSLError) or getattr(error, "status", 0) == UNAUTHORIZED:
                await self.aclose()  # the next read loads the configuration again
            return self._without_answer(error)
        self._answered_at, self._num_failures = time.monotonic(), 0
        if self._pod.uid and pod.metadata.uid != self._pod.uid:
            return self._gone()  # another pod has its name now
        state = self._last_state = PodState.of(pod, self._pod.container)
        if state.has_started:
            is_read = await self._reader.pass_on(api, self._request_s)
            if not is_read and state.stage is Stage.ENDED and self._num_last_reads < _LAST_READS:
                self._num_last_reads += 1
                return None
        self._tell(state)
        return self._judge(state, pod)

    async def _connected(self) -> async_client.CoreV1Api:
        if self._api is None:
            try:
                hook = await asyncio.to_thread(self._make_hook)  # it may read a file
                connection = await self._connection.enter_async_context(hook.get_conn())
            except _ANSWERLESS:
                raise
            # Such as a half-written kubeconfig, or an Airflow that doesn't answer: none of it
            # affects the running pod.
            except Exception as error:
                raise NoConnectionError(f"{type(error).__name__}: {error}") from error
            self._api = async_client.CoreV1Api(connection)
        return self._api

    @property
    def _request_s(self) -> float:
        return max(5.0, self._limits.poll_s * 2)

    def _judge(self, state: PodState, pod: Any) -> PodEnd | None:
        if state.stage is Stage.ENDED:
            return self._ended(state)
        if state.is_being_deleted:
            return self._judge_deletion(state, pod)
        now = datetime.now(UTC)
        waited_s = (now - (state.since or now)).total_seconds()
        if state.stage is Stage.QUEUED and waited_s > self._limits.queue_s:
            return self._end(EndKind.QUEUE_LIMIT, state)
        if state.is_hopeless or (state.is_stuck and waited_s > self._limits.stuck_s):
            return self._end(EndKind.STUCK, state)
        if state.stage is Stage.STARTING and waited_s > self._limits.start_s:
            return self._end(EndKind.START_LIMIT, state)
        return None

    def _ended(self, state: PodState) -> PodEnd:
        kind = EndKind.EXITED
        if state.is_disrupted:
            kind = EndKind.DISRUPTED
        elif state.is_being_deleted and state.exit_code != 0 and state.reason != EVICTED:
            kind = EndKind.GONE
        return self._end(kind, state)

    def _gone(self) -> PodEnd:
        """Judge a pod that is no longer there by its last state that says why."""
        last = self._last_state
        if last is None or not (last.is_disrupted or last.stage is Stage.ENDED):
            return self._end(EndKind.GONE)
        return self._ended(last)

    def _judge_deletion(self, state: PodState, pod: Any) -> PodEnd | None:
        """A deletion from outside; past the grace period, the pod's node doesn't answer."""
        if self._deleting_since is None:
            self._deleting_since = time.monotonic()
        allowed_s = (pod.metadata.deletion_grace_period_seconds or 0) + ENDING_MARGIN_S
        if time.monotonic() - self._deleting_since <= allowed_s:
            return None
        end = self._end(EndKind.DISRUPTED, state, "its node doesn't answer")
        return replace(end, is_unreachable=True)

    def _without_answer(self, error: Exception) -> PodEnd | None:
        """Judge an error of the API: the pod is gone, or the watch goes on (None) up to a limit."""
        status = error.status if isinstance(error, ApiException) else None
        if status == NOT_FOUND and status_of(error).get("reason") == "NotFound":
            return self._gone()
        self._num_failures += 1
        reason = error.reason if isinstance(error, ApiException) else str(error)
        text = f"{type(error).__name__}: {reason}".rstrip(": ")
        if self._said != text:
            self._said, self._said_at = text, datetime.now(UTC)
            hint = "; may this Airflow read pods?" if status == FORBIDDEN else ""
            self._log(f"Can't see pod {self._pod.name} at the moment ({text}){hint}")
        if time.monotonic() - self._answered_at > self._limits.api_s:
            kind = EndKind.FORBIDDEN if status == FORBIDDEN else EndKind.API_LOST
            return self._end(kind, message=text)
        return None

    def _tell(self, state: PodState) -> None:
        text = str(state) + (", being deleted" if state.is_being_deleted else "")
        if text != self._said or datetime.now(UTC) - self._said_at > _REPEAT:
            self._log(self._masked(f"Pod {self._pod.name}: {text}"))
            self._said, self._said_at = text, datetime.now(UTC)

    def _end(self, kind: EndKind, state: PodState | None = None, message: str = "") -> PodEnd:
        return PodEnd(
            kind,
            self._pod.name,
            self._pod.namespace,
            pod_uid=self._pod.uid,
            reason=state.reason if state else "",
            message=self._masked(message or (state.message if state else "")),
            exit_code=state.exit_code if state else None,
            is_over=state.is_over if state else False,
            log_ns=self._reader.last_ns,
            log_from_ns=self._log_from_ns,
            last_lines=(
                tuple(self._last_lines) if kind in (EndKind.DISRUPTED, EndKind.GONE) else ()
            ),
        )
