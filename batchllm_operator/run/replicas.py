"""A worker that is one of several replicas, as long as they compute prefixes together (ADR 24)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from batchllm_operator.engine import Engine, EngineOutput, EngineRequest
from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.run.shard_run import ShardRun
from batchllm_operator.runahead.groups import ChainProfile, RunaheadGroup, chain_subject
from batchllm_operator.runahead.meeting import Rounds
from batchllm_operator.stored_plan.stored_plan import StoredPlan


class Replicas:
    """The meetings in `folder` before a worker's shards, and what they cost; see `Rounds`."""

    def __init__(self, plan: StoredPlan, folder: Path, rank: int) -> None:
        self._spec = plan.manifest.spec
        self._rounds = Rounds(folder, rank, self._spec.engine.replicas)
        self._costs: dict[int, int] = {}
        """Computed tokens of chained groups that no request has paid for."""
        self._charged: dict[int, int] = {}
        """The same by the request_idx that pays."""

    @property
    def is_over(self) -> bool:
        """Whether this worker goes on without the others."""
        return self._rounds.is_over

    def meet(self, engine: Engine, run: ShardRun | None, is_stopped: Callable[[], bool]) -> None:
        """Meet the others before a shard, with an idle engine; None for no shard."""
        placement = run.shard.replicas if run is not None else None
        groups, measure = [], placement is not None and placement.measure
        if run is not None and placement is not None:
            sizes = run.work.sizes
            for marked in placement.spread:
                if marked.group_id in sizes:
                    prefix = run.work.first_prompt(marked.group_id)[: sum(marked.split)]
                    groups.append(RunaheadGroup(marked.group_id, prefix, marked.split))
        together = self._rounds.meet(engine.chain, groups, measure=measure, is_stopped=is_stopped)
        self._costs |= {group.group_id: sum(group.split) for group in together}
        if measure and self._rounds.measured is not None:
            bytes_per_s, steps = self._rounds.measured
            subject = chain_subject(self._spec)
            profile = ChainProfile(
                subject=subject, link_bytes_per_s=bytes_per_s, steps=tuple(steps)
            )
            StoredProfiles.of(self._spec).keep(profile)

    def noted(self, requests: Iterable[EngineRequest]) -> Iterator[EngineRequest]:
        """The requests; the first one of a chained group pays for its prefix."""
        for request in requests:
            if cost := self._costs.pop(request.group_id, 0):
                self._charged[request.request_idx] = cost
            yield request

    def charged(self, output: EngineOutput) -> EngineOutput:
        """The output, with what it pays for as computed."""
        cost = self._charged.get(output.request_idx, 0)
        if not cost or not output.is_served:
            return output
        return replace(output, num_cached_tokens=max(output.num_cached_tokens - cost, 0))

    def close(self) -> None:
        """Let no other replica wait for this one."""
        self._rounds.close()
