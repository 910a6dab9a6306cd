"""vLLM behind the engine protocol, inside this process.

There is no separate engine core process, so the engine always ends with this process. With tensor
parallelism, vLLM's workers watch this process and end with it.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm import EngineArgs, LLMEngine
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.inputs import tokens_input
from vllm.usage.usage_lib import UsageContext

from batchllm_operator.engine.protocol import (
    EngineDiedError,
    EngineJob,
    EngineOutput,
    EngineRequest,
)
from batchllm_operator.engine.vllm.answers import ReasoningSplitter, VLLMAnswers
from batchllm_operator.engine.vllm.formats import check_planned
from batchllm_operator.engine.vllm.logs import without_llvmlite
from batchllm_operator.engine.vllm.profiling import scheduler_settings
from batchllm_operator.engine.vllm.start import (
    check_pooling,
    configure,
    engine_args,
    load_adapters,
    start_attention,
)
from batchllm_operator.errors import EngineError, ModelError, SpecError, one_line
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.register import attention_chosen
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings
from batchllm_operator.vllm_plugin.scheduler.pacing import num_to_feed
from batchllm_operator.vllm_plugin.scheduler.scheduler import BatchLLMScheduler

if TYPE_CHECKING:
    from batchllm_operator.runahead.phase import ChainedEngine

_log = logging.getLogger(__name__)


class VLLMEngine:
    """vLLM's engine, fed in plan order with prefix caching on, under our scheduler.

    Raises:
        SpecError: vLLM refuses a setting or an adapter, or `engine.attention` doesn't support the
            model.
        ModelError: an adapter is missing, or is for another model.
        EngineError: vLLM can't start.
    """

    def __init__(self, spec: JobSpec, job: EngineJob) -> None:
        self._spec, self._args = spec, engine_args(spec, job.max_model_len)
        VLLMAnswers.of_all(spec, job)  # to refuse before the start what can't be
        for question in spec.questions:
            check_planned(question)  # the plan may have been made where vLLM isn't installed
        if job.is_chained:
            from batchllm_operator.runahead.groups import TRANSFER_CONFIG

            self._args["kv_transfer_config"] = dict(TRANSFER_CONFIG)
        ensure_kv_transfer_shutdown()  # of a chained engine that couldn't start
        with attention_chosen(spec.engine.attention):
            self._start(spec, self._args, job)
        self._answers = VLLMAnswers.of_all(spec, job, self._splitters)
        self._max_num_seqs = self.llm_engine.vllm_config.scheduler_config.max_num_seqs
        scheduler = self.llm_engine.engine_core.engine_core.scheduler
        # `extra_args` may name another scheduler.
        self._scheduler = scheduler if isinstance(scheduler, BatchLLMScheduler) else None
        self._begin(job)
        self.chain: ChainedEngine | None = None
        if job.is_chained:
            from batchllm_operator.runahead.phase import ChainedEngine

            self.chain = ChainedEngine(self.llm_engine, self._unpaced)

    def begin(self, job: EngineJob, spec: JobSpec) -> None:
        """Begin another job, of the same `engine_args`, with an empty prefix cache.

        Raises:
            SpecError: vLLM refuses the sampling parameters.
            EngineError: a step failed while the device was being measured.
            RuntimeError: the engine isn't idle.
        """
        if self.llm_engine.has_unfinished_requests() or not self.llm_engine.reset_prefix_cache():
            raise RuntimeError("the engine still has requests")
        self._spec, self._answers = spec, VLLMAnswers.of_all(spec, job, self._splitters)
        self._begin(job)

    def _begin(self, job: EngineJob) -> None:
        self._in_flight: dict[str, EngineRequest] = {}
        self._first_samples: dict[str, Any] = {}
        self._finished: deque[Any] = deque()
        """vLLM's outputs that the reader of `stream` hasn't kept yet."""
        if self._scheduler is not None:
            self._trace_folder = job.trace_folder
            if (num := job.num_requests) is not None:
                samples = {answers.num_samples for answers in self._answers}
                job = replace(job, num_requests=num * max(samples) if len(samples) == 1 else None)
            self._settings = scheduler_settings(
                self._spec, job, self._args, self.llm_engine, self._scheduler
            )
        self._begin_schedule()

    def _begin_schedule(self) -> None:
        """Restart our scheduler, if it is ours, with the job's settings and a trace of its own."""
        if self._scheduler is None:
            return
        settings, folder = self._settings, self._trace_folder
        if folder is not None and settings.trace_path is None:
            path = folder / f"engine-{len(list(folder.glob('*.parquet'))):03d}.parquet"
            settings = replace(settings, trace_path=str(path))
        self._scheduler.begin(settings)

    def _start(self, spec: JobSpec, args: Mapping[str, Any], job: EngineJob) -> None:
        try:
            config = EngineArgs(**args).create_engine_config(UsageContext.LLM_CLASS)
            SchedulerSettings.from_additional_config(config.additional_config)
        except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
            raise SpecError(f"engine: vLLM refuses the settings: {one_line(error)}") from error
        # vLLM doesn't check all values. If the user chose none, the machine is at fault.
        except (LookupError, AttributeError, AssertionError) as error:
            if not spec.engine.extra_args:
                raise EngineError(f"vLLM can't start: {one_line(error)}") from error
            raise SpecError(f"engine: vLLM refuses the settings: {one_line(error)}") from error
        configure(spec, config)
        if spec.model.trust_remote_code:
            _log.warning("model %s: runs code of its own (trust_remote_code)", spec.model.path)
        try:
            with without_llvmlite():
                self.llm_engine: Any = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except SpecError:  # from our attention
            raise
        # Memory, driver, weights: vLLM has no common error.
        except Exception as error:
            raise EngineError(f"vLLM can't start: {one_line(error)}") from error
        try:
            if spec.is_pooled:
                check_pooling(spec, job, self.llm_engine)
            _log.info("%s", start_attention(spec, self.llm_engine))
            self._adapters = load_adapters(spec.model, self.llm_engine)
            reasoning = spec.questions if spec.model.reasoning_parser is not None else ()
            self._splitters = [ReasoningSplitter(q, self.llm_engine) for q in reasoning]
        except (ModelError, SpecError):
            self.llm_engine.engine_core.shutdown()
            raise

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        num_finished, exhausted = 0, False
        while not exhausted or self._in_flight:
            # Of vLLM's requests: each answer to one of ours is one.
            num_held = self.llm_engine.get_num_unfinished_requests()
            num_wanted = num_to_feed(num_held, num_finished, self._max_num_seqs)
            while not exhausted and num_wanted > 0:
                if (request := next(requests, None)) is None:
                    exhausted = True
                    break
                num_wanted -= self._answers[request.question].num_samples
                if (refusal := self.add(request)) is not None:
                    yield refusal
            num_held = self.llm_engine.get_num_unfinished_requests()
            if self._in_flight:
                self.step()
            num_finished = num_held - self.llm_engine.get_num_unfinished_requests()
            while self._finished:
                yield self._answer(output := self._finished[0])
                self._finished.popleft()
                del self._in_flight[output.request_id]
                self._first_samples.pop(output.request_id, None)

    @property
    def unread(self) -> list[EngineOutput]:
        return [self._answer(output) for output in self._finished]

    def add(self, request: EngineRequest) -> EngineOutput | None:
        """Add a request; returns its output, with the reason, if vLLM refuses it."""
        prompt = tokens_input(request.prompt_token_ids)
        answers = self._answers[request.question]
        params = answers.params_of(request, hint=self._scheduler is not None)
        try:
            name = self.llm_engine.add_request(
                str(request.request_idx),
                prompt,
                params,
                lora_request=self._adapters[request.adapter] if request.adapter else None,
            )
        # vLLM checks a request before it takes it, with errors of several families. The fault is
        # the request's, so the engine goes on.
        except Exception as error:  # noqa: BLE001
            return EngineOutput.failed(request, one_line(error))
        self._in_flight[str(request.request_idx)] = request
        if answers.num_samples > 1:
            states = self.llm_engine.output_processor.request_states
            self._first_samples[str(request.request_idx)] = states[f"0_{name}"]
        return None

    def step(self) -> None:
        """Run one step of vLLM, and keep the finished outputs for `stream`.

        Raises:
            EngineDiedError: the step failed.
        """
        try:
            self._finished += (output for output in self.llm_engine.step() if output.finished)
        # A failed step leaves vLLM's state unknown.
        except Exception as error:
            _log.debug("an engine step failed", exc_info=error)
            # The frames hold the dead engine and its memory, which the next one will need.
            traceback.clear_frames(error.__traceback__)
            raise EngineDiedError(one_line(error), list(self._in_flight.values())) from error

    def _answer(self, output: Any) -> EngineOutput:
        # Of several samples, vLLM says what the last one found, which the first has computed.
        first = self._first_samples.get(output.request_id, output)
        request = self._in_flight[output.request_id]
        answers = self._answers[request.question]
        return answers.convert(request, output, first.num_cached_tokens or 0)

    @contextmanager
    def _unpaced(self) -> Iterator[None]:
        """For prompts other than the job's, without pacing; the engine must be idle."""
        if self._scheduler is not None:
            self._scheduler.begin(SchedulerSettings(pace=False))
        yield
        self._begin_schedule()

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm_engine.engine_core.shutdown()
        self.llm_engine = self._scheduler = self.chain = None
        gc.collect()
        cleanup_dist_env_and_memory()
