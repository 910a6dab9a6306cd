"""Every error that a user can meet, with its exit code on the command line.

A message says what was wrong, where (file, table, column, row), and what to do. Callers branch on
the class, never on the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, ClassVar, Final

ERROR_MARK: Final = "batchllm: error: "
"""Prefix on stderr of the error that ended the command."""
_MAX_CHARS: Final = 400
_EXTRAS: Final = {
    "airflow": ("airflow",),
    "deltalake": ("delta",),
    "obstore": ("clouds",),
    "pandas": ("spark",),
    "pyspark": ("spark",),
    "pyiceberg": ("iceberg",),
    "s3fs": ("s3",),
    "torch": ("cpu", "gpu"),
    "transformers": ("plan",),
    "vllm": ("gpu", "cpu"),
}
"""Optional libraries, and the extras that install them."""


class ExitCode(IntEnum):
    """Exit codes of the `batchllm` command. Schedulers may rely on them."""

    OK = 0
    FAILURE = 1  # the engine, the machine or the storage failed: a retry may help
    INVALID = 2  # spec, table or plan is wrong: a retry won't help
    EMPTY = 3  # the partition has no rows and the spec says on_empty: fail
    TOO_MANY_FAILED_ROWS = 4  # more than max_failed_fraction
    INCOMPLETE = 5  # commit before every shard has finished
    CONFLICT = 6  # another client has published the partition meanwhile
    INTERRUPTED = 130  # 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


FINAL_EXIT_CODES: Final = (ExitCode.INVALID, ExitCode.TOO_MANY_FAILED_ROWS, ExitCode.CONFLICT)
"""Failures that a retry can't mend. An empty partition is not among them, as data may come late."""


class BatchLLMError(Exception):
    """Base of all errors that this package raises on purpose."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE


class InvalidError(BatchLLMError):
    """What the user gave is wrong: a retry won't help."""

    exit_code = ExitCode.INVALID


class SpecError(InvalidError):
    """The job spec is wrong: unknown field, bad value, secret in the file."""


class TableError(InvalidError):
    """A lake table is absent, unreadable, or lacks a column."""


class MissingLibraryError(InvalidError):
    """A required library isn't installed."""

    @classmethod
    def of(cls, error: ModuleNotFoundError, what: str) -> MissingLibraryError:
        library = (error.name or "").partition(".")[0]
        message = f"{what}: needs the library {library or error}, which isn't installed"
        if extras := _EXTRAS.get(library):
            names = " or ".join(f"`{extra}`" for extra in extras)
            message += (
                f"; it comes with this package's extra {names}: pip install '.[{extras[0]}]' in a"
                f" checkout, pip install 'batchllm_operator-VERSION-py3-none-any.whl[{extras[0]}]'"
                " of a wheel"
            )
        elif library:
            message += f"; install the package that brings it, often: pip install {library}"
        return cls(message)


class KeyColumnError(TableError):
    """The key columns don't identify rows: a duplicate or a null key."""


class ModelError(InvalidError):
    """The model or tokenizer can't be loaded, or doesn't fit the spec."""


class PlanError(InvalidError):
    """A plan is absent, corrupted, foreign, or of another version."""


class DamagedFileError(PlanError):
    """A file in the lake isn't what was written there."""


class EmptyPartitionError(BatchLLMError):
    """The partition has no rows and the spec says `on_empty: fail`."""

    exit_code = ExitCode.EMPTY


class FailedRowsError(BatchLLMError):
    """More rows (`num_rows`) failed than `max_failed_fraction` allows; nothing was published.

    `kinds` has an `ErrorKind` for each of the most frequent kinds.
    """

    exit_code = ExitCode.TOO_MANY_FAILED_ROWS

    def __init__(self, message: str, num_rows: int = 0, kinds: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.num_rows, self.kinds = num_rows, tuple(kinds)


class IncompleteRunError(BatchLLMError):
    """Some rows have no output yet; run the named shards, then commit again."""

    exit_code = ExitCode.INCOMPLETE


class ConflictError(BatchLLMError):
    """Another client has published the partition meanwhile; our outputs were not published."""

    exit_code = ExitCode.CONFLICT


class CommitUnknownError(BatchLLMError):
    """The answer to a commit was lost: it may have happened. Commit again to find out."""


class FencedError(BatchLLMError):
    """A later attempt at the same shard has taken over; this one must stop."""


class StorageError(BatchLLMError):
    """Reading or writing the lake failed for a reason outside this package."""


class EngineError(BatchLLMError):
    """The inference engine can't start, or died and couldn't be restarted."""


class RunaheadError(EngineError):
    """The replicas of a chain can't, or can no longer, hand KV to each other."""


class Interrupted(KeyboardInterrupt):
    """The command was asked to stop by a signal. A note says what is kept of a run.

    A `KeyboardInterrupt`, so that no `except Exception` swallows it.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number


def one_line(error: BaseException) -> str:
    """An error of a library in one short line, for a message."""
    text = " ".join(str(error).split())
    clipped = text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
    return f"{type(error).__name__}: {clipped}" if text else type(error).__name__
