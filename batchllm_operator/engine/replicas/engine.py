"""Several engines behind the engine protocol: replicas in processes of their own (ADR 26)."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from batchllm_operator.engine.protocol import (
    ChainedGroup,
    ChainJob,
    EngineDiedError,
    EngineJob,
    EngineOutput,
    EngineRequest,
)
from batchllm_operator.engine.replicas.chain_profile import ChainProfile
from batchllm_operator.engine.replicas.messages import flat
from batchllm_operator.engine.replicas.placing import Placer
from batchllm_operator.engine.replicas.process import (
    PackedRequest,
    Replica,
    ReplicaGoneError,
    close_replicas,
    start_replicas,
    with_messages,
)
from batchllm_operator.errors import EngineError, SpecError
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.runahead.plan import ChainLimits, ChainSettings

_log = logging.getLogger(__name__)
_REPETITIONS: Final = 3
"""Of each measured prefill step."""
_MOST_OF_CACHE: Final = 0.5
"""Share of the KV blocks for the prefixes that one phase computes together."""


class ReplicaEngines:
    """All replicas of a run, as one engine.

    Raises:
        SpecError: as `VLLMEngine`; or the replicas take more GPUs than there are.
        EngineError: a replica can't start.
    """

    def __init__(self, spec: JobSpec, job: EngineJob) -> None:
        # The rendezvous of a chain's replicas.
        self._folder = tempfile.TemporaryDirectory(prefix="batchllm-chain-")
        self._to_chain: dict[int, ChainedGroup] = {}
        self._charges: dict[int, int] = {}
        self._replicas: list[Replica] = []
        try:
            chains = None
            if job.chain is not None:
                chains = _chain_settings(spec.engine.replicas, Path(self._folder.name))
            self._replicas = start_replicas(spec, job, chains)
            if job.chain is not None:
                self._prepare_chain(job.chain)
        except ReplicaGoneError as error:
            self.close()
            raise EngineError(f"vLLM fails on this device: {error}") from error
        except BaseException:  # an interruption must leave no process either
            self.close()
            raise
        max_in_flight = [each.started.max_in_flight for each in self._replicas]
        self._max_in_flight = sum(max_in_flight)
        self._placer = Placer(max_in_flight, job.spread_groups, spec.sampling.max_tokens)

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        held: EngineRequest | None = None
        exhausted = False
        while True:
            outputs: list[EngineOutput] = []
            try:
                while True:
                    if held is None and not exhausted:
                        held = next(requests, None)
                        exhausted = held is None
                    if held is None or not self._dispatch(held):
                        break
                    held = None
                if self._num_in_flight == 0:
                    return
                self._receive(outputs)
            except ReplicaGoneError as error:
                yield from outputs  # of other replicas
                self._fail(error, held)
            yield from outputs

    def close(self) -> None:
        close_replicas(self._replicas)
        self._folder.cleanup()

    @property
    def _num_in_flight(self) -> int:
        return sum(len(replica.in_flight) for replica in self._replicas)

    @property
    def _limits(self) -> ChainLimits:
        """The limits of all replicas of a chain, which differ only in memory."""
        limits = [each.started.limits for each in self._replicas]
        return min((each for each in limits if each), key=lambda each: each.num_blocks)

    def _dispatch(self, request: EngineRequest) -> bool:
        """Give a request to a replica; False if it must wait for other answers."""
        if request.group_id in self._to_chain:
            if self._num_in_flight:  # other work of one replica would delay all
                return False
            self._prefill_together(request.group_id)
        placed = self._placer.place(request)
        if placed is None:
            return False
        rank, seen = placed
        replica = self._replicas[rank]
        replica.send("requests", [flat(seen)])
        replica.in_flight[request.request_idx] = PackedRequest(request)
        return True

    def _prepare_chain(self, job: ChainJob) -> None:
        """Find out whether there is a chain and what it can compute; measure it if asked to."""
        started = [replica.started for replica in self._replicas]
        if failures := {each.chain_failure for each in started if each.chain_failure}:
            _log.warning("replicas compute no prefix together: %s", "; ".join(sorted(failures)))
            return
        limits = self._limits
        for group in job.groups:
            if (reason := _reason_against(group, len(started), limits)) is not None:
                _log.warning("replicas don't compute a prefix together: %s", reason)
            else:
                self._to_chain[group.prefix.group_id] = group
        if job.keep_profile is not None:
            self._measure(job.subject, job.keep_profile)

    def _measure(self, subject: Mapping[str, str], keep: Callable[[ChainProfile], None]) -> None:
        _log.info("measuring how fast replicas compute and pass on prefixes")
        found = self._ask_all("measure", _REPETITIONS, "measured")
        steps = tuple(  # a chain is as fast as its slowest replica
            (tokens, before, max(answer[at][2] for answer in found))
            for at, (tokens, before, _) in enumerate(found[0])
        )
        started = self._replicas[0].started
        assert started.link_bytes_per_s is not None
        if not steps:
            _log.warning("the engine's steps are too short for prefixes to be split between them")
            return
        keep(
            ChainProfile(
                subject=subject,
                device=started.device,
                link_bytes_per_s=started.link_bytes_per_s,
                steps=steps,
            )
        )

    def _prefill_together(self, first: int) -> None:
        """Compute the prefix of a group, and of as many later ones as fit, on all replicas."""
        groups = self._take_for_phase(first)
        answers = self._ask_all("prefill", [flat(each.prefix) for each in groups], "prefilled")
        for answer in answers:
            for group_id, num_tokens in answer["computed"].items():
                charged = self._charges.get(int(group_id), 0)
                self._charges[int(group_id)] = charged + num_tokens
        ids = ", ".join(str(each.prefix.group_id) for each in groups)
        if failures := {failure for answer in answers for failure in answer["failures"]}:
            reasons = "; ".join(sorted(failures))
            _log.warning("each replica computes prefixes by itself (groups %s): %s", ids, reasons)
            self._to_chain.clear()  # a chain fails for good
        else:
            _log.info("prefixes computed together: groups %s", ids)

    def _take_for_phase(self, first: int) -> list[ChainedGroup]:
        """The group and the next ones, as far as prefixes and members fit a phase."""
        limits = self._limits
        groups = [self._to_chain.pop(first)]
        num_blocks, num_members = (
            groups[0].prefix.num_blocks(limits.block_size),
            groups[0].num_members,
        )
        for group_id, group in list(self._to_chain.items()):
            num_blocks += group.prefix.num_blocks(limits.block_size)
            num_members += group.num_members
            if num_blocks > _MOST_OF_CACHE * limits.num_blocks or num_members > self._max_in_flight:
                break
            groups.append(self._to_chain.pop(group_id))
        return groups

    def _ask_all(self, kind: str, content: Any, answer: str) -> list[Any]:
        """Send all replicas the same message; returns their answers by rank."""
        for replica in self._replicas:
            replica.send(kind, content)
        answers = {}
        waiting = set(self._replicas)
        while waiting:
            for replica in with_messages(waiting):
                waiting.remove(replica)
                found, answers[replica.rank] = replica.receive()
                assert found == answer, found
        return [answers[rank] for rank in sorted(answers)]

    def _receive(self, outputs: list[EngineOutput]) -> None:
        """Wait for outputs, and add all that have arrived, even if a replica is gone."""
        for replica in with_messages(self._replicas):
            kind, content = replica.receive()
            assert kind == "outputs", kind
            for fields in content:
                error = None if fields["error"] is None else RowError(*fields["error"])
                output = EngineOutput(**{**fields, "error": error})
                request = replica.in_flight.pop(output.request_idx)
                self._placer.answered(replica.rank, output.request_idx)
                outputs.append(self._charged(request, output))

    def _fail(self, error: ReplicaGoneError, held: EngineRequest | None) -> NoReturn:
        """End all replicas. Suspects are the lost replica's requests first, then all others."""
        gone_first = sorted(self._replicas, key=lambda each: each.rank != error.rank)
        in_flight = [packed.unpack() for each in gone_first for packed in each.in_flight.values()]
        self.close()
        raise EngineDiedError(str(error), in_flight + ([held] if held else [])) from error

    def _charged(self, request: PackedRequest, output: EngineOutput) -> EngineOutput:
        """Count what the chain computed of a prefix as computed for the group's members."""
        charge = self._charges.get(request.group_id, 0)
        if not charge or output.error is not None:
            return output
        paid = min(charge, output.num_cached_tokens)
        self._charges[request.group_id] = charge - paid
        if paid == charge:
            del self._charges[request.group_id]
        return replace(output, num_cached_tokens=output.num_cached_tokens - paid)


def _reason_against(group: ChainedGroup, num_replicas: int, limits: ChainLimits) -> str | None:
    """Why a chain can't compute a group's prefix; None if it can."""
    try:
        group.prefix.check(num_replicas, limits)
    except SpecError as error:
        return str(error)
    if group.prefix.num_blocks(limits.block_size) >= limits.num_blocks:
        return f"the prefix of group {group.prefix.group_id} fills the KV cache"
    return None


def _chain_settings(num_replicas: int, folder: Path) -> list[ChainSettings]:
    """Each replica's place in a chain that meets in a folder of this machine."""
    store = (folder / "store").as_uri()
    return [ChainSettings(rank, num_replicas, store) for rank in range(num_replicas)]
