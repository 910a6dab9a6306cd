"""Writes the lake that a release leaves behind: one partition, planned, run and committed.

    python tests/data/make_lake.py tests/data/lake-0.1.0

`tests/test_version_0_1_0.py` reads it as later releases have to. Until 0.1.0 is released, it is
made again when a format changes; from then on it stays as it is, and a later release whose files
are of other versions adds a lake of its own.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.fake_job import DS, document_rows, fake_spec, write_table

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker

ROOT = Path("/lake-of-a-release")
"""Where the lake is made: its plan names this folder, and readers put theirs in its place."""
CHANGES = {
    "reuse_outputs": True,
    "max_failed_fraction": 0.5,
    "planner": {"num_shards": 2, "part_rows": 3, "estimated_output_tokens": {"learned": True}},
}


def main(target: Path) -> None:
    rows = [*document_rows(3, 3), {"row_key": "null", "document": None, "query": "q"}]
    write_table(ROOT / "documents", rows)
    plan = plan_job(fake_spec(ROOT, **CHANGES), DS)
    run_worker(plan)
    commit_run(plan)
    Path(plan.folder.full_path("report.html")).unlink()  # it is drawn again
    shutil.copytree(ROOT, target)
    shutil.rmtree(ROOT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
