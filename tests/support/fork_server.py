"""`python -m MODULE` without its imports: forked from a process that has done them.

What is forked is a process of its own: with its pid, session, environment, folder and output,
killed like any other, ended with its threads and `atexit`. The process that forks runs no thread.
What differs from a cold start: modules that read the environment while they are imported have read
the server's, and PYTHON* variables come too late. Modules in tests/ can be run, too.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MAX_REQUEST_BYTES = 1 << 20
_CODE = struct.Struct("i")


class ForkedProcess:
    """A process that runs or has ended; readable (`fileno`) once it has."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Exit code, or minus the signal that ended it."""
        self._status = status

    def fileno(self) -> int:
        return self._status

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            data = os.read(self._status, _CODE.size)
            os.close(self._status)
            self.returncode = _CODE.unpack(data)[0] if data else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: it runs for more than `timeout` seconds.
        """
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported `modules`, in `env`, and forks. Its children end with it."""

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(far.fileno()), *modules],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
                start_new_session=True,  # Ctrl-C is for the tests, which then close it
            )
        self.pid = self._process.pid
        self._channel = near
        self._lock = threading.Lock()

    def start(
        self,
        module: str,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int = -1,
        stderr: int = -1,
    ) -> ForkedProcess:
        """`python -P -m MODULE ARGS` in a session of its own.

        `stdout` and `stderr` are descriptors, which stay the caller's; without one, output is
        dropped.
        """
        request = {
            "module": module,
            "args": [str(arg) for arg in args],
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
        }
        reading, writing = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        given = [writing, *(nowhere if each < 0 else each for each in (stdout, stderr))]
        try:
            with self._lock:
                socket.send_fds(self._channel, [json.dumps(request).encode()], given)
                answer = self._channel.recv(64)
        finally:
            os.close(writing)
            os.close(nowhere)
        if not answer:
            os.close(reading)
            raise RuntimeError("the fork server has ended: what it says is on stderr")
        return ForkedProcess(int(answer), reading)

    def run(
        self, module: str, args: Sequence[str], *, timeout: float = 300, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """The same to its end, with what it printed."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.start(module, args, stdout=out.fileno(), stderr=err.fileno(), **options)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(list(args), code, out.read(), err.read())

    def close(self) -> None:
        """End it, and the processes that it has forked."""
        self._channel.close()
        self._process.wait()


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request. Returns one in the child that it is for, None when all is over."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and where its code goes
    while True:
        for ready in select.select([channel.fileno(), *running], [], [])[0]:
            if ready != channel.fileno():
                pid, status = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # no one waits for it
                    os.write(status, _CODE.pack(code))
                os.close(status)
                os.close(ready)
                continue
            data, given, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, 3)
            if not data:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if pid == 0:
                os.setsid()
                channel.send(str(os.getpid()).encode())  # now it can be killed as a session
                channel.close()
                for each, (_, status) in running.items():
                    os.close(each)
                    os.close(status)
                os.close(given[0])
                return json.loads(data), given[1:]
            for each in given[1:]:
                os.close(each)
            running[os.pidfd_open(pid)] = pid, given[0]


def _be(request: dict[str, Any], outputs: Sequence[int]) -> None:
    """Become the process that was asked for, and run its module."""
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    time.tzset()
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    sys.argv[1:] = request["args"]
    sys.modules.pop(request["module"], None)  # it runs as __main__
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _end(request: dict[str, Any], outputs: Sequence[int]) -> None:
    """Run it, and end as the interpreter does, but for taking everything apart (0.1 s)."""
    try:
        _be(request, outputs)
        code = 0
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            raise
        code = stop.code or 0
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code & 0xFF)


def _main(descriptor: str, *modules: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    before = dict(os.environ)
    gc.disable()  # imports leave little garbage, and much to look through
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    imported = {name: value for name, value in os.environ.items() if name not in before}
    if threading.active_count() > 1:
        sys.exit(f"one of {', '.join(modules)} starts threads when it is imported: no fork is safe")
    gc.freeze()  # or each child takes all of it apart when it ends
    child = _serve(socket.socket(fileno=int(descriptor)))
    if child is not None:
        request, outputs = child
        request["env"] = {**imported, **request["env"]}  # imports may set what is read later
        _end(request, outputs)


if __name__ == "__main__":
    _main(*sys.argv[1:])
