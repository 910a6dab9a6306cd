"""What became of each row: the columns `error` and `status`."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.shards.outputs import STATUS_COLUMN
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.tasks import INVALID_OUTPUT
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN


def outcomes(
    spec: JobSpec, rejected: pa.ChunkedArray, outputs: pa.Table
) -> dict[str, pa.ChunkedArray]:
    """The columns `error` and `status`, by name.

    Args:
        spec: the job's.
        rejected: why a row can't be prompted; null if it can.
        outputs: the rows' outputs, with the columns of a part; all null without one.
    """
    failed = outputs[ERROR_COLUMN]
    errors = pc.coalesce(rejected, failed)
    is_cut_off = pc.equal(outputs["finish_reason"], "length")
    conditions = {
        "rejected": pc.is_valid(rejected),
        INVALID_OUTPUT: pc.equal(pc.struct_field(errors, "kind"), INVALID_OUTPUT),
        "failed": pc.is_valid(failed),
        "cut_off": pc.and_(is_cut_off, pa.scalar(spec.ends_answers)),
    }
    status = pc.case_when(pc.make_struct(*conditions.values()), *conditions, "ok")
    return {ERROR_COLUMN: errors, STATUS_COLUMN: status}
