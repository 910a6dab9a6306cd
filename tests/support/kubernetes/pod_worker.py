"""One pod on a node: from its volumes to its containers' ends, and its removal."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from support.kubernetes.container_environment import (
    MissingReferenceError,
    expand,
    resolve_environment,
)
from support.kubernetes.container_log import ContainerLog
from support.kubernetes.containers import START_ERROR, Command, Container, StartError
from support.kubernetes.image_pull import POLL_S, ImagePull
from support.kubernetes.images import DEFAULT_PATH, Image, PullFailure
from support.kubernetes.pod_status import PodStatus
from support.kubernetes.status import Object
from support.kubernetes.volumes import PathMap, Volumes

_MESSAGE_BYTES = 4096
_LOG_MESSAGE_LINES, _LOG_MESSAGE_BYTES = 80, 2048


class Host(Protocol):
    """What a pod needs of its node."""

    def image(self, name: str, policy: str) -> Image | PullFailure | None:
        """The image; None while its pull takes."""

    def start_delay(self) -> float:
        """Seconds that a pod takes before its images are looked for."""

    async def read(self, plural: str, name: str) -> Object | None:
        """An object of the pod's namespace."""

    async def report(self, pod: Object, patch: Object) -> None:
        """Patch the pod's status, if there still is this pod."""

    async def remove(self, pod: Object) -> None:
        """Delete the pod's object at once."""

    async def record(
        self, pod: Object, kind: str, reason: str, message: str, container: str
    ) -> None:
        """Create an Event."""

    def takes_before_saying(self, pod: Object) -> bool:
        """Whether a pod that has exited 0 is to vanish before that is reported."""


@dataclass(frozen=True, slots=True)
class End:
    """Why a pod has to stop, and what becomes of it."""

    grace_s: float
    reason: str = ""
    message: str = ""
    removes: bool = False  # the pod's object goes when the containers have ended
    silent: bool = False  # its end isn't reported
    forgets: bool = False  # the node has nothing to do with the pod any more


class PodWorker:
    """Runs a pod that is bound to this node.

    As with restartPolicy Never, whatever it is, a container that has ended isn't run again.

    `run` ends when the pod's object is gone or the node forgets it; then no process of it and no
    folder is left.
    """

    def __init__(self, pod: Object, host: Host, folder: Path, claims: Path, pod_ip: str) -> None:
        self.pod = pod
        self.status = PodStatus(pod, "127.0.0.1", pod_ip)
        self.containers: dict[str, Container] = {}
        self.logs: dict[str, ContainerLog] = {}
        self._host = host
        self._folder = folder
        self._volumes = Volumes(folder / "volumes", claims)
        self._ends: asyncio.Queue[End] = asyncio.Queue()
        self._grace_ends = float("inf")

    def stop(self, end: End) -> None:
        """Ask for the pod's end; a later call may shorten the grace."""
        now = asyncio.get_running_loop().time()
        self._grace_ends = min(self._grace_ends, now + end.grace_s)
        self._ends.put_nowait(end)

    async def run(self) -> None:
        life = asyncio.create_task(self._live())
        clock = asyncio.create_task(self._watch_deadline())
        next_end = None
        try:
            forgotten = False
            while not forgotten:
                next_end = asyncio.create_task(self._ends.get())
                await asyncio.wait({life, next_end}, return_when=asyncio.FIRST_COMPLETED)
                if life.done() and not life.cancelled():
                    life.result()  # what went wrong in it goes to the agent
                end = await next_end
                await _cancelled(life)
                await self._finish(end)
                forgotten = end.forgets
        finally:
            for task in filter(None, (life, clock, next_end)):
                await _cancelled(task)
            await self._clean()

    async def _clean(self) -> None:
        for container in self.containers.values():
            container.kill()
            await container.exited
        for log in self.logs.values():
            await log.close()
        self._volumes.remove()

    async def _live(self) -> None:
        """Everything that happens until the pod is ended."""
        await self._report()
        await self._mount()
        await asyncio.sleep(self._host.start_delay())
        for spec, state in zip(
            self.pod["spec"].get("initContainers", []), self.status.init, strict=True
        ):
            await self._start(spec)
            await self._wait_for(spec)
            if state.exit_code != 0:
                self.status.phase = "Failed"
                await self._report()
                return
        for state in self.status.main:
            state.waits("ContainerCreating")
        specs = self.pod["spec"]["containers"]
        await asyncio.gather(*(self._start(spec) for spec in specs))
        await asyncio.gather(*(self._wait_for(spec) for spec in specs))
        succeeded = all(state.exit_code == 0 for state in self.status.main)
        self.status.phase = "Succeeded" if succeeded else "Failed"
        if succeeded and self._host.takes_before_saying(self.pod):
            await self._host.remove(self.pod)
        else:
            await self._report()

    async def _report(self) -> None:
        await self._host.report(self.pod, self.status.as_patch())

    async def _record(self, kind: str, reason: str, message: str, container: str = "") -> None:
        await self._host.record(self.pod, kind, reason, message, container)

    async def _mount(self) -> None:
        told = ""
        while True:
            try:
                await self._volumes.prepare(self.pod, self._host.read)
                return
            except MissingReferenceError as error:
                if told != str(error):
                    told = str(error)
                    await self._record("Warning", "FailedMount", told)
            await asyncio.sleep(POLL_S)

    async def _start(self, spec: Object) -> None:
        """Start a container, once there is everything that it takes."""
        name, state = spec["name"], self.status.of(spec["name"])
        image = await ImagePull(spec, state, self._host, self._record, self._report).run()
        while True:
            try:
                environment = await resolve_environment(spec, self.pod, self._host.read)
                break
            except MissingReferenceError as error:
                if state.waits("CreateContainerConfigError", str(error)):
                    await self._report()
                    await self._record("Warning", "Failed", f"Error: {error}", name)
            await asyncio.sleep(POLL_S)
        await self._record("Normal", "Created", f"Container created: {name}", name)
        log = self.logs[name] = ContainerLog()
        command = self._command(spec, image, environment)
        try:
            await self._start_process(name, command, log)
        except StartError as error:
            await log.close()
            state.ends(START_ERROR, "StartError", str(error))
            await self._record("Warning", "Failed", f"Error: {error}", name)
            return
        state.runs()
        if state in self.status.main:
            self.status.phase = "Running"
        await self._report()
        await self._record("Normal", "Started", f"Container started: {name}", name)

    async def _start_process(self, name: str, command: Command, log: ContainerLog) -> None:
        """Start a process that `self` knows of, even if this is cancelled meanwhile."""
        starting = asyncio.create_task(Container.start(command, log))
        try:
            await asyncio.wait({starting})
        finally:
            if not starting.done():
                await asyncio.wait({starting})
            if starting.exception() is None:
                self.containers[name] = starting.result()
        starting.result()

    def _command(self, spec: Object, image: Image, variables: dict[str, str]) -> Command:
        mounts = self._volumes.mounts(spec, variables)
        mounts[spec["terminationMessagePath"]] = self._message_file(spec)
        here = PathMap(mounts)
        own = {name: here(value) for name, value in variables.items()}
        host_name = {"HOSTNAME": self.pod["metadata"]["name"]}
        environment = {"PATH": DEFAULT_PATH, **host_name, **image.environment, **own}
        arguments = [
            here(expand(each, variables))
            for each in image.command(spec.get("command", []), spec.get("args", []))
        ]
        root = self._folder / "rootfs" / spec["name"]
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(here(spec.get("workingDir") or image.working_dir or str(root)))
        if not folder.is_dir():  # a runtime makes it, in the container's own files
            folder = root / folder.relative_to("/")
            folder.mkdir(parents=True, exist_ok=True)
        return Command(arguments, environment, folder, f"{uuid.uuid4()}", image.commands)

    def _message_file(self, spec: Object) -> Path:
        folder = self._folder / "messages"
        folder.mkdir(parents=True, exist_ok=True)
        file: Path = folder / spec["name"]
        file.touch()
        return file

    async def _wait_for(self, spec: Object) -> None:
        container = self.containers.get(spec["name"])
        if container is not None:
            await asyncio.shield(container.exited)
            self._note_end(spec)
            if len(self.status.main) > 1:
                await self._report()

    def _note_end(self, spec: Object) -> None:
        """Put a container's end into the status."""
        name = spec["name"]
        container, state = self.containers[name], self.status.of(name)
        if state.exit_code is not None:
            return
        code = container.exited.result()
        reason = "OOMKilled" if container.out_of_memory else "Error" if code else "Completed"
        file = self._message_file(spec)
        message = file.read_bytes()[:_MESSAGE_BYTES].decode(errors="replace")
        from_log = spec["terminationMessagePolicy"] == "FallbackToLogsOnError" and code != 0
        if not message and from_log:
            message = container.log.tail(_LOG_MESSAGE_LINES, _LOG_MESSAGE_BYTES)
        state.ends(code, reason, message)

    async def _watch_deadline(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while not self.status.is_over():
            deadline = self.pod["spec"].get("activeDeadlineSeconds")
            if deadline is not None and loop.time() >= started + deadline:
                message = "Pod was active on the node longer than the specified deadline"
                await self._record("Normal", "DeadlineExceeded", message)
                self.stop(End(self._grace_s(), "DeadlineExceeded", message))
                return
            await asyncio.sleep(POLL_S)

    def _grace_s(self) -> float:
        return float(self.pod["spec"]["terminationGracePeriodSeconds"])

    async def _finish(self, end: End) -> None:
        """End the containers, and the pod as `end` says."""
        was_over = self.status.is_over()
        await self._end_containers(end)
        if not end.silent:
            for spec in [
                *self.pod["spec"].get("initContainers", []),
                *self.pod["spec"]["containers"],
            ]:
                if spec["name"] in self.containers:
                    self._note_end(spec)
            if not was_over:
                succeeded = all(state.exit_code == 0 for state in self.status.main)
                self.status.phase = "Succeeded" if succeeded and not end.reason else "Failed"
                self.status.reason, self.status.message = end.reason, end.message
                await self._report()
        if end.removes:
            await self._host.remove(self.pod)

    async def _end_containers(self, end: End) -> None:
        running = {name: c for name, c in self.containers.items() if not c.exited.done()}
        if not running:
            return
        loop = asyncio.get_running_loop()
        if end.grace_s > 0:
            for name, container in running.items():
                container.terminate()
                if not end.silent:
                    await self._record("Normal", "Killing", f"Stopping container {name}", name)
        tasks = {container.exited for container in running.values()}
        while tasks and loop.time() < self._grace_ends:
            left = self._grace_ends - loop.time()
            _, tasks = await asyncio.wait(tasks, timeout=min(left, POLL_S))
        for container in running.values():
            if not container.exited.done():
                container.kill()
        await asyncio.gather(*(container.exited for container in running.values()))


async def _cancelled(task: asyncio.Task[End | None] | asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; a failure of it has been seen or isn't one any more."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
