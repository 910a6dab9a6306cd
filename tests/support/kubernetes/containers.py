"""Containers as processes of this machine.

Each runs in a session of its own, with the environment that it is given and two variables that
container runtimes set: HOSTNAME, and `container`, by which even processes that left the session are
found (not the forks of a forked `batchllm`: /proc has what a program was started with). There is no
pid namespace: a program that handles no SIGTERM ends by it here, where as process 1 of a real
container it would go on until SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.fork_server import ForkedProcess, ForkServer
from support.kubernetes.container_log import ContainerLog

START_ERROR = 128  # the exit code of a container whose command couldn't be started


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: arguments, the whole environment, and a folder that exists."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    identity: str  # of the container, unique on this machine
    commands: ForkServer | None = None  # forks what would be started as `batchllm`


class StartError(Exception):
    """The command can't be run; the message is the runtime's."""


class Container:
    """A process and its log. `exited` ends when nothing of it is left and the log is whole."""

    def __init__(
        self,
        process: asyncio.subprocess.Process | ForkedProcess,
        identity: str,
        log: ContainerLog,
    ) -> None:
        self._process = process
        self._identity = identity
        self.log = log
        self.out_of_memory = False
        self.exited: asyncio.Task[int]

    @classmethod
    async def start(cls, command: Command, log: ContainerLog) -> Container:
        """Start the process.

        Raises:
            StartError: There is no such program, or it can't be run.
        """
        program = _program(command)
        reading, writing = os.pipe()
        try:
            process = await _start(program, command, writing)
        except OSError as error:
            os.close(reading)
            raise StartError(_start_message(command, str(error))) from error
        finally:
            os.close(writing)
        container = cls(process, command.identity, log)
        container.exited = asyncio.create_task(container._run(reading))
        return container

    async def _run(self, reading: int) -> int:
        """Write the log until the process has ended; return the exit code."""
        output = asyncio.create_task(self._copy_output(reading))
        try:
            code = await _code(self._process)
        finally:
            await self._sweep()  # a container ends with its first process
        await output
        await self.log.close()
        return code if code >= 0 else 128 - code

    async def _sweep(self) -> None:
        while self.processes():
            self.kill()
            await asyncio.sleep(0.01)

    async def _copy_output(self, reading: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0)
        )
        try:
            while data := await reader.read(65536):
                await self.log.write(data)
        finally:
            transport.close()

    def terminate(self) -> None:
        """Ask the first process to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill every process of the container."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_for_memory(self) -> None:
        """What the kernel does when the container's memory is used up."""
        self.out_of_memory = True
        self.kill()

    def processes(self) -> list[int]:
        """Its processes that haven't ended."""
        marker = f"container={self._identity}".encode()
        return [pid for pid in _live() if _belongs(pid, self._process.pid, marker)]


def _program(command: Command) -> str:
    if not command.arguments:
        raise StartError("no command specified")
    name = command.arguments[0]
    if "/" in name:
        return str(command.folder / name)
    found = shutil.which(name, path=command.environment.get("PATH", ""))
    if found is None:
        raise StartError(
            _start_message(command, f'exec: "{name}": executable file not found in $PATH')
        )
    return found


async def _start(
    program: str, command: Command, output: int
) -> asyncio.subprocess.Process | ForkedProcess:
    """The process; only a command line that begins with `batchllm` is forked."""
    environment = {**command.environment, "container": command.identity}
    arguments = command.arguments[1:]
    if command.commands is not None and command.arguments[0] == "batchllm":
        return command.commands.start(
            "batchllm_operator",
            arguments,
            env=environment,
            cwd=command.folder,
            stdout=output,
            stderr=output,
        )
    return await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        cwd=command.folder,
        start_new_session=True,
    )


async def _code(process: asyncio.subprocess.Process | ForkedProcess) -> int:
    """The exit code, once it has ended."""
    if not isinstance(process, ForkedProcess):
        return await process.wait()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process)
    return process.wait()


def _start_message(command: Command, why: str) -> str:
    return (
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: "
        "runc create failed: unable to start container process: error during container init: "
        f"{why}: unknown"
    )


def _live() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _belongs(pid: int, session: int, marker: bytes) -> bool:
    folder = Path("/proc", str(pid))
    try:
        state, _, _, found, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        if state in "ZX":
            return False
        return int(found) == session or marker in (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
