import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from batchllm_operator.operators.command import ChildProcess
from batchllm_operator.secrets import Masker

HANG_GUARD_S = 60
WRITER = "import sys, signal; f = open(sys.argv[1], 'wb', 0); f.write(b'!'); signal.pause()"


def child(code: str, *arguments: str, kill_grace_s: float = 30.0) -> ChildProcess:
    argv = (sys.executable, "-u", "-c", code, *arguments)
    return ChildProcess(argv, env=dict(os.environ), kill_grace_s=kill_grace_s, masker=Masker())


def await_writer(fifo: Path) -> int:
    """Open `fifo` for reading and return when a process has written one byte into it."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    ready, _, _ = select.select([reader], [], [], HANG_GUARD_S)
    assert ready, "the process didn't start"
    assert os.read(reader, 1) == b"!"
    return reader


def await_no_writer(reader: int) -> None:
    """Return when the last process that holds the pipe's other end has ended."""
    ready, _, _ = select.select([reader], [], [], HANG_GUARD_S)
    assert ready, "a process is still alive"
    assert os.read(reader, 1) == b""


@pytest.mark.parametrize(
    ("code", "outcome", "printed"),
    [
        ("print('a'); print(); print('ü', file=sys.stderr)", (0, "ü"), ["a", "ü"]),
        ("print('1%\\r2%\\r\\n', end='x')", (0, "x"), ["1%", "2%", "x"]),
        ("for i in range(20_000): print(i)", (0, "19999"), [str(i) for i in range(20_000)]),
        (
            "print('batchllm: error: no such table'); print('bye'); sys.exit(2)",
            (2, "no such table"),
            ["batchllm: error: no such table", "bye"],
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", (128 + signal.SIGKILL, ""), []),
        ("os.close(1); os.close(2); time.sleep(0.3); sys.exit(3)", (3, ""), []),
    ],
)
def test_a_command_ends_with_its_code_its_error_and_all_of_its_lines(
    code: str, outcome: tuple[int, str], printed: list[str]
) -> None:
    lines: list[str] = []
    process = child(f"import os, signal, sys, time\n{code}")
    process.run(lines.append)
    assert (process.exit_code, process.error) == outcome
    assert lines == printed and process.stop_reason is None


@pytest.mark.parametrize("is_ignored", [False, True])
def test_stop_asks_with_sigterm_and_kills_after_the_grace(is_ignored: bool) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if is_ignored else ""
    code = f"import signal; {ignore} print('up')\nwhile True: signal.pause()"
    process = child(code, kill_grace_s=0.1 if is_ignored else 30.0)
    process.run(lambda line: process.stop("enough"))
    number = signal.SIGKILL if is_ignored else signal.SIGTERM
    assert (process.exit_code, process.error) == (128 + number, "up")
    assert process.stop_reason == "enough"


def test_an_exception_while_waiting_ends_the_command_first(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    code = "import sys, signal; f = open(sys.argv[1], 'w'); print('up'); signal.pause()"

    def log(line: str) -> None:
        raise TimeoutError(line)

    with pytest.raises(TimeoutError, match="up"):
        child(code, str(fifo)).run(log)
    await_no_writer(reader)
    os.close(reader)


def test_what_a_failed_command_started_ends_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    code = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {WRITER!r}, sys.argv[1]],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "open(sys.argv[1] + '.go').read()\n"
        "sys.exit(1)\n"
    )
    os.mkfifo(f"{fifo}.go")
    process = child(code, str(fifo))
    runner = threading.Thread(target=process.run, args=(print,))
    runner.start()
    reader = await_writer(fifo)
    Path(f"{fifo}.go").write_text("go")
    runner.join(HANG_GUARD_S)
    assert process.exit_code == 1
    await_no_writer(reader)
    os.close(reader)


def test_death_of_the_parent_ends_the_command(tmp_path: Path) -> None:
    """As when Airflow's supervisor is killed: supervisor -> task -> command."""
    fifo, outcome = tmp_path / "alive", tmp_path / "outcome"
    os.mkfifo(fifo)
    task = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from batchllm_operator.operators.command import ChildProcess\n"
        f"argv = [sys.executable, '-c', {WRITER!r}, {str(fifo)!r}]\n"
        "from batchllm_operator.secrets import Masker\n"
        "process = ChildProcess(argv, env=dict(os.environ), kill_grace_s=30, masker=Masker())\n"
        "process.run(print)\n"
        f"part = Path({str(outcome) + '.part'!r})\n"
        "part.write_text(f'{process.exit_code} {process.stop_reason}')\n"
        f"part.rename({str(outcome)!r})\n"
    )
    supervisor = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    process = subprocess.Popen([sys.executable, "-c", supervisor, task])
    reader = await_writer(fifo)
    process.kill()
    process.wait()
    await_no_writer(reader)
    os.close(reader)
    for _ in range(HANG_GUARD_S * 10):
        if outcome.exists():
            break
        time.sleep(0.1)
    code, _, reason = outcome.read_text().partition(" ")
    assert int(code) == 128 + signal.SIGTERM
    assert reason == "the process that supervised this task has died"
