"""What vLLM's scheduler does with shares of a prefix, and what each step is told to load and send.

The scheduler is the real one, without a model; the replica is the middle one of three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

# First, because it says how vLLM is imported.
from batchllm_operator.simulate.vllm_config import make_scheduler  # isort: split

from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.errors import SpecError
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.vllm_plugin.compat import make_model_output, make_request
from batchllm_operator.vllm_plugin.runahead import connector as runahead
from batchllm_operator.vllm_plugin.runahead.plan import ChainSettings, RunaheadGroup
from batchllm_operator.vllm_plugin.runahead.scheduling import RunaheadMetadata
from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings

BLOCK, STEP = 16, 64
SPLIT = (64, 64, 40)  # 168 tokens, 160 of them in whole blocks
Start = Callable[..., "Stepper"]


class Stepper:
    """A scheduler and what it is given: steps are computed as soon as they are put together."""

    def __init__(self, rank: int, policy: str, step: int) -> None:
        machine = Machine(
            MODEL_SHAPES["Mistral-7B"],
            find_gpu("H100"),
            num_blocks=200,
            block_size=BLOCK,
            max_num_batched_tokens=step,
        )
        made = make_scheduler(POLICIES["stock_sorted"], machine, 512, SchedulerSettings())
        transfer = ChainSettings(rank, 3, "file:///tmp/unused").to_kv_transfer_config()
        config = made.vllm_config
        config.kv_transfer_config = KVTransferConfig(
            **{**transfer, "kv_load_failure_policy": policy}
        )
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        self.scheduler = AsyncScheduler(
            vllm_config=config,
            kv_cache_config=made.kv_cache_config,
            structured_output_manager=made.structured_output_manager,
            block_size=BLOCK,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduled: dict[str, int] = {}

    def add(self, name: str, tokens: list[int], extra_args: dict[str, Any] | None = None) -> None:
        params = SamplingParams(max_tokens=1, extra_args=extra_args)
        self.scheduler.add_request(make_request(name, tokens, params, self._hasher))

    def add_group(self, group: RunaheadGroup, rank: int) -> None:
        bounds = group.share("chunk").bounds(rank, BLOCK)
        tokens = list(group.prefix_token_ids)
        chunk, fill = f"chunk {group.group_id}", f"fill {group.group_id}"
        self.add(fill, [*tokens[: bounds.whole], 7], group.share("fill").to_extra_args())
        self.add(chunk, tokens[: bounds.end], group.share("chunk").to_extra_args())

    def step(self, loaded: Sequence[str] = (), sent: Sequence[str] = ()) -> RunaheadMetadata:
        """A step's metadata; what it scheduled is in `scheduled`."""
        output = self.scheduler.schedule()
        self.scheduled = dict(output.num_scheduled_tokens)
        names = list(self.scheduled)
        requests = self.scheduler.requests
        sampled = [
            [5] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name in names
        ]
        result = make_model_output(names, sampled)
        result.kv_connector_output = KVConnectorOutput(
            finished_recving=set(loaded), finished_sending=set(sent)
        )
        self.scheduler.update_from_output(output, result)
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, RunaheadMetadata)
        return metadata

    def end(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def holds_blocks(self, name: str) -> bool:
        return name in self.scheduler.requests

    def num_cached(self, tokens: list[int]) -> int:
        """Tokens of a prompt that a request arriving now would find in the prefix cache."""
        request = make_request("probe", tokens, SamplingParams(max_tokens=1), self._hasher)
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])


def prefix(seed: int) -> list[int]:
    return [100 * seed + idx for idx in range(sum(SPLIT))]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def start_(rank: int = 1, policy: str = "fail", step: int = STEP) -> Stepper:
        if policy != "fail":  # what our connector refuses
            monkeypatch.setattr(runahead, "_check_engine", lambda *args: None)
        return Stepper(rank, policy, step)

    return start_


def test_the_middle_replica_computes_its_chunk_and_passes_on_both_ways(start: Start) -> None:
    stepper = start()
    group = RunaheadGroup(3, prefix(1), SPLIT)
    stepper.add_group(group, rank=1)
    first = stepper.step()
    assert stepper.scheduled == {"chunk 3": 64}
    (load,) = first.loads
    assert (load.way, load.extent.begin, load.extent.end) == ("down", 0, 64)
    assert (load.num_blocks, len(load.block_ids), load.is_waited_for) == (4, 4, True)
    (send,) = first.sends
    assert (send.way, send.extent.begin, send.extent.end) == ("down", 0, 128)
    assert send.block_ids[:4] == load.block_ids
    second = stepper.step()  # the fill came first, and waited for its turn
    assert stepper.scheduled == {}
    (load,) = second.loads
    assert (load.way, load.extent.begin, load.extent.end) == ("up", 128, 160)
    assert (load.is_waited_for, load.is_reported, len(load.block_ids)) == (False, True, 2)
    back = load.passed_on
    assert back is not None
    assert (back.way, back.extent.begin, back.extent.end) == ("up", 64, 160)
    assert back.block_ids == [*send.block_ids[4:], *load.block_ids]
    assert stepper.num_cached([*prefix(1), 7]) == 128  # what hasn't come isn't in the cache
    stepper.step(loaded=["fill 3"])
    assert stepper.scheduled == {}
    stepper.step()
    assert stepper.scheduled == {"fill 3": 1}
    assert stepper.num_cached([*prefix(1), 7]) == 160


def test_a_step_has_one_chunk_and_fills_keep_the_order_of_the_chunks(start: Start) -> None:
    stepper = start(step=1000)
    groups = [RunaheadGroup(idx, prefix(idx), SPLIT) for idx in (5, 2)]
    for group in groups:
        stepper.add_group(group, rank=1)
    chunks, fills = [], []
    for _ in range(6):
        metadata = stepper.step()
        chunks.append([send.extent.group_id for send in metadata.sends])
        fills += [load.extent.group_id for load in metadata.loads if load.way == "up"]
    assert [each for each in chunks if each] == [[5], [2]]
    assert fills == [5, 2]


def test_a_chunk_waits_for_the_outcome_of_the_one_before(start: Start) -> None:
    """A step is scheduled while the one before runs, whose load may fail: no other shares blocks.

    vLLM wouldn't take what is computed from such blocks out of the prefix cache.
    """
    stepper = start(step=1000)
    first = RunaheadGroup(3, prefix(1), SPLIT)
    alike = RunaheadGroup(4, [*prefix(1)[:96], *prefix(2)[96:]], SPLIT)
    for group in (first, alike):
        tokens = list(group.prefix_token_ids)[:128]
        stepper.add(f"chunk {group.group_id}", tokens, group.share("chunk").to_extra_args())
    output = stepper.scheduler.schedule()
    assert set(output.num_scheduled_tokens) == {"chunk 3"}
    ahead = stepper.scheduler.schedule()
    assert not ahead.num_scheduled_tokens
    (load,) = output.kv_connector_metadata.loads
    result = make_model_output(["chunk 3"], [[5]])
    result.kv_connector_output = KVConnectorOutput(invalid_block_ids=set(load.block_ids))
    stepper.scheduler.update_from_output(output, result)
    stepper.scheduler.update_from_output(ahead, make_model_output([], []))
    stepper.step()
    assert stepper.scheduled == {"chunk 4": 64}, "nothing of the first one is left"


def test_a_chunk_that_shares_its_step_is_sent_when_it_is_whole(start: Start) -> None:
    stepper = start()
    stepper.add("other", [9] * 30)
    stepper.add_group(RunaheadGroup(3, prefix(1), SPLIT), rank=1)
    first = stepper.step()
    assert stepper.scheduled == {"other": 30, "chunk 3": 34}
    assert [load.way for load in first.loads] == ["down"]
    assert not first.sends
    second = stepper.step()
    assert stepper.scheduled == {"chunk 3": 30}
    (send,) = second.sends
    assert (send.extent.end, len(set(send.block_ids))) == (128, 8)
    (load,) = second.loads  # the fill begins in the same step, whose tokens suffice
    assert load.way == "up"


def test_a_fill_waits_for_the_last_tokens_of_its_chunk(start: Start) -> None:
    """The chunk has all its blocks before the step that computes the last of them."""
    stepper = start()
    stepper.add("other", [9] * 3)
    stepper.add_group(RunaheadGroup(3, prefix(1), SPLIT), rank=1)
    stepper.step()
    assert stepper.scheduled == {"other": 3, "chunk 3": 61}
    connector, fill = stepper.scheduler.connector, stepper.scheduler.requests["fill 3"]
    assert connector is not None
    assert connector.get_num_new_matched_tokens(fill, 112) == (None, False)
    second = stepper.step()
    assert second.failure is None
    assert [load.way for load in second.loads] == ["up"]


def test_what_is_cached_is_neither_written_nor_computed(start: Start) -> None:
    stepper = start(step=1000)
    group = RunaheadGroup(3, prefix(1), SPLIT)
    stepper.add("earlier", [*prefix(1)[:96], 8])
    stepper.step()
    stepper.add_group(group, rank=1)
    metadata = stepper.step()
    assert stepper.scheduled == {"chunk 3": 32}
    (load,) = metadata.loads  # taken from the link all the same, and not waited for
    assert (load.num_blocks, list(load.block_ids), load.is_waited_for) == (4, [], False)


@pytest.mark.parametrize("rank", [0, 1])  # the first one's fill is passed on to nobody
def test_blocks_stay_until_what_they_hold_has_been_sent_or_written(start: Start, rank: int) -> None:
    stepper = start(rank)
    stepper.add_group(RunaheadGroup(3, prefix(1), SPLIT), rank)
    stepper.step()
    assert stepper.holds_blocks("chunk 3"), "it has ended, and is being sent"
    stepper.step()
    stepper.end("fill 3")
    assert stepper.holds_blocks("fill 3"), "what comes is still written there"
    stepper.step(sent=["chunk 3"])
    assert not stepper.holds_blocks("chunk 3")
    assert stepper.holds_blocks("fill 3")
    stepper.step(loaded=["fill 3"])
    assert not stepper.holds_blocks("fill 3")


def test_a_chunk_that_ends_before_it_is_whole_ends_the_chain(start: Start) -> None:
    stepper = start()
    stepper.add("other", [9] * 30)
    share = RunaheadGroup(3, prefix(1), SPLIT).share("chunk")
    stepper.add("chunk 3", prefix(1)[:128], share.to_extra_args())
    assert stepper.step().failure is None
    stepper.end("chunk 3")
    assert not stepper.holds_blocks("chunk 3")
    assert "chunk 3 ended before its KV was there" in (stepper.step().failure or "")


def test_a_fill_that_ends_before_it_begins_ends_the_chain(start: Start) -> None:
    stepper = start()
    stepper.add_group(RunaheadGroup(3, prefix(1), SPLIT), rank=1)
    stepper.step()  # the chunk has the whole step
    stepper.end("fill 3")
    assert "fill 3 ended before it was begun" in (stepper.step().failure or "")


def test_a_chunk_whose_blocks_are_lost_before_its_fill_ends_the_chain(start: Start) -> None:
    stepper = start(step=1000)
    group = RunaheadGroup(3, prefix(1), SPLIT)
    tokens = list(group.prefix_token_ids)
    stepper.add("chunk 3", tokens[:128], group.share("chunk").to_extra_args())
    stepper.step()
    stepper.step(sent=["chunk 3"])
    assert stepper.scheduler.reset_prefix_cache()
    stepper.add("fill 3", [*tokens[:160], 7], group.share("fill").to_extra_args())
    metadata = stepper.step()
    assert "only 0 of 128 tokens are left" in (metadata.failure or "")
    assert not metadata.loads


def test_a_chunk_that_was_preempted_is_computed_by_itself(start: Start) -> None:
    stepper = start()
    stepper.add("other", [9] * 30)
    stepper.add_group(RunaheadGroup(3, prefix(1), SPLIT), rank=1)
    stepper.step()
    connector, chunk = stepper.scheduler.connector, stepper.scheduler.requests["chunk 3"]
    assert connector is not None
    assert connector.get_num_new_matched_tokens(chunk, 0) == (0, False)


@pytest.mark.parametrize(
    ("policy", "num_cached"),
    [
        ("fail", 0),
        # vLLM keeps blocks that a load left empty in the prefix cache until they are computed
        # again, over two steps here; why `recompute` is refused.
        ("recompute", 128),
    ],
)
def test_blocks_of_a_load_that_failed_leave_the_prefix_cache(
    start: Start, policy: str, num_cached: int
) -> None:
    stepper = start(policy=policy)
    group = RunaheadGroup(3, prefix(1), SPLIT)
    tokens = list(group.prefix_token_ids)
    stepper.add("chunk", tokens[:128], group.share("chunk").to_extra_args())
    output = stepper.scheduler.schedule()
    (load,) = output.kv_connector_metadata.loads
    result = make_model_output(["chunk"], [[5]])
    result.kv_connector_output = KVConnectorOutput(invalid_block_ids=set(load.block_ids))
    stepper.scheduler.update_from_output(output, result)
    assert stepper.num_cached([*tokens[:128], 7]) == num_cached


@pytest.mark.parametrize(
    ("share", "num_tokens", "reason"),
    [
        (RunaheadGroup(3, prefix(1), SPLIT).share("chunk"), 129, "chunk must have 128 tokens"),
        (RunaheadGroup(3, prefix(1), SPLIT).share("fill"), 160, "fill must have 161 tokens"),
        (RunaheadGroup(3, prefix(1)[:64], (32, 32)).share("chunk"), 32, "2 chunks for 3 replicas"),
    ],
)
def test_a_share_that_does_not_fit_its_request_is_refused(
    start: Start, share: Any, num_tokens: int, reason: str
) -> None:
    stepper = start()
    stepper.add("chunk", prefix(1)[:num_tokens], share.to_extra_args())
    with pytest.raises(SpecError, match=reason):
        stepper.step()
