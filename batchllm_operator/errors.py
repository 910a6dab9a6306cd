"""Every error that a user can meet, with its exit code on the command line.

A message says what was wrong, where (file, table, column, row), and what to do. Callers branch on
the class, never on the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    REFUSED = 4  # too many rows failed, or the answers aren't as the spec expects
    INCOMPLETE = 5  # commit before every shard has finished
    CONFLICT = 6  # another client has published the partition meanwhile
    LIMIT = 7  # the run has used what the spec allows
    INTERRUPTED = 130  # 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


FINAL_EXIT_CODES: Final = (
    *(ExitCode.INVALID, ExitCode.REFUSED, ExitCode.CONFLICT, ExitCode.LIMIT),
)
"""Failures that a retry can't mend. An empty partition is not among them, as data may come late."""


class BatchLLMError(Exception):
    """Base of all errors that this package raises on purpose."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE
    result: Mapping[str, Any] = {}
    """What `--result` has of the failure."""


class InvalidError(BatchLLMError):
    """Base of errors that a retry won't mend; an argument is wrong: follow the message."""

    exit_code = ExitCode.INVALID


class SpecError(InvalidError):
    """The spec has an unknown field, a bad value or a secret: mend the named field."""


class TableError(InvalidError):
    """A table is absent, unreadable, or lacks a column or a type: mend it, or cast in a view."""


class MissingLibraryError(InvalidError):
    """A library isn't installed: install the extra that the message names."""

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
    """The key has a null, or the same values in two rows: name columns that identify a row."""


class ModelError(InvalidError):
    """Model, tokenizer or adapter can't be loaded, or doesn't fit; the message names the file."""


class PlanError(InvalidError):
    """A plan is absent, damaged, foreign, or of another version: plan again."""


class DamagedFileError(PlanError):
    """A file in the lake isn't what was written there: plan or run again; look at the storage."""


class EmptyPartitionError(BatchLLMError):
    """The partition is absent or empty, and the spec says `on_empty: fail`: check `--ds`."""

    exit_code = ExitCode.EMPTY


class FailedRowsError(BatchLLMError):
    """More rows (`num_rows`) failed than `max_failed_fraction` allows; nothing was published.

    `batchllm failed` lists them: mend them, raise the limit, or `commit --accept`.
    `kinds` has an `ErrorKind` for each of the most frequent kinds.
    """

    exit_code = ExitCode.REFUSED

    def __init__(self, message: str, num_rows: int = 0, kinds: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.num_rows, self.kinds = num_rows, tuple(kinds)


class ExpectationError(BatchLLMError):
    """The answers aren't as the spec expects; nothing was published.

    Look at the numbers that the message names: `commit --accept`, or change `expect` or the prompt.
    """

    exit_code = ExitCode.REFUSED


class LimitError(BatchLLMError):
    """A run has used what `limits` allows: raise the limit in the spec, plan again and run.

    Finished rows are kept.
    """

    exit_code = ExitCode.LIMIT


class IncompleteRunError(BatchLLMError):
    """Rows have no output yet: run the named shards, then commit again."""

    exit_code = ExitCode.INCOMPLETE


class ConflictError(BatchLLMError):
    """Another client has published the partition: plan again, if this job's outputs should win."""

    exit_code = ExitCode.CONFLICT


class CommitUnknownError(BatchLLMError):
    """The answer to a commit was lost: commit again, which finds out whether it happened."""


class FencedError(BatchLLMError):
    """A later attempt has taken over the shard: this one stops, the other one goes on."""


class StorageError(BatchLLMError):
    """Reading or writing the lake failed: check network, credentials and disk, then repeat."""


class EngineError(BatchLLMError):
    """The engine can't start, or died: see the lines above; often memory, or an argument."""


class RunaheadError(EngineError):
    """Replicas can't hand KV to each other: each computes prefixes by itself; the log says why."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to stop: give it again. A note says what is kept of a run.

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
