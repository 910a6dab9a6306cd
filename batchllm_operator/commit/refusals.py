"""Notes in the plan's folder why a commit published nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from batchllm_operator.errors import BatchLLMError, FailedRowsError, StorageError
from batchllm_operator.secrets.masking import Masker
from batchllm_operator.shards.refusal import REFUSED_FILE, Refusal
from batchllm_operator.shards.row_errors import RowErrors
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_MAX_CHARS: Final = 2_000
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RefusalNote:
    """What a note will say beside the error."""

    errors: RowErrors | None = None
    """The failed rows, once they are known."""


@contextmanager
def noting_refusal(plan: StoredPlan) -> Iterator[RefusalNote]:
    """Store the error that ends the context, if it is one of ours; it is raised all the same."""
    note = RefusalNote()
    try:
        yield note
    except BatchLLMError as error:
        try:
            _store(plan, error, note.errors if isinstance(error, FailedRowsError) else None)
        except (StorageError, OSError, BatchLLMError) as fault:  # the commit's own error counts
            _log.warning("%s/%s isn't written: %s", plan.folder.uri, REFUSED_FILE, fault)
        raise


def _store(plan: StoredPlan, error: BatchLLMError, errors: RowErrors | None) -> None:
    reason = Masker.of(os.environ)(str(error)).encode(errors="replace").decode()
    refusal = Refusal(
        plan_id=plan.manifest.plan_id,
        refused_at=datetime.now(UTC),
        reason=reason if len(reason) <= _MAX_CHARS else reason[: _MAX_CHARS - 1] + "…",
        num_rows_failed=0 if errors is None else errors.num_rows,
        errors=() if errors is None else errors.kinds(plan),
    )
    plan.check_stays()  # a file in the folder of a removed plan would stay for ever
    plan.folder.write_bytes(REFUSED_FILE, refusal.model_dump_json(indent=1).encode())
