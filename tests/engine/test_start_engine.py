"""Starting an engine, and what a user reads when that fails. vLLM itself: tests/e2e."""

import os
import sys
from types import SimpleNamespace

import pytest
from support.fake_job import fake_spec

from batchllm_operator.engine import EngineJob, EngineOutput, EngineRequest, start_engine
from batchllm_operator.engine.arguments import INVARIANCE
from batchllm_operator.errors import MissingLibraryError


def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "batchllm_operator.engine.vllm.engine", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingLibraryError, match=r"library vllm, .* extra `gpu` or `cpu`: pip "):
        start_engine(fake_spec("/lake", engine={"backend": "vllm"}), EngineJob(100))


@pytest.mark.parametrize("asked", [True, False])
def test_batch_invariance_is_asked_of_vllm_before_its_import(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    found: list[str] = []
    engine = SimpleNamespace(VLLMEngine=lambda *_: found.append(os.environ[INVARIANCE]))
    monkeypatch.setitem(sys.modules, "batchllm_operator.engine.vllm.engine", engine)
    spec = fake_spec("/lake", engine={"backend": "vllm", "batch_invariant": asked})
    start_engine(spec, EngineJob(100))
    assert found == ["1" if asked else "0"]


def test_a_failed_output_is_one_line() -> None:
    output = EngineOutput.failed(EngineRequest(0, [1, 2, 3], 0, 0), "first\n  second")
    assert str(output.error) == "engine_error: first second"
    assert (output.text, output.num_prompt_tokens, output.num_output_tokens) == (None, 3, 0)
