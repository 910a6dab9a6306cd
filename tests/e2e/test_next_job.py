"""An engine that has ended one job takes up another, as if it had been started for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support.demo_job import OFFLINE, Demo

# Prints what each job of one engine gives, and what happens to a job that comes too early.
JOBS = """
import json, sys
from batchllm_operator.engine import EngineJob, EngineRequest
from batchllm_operator.engine.vllm_engine import VLLMEngine
from batchllm_operator.spec import SamplingSpec, load_spec

prompt = [5 + idx % 40 for idx in range(96)]
requests = [EngineRequest(idx, [*prompt, 50 + idx], 0, 96, 4) for idx in range(4)]

def outputs(engine):
    found = sorted(engine.stream(iter(requests)), key=lambda each: each.request_idx)
    return [[each.num_output_tokens, each.num_cached_tokens, each.text] for each in found]

engine = VLLMEngine(load_spec(sys.argv[1]), EngineJob(128, num_requests=4))
jobs = [outputs(engine)]
engine.begin(EngineJob(1, num_requests=4), SamplingSpec(max_tokens=3, ignore_eos=True))
jobs.append(outputs(engine))
stream = engine.stream(iter(requests))
next(stream)
early = None
try:
    engine.begin(EngineJob(1), SamplingSpec(max_tokens=3))
except RuntimeError as error:
    early = str(error)
rest = len(list(stream))
engine.close()
print(json.dumps({"jobs": jobs, "early": early, "rest": rest}))
"""


def test_the_next_job_finds_nothing_of_the_one_before(demo: Demo) -> None:
    sampling = {"max_tokens": 5, "ignore_eos": True}
    engine = {"max_num_seqs": 1}  # one after the other, so that the first to end leaves others
    spec = demo.write_spec("next", sampling=sampling, engine=engine)
    finished = subprocess.run(
        [sys.executable, "-c", JOBS, str(spec)],
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    first, second = result["jobs"]
    assert [each[0] for each in first] == [5] * 4
    assert [each[0] for each in second] == [3] * 4
    # Both find the prefix of the request before, and neither one of another job's.
    assert [each[1] for each in first] == [each[1] for each in second] == [0, 96, 96, 96]
    assert all(a[2].startswith(b[2]) for a, b in zip(first, second, strict=True))
    assert result["early"] == "the engine still has requests"
    assert result["rest"] == 3
