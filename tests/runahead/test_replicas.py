"""Several replicas as one engine; they are doubles, without vLLM."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runahead.test_placing import group
from support.fork_server import ForkedProcess, ForkServer

from batchllm_operator.engine import (
    ChainedGroup,
    ChainJob,
    EngineDiedError,
    EngineJob,
    EngineOutput,
    EngineRequest,
    start_engine,
)
from batchllm_operator.engine.device_profile import DeviceProfile
from batchllm_operator.engine.replicas import process as replica_process
from batchllm_operator.engine.replicas.chain_profile import ChainProfile, chain_subject
from batchllm_operator.engine.replicas.engine import ReplicaEngines
from batchllm_operator.errors import EngineError, ModelError, SpecError
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.runahead.plan import RunaheadGroup

TESTS = Path(__file__).parent.parent


def spec(num_replicas: int = 2, **planner: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "spec_version": 1,
            "name": "replicas",
            "input": {"uri": "/in", "key": "id"},
            "prompt": {"template": "{text}"},
            "model": {"path": "/model"},
            "output": {"uri": "/out"},
            "engine": {"replicas": num_replicas},
            "planner": planner,
        }
    )


class Doubles:
    """Replicas to be started, and what they were told."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        self.opened: list[ReplicaEngines] = []
        self.behave({})

    def behave(self, by_rank: dict[int, dict[str, Any]]) -> None:
        """What replicas that are started from now on do otherwise."""
        told = {"log": str(self._folder), **{str(rank): own for rank, own in by_rank.items()}}
        self._patch.setenv("REPLICA_DOUBLE", json.dumps(told))

    def start(self, num_replicas: int = 2, **job: Any) -> ReplicaEngines:
        engine = ReplicaEngines(spec(num_replicas), EngineJob(max_model_len=1024, **job))
        self.opened.append(engine)
        return engine

    def told(self, rank: int) -> list[list[Any]]:
        """What a replica was told, in order: kind and content."""
        path = self._folder / f"{rank}.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def calls(self, rank: int) -> list[str]:
        """The kinds of these."""
        return [kind for kind, _ in self.told(rank)]


@pytest.fixture
def cold_doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doubles]:
    monkeypatch.setattr(replica_process, "_MODULE", "support.replica_double")
    monkeypatch.setattr(replica_process, "_END_STARTING_S", 60.0)  # a busy machine
    folders = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    found = Doubles(tmp_path, monkeypatch)
    yield found
    for engine in found.opened:
        engine.close()


@pytest.fixture
def doubles(
    cold_doubles: Doubles, commands: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> Doubles:
    """The same, forked."""

    def fork(command: list[str], *, pass_fds: list[int], **options: Any) -> ForkedProcess:
        # Their end of the socket comes as standard output, which doubles don't use.
        arguments = ["1", command[-1]]
        return commands.start(command[3], arguments, env=options["env"], stdout=pass_fds[0])

    popen = SimpleNamespace(Popen=fork, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=0)
    monkeypatch.setattr(replica_process, "subprocess", popen)
    return cold_doubles


def texts(outputs: list[EngineOutput]) -> dict[int, str | None]:
    return {output.request_idx: output.text for output in outputs}


def chained(
    group_id: int, size: int, first_idx: int, prefix: int = 160, split: tuple[int, ...] = (96, 64)
) -> tuple[list[EngineRequest], ChainedGroup]:
    """A group that is to be computed by a chain."""
    requests = group(group_id, size, first_idx=first_idx, prefix=prefix)
    tokens = requests[0].prompt_token_ids[: sum(split)]
    return requests, ChainedGroup(RunaheadGroup(group_id, tokens, split), size)


def test_all_requests_are_answered_once(doubles: Doubles) -> None:
    requests = [*group(0, 20), *group(1, 5, first_idx=20), *group(2, 6, first_idx=25)]
    outputs = list(doubles.start().stream(iter(requests)))
    assert sorted(output.request_idx for output in outputs) == list(range(31))
    assert all(output.num_cached_tokens == 64 for output in outputs)


def test_a_group_is_on_one_replica(doubles: Doubles) -> None:
    """Of groups that have room there, however fast the replicas are."""
    requests = [*group(0, 3), *group(1, 4, first_idx=3), *group(2, 5, first_idx=7)]
    found = texts(list(doubles.start().stream(iter(requests))))
    for members in (range(3), range(3, 7), range(7, 12)):
        assert len({found[idx] for idx in members}) == 1


def test_requests_are_taken_as_they_are_needed(doubles: Doubles) -> None:
    """Two replicas that hold eight each have no more than sixteen, and one that waits."""
    taken = []

    def requests() -> Iterator[EngineRequest]:
        for request in group(0, 200):
            taken.append(request.request_idx)
            yield request

    answered = 0
    for _ in doubles.start(spread_groups=frozenset({0})).stream(requests()):
        answered += 1
        assert len(taken) - answered <= 17
    assert answered == 200


def test_a_spread_group_is_on_all_replicas(doubles: Doubles) -> None:
    engine = doubles.start(3, spread_groups=frozenset({0}))
    found = texts(list(engine.stream(iter(group(0, 7)))))
    assert [found[idx] for idx in range(7)] == ["0/3", "1/2", "2/2", "0/3", "1/2", "2/2", "0/3"]


def test_an_engine_can_be_given_more_than_one_stream(doubles: Doubles) -> None:
    engine = doubles.start()
    assert len(list(engine.stream(iter(group(0, 3))))) == 3
    assert len(list(engine.stream(iter(group(1, 3, first_idx=3))))) == 3
    assert list(engine.stream(iter(()))) == []


@pytest.mark.parametrize("how", ["dies_at", "killed_at"])
def test_a_replica_that_dies_takes_all_along_and_its_own_requests_are_suspected_first(
    doubles: Doubles, how: str
) -> None:
    doubles.behave({1: {how: [9]}})
    engine = doubles.start()
    requests = [*group(0, 4), *group(1, 8, first_idx=4)]
    answered: list[int] = []
    with pytest.raises(EngineDiedError, match="replica 1") as caught:
        for output in engine.stream(iter(requests)):
            answered.append(output.request_idx)
    suspects = [request.request_idx for request in caught.value.in_flight]
    assert 9 in suspects
    assert suspects[0] >= 4
    # What was taken and not answered, each once.
    assert sorted([*answered, *suspects]) == list(range(len(answered) + len(suspects)))
    assert all(replica._process.poll() is not None for replica in engine._replicas)


def test_what_one_replica_answered_is_kept_when_another_is_found_dead_with_it(
    doubles: Doubles,
) -> None:
    """Both are found in one look: the outputs of the first must not go down with the second."""
    doubles.behave({1: {"dies_at": [4]}})
    engine = doubles.start()
    wait = engine._receive

    def receive_late(outputs: list[EngineOutput]) -> None:
        for replica in engine._replicas:  # both have spoken
            assert select.select([replica.fileno()], [], [], 30)[0]
        wait(outputs)

    engine._receive = receive_late  # type: ignore[method-assign]
    answered: list[int] = []
    with pytest.raises(EngineDiedError, match="replica 1 failed: RuntimeError: out of") as caught:
        for output in engine.stream(iter([*group(0, 4), *group(1, 1, first_idx=4)])):
            answered.append(output.request_idx)
    suspects = [request.request_idx for request in caught.value.in_flight]
    assert answered
    assert sorted([*answered, *suspects]) == list(range(5))


@pytest.mark.parametrize(
    ("how", "reason"),
    [("killed_at", "ended by signal 9"), ("dies_at", "failed: RuntimeError: out of luck")],
)
def test_a_request_that_a_dead_replica_didnt_take_is_one_suspect(
    doubles: Doubles, how: str, reason: str
) -> None:
    """It can't be sent any more: it is neither lost nor there twice."""
    doubles.behave({0: {how: [0]}})
    engine = doubles.start()

    def requests() -> Iterator[EngineRequest]:
        for request in group(0, 3):
            yield request
            engine._replicas[0]._process.wait(30)

    with pytest.raises(EngineDiedError, match=f"replica 0 {reason}") as caught:
        list(engine.stream(requests()))
    assert [request.request_idx for request in caught.value.in_flight] == [0, 1]


def test_the_dead_ones_requests_are_suspected_before_all_others(doubles: Doubles) -> None:
    doubles.behave({0: {"silent": True}, 1: {"dies_at": [2]}})
    engine = doubles.start()
    with pytest.raises(EngineDiedError, match="replica 1") as caught:
        list(engine.stream(iter([*group(0, 2), *group(1, 2, first_idx=2)])))
    suspects = [request.request_idx for request in caught.value.in_flight]
    assert suspects[0] == 2
    assert sorted(suspects) == [0, 1, 2, 3]


def test_a_row_that_kills_a_replica_costs_only_itself(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles.behave({rank: {"dies_at": [5]} for rank in (0, 1)})
    engine = start_engine(spec(), EngineJob(max_model_len=1024))
    try:
        outputs = list(engine.stream(iter(group(0, 8))))
    finally:
        engine.close()
    errors = {output.request_idx: output.error for output in outputs}
    assert sorted(errors) == list(range(8))
    assert [idx for idx, error in errors.items() if error] == [5]
    assert "out of luck" in str(errors[5])


@pytest.mark.parametrize(
    ("kind", "error"), [("SpecError", SpecError), ("ModelError", ModelError), ("X", EngineError)]
)
def test_a_replica_that_cant_start_says_why_and_none_is_left(
    doubles: Doubles, kind: str, error: type[Exception]
) -> None:
    doubles.behave({1: {"failed": [kind, "no such argument"]}})
    with pytest.raises(error, match="no such argument"):
        doubles.start()
    assert doubles.calls(0)[-1] == "closed"


def test_a_replica_that_dies_while_it_starts_is_an_engine_that_cant_start(doubles: Doubles) -> None:
    doubles.behave({0: {"starts": "never"}})
    with pytest.raises(EngineError, match="can't start: replica 0 ended by signal 9"):
        doubles.start()


def test_a_replica_that_dies_when_it_has_started_keeps_the_others_from_waiting_for_it(
    doubles: Doubles,
) -> None:
    """While they open the chain, they would wait for ten minutes."""
    doubles.behave({0: {"ends": "started"}, 1: {"starts": "late"}})
    with pytest.raises(EngineError, match="can't start: replica 0 ended"):
        doubles.start()


def test_replicas_end_when_the_engine_is_closed(doubles: Doubles) -> None:
    engine = doubles.start()
    engine.close()
    assert [replica._process.poll() for replica in engine._replicas] == [0, 0]
    assert [doubles.calls(rank)[-1] for rank in (0, 1)] == ["closed", "closed"]


def test_replicas_that_dont_end_share_the_time_that_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stuck:
        now, hung_up = 0.0, 0

        def disconnect(self) -> None:
            Stuck.hung_up += 1

        def close(self, patience_s: float) -> None:
            assert Stuck.hung_up == 3
            Stuck.now += patience_s

    monkeypatch.setattr(replica_process.time, "monotonic", lambda: Stuck.now)
    replica_process.close_replicas([Stuck(), Stuck(), Stuck()], 60.0)  # type: ignore[list-item]
    assert Stuck.now == 60.0


def test_nothing_in_the_working_directory_shadows_a_package(
    cold_doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cold_doubles.start()
    path = cold_doubles.told(1)[0][1]["path"]
    assert not {"", ".", str(tmp_path)} & set(path)


def test_a_device_profile_is_looked_up_and_kept_in_the_run(doubles: Doubles) -> None:
    profile = DeviceProfile(subject={"device": "x"}, steps=((64, 0.1),), num_kv_blocks=9)
    other = profile.model_copy(update={"subject": {"device": "y"}})

    class Store:
        def __init__(self) -> None:
            self.kept: list[DeviceProfile] = []

        def find(self, subject: Any) -> DeviceProfile | None:
            return profile if subject == profile.subject else None

        def keep(self, kept: DeviceProfile) -> None:
            self.kept.append(kept)

    store = Store()
    told = {"subject": {"device": "y"}, "profile": other.model_dump(mode="json")}
    doubles.behave({0: {"subject": dict(profile.subject)}, 1: told})
    doubles.start(profiles=store)
    assert ["found", profile.model_dump(mode="json")] in doubles.told(0)
    assert ["found", None] in doubles.told(1)
    assert store.kept == [other]


def test_each_replica_has_a_folder_for_its_traces(doubles: Doubles, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    doubles.start(trace_folder=folder, num_requests=7)
    jobs = [doubles.told(rank)[0][1]["job"] for rank in (0, 1)]
    assert [job["trace_folder"] for job in jobs] == [str(folder), str(folder / "replica-1")]
    assert (folder / "replica-1").is_dir()
    assert [job["num_requests"] for job in jobs] == [4, 4]


class TestChains:
    """Prefixes that all replicas compute together."""

    def test_a_prefix_is_computed_before_its_members_come(self, doubles: Doubles) -> None:
        requests, marked = chained(0, 6, 0)
        engine = doubles.start(chain=ChainJob((marked,)), spread_groups=frozenset({0}))
        outputs = list(engine.stream(iter([*requests, *group(1, 2, first_idx=6)])))
        assert len(outputs) == 8
        for rank in (0, 1):
            calls = doubles.calls(rank)
            assert calls[:3] == ["start", "prefill", "requests"]
            assert calls.count("prefill") == 1
            ((_, told),) = [each for each in doubles.told(rank) if each[0] == "prefill"]
            assert told == [{"group_id": 0, "prefix_token_ids": [0] * 160, "split": [96, 64]}]
        settings = [doubles.told(rank)[0][1]["chain"] for rank in (0, 1)]
        assert [each["rank"] for each in settings] == [0, 1]
        assert settings[0]["store"] == settings[1]["store"]

    def test_what_was_computed_together_is_charged_to_the_group_once(
        self, doubles: Doubles
    ) -> None:
        """A member finds 160 tokens in the cache; the first pays for the 160 computed."""
        requests, marked = chained(0, 6, 0)
        engine = doubles.start(chain=ChainJob((marked,)), spread_groups=frozenset({0}))
        outputs = list(engine.stream(iter(requests)))
        assert sorted(output.num_cached_tokens for output in outputs) == [0] + [160] * 5

    def test_what_each_replica_had_to_compute_itself_is_charged_to_as_many_members(
        self, doubles: Doubles
    ) -> None:
        """A member can't pay for more than it found."""
        doubles.behave({rank: {"computes": 160, "phase_failure": "late"} for rank in (0, 1)})
        requests, marked = chained(0, 6, 0)
        engine = doubles.start(chain=ChainJob((marked,)), spread_groups=frozenset({0}))
        outputs = list(engine.stream(iter(requests)))
        assert sorted(output.num_cached_tokens for output in outputs) == [0, 0] + [160] * 4

    def test_groups_that_fit_are_computed_in_one_phase(self, doubles: Doubles) -> None:
        first, one = chained(0, 4, 0)
        second, two = chained(1, 4, 4)
        engine = doubles.start(chain=ChainJob((one, two)), spread_groups=frozenset({0, 1}))
        assert len(list(engine.stream(iter([*first, *second])))) == 8
        phases = [content for kind, content in doubles.told(0) if kind == "prefill"]
        assert [[each["group_id"] for each in phase] for phase in phases] == [[0, 1]]

    @pytest.mark.parametrize(
        ("size", "prefix", "split"), [(14, 160, (96, 64)), (4, 480, (240, 240))]
    )
    def test_others_have_a_phase_of_their_own_when_all_replicas_are_idle(
        self, doubles: Doubles, size: int, prefix: int, split: tuple[int, ...]
    ) -> None:
        """Sixteen requests are looked ahead, and half of 100 blocks of 16 may be prefixes."""
        first, one = chained(0, size, 0, prefix, split)
        second, two = chained(1, size, size, prefix, split)
        engine = doubles.start(chain=ChainJob((one, two)), spread_groups=frozenset({0, 1}))
        answered = []
        for output in engine.stream(iter([*first, *second])):
            answered.append(output.request_idx)
        assert sorted(answered) == list(range(2 * size))
        for rank in (0, 1):
            kinds = doubles.calls(rank)
            again = len(kinds) - 1 - kinds[::-1].index("prefill")
            before = [
                each
                for kind, told in doubles.told(rank)[:again]
                if kind == "requests"
                for each in told
            ]
            assert {each["group_id"] for each in before} == {0}
            assert kinds.count("prefill") == 2
        # All of the first group were answered before anything of the second was.
        assert max(answered.index(idx) for idx in range(size)) == size - 1

    def test_a_group_that_the_engine_cant_take_is_left_to_each_replica(
        self, doubles: Doubles, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests, marked = chained(0, 4, 0, 600, (304, 296))  # no step has 304 tokens
        engine = doubles.start(chain=ChainJob((marked,)), spread_groups=frozenset({0}))
        assert len(list(engine.stream(iter(requests)))) == 4
        assert "prefill" not in doubles.calls(0)
        assert "max_num_batched_tokens" in caplog.text

    def test_a_prefix_that_fills_the_cache_isnt_computed_ahead(
        self, doubles: Doubles, caplog: pytest.LogCaptureFixture
    ) -> None:
        doubles.behave({1: {"num_blocks": 20}})  # its GPU has less memory left
        requests, marked = chained(0, 4, 0, 320, (160, 160))
        engine = doubles.start(chain=ChainJob((marked,)), spread_groups=frozenset({0}))
        assert len(list(engine.stream(iter(requests)))) == 4
        assert "prefill" not in doubles.calls(0)
        assert "KV cache" in caplog.text

    def test_a_chain_that_cant_open_stops_nothing(
        self, doubles: Doubles, caplog: pytest.LogCaptureFixture
    ) -> None:
        doubles.behave({1: {"chain_failure": "no route to replica 0"}})
        requests, marked = chained(0, 4, 0)
        kept: list[ChainProfile] = []
        engine = doubles.start(chain=ChainJob((marked,), kept.append), spread_groups=frozenset({0}))
        assert len(list(engine.stream(iter(requests)))) == 4
        assert "prefill" not in doubles.calls(0)
        assert "no route to replica 0" in caplog.text
        assert not kept

    def test_a_phase_that_fails_is_the_last_one(
        self, doubles: Doubles, caplog: pytest.LogCaptureFixture
    ) -> None:
        doubles.behave({0: {"phase_failure": "replica 1 was too late"}})
        first, one = chained(0, 14, 0)
        second, two = chained(1, 14, 14)
        engine = doubles.start(chain=ChainJob((one, two)), spread_groups=frozenset({0, 1}))
        assert len(list(engine.stream(iter([*first, *second])))) == 28
        assert doubles.calls(1).count("prefill") == 1
        assert "replica 1 was too late" in caplog.text

    def test_engines_after_a_death_have_no_chain(self, doubles: Doubles) -> None:
        doubles.behave({1: {"dies_in_phase": True}})
        requests, marked = chained(0, 4, 0)
        job = EngineJob(1024, chain=ChainJob((marked,)), spread_groups=frozenset({0}))
        engine = start_engine(spec(), job)
        try:
            outputs = list(engine.stream(iter(requests)))
        finally:
            engine.close()
        assert sorted(output.request_idx for output in outputs) == [0, 1, 2, 3]
        assert all(output.error is None for output in outputs)
        starts = [content["chain"] for kind, content in doubles.told(0) if kind == "start"]
        assert [each is not None for each in starts] == [True, False]

    @pytest.mark.parametrize(
        ("own", "reason"),
        [
            ({"refuses_chain": ["SpecError", "no full attention in all layers"]}, "full attention"),
            ({"refuses_chain": ["EngineError", "no such connector"]}, "no such connector"),
            ({"dies_measuring": True}, "replica 1 ended by signal 9"),
        ],
    )
    def test_a_chain_that_keeps_replicas_from_starting_is_left_out(
        self, doubles: Doubles, caplog: pytest.LogCaptureFixture, own: dict[str, Any], reason: str
    ) -> None:
        """Nobody has asked for one: with auto, any job's plan may want to measure."""
        doubles.behave({1: own})
        kept: list[ChainProfile] = []
        job = EngineJob(1024, num_requests=6, chain=ChainJob((), kept.append))
        engine = start_engine(spec(), job)
        try:
            outputs = list(engine.stream(iter(group(0, 6))))
        finally:
            engine.close()
        assert sorted(texts(outputs)) == list(range(6))
        assert not kept
        assert reason in caplog.text
        starts = [content for kind, content in doubles.told(0) if kind == "start"]
        assert [start["chain"] is not None for start in starts] == [True, False]
        assert [start["job"]["num_requests"] for start in starts] == [3, 3]

    def test_what_is_measured_is_that_of_the_slowest_replica(self, doubles: Doubles) -> None:
        doubles.behave(
            {
                0: {"rate": 2e9, "steps": [[64, 0, 0.5], [128, 0, 1.0]]},
                1: {"rate": 2e9, "steps": [[64, 0, 0.7], [128, 0, 0.9]]},
            }
        )
        kept: list[ChainProfile] = []
        doubles.start(chain=ChainJob((), kept.append, chain_subject(spec())))
        (profile,) = kept
        assert profile.link_bytes_per_s == 2e9
        assert profile.steps == ((64, 0, 0.7), (128, 0, 1.0))
        assert profile.subject == chain_subject(spec())
        assert ChainProfile.model_validate_json(profile.model_dump_json()) == profile

    def test_nothing_is_kept_of_steps_that_are_too_short(
        self, doubles: Doubles, caplog: pytest.LogCaptureFixture
    ) -> None:
        doubles.behave({0: {"steps": []}, 1: {"steps": []}})
        kept: list[ChainProfile] = []
        doubles.start(chain=ChainJob((), kept.append))
        assert not kept
        assert "too short" in caplog.text


@pytest.mark.parametrize("change", [{"target_gpu": "A100"}, {"num_shards": 2}])
def test_a_chain_is_measured_again_for_another_gpu_and_for_nothing_else(
    change: dict[str, Any],
) -> None:
    is_same = chain_subject(spec(**change)) == chain_subject(spec())
    assert is_same == ("target_gpu" not in change)
    assert chain_subject(spec(3)) != chain_subject(spec())


def test_a_request_keeps_its_place_among_the_suspects(doubles: Doubles) -> None:
    """The one that waits for room was taken, too, and has no output yet."""
    doubles.behave({0: {"dies_at": [0], "max_in_flight": 1}, 1: {"max_in_flight": 1}})
    requests = [replace(each, group_size=3) for each in group(0, 3)]
    with pytest.raises(EngineDiedError) as caught:
        list(doubles.start().stream(iter(requests)))
    assert [request.request_idx for request in caught.value.in_flight][:1] == [0]
