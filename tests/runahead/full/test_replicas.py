"""Real engines on CPU, one process each, that prefill together: tokens, counts and faults."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.fork_server import ForkServer
from support.runahead_replicas import Replica, ReplicaError, Replicas, together

from batchllm_operator.demo import model as demo_model

BLOCK = 32
VOCABULARY = range(300, 4000)  # of the demo model: ordinary tokens
MEMBERS = 3


OURS = "batchllm_operator.vllm_plugin.scheduler.scheduler.BatchLLMScheduler"


class Group:
    """A prefix of random tokens, its split, and prompts that begin with it."""

    def __init__(
        self, group_id: int, split: tuple[int, ...], head: list[int] | None = None
    ) -> None:
        tokens = random.Random(group_id)
        draw = [tokens.choice(VOCABULARY) for _ in range(sum(split) + 20 * MEMBERS)]
        self.prefix = [*(head or []), *draw][: sum(split)]
        own = draw[-20 * MEMBERS :]
        self.prompts = [self.prefix + own[20 * i : 20 * i + 20] for i in range(MEMBERS)]
        self.group = (group_id, self.prefix, split)
        self.whole = sum(split) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, engines: ForkServer) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("replicas")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "_NUM_LAYERS", 4)
        demo_model.build_demo_model(folder / "model")
    pool = Replicas(folder, folder / "model", engines)
    try:
        yield pool
        assert set(pool.close()) <= {0}  # threads of links keep no process from ending in peace
    finally:
        pool.kill()


def alone(replica: Replica, groups: list[Group]) -> list[list[dict[str, Any]]]:
    """What one replica makes of the groups' prompts by itself, beginning with an empty cache."""
    assert replica.call("forget")
    found = [replica.call("generate", group.prompts) for group in groups]
    assert replica.call("forget")
    return found


def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


def phase(chain: list[Replica], groups: list[Group]) -> list[Any]:
    """Outcomes of the groups by replica; what it raised, for one that did."""
    return together(chain, "phase", [group.group for group in groups])


def check_members(
    replica: Replica, groups: list[Group], expected: list[list[dict[str, Any]]]
) -> None:
    """Members find the whole prefixes in the cache, and get the expected tokens."""
    for group, wanted in zip(groups, expected, strict=True):
        outputs = replica.call("generate", group.prompts)
        assert [output["num_cached"] for output in outputs] == [group.whole] * MEMBERS
        assert tokens(outputs) == tokens(wanted)
        for ours, theirs in zip(outputs, wanted, strict=True):
            assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)


THREE = [(256, 224, 170), (32, 416, 32), (160, 160, 160)]  # replicas, of three groups
TWO = [(416, 224), (384, 20), (96, 410)]  # 20 tokens are less than a block


@pytest.mark.parametrize(
    ("splits", "is_late"),
    [(THREE, False), (TWO, True)],
    ids=["three", "two-sent-after-attention"],
)
def test_members_on_every_replica_get_the_tokens_of_one_process(
    replicas: Replicas, splits: list[tuple[int, ...]], is_late: bool
) -> None:
    world_size = len(splits[0])
    chain = replicas.chain(world_size, max_num_batched_tokens=416)
    groups = [Group(idx, split) for idx, split in enumerate(splits)]
    expected = alone(chain[0], groups)
    if is_late:
        replicas.spoil()
        together(chain, "send_late")
    assert len({str(output["tokens"]) for group in expected for output in group}) > 5
    for rank, outcomes in enumerate(phase(chain, groups)):
        is_last = rank == world_size - 1
        computed = [split[rank] + (not is_last) for split in splits]
        whole = [group.whole for group in groups]
        received = [
            sum(split[:rank]) if is_last else end - split[rank]
            for split, end in zip(splits, whole, strict=True)
        ]
        assert [each["failure"] for each in outcomes] == [None] * 3
        assert [each["num_computed_tokens"] for each in outcomes] == computed
        assert [each["num_received_tokens"] for each in outcomes] == received
        assert chain[rank].call("take_num_computed") == sum(computed)
        check_members(chain[rank], groups, expected)


def test_what_is_cached_already_is_not_computed_again(replicas: Replicas) -> None:
    chain = replicas.chain(2, max_num_batched_tokens=416)
    first = Group(0, (320, 320))
    longer = Group(1, (320, 416), head=first.prefix[:480])
    again = Group(0, (320, 320))
    again.group = (2, again.prefix, (320, 320))
    expected = alone(chain[0], [first, longer])
    phase(chain, [first])
    outcomes = phase(chain, [longer, again])
    # A request computes its last block at least: vLLM needs a token to go on from.
    assert [each["num_computed_tokens"] for each in outcomes[0]] == [32 + 1, 32 + 1]
    assert [each["num_computed_tokens"] for each in outcomes[1]] == [736 - 480, 32]
    for replica in chain:
        check_members(replica, [first, longer], expected)


def test_a_later_replica_that_has_all_in_its_cache_overtakes_nobody(replicas: Replicas) -> None:
    """It sends back at once what it has, when the replica between has computed nothing yet."""
    chain = replicas.chain(3)
    group = Group(0, (256, 224, 170))
    (expected,) = alone(chain[0], [group])
    chain[2].call("generate", [group.prefix], max_tokens=1)
    for outcomes in phase(chain, [group]):
        assert outcomes[0]["failure"] is None
    for replica in chain:
        check_members(replica, [group], [expected])


def test_a_prefix_after_which_the_model_would_end_is_like_others(replicas: Replicas) -> None:
    chain = replicas.chain(2, max_num_batched_tokens=416)
    candidates = [Group(100 + idx, (32, 64)) for idx in range(120)]
    first = chain[0].call("generate", [group.prefix for group in candidates], max_tokens=1)
    end = replicas.end_token
    ending = [
        group for group, output in zip(candidates, first, strict=True) if output["tokens"] == [end]
    ]
    assert ending
    assert chain[0].call("forget")
    for outcomes in phase(chain, ending[:3]):
        assert {each["failure"] for each in outcomes} == {None}


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ((448, 96), "chunk 0 of 448 tokens is larger than a step of 416"),
        ((96, 417), "chunk 1 of 417 tokens is larger than a step of 416"),
        ((300, 340), "chunk 0 of 300 tokens doesn't end with a KV block"),
        ((256, 256, 128), "split in 3 chunks for 2 replicas"),
    ],
)
def test_a_group_that_can_not_run_is_refused_before_anything_is_sent(
    replicas: Replicas, split: tuple[int, ...], reason: str
) -> None:
    chain = replicas.chain(2, max_num_batched_tokens=416)
    for answer in phase(chain, [Group(0, (320, 320)), Group(1, split)]):
        assert isinstance(answer, ReplicaError)
        assert answer.kind == "SpecError"
        assert reason in answer.message
    assert together(chain, "take_num_computed") == [0, 0]


def test_replicas_with_other_groups_find_out_before_anything_is_sent(replicas: Replicas) -> None:
    chain = replicas.chain(2, max_num_batched_tokens=416)
    groups = [Group(0, (320, 320)), Group(1, (320, 320))]
    chain[0].ask("phase", [group.group for group in groups])
    with pytest.raises(ReplicaError, match="replicas differ in groups") as caught:
        chain[1].call("phase", [group.group for group in reversed(groups)])
    assert caught.value.kind == "RunaheadMismatchError"
    with pytest.raises(ReplicaError, match="replicas differ in groups"):
        chain[0].answer()
    assert together(chain, "take_num_computed") == [0, 0]
    for outcomes in phase(chain, groups):  # the chain is as good as before
        assert [each["failure"] for each in outcomes] == [None, None]


def test_zeros_in_place_of_received_kv_give_other_tokens(replicas: Replicas) -> None:
    chain = replicas.chain(2, max_num_batched_tokens=416)
    group = Group(7, (320, 320))
    (expected,) = alone(chain[0], [group])
    together(chain, "zero_received")
    for outcomes in phase(chain, [group]):
        assert outcomes[0]["failure"] is None
    for replica in chain:
        outputs = replica.call("generate", group.prompts)
        assert [output["num_cached"] for output in outputs] == [640] * MEMBERS
        for ours, theirs in zip(outputs, expected, strict=True):
            assert ours["tokens"] != theirs["tokens"]


def test_it_runs_under_our_scheduler(replicas: Replicas) -> None:
    chain = replicas.chain(2, scheduler_cls=OURS)
    groups = [Group(idx, (416, 224)) for idx in range(2)]
    expected = alone(chain[0], groups)
    for rank, outcomes in enumerate(phase(chain, groups)):
        assert [outcome["failure"] for outcome in outcomes] == [None, None]
        assert [outcome["num_computed_tokens"] for outcome in outcomes] == [[417, 224][rank]] * 2
        check_members(chain[rank], groups, expected)


def test_bf16_is_that_of_one_process_with_the_same_chunks(replicas: Replicas) -> None:
    chain = replicas.chain(2, dtype="bfloat16")
    group = Group(8, (352, 288))
    chain[0].call("generate", [group.prefix[:352]], max_tokens=1)
    chain[0].call("generate", [group.prefix], max_tokens=1)
    expected = chain[0].call("generate", group.prompts)
    assert chain[0].call("forget")
    for outcomes in phase(chain, [group]):
        assert outcomes[0]["failure"] is None
    for replica in chain:
        assert replica.call("generate", group.prompts) == expected  # log-probabilities too


@pytest.mark.parametrize(
    ("change", "named"),
    [({"dtype": "bfloat16"}, "dtype: '.*float32' and '.*bfloat16'"), ({"block_size": 64}, "block")],
)
def test_replicas_that_differ_do_not_begin(
    replicas: Replicas, change: dict[str, Any], named: str
) -> None:
    chain = replicas.chain(2, {}, change)
    for answer in phase(chain, [Group(0, (320, 320))]):
        assert isinstance(answer, ReplicaError)
        assert answer.kind == "RunaheadMismatchError"
        assert re.search(f"replicas 0 and 1 differ in {named}", answer.message)
    assert together(chain, "take_num_computed") == [0, 0]
    assert chain[1].call("generate", Group(0, (320, 320)).prompts)  # by itself, as ever


@pytest.mark.parametrize("faulty", [0, 2])
def test_after_a_fault_every_replica_computes_what_it_lacks(
    replicas: Replicas, faulty: int
) -> None:
    chain = replicas.chain(3, max_num_batched_tokens=416)
    groups = [Group(idx, (384, 192, 200)) for idx in range(3)]
    expected = alone(chain[0], groups)
    replicas.spoil()
    chain[faulty].call("fail_at_message", 6, "raise")  # of 4 layers: in the second group
    outcomes = phase(chain, groups)
    assert "a fault on purpose" in outcomes[faulty][2]["failure"]
    for rank, replica in enumerate(chain):
        assert outcomes[rank][2]["failure"]
        assert outcomes[rank][2]["num_received_tokens"] == 0
        check_members(replica, groups, expected)
    # What was whole before the fault stays. The first replica's fault may come so soon that the
    # last one has no group whole yet.
    first = outcomes[2][0]
    if faulty == 0 and first["failure"]:
        assert first["num_received_tokens"] == 0
    else:
        assert first["num_received_tokens"] == 576


def test_after_a_fault_groups_that_begin_alike_share_no_lost_blocks(replicas: Replicas) -> None:
    """The second chunk is admitted with blocks that nothing comes for any more."""
    chain = replicas.chain(2)
    first = Group(0, (256, 170))
    groups = [first, Group(1, (256, 170), head=first.prefix[:160])]
    expected = alone(chain[0], groups)
    replicas.spoil()
    chain[0].call("fail_at_message", 2, "raise")
    for replica, outcomes in zip(chain, phase(chain, groups), strict=True):
        assert all(each["failure"] for each in outcomes)
        check_members(replica, groups, expected)


def test_a_replica_whose_engine_fails_leaves_nobody_waiting(replicas: Replicas) -> None:
    chain = replicas.chain(2)
    group = Group(0, (320, 352))
    (expected,) = alone(chain[1], [group])
    replicas.spoil()
    chain[0].call("break_step")
    failed, outcomes = phase(chain, [group])
    assert isinstance(failed, ReplicaError)
    assert failed.message == "a fault on purpose"
    assert chain[0].call("num_unfinished") == 0
    assert "Timed out" not in outcomes[0]["failure"]
    check_members(chain[1], [group], [expected])


def test_a_policy_that_leaves_lost_blocks_in_the_cache_is_refused(replicas: Replicas) -> None:
    replicas.spoil()
    with pytest.raises(ReplicaError, match="kv_load_failure_policy must be fail") as caught:
        replicas.chain(2, policy="recompute")
    assert caught.value.kind == "SpecError"


def test_replicas_go_on_without_one_that_is_killed(replicas: Replicas) -> None:
    chain = replicas.chain(3, layer_timeout_s=20.0)
    groups = [Group(idx, (256, 224, 170)) for idx in range(2)]
    expected = alone(chain[0], groups)
    replicas.spoil()
    chain[1].call("fail_at_message", 2, "die")  # with half of the layers sent, one way or both
    answers = phase(chain, groups)
    assert isinstance(answers[1], EOFError)
    for rank in (0, 2):
        assert all(each["failure"] for each in answers[rank])
        check_members(chain[rank], groups, expected)


def test_a_replica_that_hangs_is_given_up_in_time(replicas: Replicas) -> None:
    chain = replicas.chain(2, layer_timeout_s=1.0)
    group = Group(0, (320, 352))
    (expected,) = alone(chain[0], [group])
    replicas.spoil()
    chain[0].call("fail_at_message", 2, "stall")
    together(chain, "recompute_nothing")
    answers = phase(chain, [group])
    assert "Timed out" in answers[1][0]["failure"]
    together(chain, "heal")
    for replica in chain:  # what came stays out of the prefix cache
        outputs = replica.call("generate", group.prompts)
        assert outputs[0]["num_cached"] == (320 if replica is chain[0] else 0)
        assert tokens(outputs) == tokens(expected)
