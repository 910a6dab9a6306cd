"""Offline LLM jobs over data-lake tables, planned by their shared prefixes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchllm_operator.commit.commit_run import commit_run as commit_run
    from batchllm_operator.frames import generate as generate
    from batchllm_operator.plan.plan_job import plan_job as plan_job
    from batchllm_operator.run.run_shards import run_worker as run_worker
    from batchllm_operator.spec import load_spec as load_spec

__version__ = "0.1.0"
__all__ = ["commit_run", "generate", "load_spec", "plan_job", "run_worker"]

_ROOMS = {
    "commit_run": "commit.commit_run",
    "generate": "frames",
    "load_spec": "spec",
    "plan_job": "plan.plan_job",
    "run_worker": "run.run_shards",
}


def __getattr__(name: str) -> Any:
    """Import a function on first access, so that importing the package is cheap."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
