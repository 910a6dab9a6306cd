"""Why a row has no usable answer."""

from typing import Final, NamedTuple

INVALID_OUTPUT: Final = "invalid_output"
"""The kind of the error of an answer that can't be used."""

SKIPPED: Final = "skipped"
REPETITION: Final = "repetition"
ANSWERED: Final = ("ok", "cut_off")
"""Values of an answer's `status` with which it is used."""
ASKED: Final = (*ANSWERED, REPETITION, INVALID_OUTPUT, "failed", "rejected")
"""Values of `status` of rows that were asked."""


class RowError(NamedTuple):
    """A row's error: columns of the plan's rows, of parts and of the output table hold it so."""

    kind: str
    """A name, such as `null_value`."""
    message: str | None = None
    """For people."""

    def __str__(self) -> str:
        return self.kind if self.message is None else f"{self.kind}: {self.message}"


UNASKED: Final = RowError(kind=SKIPPED)
"""Marks what isn't asked of a row, in the plan's rows only: it isn't a failure."""
