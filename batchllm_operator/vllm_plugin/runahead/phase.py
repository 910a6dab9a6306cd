"""The prefill-only phase of one replica: its shares of the prefixes that a chain computes.

Every replica of the chain calls `run_prefill_phase` with the same groups. Afterwards each has the
whole prefixes in its prefix cache, where the groups' members find them.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from batchllm_operator.errors import RunaheadError, SpecError
from batchllm_operator.vllm_plugin.runahead.chain import Chain
from batchllm_operator.vllm_plugin.runahead.connector import (
    RunaheadConnector,
    fingerprint,
    weights_digest,
)
from batchllm_operator.vllm_plugin.runahead.plan import ChainLimits, Part, RunaheadGroup
from batchllm_operator.vllm_plugin.runahead.scheduling import RunaheadConnectorScheduler
from batchllm_operator.vllm_plugin.runahead.working import RunaheadConnectorWorker

_MOST_ACTIVE: Final = 2
"""Groups in progress at a time: a replica begins the next one while others still compute."""
_IDLE_S: Final = 5e-4
"""Pause between steps with nothing to compute: the threads that move KV need the core."""


@dataclass(frozen=True, slots=True)
class RunaheadOutcome:
    """The result of one group on this replica."""

    group_id: int
    num_computed_tokens: int
    """Computed by this replica: its chunk, one more if it received the rest, and what it had to
    compute again."""
    num_received_tokens: int
    """Tokens whose KV came from other replicas and is used."""
    failure: str | None
    """Why this replica had to compute the prefix alone; None if it didn't."""


def open_chain(engine: Any) -> Chain:
    """This replica's chain; the first call opens it and waits for all replicas.

    Args:
        engine: vLLM's `LLMEngine`, in this process, with the connector that
            `ChainSettings.to_kv_transfer_config` names.

    Raises:
        SpecError: the engine has no such connector, or isn't in this process.
        RunaheadMismatchError: another replica's engine differs from this one.
        RunaheadError: not all replicas connected in time.
    """
    connector = _connectors(engine)[1]
    working = connector.working
    if working.chain is None:
        (weights,) = engine.collective_rpc(weights_digest)
        assert working.blocks is not None
        working.chain = Chain(
            connector.settings, working.blocks, fingerprint(engine.vllm_config, working, weights)
        )
    return working.chain


def chain_limits(engine: Any) -> ChainLimits:
    """The engine's limits for groups.

    Raises:
        SpecError: the engine has no connector of ours.
    """
    return _connectors(engine)[0].limits


def run_prefill_phase(engine: Any, groups: Sequence[RunaheadGroup]) -> list[RunaheadOutcome]:
    """Prefill this replica's chunk of each group, and receive the rest from the others.

    All replicas of the chain call this with the same groups in the same order. When it returns,
    no request of the phase is left here. A chain that fails stays failed: from then on each replica
    computes alone what its cache lacks of the prefixes. After an error or a signal no request of
    the phase is left either; but if it interrupted a step of the engine, the prefix cache has
    blocks without KV, and must be reset before it is used.

    Args:
        engine: as for `open_chain`; it has no other requests.
        groups: together they fit into the KV cache.

    Returns:
        An outcome for each group, in their order.

    Raises:
        SpecError: a group can't be run; nothing has been sent.
        RunaheadMismatchError: another replica has other groups, or another engine; nothing has
            been sent.
        RunaheadError: not all replicas connected in time.
    """
    scheduler_half, worker_half = _connectors(engine)
    _check(engine, scheduler_half, groups)
    chain = open_chain(engine)
    chain.agree("groups", _digest(groups))
    phase = _Phase(engine, chain, scheduler_half.scheduling, worker_half.working)
    try:
        return phase.run(groups)
    except BaseException as error:
        chain.fail(f"the phase ended by {type(error).__name__}")  # so that no replica waits for us
        phase.abandon()
        raise


@dataclass(slots=True)
class _Progress:
    """A group's requests on this replica."""

    group: RunaheadGroup
    unfinished: dict[str, Part | Literal["alone"]] = field(default_factory=dict)
    num_computed: int = 0
    num_received: int = 0
    failure: str | None = None
    is_alone: bool = False
    """Whether this replica computes alone what it lacks of the prefix."""

    def outcome(self) -> RunaheadOutcome:
        return RunaheadOutcome(
            self.group.group_id, self.num_computed, self.num_received, self.failure
        )


class _Phase:
    """Runs groups on one replica."""

    def __init__(
        self,
        engine: Any,
        chain: Chain,
        scheduling: RunaheadConnectorScheduler,
        working: RunaheadConnectorWorker,
    ) -> None:
        self._engine, self._chain = engine, chain
        self._scheduling, self._working = scheduling, working
        self._rank = chain.settings.rank
        self._by_request: dict[str, _Progress] = {}
        self._alone_due: deque[_Progress] = deque()

    def run(self, groups: Sequence[RunaheadGroup]) -> list[RunaheadOutcome]:
        everything = [_Progress(group) for group in groups]
        waiting = deque(everything)
        while waiting or self._by_request or self._alone_due or self._has_ends():
            while waiting and self._num_active() < _MOST_ACTIVE:
                self._begin(waiting.popleft())
            while self._may_begin_alone() and self._num_active() < _MOST_ACTIVE:
                due = self._alone_due.popleft()
                self._add(due, "alone", self._whole_prompt(due.group))
            for output in self._engine.step():
                if output.finished:
                    self._on_output(output)
            if self._scheduling.num_step_tokens == 0:
                time.sleep(_IDLE_S)
        return [progress.outcome() for progress in everything]

    def abandon(self) -> None:
        """Abort all requests of this phase."""
        self._engine.abort_request(list(self._by_request))

    def _has_ends(self) -> bool:
        """Whether KV is still being sent, or blocks wait to be freed."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        return not self._working.is_idle or bool(scheduler.has_requests())

    def _num_active(self) -> int:
        return len({progress.group.group_id for progress in self._by_request.values()})

    def _begin(self, progress: _Progress) -> None:
        if self._chain.failure is not None:
            progress.failure = self._chain.failure
            self._compute_alone(progress)
            return
        group = progress.group
        bounds = group.share("chunk").bounds(self._rank, self._scheduling.limits.block_size)
        self._add(progress, "chunk", group.prefix_token_ids[: bounds.end])
        if not bounds.is_last:  # in the same step, so that it shares the chunk's blocks
            self._add(progress, "fill", self._whole_prompt(group))

    def _compute_alone(self, progress: _Progress) -> None:
        progress.is_alone = True
        self._alone_due.append(progress)

    def _may_begin_alone(self) -> bool:
        """Not beside a chunk or a fill: until it ends, the cache may have blocks of it whose KV
        never arrives, and a request that hits them fails with it."""
        parts = {part for each in self._by_request.values() for part in each.unfinished.values()}
        return bool(self._alone_due) and parts <= {"alone"}

    def _whole_prompt(self, group: RunaheadGroup) -> Sequence[int]:
        """The whole blocks of the prefix and one token, because vLLM computes at least one."""
        tokens, block_size = group.prefix_token_ids, self._scheduling.limits.block_size
        whole = len(tokens) // block_size * block_size
        return [*tokens[:whole], tokens[min(whole, len(tokens) - 1)]]

    def _add(
        self, progress: _Progress, part: Part | Literal["alone"], tokens: Sequence[int]
    ) -> None:
        group = progress.group
        request_id = f"runahead-{group.group_id}-{part}"
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=group.share(part).to_extra_args() if part != "alone" else None,
        )
        prompt = TokensPrompt(prompt_token_ids=list(tokens))
        progress.unfinished[request_id] = part
        self._by_request[request_id] = progress
        self._engine.add_request(request_id, prompt, params)

    def _on_output(self, output: Any) -> None:
        progress = self._by_request.pop(output.request_id)
        part = progress.unfinished.pop(output.request_id)
        has_failed = output.outputs[0].finish_reason not in ("length", "stop")
        if part == "alone":
            if has_failed:
                raise RunaheadError(f"runahead group {progress.group.group_id}: vLLM failed at it")
            progress.num_computed += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
        else:
            key = progress.group.group_id, part
            progress.num_computed += self._scheduling.num_computed.pop(key, 0)
            progress.num_received += self._scheduling.num_received.pop(key, 0)
            if has_failed:
                progress.failure = self._chain.failure or "vLLM ended its request"
        if not progress.unfinished and progress.failure is not None and not progress.is_alone:
            progress.num_received = 0
            self._compute_alone(progress)


def _connectors(engine: Any) -> tuple[RunaheadConnector, RunaheadConnector]:
    """The halves in the scheduler and in the worker, both in this process."""
    core = getattr(engine.engine_core, "engine_core", None)
    scheduler_half = getattr(getattr(core, "scheduler", None), "connector", None)
    worker_half = get_kv_transfer_group() if has_kv_transfer_group() else None
    if not isinstance(scheduler_half, RunaheadConnector) or not isinstance(
        worker_half, RunaheadConnector
    ):
        raise SpecError(
            "runahead: the engine must run in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0),"
            f" with kv_transfer_config naming {RunaheadConnector.__name__}"
        )
    return scheduler_half, worker_half


def _check(engine: Any, connector: RunaheadConnector, groups: Sequence[RunaheadGroup]) -> None:
    limits = connector.limits
    for group in groups:
        group.check(connector.settings.world_size, limits)
    ids = [group.group_id for group in groups]
    if len(set(ids)) < len(ids):
        raise SpecError("runahead: two groups of a phase have the same id")
    num_blocks = sum(group.num_blocks(limits.block_size) for group in groups)
    if num_blocks >= limits.num_blocks:
        raise SpecError(
            f"runahead: the groups of a phase take {num_blocks} KV blocks, the cache has"
            f" {limits.num_blocks - 1}; run fewer at a time"
        )
    if engine.has_unfinished_requests():
        raise SpecError("runahead: the engine has other requests; they would delay all replicas")


def _digest(groups: Sequence[RunaheadGroup]) -> str:
    digest = hashlib.sha256()
    for group in groups:
        share = group.share("chunk")
        digest.update(f"{share.group_id} {share.split} {share.digest}\n".encode())
    return digest.hexdigest()[:16]
