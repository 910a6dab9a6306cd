"""The child processes of operators, without the imports of `batchllm`."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.fork_server import ForkServer

from batchllm_operator.operators import command


def fork_children(commands: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operators in this process fork what they would start."""

    def popen(argv: Sequence[str], *, env: Mapping[str, str], **options: Any) -> _Child:
        return _Child(commands, argv, env)

    pipes = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "STDOUT")}
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(Popen=popen, **pipes))


class _Child:
    """What `command.ChildProcess` uses of `subprocess.Popen`."""

    def __init__(self, commands: ForkServer, argv: Sequence[str], env: Mapping[str, str]) -> None:
        module = argv.index("-m") + 1
        arguments = list(argv[module + 1 :])
        arguments[arguments.index("--die-with-parent") + 1] = str(commands.pid)
        reader, writer = os.pipe()
        process = commands.start(argv[module], arguments, env=env, stdout=writer, stderr=writer)
        os.close(writer)
        self.stdout = os.fdopen(reader, "rb")
        self.pid, self.poll, self.wait = process.pid, process.poll, process.wait
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.returncode
