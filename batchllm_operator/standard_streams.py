"""stdout and stderr of a command, which may be closed, a pipe without a reader, or a full disk."""

import os
import select
import signal
import sys
from contextlib import suppress
from typing import Final

from batchllm_operator.errors import ERROR_MARK, ExitCode

_UNREAD: Final = 128 + signal.SIGPIPE
"""Exit code if the pipe has no reader, as a shell reports it for any other program."""


def open_streams() -> None:
    """Discard output to a stream that the caller has closed.

    Before any file is opened, which would get the stream's descriptor, and before libraries print.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            _discard(descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))


def say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr)


def code_of(error: OSError) -> int:
    """The exit code for an error that no stage expects; prints it unless a pipe was closed."""
    if isinstance(error, BrokenPipeError) and any(map(_is_unread, (1, 2))):
        return _UNREAD
    if _flush() is None:
        say(f"{ERROR_MARK}{error}")
    return ExitCode.FAILURE


def finish(code: int) -> int:
    """Flush both streams; returns the exit code, which is `code` if that succeeds."""
    error = _flush()
    if error is None or code != ExitCode.OK:
        return code
    return _UNREAD if isinstance(error, BrokenPipeError) else ExitCode.FAILURE


def _flush() -> OSError | None:
    """Flush both streams; returns an error, which is printed unless a pipe was closed."""
    last = None
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        try:
            getattr(sys, name).flush()
        except OSError as error:
            last = error
            _discard(descriptor)  # Python would try again at exit, and complain
            if not isinstance(error, BrokenPipeError):
                say(f"{ERROR_MARK}{name} can't be written: {error.strerror}")
    return last


def _is_unread(descriptor: int) -> bool:
    """Whether it is a pipe without a reader."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    else:
        os.set_inheritable(descriptor, True)
