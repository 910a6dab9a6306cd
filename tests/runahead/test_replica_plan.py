"""How a plan places groups on the replicas of a run, and what it has to know for that."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_job import DS, document_rows, fake_spec, job_fields, write_table

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.engine.device_profile import StoredProfiles
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.estimate import Target, engine_limits
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.plan.replicas import ReplicaPlanner
from batchllm_operator.prefixes import PrefixGroups
from batchllm_operator.report import format_plan
from batchllm_operator.runahead.groups import ChainProfile, chain_subject
from batchllm_operator.spec import JobSpec, parse_spec
from batchllm_operator.stored_plan.manifest import ReplicaPlacement

BLOCK = 64
LINK = {"runahead": "on", "link_bytes_per_s": 2e11}
# Prefill steps of a 7B model on a large GPU, about: 0.1 ms a token, more with what is before it.
STEPS = ((2048, 0, 0.21), (4096, 0, 0.43), (8192, 0, 0.9), (4096, 4096, 0.48), (8192, 8192, 1.1))


def spec(lake: Path, engine: dict[str, Any] | None = None, **planner: Any) -> JobSpec:
    """A job for two replicas whose steps hold 20,000 tokens."""
    own = {"backend": "vllm", "replicas": 2, "max_num_batched_tokens": 20_000, **(engine or {})}
    return parse_spec(job_fields(str(lake), engine=own, planner=planner), source="test spec")


def target(job: JobSpec) -> Target:
    return Target(find_gpu("H100"), MODEL_SHAPES["Mistral-7B"], engine_limits(job))


def place(job: JobSpec, *groups: tuple[int, int], outputs: int = 32) -> ReplicaPlacement | None:
    """Place groups of (prefix, members), each with 64 tokens of its own and some to generate."""
    planner = ReplicaPlanner.of(job, target(job))
    if planner is None:
        return None
    prefixes, sizes = (np.array(each, dtype=np.int64) for each in zip(*groups, strict=True))
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    lengths = np.repeat(prefixes, sizes) + 64
    return planner.place(
        PrefixGroups(
            np.arange(offsets[-1], dtype=np.int64), offsets, np.where(sizes > 1, prefixes, 0)
        ),
        lengths,
        np.full(len(lengths), outputs, dtype=np.int64),
        np.arange(100, 100 + len(groups), dtype=np.int64),
    )


def keep_profile(job: JobSpec, **changes: Any) -> None:
    """As a run that has measured."""
    fields: dict[str, Any] = {
        "subject": chain_subject(job),
        "link_bytes_per_s": 2e11,
        "steps": STEPS,
    }
    StoredProfiles.of(job).keep(ChainProfile(**{**fields, **changes}))


def test_a_giant_group_is_computed_by_all_replicas(tmp_path: Path) -> None:
    placement = place(spec(tmp_path, **LINK), (32_768, 8), (640, 2), (640, 2))
    assert placement is not None
    (giant,) = placement.spread
    assert giant.group_id == 100
    assert sum(giant.split) == 32_768
    assert giant.split[0] > giant.split[1] > 0
    assert giant.split[0] % BLOCK == 0
    assert placement.makespan_s < 0.95 * placement.without_chains_s
    assert placement.measure  # nobody has yet: the rate is the spec's


def test_a_request_that_shares_nothing_can_be_computed_by_all_replicas(tmp_path: Path) -> None:
    """Its prompt but the last token, which is left to be computed for the first output token."""
    placement = place(spec(tmp_path, **LINK), (32_704, 1), (640, 2))
    assert placement is not None
    assert [sum(group.split) for group in placement.spread] == [32_704 + 64 - 1]


@pytest.mark.parametrize(
    ("groups", "outputs", "first_groups"),
    [
        pytest.param([(32_000, 8), (32_768, 8), (32_000, 8)], 32, [101], id="the uneven rest"),
        pytest.param([(38_000, 8), *[(16, 1)] * 530], 1, [100], id="a giant beside small ones"),
        pytest.param([(640, 4)] * 100, 32, None, id="short prefixes are left as they come"),
    ],
)
def test_groups_of_all_replicas_come_first_and_no_others_are_named(
    tmp_path: Path, groups: list[tuple[int, int]], outputs: int, first_groups: list[int] | None
) -> None:
    placement = place(spec(tmp_path, **LINK), *groups, outputs=outputs)
    assert (placement.first_groups if placement else None) == first_groups


def test_a_prefix_that_steps_dont_hold_isnt_chained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert place(spec(tmp_path, {"max_num_batched_tokens": 8192}, **LINK), (32_768, 8)) is None
    assert "raise engine.max_num_batched_tokens" in caplog.text
    caplog.clear()
    for other in ({"max_num_batched_tokens": 20_000}, {"tensor_parallel_size": 2}):
        place(spec(tmp_path, other), (32_768, 8))
    assert not caplog.text


GIANT, SMALL = (32_768, 8), (640, 2)
MEASURED: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("planner", "engine", "profile", "groups", "num_chained", "measures"),
    [
        pytest.param(LINK, {}, None, [GIANT, GIANT], 0, False, id="both replicas are busy"),
        pytest.param(
            {"runahead": "on", "link_bytes_per_s": 1e8},
            {},
            None,
            [GIANT, SMALL],
            0,
            False,
            id="slow",
        ),
        pytest.param({}, {}, None, [GIANT, SMALL], 0, True, id="nobody knows the link"),
        pytest.param({}, {}, None, [GIANT, GIANT], 0, False, id="an ideal link wouldn't pay"),
        pytest.param({}, {}, MEASURED, [GIANT, SMALL], 1, False, id="measured"),
        pytest.param(
            {}, {}, {"link_bytes_per_s": 1e8}, [GIANT, SMALL], 0, False, id="measured slow"
        ),
        pytest.param({"runahead": "off"}, {}, MEASURED, [GIANT, SMALL], 0, False, id="off"),
        *(
            pytest.param({}, engine, MEASURED, [GIANT, SMALL], 0, False, id=f"no chain: {name}")
            for name, engine in (
                ("tensor parallel", {"tensor_parallel_size": 2}),
                ("connector", {"extra_args": {"kv_transfer_config": {"kv_connector": "Other"}}}),
                ("speculative", {"extra_args": {"speculative_config": {"method": "ngram"}}}),
            )
        ),
    ],
)
def test_chains_are_for_links_that_are_known_and_pay(
    tmp_path: Path,
    planner: dict[str, Any],
    engine: dict[str, Any],
    profile: dict[str, Any] | None,
    groups: list[tuple[int, int]],
    num_chained: int,
    measures: bool,
) -> None:
    job = spec(tmp_path, engine, **planner)
    if profile is not None:
        keep_profile(job, **profile)
    placement = place(job, *groups)
    found = (len(placement.spread), placement.measure) if placement else (0, False)
    assert found == (num_chained, measures)
    if placement and num_chained:
        assert placement.makespan_s > 1.5, "by the measured steps, longer than the roofline's"


@pytest.mark.parametrize("other", [{"replicas": 4}, {"dtype": "float16"}])
def test_what_was_measured_otherwise_does_not_count(tmp_path: Path, other: dict[str, Any]) -> None:
    keep_profile(spec(tmp_path, other))
    placement = place(spec(tmp_path), GIANT, SMALL)
    assert placement is not None and placement.measure


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("link_bytes_per_s", 1e-300),
        ("link_bytes_per_s", 1e300),
        ("steps", [[2048, 0, 1e-300], [4096, 0, 0.4], [8192, 0, 0.9]]),
        ("steps", [[2048, 0, 0.2], [4096, 0, 0.4], [1 << 60, 0, 0.9]]),
        ("steps", [[2048, 0, 0.2], [4096, 0, 0.2], [8192, 0, 0.2]]),  # says nothing
    ],
)
def test_a_profile_that_cant_be_one_doesnt_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    """Whoever can write to the lake: predictions by it would overflow."""
    job = spec(tmp_path)
    keep_profile(job)
    (path,) = (tmp_path / "out" / "_batchllm" / "profiles").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), name: value}), "utf-8")
    placement = place(job, (32_768, 8), (640, 2))
    assert placement is not None
    assert placement.measure
    assert "doesn't count" in caplog.text


def test_on_needs_to_know_the_link(tmp_path: Path) -> None:
    job = spec(tmp_path, runahead="on")
    with pytest.raises(SpecError, match="link_bytes_per_s"):
        ReplicaPlanner.of(job, target(job))
    keep_profile(job)
    assert ReplicaPlanner.of(job, target(job)) is not None


def test_on_needs_something_to_predict_with(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="target_gpu"):
        ReplicaPlanner.of(spec(tmp_path, **LINK), None)
    assert ReplicaPlanner.of(spec(tmp_path), None) is None


PLACED = ReplicaPlacement.model_validate(
    {
        "num_replicas": 2,
        "spread": [{"group_id": 0, "split": [64, 32]}],
        "makespan_s": 3.0,
        "without_chains_s": 4.5,
    }
)


@pytest.fixture
def placing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of the fake engine, whose replicas form no chain, are placed nevertheless."""

    def place(self: ReplicaPlanner, *args: Any) -> ReplicaPlacement:
        return PLACED.model_copy(update={"measure": self.wants_profile})

    monkeypatch.setattr(ReplicaPlanner, "place", place)
    planner = ReplicaPlanner.of(spec(tmp_path), target(spec(tmp_path)))
    monkeypatch.setattr(ReplicaPlanner, "of", lambda spec, target: planner)
    write_table(tmp_path / "documents", document_rows(6, 3))


def test_replicas_change_neither_the_plan_nor_its_files(tmp_path: Path, placing: None) -> None:
    """What is paid for stays paid for when a run gets more GPUs."""
    one = plan_job(fake_spec(tmp_path), DS)
    two = plan_job(fake_spec(tmp_path, engine={"replicas": 2}), DS)
    assert two.manifest.plan_id == one.manifest.plan_id
    assert two.manifest.files == one.manifest.files
    assert all(shard.replicas is None for shard in one.manifest.shards)
    assert all(shard.replicas is not None for shard in two.manifest.shards)
    assert "2 replicas share a shard" in format_plan(two.manifest, "uri")
    assert "replicas" not in format_plan(one.manifest, "uri")


def test_one_shard_of_a_plan_measures(tmp_path: Path, placing: None) -> None:
    """A run that measures has the connector in all of its engines, to its end."""
    two = fake_spec(tmp_path, planner={"num_shards": 3}, engine={"replicas": 2})
    plan = plan_job(two, DS).manifest
    measured = [shard.replicas.measure for shard in plan.shards if shard.replicas is not None]
    assert measured == [True, False, False]


def test_what_is_printed_says_what_chains_are_to_gain(tmp_path: Path, placing: None) -> None:
    job = fake_spec(tmp_path, planner={"num_shards": 1}, engine={"replicas": 2})
    text = format_plan(plan_job(job, DS).manifest, "uri")
    assert "all compute 1 prefix together: the longest such shard takes 3 s, not 4.5 s" in text
    assert "the run will measure how fast replicas hand KV on" in text


@pytest.mark.parametrize(
    "spread",
    [
        [{"group_id": 0, "split": [64, 32, 8]}],
        [{"group_id": 0, "split": [64, 0]}],
        [{"group_id": 0, "split": [64, 32]}] * 2,
        [{"group_id": -1, "split": [64, 32]}],
    ],
)
def test_a_placement_that_contradicts_itself_is_refused(spread: list[dict[str, Any]]) -> None:
    fields = {"num_replicas": 2, "makespan_s": 1.0, "without_chains_s": 1.0, "spread": spread}
    with pytest.raises(ValueError, match=r"spread|split|twice"):
        ReplicaPlacement.model_validate(fields)
