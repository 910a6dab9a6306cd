"""An engine that has ended one job takes up another, as if it had been started for it."""

from __future__ import annotations

import pytest
from support.demo_job import Demo

from batchllm_operator.engine import EngineJob, EngineRequest
from batchllm_operator.spec import load_spec

LONG = {"max_tokens": 5, "ignore_eos": True}
SHORT = {"max_tokens": 3, "ignore_eos": True}


def test_the_next_job_finds_nothing_of_the_one_before(demo: Demo) -> None:
    few = {"filter": [{"column": "package", "op": "<", "value": "d"}]}
    first, second = (
        demo.run_job(name, sampling=sampling, input=few).table
        for name, sampling in (("first", LONG), ("second", SHORT))
    )
    assert set(first["num_output_tokens"].to_pylist()) == {5}
    assert set(second["num_output_tokens"].to_pylist()) == {3}
    assert first["num_cached_tokens"].equals(second["num_cached_tokens"])
    texts = (table["generated_text"].to_pylist() for table in (first, second))
    assert all(long.startswith(short) for long, short in zip(*texts, strict=True))


def test_a_job_waits_for_the_requests_of_the_one_before(demo: Demo) -> None:
    spec, job = load_spec(demo.write_spec("waits", sampling=LONG)), EngineJob(64)
    num_requests = 8 + (spec.engine.max_num_seqs or 0)  # so that the first to end leave others
    requests = (EngineRequest(idx, [5, 6], idx, 0) for idx in range(num_requests))
    stream = demo.warm(spec, job).stream(requests)
    next(stream)
    with pytest.raises(RuntimeError, match="the engine still has requests"):
        demo.warm(spec, job)
    assert len(list(stream)) == num_requests - 1
