"""Rows that a real engine can't serve cost only themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support.demo_job import OFFLINE, Demo

# An engine step fails whenever a batch holds the poisoned request; the other requests are fine.
POISON = """
import json, sys
from batchllm_operator.engine import EngineJob, EngineRequest
from batchllm_operator.engine.isolation import IsolatingEngine
from batchllm_operator.engine.vllm_engine import VLLMEngine
from batchllm_operator.spec import load_spec

spec = load_spec(sys.argv[1])
started = []

def start():
    engine = VLLMEngine(spec, EngineJob(64))
    step = engine._engine.step
    def poisoned_step():
        held = engine._engine.output_processor.request_states.values()
        if any(state.prompt_token_ids[0] == 13 for state in held):
            raise RuntimeError("poisoned batch")
        return step()
    engine._engine.step = poisoned_step
    started.append(1)
    return engine

engine = IsolatingEngine(start)
prompts = {0: [5, 6, 7], 1: [13, 6, 7], 2: [5, 6, 8], 3: [9] * 64, 4: [], 5: [10**6]}
requests = [EngineRequest(idx, ids, idx, 0) for idx, ids in prompts.items()]
outputs = {o.request_idx: [o.text is not None, o.error] for o in engine.stream(iter(requests))}
engine.close()
print(json.dumps({"outputs": outputs, "started": len(started)}))
"""


def test_poisoned_too_long_empty_and_foreign_prompts_fail_alone(demo: Demo) -> None:
    spec = demo.write_spec("poison", sampling={"max_tokens": 4})
    finished = subprocess.run(
        [sys.executable, "-c", POISON, str(spec)],
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    outputs = result["outputs"]
    assert {idx: has_text for idx, (has_text, _) in outputs.items()} == {
        "0": True,
        "1": False,
        "2": True,
        "3": False,
        "4": False,
        "5": False,
    }
    assert "poisoned batch" in outputs["1"][1]
    for idx in "345":  # refused by vLLM before anything ran
        assert outputs[idx][1].startswith("engine_error: ")
    assert result["started"] >= 2
