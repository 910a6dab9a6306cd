"""Which GPUs and cores replicas have."""

from typing import Any

import pytest
from support.fake_job import job_fields

from batchllm_operator.engine import gpus
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec, parse_spec


def spec(num_replicas: int = 2, **engine: Any) -> JobSpec:
    fields = job_fields("/lake", engine={"backend": "vllm", "replicas": num_replicas, **engine})
    return parse_spec(fields, source="test spec")


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM's build for GPUs were installed, and nothing said which to take."""
    monkeypatch.setattr(gpus, "version", lambda name: "0.32.0+cu129")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, ["0", "1"]),
        ({"tensor_parallel_size": 2}, ["0,1", "2,3"]),
        ({"extra_args": {"pipeline_parallel_size": 2}}, ["0,1", "2,3"]),
    ],
)
def test_each_replica_sees_its_own_gpus(engine: dict[str, Any], expected: list[str]) -> None:
    job = spec(**engine)
    found = [gpus.replica_environment(job, rank) for rank in (0, 1)]
    assert found == [{"CUDA_VISIBLE_DEVICES": each} for each in expected]
    assert gpus.num_gpus_of(job) == len(",".join(expected).split(","))


def test_of_gpus_that_were_given_each_replica_has_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    job = spec(tensor_parallel_size=2)
    found = [gpus.replica_environment(job, rank) for rank in (0, 1)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["GPU-a,GPU-b", "GPU-c,GPU-d"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5,6,7")
    assert gpus.replica_environment(job, 1) == {
        "CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d",
        "HIP_VISIBLE_DEVICES": "6,7",
    }


@pytest.mark.parametrize("given", ["", "0", "0,1,2"])
def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Also none at all: a replica must not take GPUs that were hidden from its run."""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", given)
    with pytest.raises(SpecError, match=f"2 replicas take 4 GPUs, but HIP_VIS.* is '{given}'"):
        gpus.replica_environment(spec(tensor_parallel_size=2), 0)


def test_on_a_cpu_replicas_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "version", lambda name: "0.32.0+cpu")
    assert gpus.replica_environment(spec(), 1) == {}
    assert gpus.num_gpus_of(spec()) == 0
    monkeypatch.setattr(gpus.os, "sched_getaffinity", lambda pid: {7, 2, 3, 5, 9})
    assert [gpus.replica_cores(2, rank) for rank in (0, 1)] == [[2, 3], [5, 7]]
    assert gpus.replica_cores(6, 5) == [2, 3, 5, 7, 9]


def test_blocks_are_those_of_the_spec_or_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.block_size_of(spec(block_size=48)) == 48
    assert gpus.block_size_of(spec()) == 16
    monkeypatch.setattr(gpus, "runs_on_cpu", lambda: True)
    assert gpus.block_size_of(spec()) == 32
    assert gpus.block_size_of(spec(backend="fake")) == 16
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)  # a plan made without vLLM
    assert gpus.block_size_of(spec()) == 16
