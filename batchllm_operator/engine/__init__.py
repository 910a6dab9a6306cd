"""The inference engine behind one protocol; a row that kills it costs only itself."""

import logging
import os
from dataclasses import replace
from itertools import count

from batchllm_operator.engine.arguments import INVARIANCE
from batchllm_operator.engine.arguments import check_arguments as check_arguments
from batchllm_operator.engine.isolation import IsolatingEngine
from batchllm_operator.engine.protocol import Engine as Engine
from batchllm_operator.engine.protocol import EngineDiedError as EngineDiedError
from batchllm_operator.engine.protocol import EngineJob as EngineJob
from batchllm_operator.engine.protocol import EngineOutput as EngineOutput
from batchllm_operator.engine.protocol import EngineRequest as EngineRequest
from batchllm_operator.errors import EngineError, MissingLibraryError, SpecError
from batchllm_operator.spec import JobSpec

# For torch's C++ logs, such as vLLM's memory binding; read when torch is imported, which each stage
# does after this room.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
_log = logging.getLogger(__name__)


def check_format(spec: JobSpec) -> None:
    """Refuse a question's response format that vLLM would refuse, where it is installed.

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


def start_engine(spec: JobSpec, job: EngineJob) -> Engine:
    """Start the engine that the spec names, so that a row that kills it costs only itself.

    Raises:
        SpecError: an argument of `engine.extra_args` is unknown or refused.
        MissingLibraryError: vLLM isn't installed.
        EngineError: vLLM can't start.
    """
    check_arguments(spec)  # the plan may have been made where vLLM isn't installed
    if spec.engine.backend == "fake":
        from batchllm_operator.engine.fake import FakeEngine

        return IsolatingEngine(lambda: FakeEngine(spec, job.max_model_len))
    if spec.engine.batch_invariant:  # read when vLLM is imported, here and in its processes
        os.environ[INVARIANCE] = "1"
    _log.info("starting vLLM with model %s", spec.model.path)
    try:
        from batchllm_operator.engine.vllm.engine import VLLMEngine  # imports vLLM: seconds
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, "vLLM") from error
    except ImportError as error:
        raise EngineError(f"vLLM can't be imported ({error})") from error
    num_started = count()

    def start() -> Engine:
        # A later engine gets the remaining requests, whose number is unknown, and is in no chain,
        # which may have killed the first.
        is_first = next(num_started) == 0
        if is_first and job.is_chained:
            try:
                return VLLMEngine(spec, job)
            except (EngineError, SpecError) as error:  # other faults show again
                _log.warning(
                    "the engine starts again without a chain (planner.runahead: off saves the first"
                    " start): %s",
                    error,
                )
        known = replace(job, is_chained=False)
        return VLLMEngine(spec, known if is_first else replace(known, num_requests=None))

    return IsolatingEngine(start)
