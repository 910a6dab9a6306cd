"""Whether the engine takes a response format, before it is started."""

from __future__ import annotations

import logging

from batchllm_operator.spec import JobSpec

_log = logging.getLogger(__name__)


def check_format(spec: JobSpec) -> None:
    """Refuse a response format that vLLM would refuse, where it is installed.

    Imports vLLM, which takes seconds, but only for a spec with a `response_format`.

    Raises:
        SpecError: with vLLM's reason.
    """
    if spec.response_format is None or spec.engine.backend == "fake":
        return
    try:
        from batchllm_operator.engine.vllm.formats import check_planned
    except ImportError as error:  # a GPU's build may not be importable without a GPU
        _log.info("response_format: is checked when the engine starts: vLLM isn't here: %s", error)
        return
    check_planned(spec)
