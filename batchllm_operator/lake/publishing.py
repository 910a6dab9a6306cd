"""Publishing a partition, alike in all formats: whose rows it holds, and repeated commits."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from batchllm_operator.errors import (
    BatchLLMError,
    CommitUnknownError,
    ConflictError,
    StorageError,
    TableError,
)

RUN_ID: Final = "run_id"
"""The column that names a row's publication."""
_ATTEMPTS: Final = 20
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Publication:
    """The job and plan whose outputs a partition of an output table holds."""

    job: str
    partition: str
    plan_id: str

    @property
    def run_id(self) -> str:
        """The value of column `run_id` in each of its rows."""
        return f"{self.job}/{self.partition}/{self.plan_id}"

    @property
    def properties(self) -> dict[str, str]:
        """Stored with the commit in the table's history."""
        fields = {"job": self.job, "partition": self.partition, "plan-id": self.plan_id}
        return {f"batchllm.{name}": value for name, value in fields.items()}

    @classmethod
    def of_run_id(cls, run_id: str | None) -> Publication | None:
        """The publication that a row's `run_id` names; None if no job of ours wrote it.

        A job's name and a plan's id contain no `/`; a partition's name may.
        """
        job, _, rest = (run_id or "").partition("/")
        partition, _, plan_id = rest.rpartition("/")
        return cls(job, partition, plan_id) if job and partition and plan_id else None


@dataclass(frozen=True, slots=True)
class RefusedCommit:
    """Why a commit wasn't made, or the loss of its answer: only the table tells which."""

    text: str
    cause: BaseException | None = None
    may_arrive: bool = False
    """Whether the commit may still happen after the table was looked at."""
    is_certain: bool = False
    """Whether this commit hasn't happened, and can't any more."""
    may_repeat: bool = True
    kind: type[BatchLLMError] = StorageError
    """The error if the commit certainly hasn't happened."""

    def error(self, uri: str, partition: str) -> BatchLLMError:
        if self.may_arrive:
            return CommitUnknownError(
                f"output {uri}: no answer came whether partition {partition!r} was published;"
                f" commit again to find out: {self.text}"
            )
        advice = "; commit again" if self.kind is StorageError else ""
        return self.kind(
            f"output {uri}: partition {partition!r} wasn't published{advice}: {self.text}"
        )


class Attempt(Protocol):
    """A publication on its way into a table of some format."""

    def look(self) -> Publication | None:
        """The partition's publication now; the attempt's own if the table's history has it."""

    def commit(self) -> RefusedCommit | None:
        """Replace the partition in the table as it was looked at; None if that has happened.

        An error means that nothing was committed, and that a repetition wouldn't help.
        """


def publish_once(
    uri: str,
    publication: Publication,
    replaces: Publication | None,
    attempt: Attempt,
    *,
    again: bool = False,
) -> None:
    """See `LakeTable.publish`: commit until somebody's rows are there, or commits are refused."""
    refusal: RefusedCommit | None = None
    published = attempt.look()
    for idx in range(_ATTEMPTS):
        if not again and is_published(uri, published, publication, replaces):
            return
        refusal = attempt.commit()
        if refusal is None:
            return
        _log.warning("output %s: a commit was refused: %s", uri, refusal.text)
        # Exponential, with jitter so that writers don't stay in step.
        time.sleep(random.uniform(0.5, 1.0) * min(_FIRST_PAUSE_S * 2**idx, _LONGEST_PAUSE_S))
        with looking_again(uri, publication.partition):
            published = attempt.look()
        if not refusal.may_repeat:
            break
    assert refusal is not None
    if again or not is_published(uri, published, publication, replaces):
        raise refusal.error(uri, publication.partition) from refusal.cause


@contextmanager
def looking_again(uri: str, partition: str) -> Iterator[None]:
    """Turn a failed read after a commit, whose outcome is open, into `CommitUnknownError`."""
    try:
        yield
    except StorageError as error:
        raise RefusedCommit(f"{error}", may_arrive=True).error(uri, partition) from error


def is_published(
    uri: str, published: Publication | None, wanted: Publication, replaces: Publication | None
) -> bool:
    """Whether the partition holds `wanted` or `replaces`; raises `ConflictError` if neither."""
    if published == wanted:
        return True
    if published == replaces:
        return False
    held, expected = (whose.run_id if whose else "nothing" for whose in (published, replaces))
    raise ConflictError(
        f"output {uri}: partition {wanted.partition!r} holds {held} where {expected} was expected:"
        f" another writer has published it meanwhile; {wanted.run_id} wasn't published"
    )


def check_name(uri: str, partition: str) -> None:
    """Raise `TableError` if the partition's name is empty: no reader could name it."""
    if not partition:
        raise TableError(f"output {uri}: a partition needs a name, such as 2026-01-31")
