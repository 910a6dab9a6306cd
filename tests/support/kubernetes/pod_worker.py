"""One pod on a node, as a kubelet runs it: a container that is a process of this machine.

It runs in a session of its own, whose processes end with it. There is no mount namespace: paths
below a mount of an `emptyDir` are replaced in the values of variables.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.fork_server import ForkedProcess, ForkServer
from support.kubernetes.api_client import MERGE_PATCH
from support.kubernetes.objects import Object, has_ended, now_text, with_condition

if TYPE_CHECKING:
    from support.kubernetes.node_agent import NodeAgent

_POLL_S = 0.03
_IMAGE_NAME = re.compile(r"[a-z0-9./:@_-]+")
_REFERENCE = re.compile(r"\$(?:\$|\((?P<name>[^()]+)\))")
_FIELD = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_LOG_BYTES = 2048  # of the end of the log, in a termination message


@dataclass(frozen=True, slots=True)
class Image:
    """What an image brings. `command` runs whatever the pod says; its `batchllm` is forked from
    `commands`, if there are any.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] | None = None
    commands: ForkServer | None = None


class _StopError(Exception):
    """The pod is to end before its container has been started."""


class PodWorker:
    """Runs a pod that is bound to a node in a `thread`, and reports its status, until its end."""

    def __init__(self, agent: NodeAgent, pod: Object, folder: Path) -> None:
        self.pod, self._agent, self._folder = pod, agent, folder
        self.name, self.uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.is_out_of_memory = False
        self._is_silent = False
        self._kill_at = float("inf")
        self._final: Object = {}
        """Parts of the status at its end: reason, message, condition."""
        self._stopping, self._lock = threading.Event(), threading.Lock()
        folder.mkdir(parents=True)
        self.log.touch()
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    # From other threads

    def stop(self, grace_s: float) -> None:
        """Ask the container to end, and kill it after this time, which only gets shorter."""
        with self._lock:
            if not self._stopping.is_set() and grace_s > 0 and self.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.process.pid, signal.SIGTERM)
            self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
            self._stopping.set()

    def evict(self, message: str, *, is_disrupted: bool) -> None:
        """End the pod at once, and leave its object, Failed."""
        self._final = {"reason": "Evicted", "message": message}
        if is_disrupted:
            why = {"reason": "TerminationByKubelet", "message": message}
            self._final |= with_condition({}, "DisruptionTarget", **why)
        self.stop(0)

    def abandon(self) -> None:
        """End its processes, and report nothing any more: the pod or the node is gone."""
        self._is_silent = True
        self.stop(0)

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the container; it must be running."""
        if self.process is None:
            raise LookupError(f"pod {self.name} runs no container")
        os.killpg(self.process.pid, number)

    # In its own

    def _run(self) -> None:
        container = self.pod["spec"]["containers"][0]
        try:
            self._report("Pending", {"waiting": {"reason": "ContainerCreating"}})
            image = self._pulled(container["image"])
            environment = self._environment(container)
            with self._lock:  # from here on a stop is a signal
                if self._stopping.is_set():
                    raise _StopError
                self.process = self._started(container, image, environment)
        except _StopError:
            self._report("Failed", {"terminated": _terminated(137, "Error", "", now_text())})
        except OSError as error:
            state = _terminated(128, "StartError", f"exec: {error}", now_text())
            self._report("Failed", {"terminated": state})
        else:
            self._follow(self.process)

    def _follow(self, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        """Report that the container runs, and then how it has ended."""
        started = now_text()
        self._report("Running", {"running": {"startedAt": started}})
        while True:
            try:
                code = process.wait(_POLL_S)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() >= self._kill_at:
                    _kill(process.pid)
        _kill(process.pid)  # a container ends with its first process
        code = code if code >= 0 else 128 - code
        if code == 0 and self._agent.is_to_vanish():
            self._report("Failed", {})
            self._agent.remove(self.pod)
            return
        message = self.log.read_bytes()[-_LOG_BYTES:].decode(errors="replace") if code else ""
        reason = "OOMKilled" if self.is_out_of_memory else "Error" if code else "Completed"
        phase = "Failed" if code or self._final else "Succeeded"
        self._report(phase, {"terminated": _terminated(code, reason, message, started)})

    def _report(self, phase: str, state: Object) -> None:
        """Write the pod's status, as long as there is this pod."""
        while not self._is_silent:
            pod = self._agent.read("pods", self.name)
            if pod is None or pod["metadata"]["uid"] != self.uid or has_ended(pod):
                return
            container = self.pod["spec"]["containers"][0]
            is_running = "running" in state
            known = {"name": container["name"], "image": container["image"], "imageID": ""}
            known |= {"ready": is_running, "restartCount": 0, "state": state}
            final = {**self._final} if phase == "Failed" else {}
            status = {**pod["status"], "phase": phase}
            for condition in final.pop("conditions", []):
                why = {key: condition[key] for key in ("reason", "message")}
                status = with_condition(status, condition["type"], **why)
            status = with_condition(status, "Ready", str(is_running)) | final
            status |= {"containerStatuses": [known]} if state else {}
            metadata = {"resourceVersion": pod["metadata"]["resourceVersion"]}
            path = self._agent.path("pods", self.name, "status")
            body = {"metadata": metadata, "status": status}
            code, answer = self._agent.api.ask("PATCH", path, body, MERGE_PATCH)
            if code in (200, 404):
                return
            assert code == 409, answer

    def _await(self, look: Callable[[], Any]) -> Any:
        """What `look` returns, once that isn't a state to wait in; such states are reported."""
        last: Object = {}
        while True:
            if self._stopping.is_set():
                raise _StopError
            found = look()
            if not (isinstance(found, dict) and "waiting" in found):
                return found
            if found != last:
                last = found
                self._report("Pending", found)
            self._stopping.wait(_POLL_S)

    def _pulled(self, name: str) -> Image:
        num_failures = 0

        def look() -> Image | Object:
            nonlocal num_failures
            if self._agent.is_held(name):
                return {"waiting": {"reason": "ContainerCreating"}}
            if (image := self._agent.images.get(name)) is not None:
                return image
            num_failures += 1
            reason = "ErrImagePull" if num_failures == 1 else "ImagePullBackOff"
            message = f'failed to pull and unpack image "{name}": not found'
            if not _IMAGE_NAME.fullmatch(name):
                reason, message = "InvalidImageName", f'couldn\'t parse image name "{name}"'
            return {"waiting": {"reason": reason, "message": message}}

        image: Image = self._await(look)
        return image

    def _environment(self, container: Object) -> dict[str, str]:
        """All variables of a container, once the Secrets that they come from are there."""

        def look() -> Object:
            try:
                return {"environment": self._resolved(container)}
            except LookupError as error:
                why = {"reason": "CreateContainerConfigError", "message": str(error.args[0])}
                return {"waiting": why}

        environment: dict[str, str] = self._await(look)["environment"]
        return environment

    def _resolved(self, container: Object) -> dict[str, str]:
        """Variables by name; later ones and `env` win.

        Raises:
            LookupError: a Secret or a key isn't there, in the kubelet's words.
        """
        resolved: dict[str, str] = {}
        for source in container.get("envFrom") or []:
            resolved |= self._secret(source["secretRef"]["name"])
        for variable in container.get("env") or []:
            origin = variable.get("valueFrom") or {}
            if "secretKeyRef" in origin:
                name, key = origin["secretKeyRef"]["name"], origin["secretKeyRef"]["key"]
                secret = self._secret(name)
                if key not in secret:
                    raise LookupError(f"couldn't find key {key} in Secret {name}")
                value = secret[key]
            elif "fieldRef" in origin:
                value = self._field(origin["fieldRef"]["fieldPath"])
            else:
                value = expand(variable.get("value") or "", resolved)
            resolved[variable["name"]] = value
        return resolved

    def _secret(self, name: str) -> dict[str, str]:
        found = self._agent.read("secrets", name)
        if found is None:
            raise LookupError(f'secret "{name}" not found')
        return {key: base64.b64decode(text).decode() for key, text in found["data"].items()}

    def _field(self, path: str) -> str:
        if match := _FIELD.fullmatch(path):
            return str(self.pod["metadata"].get(match[1], {}).get(match[2], ""))
        return str(self.pod["metadata"][path.removeprefix("metadata.")])

    def _started(
        self, container: Object, image: Image, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        """The container's process.

        Raises:
            OSError: there is no such program.
        """
        own = {name: self._mapped(container, value) for name, value in variables.items()}
        environment = {"HOSTNAME": self.name, **image.environment, **own}
        words = image.command or [*(container.get("command") or []), *(container.get("args") or [])]
        program, *arguments = [expand(word, variables) for word in words]
        with self.log.open("ab") as output:
            descriptors = {"stdout": output.fileno(), "stderr": output.fileno()}
            options: Any = {"env": environment, "cwd": self._folder, **descriptors}
            if image.commands is not None and program == "batchllm":
                return image.commands.start("batchllm_operator", arguments, **options)
            path = shutil.which(program, path=environment.get("PATH"))
            if path is None:
                raise FileNotFoundError(f'"{program}": executable file not found in $PATH')
            return subprocess.Popen(
                [path, *arguments], stdin=subprocess.DEVNULL, start_new_session=True, **options
            )

    def _mapped(self, container: Object, value: str) -> str:
        """A variable's value, with the real path of the volume that it begins with."""
        volumes = {volume["name"]: volume for volume in self.pod["spec"].get("volumes") or []}
        mounts = container.get("volumeMounts") or []
        for mount in sorted(mounts, key=lambda mount: -len(mount["mountPath"])):
            path = mount["mountPath"]
            if f"{value}/".startswith(f"{path}/"):
                if "hostPath" in volumes[mount["name"]]:
                    return value
                real = self._folder / mount["name"]
                real.mkdir(exist_ok=True)
                return f"{real}{value.removeprefix(path)}"
        return value


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)`; `$$` is an escaped `$`, and unknown names stay as they are."""

    def replacement(match: re.Match[str]) -> str:
        return variables.get(match["name"], match[0]) if match["name"] else "$"

    return _REFERENCE.sub(replacement, text)


def _terminated(code: int, reason: str, message: str, started: str) -> Object:
    times = {"startedAt": started, "finishedAt": now_text()}
    return {"exitCode": code, "reason": reason, "message": message, **times}


def _kill(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
