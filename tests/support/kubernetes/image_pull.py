"""The pull of a container's image: waited for as long as it takes, reported as a kubelet does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from support.kubernetes.images import Image, PullFailure
from support.kubernetes.pod_status import ContainerState
from support.kubernetes.status import Object

POLL_S = 0.03  # how often something that is awaited is looked for


class ImageSource(Protocol):
    """The node, as far as images go."""

    def image(self, name: str, policy: str) -> Image | PullFailure | None:
        """The image; None while its pull takes."""


class ImagePull:
    """The pull for one container: `spec` is the container's, `state` its status."""

    def __init__(
        self,
        spec: Object,
        state: ContainerState,
        node: ImageSource,
        record: Callable[[str, str, str, str], Awaitable[None]],
        report: Callable[[], Awaitable[None]],
    ) -> None:
        self._spec = spec
        self._state = state
        self._node = node
        self._record = record
        self._report = report

    async def run(self) -> Image:
        """The image, once the node has it."""
        spec, state = self._spec, self._state
        name, image, policy = spec["name"], spec["image"], spec["imagePullPolicy"]
        pulling = failed = False
        while True:
            found = self._node.image(image, policy)
            if isinstance(found, Image):
                if pulling or policy == "Always":
                    message = f'Successfully pulled image "{image}" in 1ms (1ms including waiting).'
                else:
                    message = f'Container image "{image}" already present on machine'
                await self._record("Normal", "Pulled", message, name)
                return found
            if not pulling and policy != "Never":
                pulling = True
                await self._record("Normal", "Pulling", f'Pulling image "{image}"', name)
            if isinstance(found, PullFailure):
                await self._tell_failure(found, again=failed)
                failed = True
            elif not failed and state.waits("ContainerCreating"):
                await self._report()
            await asyncio.sleep(POLL_S)

    async def _tell_failure(self, failure: PullFailure, again: bool) -> None:
        spec, name, state = self._spec, self._spec["name"], self._state
        backs_off = again and bool(failure.later_reason)
        reason = failure.later_reason if backs_off else failure.reason
        message = failure.later_message if backs_off else failure.message
        if not state.waits(reason, message):
            return
        await self._report()
        if backs_off:
            back_off = f'Back-off pulling image "{spec["image"]}"'
            await self._record("Normal", "BackOff", back_off, name)
        elif reason == "ErrImagePull":
            told = f'Failed to pull image "{spec["image"]}": {message}'
            await self._record("Warning", "Failed", told, name)
        elif reason == "InvalidImageName":
            await self._record("Warning", "InspectFailed", message, name)
        else:
            await self._record("Warning", reason, message, name)
        await self._record("Warning", "Failed", f"Error: {reason}", name)
