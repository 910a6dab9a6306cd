"""Real vLLM on CPU over the demo table."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.demo_job import DS, Demo

from batchllm_operator.demo.model import build_demo_model
from batchllm_operator.demo.table import build_demo_table


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    build_demo_table(folder / "documents", ds=DS)
    build_demo_model(folder / "model")
    return Demo(folder)


@pytest.fixture
def refusal(demo: Demo, batchllm: Callable[..., Any]) -> Callable[..., str]:
    """Runs a job with settings of `engine` that `batchllm run` refuses; the line that says why.

    In this process: importing vLLM takes far longer than finding fault with its arguments.
    """

    def refused(**engine: Any) -> str:
        spec, result = demo.write_spec("refused", engine=engine), demo.folder / "refused.json"
        planned = batchllm("plan", "--job", spec, "--ds", DS, "--result", result)
        assert planned.code == 0, planned.err
        plan_uri = json.loads(result.read_text())["plan_uri"]
        outcome = batchllm("run", "--plan", plan_uri, "--shard", 0)
        assert outcome.code == 2, outcome.err
        lines = [*outcome.out.splitlines(), *outcome.err.splitlines()]
        [line] = [line for line in lines if "batchllm: error: " in line]
        return str(line)

    return refused
