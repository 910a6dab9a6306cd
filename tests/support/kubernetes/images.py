"""Container images that a node knows, and how a pull of others fails."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from support.fork_server import ForkServer

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REFERENCE = re.compile(
    r"^(?:(?:[A-Za-z0-9.-]+)(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
    r"(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?$"
)


@dataclass(frozen=True, slots=True)
class Image:
    """What an image brings: its environment and its command.

    A pod's `command` takes the place of `entrypoint`, its `args` that of `cmd`. `replaced_command`
    runs whatever the pod says, for containers that don't do what they were asked to. Its `batchllm`
    is forked from `commands`, if there are any.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoint: Sequence[str] = ()
    cmd: Sequence[str] = ()
    working_dir: str = ""
    replaced_command: Sequence[str] | None = None
    commands: ForkServer | None = None

    def command(self, command: Sequence[str], args: Sequence[str]) -> list[str]:
        """What a container with these fields runs."""
        if self.replaced_command is not None:
            return list(self.replaced_command)
        if command:
            return [*command, *args]
        return [*self.entrypoint, *(args or self.cmd)]


@dataclass(frozen=True, slots=True)
class PullFailure:
    """Why an image isn't there: `reason` of the waiting container at first, and after that."""

    reason: str
    message: str
    later_reason: str = ""
    later_message: str = ""


def pull_failure(name: str, policy: str) -> PullFailure:
    """How a real kubelet words it that a name isn't known."""
    if not _REFERENCE.match(name):
        return PullFailure(
            "InvalidImageName",
            f'Failed to apply default image tag "{name}": couldn\'t parse image name "{name}": '
            "invalid reference format",
        )
    if policy == "Never":
        message = f'Container image "{name}" is not present with pull policy of Never'
        return PullFailure("ErrImageNeverPull", message)
    full = full_name(name)
    message = (
        f'failed to pull and unpack image "{full}": failed to resolve reference "{full}": '
        f"{full}: not found"
    )
    error = f"rpc error: code = NotFound desc = {message}"
    back_off = f'Back-off pulling image "{name}": ErrImagePull: {error}'
    return PullFailure("ErrImagePull", error, "ImagePullBackOff", back_off)


def full_name(name: str) -> str:
    """The image's name with its registry and tag."""
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif "." not in first and ":" not in first and first != "localhost":
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"
