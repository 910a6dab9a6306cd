"""A shard in a pod, with vLLM on the CPU and a real model, and the commit after it."""

import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from demo_model import build_demo_model
from support.fake_job import DS, document_rows, fake_spec, write_table
from support.kubernetes.cluster import python_image
from support.pod_shards import NUM_ROWS, Shards, in_triggerer

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.operators import command
from batchllm_operator.plan.plan_job import plan_job


@in_triggerer
def test_vllm_generates_in_a_pod_what_it_generates_here(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards.cluster.agent.add_image("job:1", python_image())
    monkeypatch.setattr(command, "subprocess", subprocess)  # both import vLLM, as for users
    build_demo_model(shards.lake / "model")
    write_table(shards.lake / "documents", document_rows())
    spec = fake_spec(
        shards.lake,
        model={"path": str(shards.lake / "model")},
        engine={"backend": "vllm", "dtype": "float32", "max_num_seqs": 16},
        planner={"num_shards": 1},
    )
    shards.plan_uri = plan_job(spec, DS).folder.uri
    result = shards.start(memory="4Gi", env={"HF_HUB_OFFLINE": "1"}).wait()
    assert result["num_rows"] == NUM_ROWS and result["num_failed_rows"] == 0
    assert result["num_cached_tokens"] > 0  # groups share their prefixes
    shards.check_whole()
    commit_run(shards.plan_uri)
    in_pod = texts(shards.lake / "out")
    assert len(in_pod) == NUM_ROWS and None not in in_pod.values()

    output = spec.output.model_copy(update={"uri": str(shards.lake / "here")})
    shards.plan_uri = plan_job(spec.model_copy(update={"output": output}), DS).folder.uri
    shards.start(runner="local").wait()
    commit_run(shards.plan_uri)
    assert texts(shards.lake / "here") == in_pod


def texts(table: Path) -> dict[str, str | None]:
    """What was generated, by key."""
    rows = pq.read_table(table / f"ds={DS}").to_pylist()
    return {row["row_key"]: row["generated_text"] for row in rows}
