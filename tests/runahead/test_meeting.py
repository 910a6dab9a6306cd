"""Meetings of replicas, which are threads here; their engines are doubles."""

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from batchllm_operator.errors import EngineError, RunaheadError
from batchllm_operator.runahead import meeting as meeting_module
from batchllm_operator.runahead.groups import ChainLimits, RunaheadGroup
from batchllm_operator.runahead.meeting import Rounds

LIMITS = ChainLimits(block_size=16, num_blocks=100, max_chunk=256, max_model_len=1024)


@dataclass
class Chain:
    """An engine that notes what it is asked for."""

    limits: ChainLimits = LIMITS
    own: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    steps: Sequence[tuple[int, int, float]] = ()
    rate: float = 1e9
    opened: list[tuple[int, int]] = field(default_factory=list)
    prefilled: list[list[int]] = field(default_factory=list)

    def fingerprint(self) -> dict[str, Any]:
        return {"dtype": "float32", "attention": "a", **self.own}

    def open(self, rank: int, world_size: int, store: Path) -> None:
        assert store.parent.is_dir()
        self.opened.append((rank, world_size))

    def prefill(self, groups: Sequence[RunaheadGroup]) -> str | None:
        self.prefilled.append([group.group_id for group in groups])
        return self.failure

    def measure(self) -> tuple[float, list[tuple[int, int, float]]]:
        return self.rate, list(self.steps)


def group(group_id: int, first_token: int = 0, split: tuple[int, ...] = (96, 64)) -> RunaheadGroup:
    return RunaheadGroup(group_id, [first_token] * sum(split), split)


class Pod:
    """Replicas that meet."""

    def __init__(self, folder: Path, *chains: Any) -> None:
        self.chains = chains
        self.rounds = [Rounds(folder, rank, len(chains)) for rank in range(len(chains))]

    def meet(self, *groups: list[RunaheadGroup], measure: bool = False) -> list[list[int]]:
        """Ids of the groups that each replica is charged for."""

        def one(rank: int) -> list[int]:
            computed = self.rounds[rank].meet(
                self.chains[rank], groups[rank], measure=measure and rank == 0
            )
            return [each.group_id for each in computed]

        with ThreadPoolExecutor(len(self.rounds)) as pool:
            return list(pool.map(one, range(len(self.rounds))))

    @property
    def is_over(self) -> list[bool]:
        return [rounds.is_over for rounds in self.rounds]


def test_a_replica_without_a_shard_helps_until_no_prefix_is_left(tmp_path: Path) -> None:
    pod = Pod(tmp_path, Chain(), Chain())
    assert pod.meet([group(4)], []) == [[4], []]
    assert pod.meet([], [group(7, 1)]) == [[], [7]]
    assert pod.is_over == [False, False]
    assert pod.meet([], []) == [[], []]
    assert pod.is_over == [True, True]
    for rank, chain in enumerate(pod.chains):
        assert chain is not None
        assert chain.prefilled == [[4], [7]]
        assert set(chain.opened) == {(rank, 2)}


def test_a_prefix_that_several_shards_have_is_computed_once(tmp_path: Path) -> None:
    pod = Pod(tmp_path, Chain(), Chain())
    assert pod.meet([group(4)], [group(5)]) == [[4], []]
    assert pod.meet([group(6)], []) == [[], []]  # it is in all caches
    assert [chain.prefilled for chain in pod.chains if chain] == [[[4]], [[4]]]


def test_as_many_prefixes_as_replicas_are_computed_side_by_side(tmp_path: Path) -> None:
    pod = Pod(tmp_path, Chain(), Chain())
    assert pod.meet([group(4)], [group(5, 1)]) == [[], []]
    assert pod.is_over == [False, False]
    assert [chain.prefilled for chain in pod.chains if chain] == [[], []]


def test_prefixes_that_an_engine_can_not_compute_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chains = [Chain(), Chain(), Chain(limits=ChainLimits(16, 40, 256, 1024))]
    split = (96, 96, 96)  # 20 of the least 40 blocks
    marked = [group(1, 1, (512, 16, 16)), group(2, 2, split), group(3, 3, split)]
    assert Pod(tmp_path, *chains).meet(marked, [], []) == [[2], [], []]
    assert "chunk 0 of 512 tokens is larger" in caplog.text


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (Chain(own={"dtype": "bf16", "attention": "b"}), "differ in dtype: 'float32' and 'bf16'"),
        (None, "replica 1 can't pass on KV"),
    ],
)
def test_replicas_that_can_not_form_a_chain_go_on_without_one(
    tmp_path: Path, chain: Chain | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    pod = Pod(tmp_path, Chain(), chain)
    assert pod.meet([group(4)], [group(4)]) == [[], []]
    assert pod.is_over == [True, True]
    assert reason in caplog.text


def test_a_chain_that_fails_is_the_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pod = Pod(tmp_path, Chain(failure="no luck"), Chain(failure="no luck"))
    assert pod.meet([group(4)], []) == [[], []]
    assert pod.is_over == [True, True]
    assert "each replica computes prefixes by itself: no luck" in caplog.text


def test_a_chain_that_can_not_open_is_the_last(tmp_path: Path) -> None:
    class Closed(Chain):
        def open(self, rank: int, world_size: int, store: Path) -> None:
            raise RunaheadError("nobody there")

    pod = Pod(tmp_path, Closed(), Closed())
    assert pod.meet([group(4)], []) == [[], []]
    assert pod.is_over == [True, True]


def test_an_engine_that_keeps_blocks_of_a_failed_chain_does_not_go_on(tmp_path: Path) -> None:
    class Stuck(Chain):
        def prefill(self, groups: Sequence[RunaheadGroup]) -> str | None:
            raise EngineError("blocks stay in use")

    with pytest.raises(EngineError, match="stay in use"):
        Pod(tmp_path, Stuck(), Stuck()).meet([group(4)], [])


def test_all_measure_and_the_slowest_counts(tmp_path: Path) -> None:
    slow = Chain(steps=[(64, 0, 0.7), (128, 0, 0.9)], rate=2e9)
    pod = Pod(tmp_path, Chain(steps=[(64, 0, 0.5), (128, 0, 1.0)], rate=3e9), slow)
    pod.meet([], [], measure=True)
    assert pod.rounds[0].measured == (2e9, [(64, 0, 0.7), (128, 0, 1.0)])
    assert pod.is_over == [True, True]  # there was nothing else


def test_nothing_is_measured_of_steps_that_are_too_short(tmp_path: Path) -> None:
    pod = Pod(tmp_path, Chain(), Chain())
    pod.meet([], [], measure=True)
    assert pod.rounds[0].measured is None


def test_nobody_waits_for_a_replica_that_has_left(tmp_path: Path) -> None:
    pod = Pod(tmp_path, Chain(), Chain())
    pod.rounds[1].close()
    assert pod.rounds[0].meet(pod.chains[0], [group(4)]) == []
    assert pod.rounds[0].is_over


def test_nobody_waits_for_a_replica_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path;"
        "from batchllm_operator.runahead.meeting import Rounds;"
        "here = Rounds(Path(sys.argv[1]), 1, 2); print('here', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            meeting = Rounds(tmp_path, 0, 2)
            assert not meeting._has_ended(1)
        finally:
            process.kill()
        assert meeting.exchange("x") is None


def test_what_a_replica_said_before_it_left_counts(tmp_path: Path) -> None:
    first, second = Rounds(tmp_path, 0, 2), Rounds(tmp_path, 1, 2)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(second.exchange, "b")
        assert first.exchange("a") == ["a", "b"]
        assert theirs.result() == ["a", "b"]
    second.close()
    assert first.exchange("c") is None


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_replica_waits_until_it_is_stopped_or_too_long(
    tmp_path: Path, is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "_MOST_WAIT_S", 600.0 if is_stopped else 0.1)
    began = time.monotonic()
    assert Rounds(tmp_path, 0, 2).exchange("a", lambda: is_stopped) is None
    assert time.monotonic() - began < 300
    assert not list(tmp_path.glob("*.json"))  # one that comes later finds nobody
