"""Real engines on CPU, one process each, that prefill together: tokens, counts and faults."""

import random
from collections.abc import Iterator
from typing import Any

import demo_model
import pytest
from support.fork_server import ForkServer
from support.runahead_replicas import Replica, ReplicaError, Replicas, together

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
    """Why the chain has failed, by replica; what it raised, for one that did."""
    return together(chain, "prefill", [group.group for group in groups])


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
    chain = replicas.chain(world_size, max_num_batched_tokens=417)
    groups = [Group(idx, split) for idx, split in enumerate(splits)]
    expected = alone(chain[0], groups)
    if is_late:
        replicas.spoil()
        together(chain, "send_late")
    assert len({str(output["tokens"]) for group in expected for output in group}) > 5
    assert phase(chain, groups) == [None] * world_size
    for rank, replica in enumerate(chain):
        is_last = rank == world_size - 1
        computed = [split[rank] + (not is_last) for split in splits]
        assert replica.call("take_num_computed") == sum(computed)
        check_members(replica, groups, expected)


def test_what_is_cached_already_is_not_computed_again(replicas: Replicas) -> None:
    chain = replicas.chain(2, max_num_batched_tokens=417)
    first = Group(0, (320, 320))
    longer = Group(1, (320, 416), head=first.prefix[:480])
    again = Group(0, (320, 320))
    expected = alone(chain[0], [first, longer])
    assert phase(chain, [first]) == [None, None]
    together(chain, "take_num_computed")
    assert phase(chain, [longer, again]) == [None, None]
    # A request computes its last block at least: vLLM needs a token to go on from.
    first_computed, second_computed = together(chain, "take_num_computed")
    assert first_computed == 2 * (32 + 1)
    assert second_computed == (736 - 480) + 32
    for replica in chain:
        check_members(replica, [first, longer], expected)


def test_a_later_replica_that_has_all_in_its_cache_overtakes_nobody(replicas: Replicas) -> None:
    chain = replicas.chain(3)
    group = Group(0, (256, 224, 170))
    (expected,) = alone(chain[0], [group])
    chain[2].call("generate", [group.prefix], max_tokens=1)
    assert phase(chain, [group]) == [None] * 3
    for replica in chain:
        check_members(replica, [group], [expected])


def test_a_prefix_after_which_the_model_would_end_is_like_others(replicas: Replicas) -> None:
    chain = replicas.chain(2, max_num_batched_tokens=417)
    candidates = [Group(100 + idx, (32, 64)) for idx in range(120)]
    first = chain[0].call("generate", [group.prefix for group in candidates], max_tokens=1)
    end = replicas.end_token
    ending = [
        group for group, output in zip(candidates, first, strict=True) if output["tokens"] == [end]
    ]
    assert ending
    assert chain[0].call("forget")
    assert phase(chain, ending[:3]) == [None, None]


def test_zeros_in_place_of_received_kv_give_other_tokens(replicas: Replicas) -> None:
    chain = replicas.chain(2, max_num_batched_tokens=417)
    group = Group(7, (320, 320))
    (expected,) = alone(chain[0], [group])
    together(chain, "zero_received")
    assert phase(chain, [group]) == [None, None]
    for replica in chain:
        outputs = replica.call("generate", group.prompts)
        assert [output["num_cached"] for output in outputs] == [640] * MEMBERS
        for ours, theirs in zip(outputs, expected, strict=True):
            assert ours["tokens"] != theirs["tokens"]


def test_it_runs_under_our_scheduler(replicas: Replicas) -> None:
    chain = replicas.chain(2, scheduler_cls=OURS)
    groups = [Group(idx, (416, 224)) for idx in range(2)]
    expected = alone(chain[0], groups)
    assert phase(chain, groups) == [None, None]
    assert together(chain, "take_num_computed") == [2 * 417, 2 * 224]
    for replica in chain:
        check_members(replica, groups, expected)


def test_bf16_is_that_of_one_process_with_the_same_chunks(replicas: Replicas) -> None:
    chain = replicas.chain(2, dtype="bfloat16")
    group = Group(8, (352, 288))
    chain[0].call("generate", [group.prefix[:352]], max_tokens=1)
    chain[0].call("generate", [group.prefix], max_tokens=1)
    expected = chain[0].call("generate", group.prompts)
    assert chain[0].call("forget")
    assert phase(chain, [group]) == [None, None]
    for replica in chain:
        assert replica.call("generate", group.prompts) == expected  # log-probabilities too


@pytest.mark.parametrize("faulty", [0, 2])
@pytest.mark.parametrize("how", ["raise", "die"])
def test_after_a_fault_members_get_their_tokens_on_every_other_replica(
    replicas: Replicas, faulty: int, how: str
) -> None:
    chain = replicas.chain(3, max_num_batched_tokens=417)
    groups = [Group(idx, (384, 192, 200)) for idx in range(3)]
    expected = alone(chain[0], groups)
    replicas.spoil()
    chain[faulty].call("fail_at_message", 18, how)  # of 4 layers and 3 chunks: in the second group
    failures = phase(chain, groups)
    for rank, (replica, failure) in enumerate(zip(chain, failures, strict=True)):
        if rank == faulty and how == "die":
            assert isinstance(failure, EOFError)
            continue
        assert isinstance(failure, str)
        for group, wanted in zip(groups, expected, strict=True):
            assert tokens(replica.call("generate", group.prompts)) == tokens(wanted)


def test_a_replica_whose_engine_fails_leaves_nobody_waiting(replicas: Replicas) -> None:
    chain = replicas.chain(2)
    group = Group(0, (320, 352 - 32))
    (expected,) = alone(chain[1], [group])
    assert phase(chain, []) == [None, None]  # else one may fail before the other is there
    replicas.spoil()
    chain[0].call("break_step")
    chain[0].ask("prefill", [group.group])
    chain[1].ask("prefill", [group.group])
    failed = chain[0].outcome()
    assert isinstance(failed, ReplicaError)
    assert failed.message == "a fault on purpose"
    assert isinstance(chain[1].outcome(), str)
    assert tokens(chain[1].call("generate", group.prompts)) == tokens(expected)


def test_a_replica_that_hangs_is_given_up_in_time(replicas: Replicas) -> None:
    chain = replicas.chain(2, timeout_s=5.0)
    group = Group(0, (320, 320))
    (expected,) = alone(chain[0], [group])
    replicas.spoil()
    chain[0].call("fail_at_message", 2, "stall")
    chain[0].ask("prefill", [group.group])
    assert "imed out" in chain[1].call("prefill", [group.group])
    assert tokens(chain[1].call("generate", group.prompts)) == tokens(expected)
    chain[0].process.kill()
    chain[0].process.wait()
