"""Run as a script: what a test does with a real engine, in a process of its own.

    python -m support.engine_scripts NAME [SPEC]

What it finds is the last line on stdout, as JSON.
"""

import json
import sys
from typing import Any

from batchllm_operator.engine import EngineJob, EngineRequest
from batchllm_operator.spec import load_spec


def poisoned(path: str) -> dict[str, Any]:
    """Outputs of an engine whose steps fail whenever a batch holds the poisoned request."""
    from batchllm_operator.engine.isolation import IsolatingEngine
    from batchllm_operator.engine.vllm.engine import VLLMEngine

    spec, started = load_spec(path), []

    def start() -> VLLMEngine:
        engine = VLLMEngine(spec, EngineJob(64))
        step = engine.llm_engine.step

        def poisoned_step() -> Any:
            held = engine.llm_engine.output_processor.request_states.values()
            if any(state.prompt_token_ids[0] == 13 for state in held):
                raise RuntimeError("poisoned batch")
            return step()

        engine.llm_engine.step = poisoned_step
        started.append(1)
        return engine

    engine = IsolatingEngine(start)
    prompts = {0: [5, 6, 7], 1: [13, 6, 7], 2: [5, 6, 8], 3: [9] * 64, 4: [], 5: [10**6]}
    requests = [EngineRequest(idx, ids, idx, 0) for idx, ids in prompts.items()]
    outputs = {
        o.request_idx: [o.text is not None, o.error and str(o.error)]
        for o in engine.stream(iter(requests))
    }
    engine.close()
    return {"outputs": outputs, "started": len(started)}


def without_pyarrow() -> bool:
    """Whether our plugin of vLLM can be imported where there is no pyarrow."""
    for name in [each for each in sys.modules if each.startswith(("batchllm_", "pyarrow"))]:
        del sys.modules[name]
    sys.modules["pyarrow"] = None  # type: ignore[assignment]
    import batchllm_operator.vllm_plugin.attention.backend
    import batchllm_operator.vllm_plugin.scheduler.scheduler  # noqa: F401

    return sys.modules["pyarrow"] is None


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps(globals()[name](*arguments)))
