"""The tuner: its choices on given times, and the whole of it with a timer that invents them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from batchllm_kernels import tune
from batchllm_kernels.prefix_attention import ArchConfig, Gate, load_config
from batchllm_kernels.prefix_attention.config import (
    ARCHITECTURES,
    HEAD_DIMS,
    LaunchConfig,
    SplitRule,
    Tiling,
    config_file,
    parse_config,
    to_json,
)
from batchllm_kernels.tuning.bench import DeviceBench
from batchllm_kernels.tuning.candidates import grid_for, launch_label, steps_ahead
from batchllm_kernels.tuning.selection import choose, faster_half, gate_table, relative_time
from batchllm_kernels.tuning.tuner import Progress, Tuner, TuningError, gate_workloads
from batchllm_kernels.tuning.workloads import (
    BLOCK_SIZE,
    Group,
    Workload,
    check_workload,
    launch_workloads,
    lay_out,
    shape_for,
    split_workloads,
    table_blocks_for,
)

KEY = 64, 16
SMALL = [
    Workload("alone", (Group(1, 0, 20), Group(1, 16, 3))),
    Workload("shared", (Group(3, 32, 5),)),
]
FASTER = LaunchConfig(Tiling(16, 16, 1), Tiling(32, 16, 1), 4, 4, {})
SLOWER = LaunchConfig(Tiling(16, 64, 1), Tiling(32, 32, 1), 4, 4, {})


class FakeBench:
    """Times by the step of the narrow tiling and by who shares; counts what it is asked."""

    def __init__(self, error: Callable[[LaunchConfig], float] = lambda launch: 0.0) -> None:
        self.error_of = error
        self.timed: list[tuple[str, int]] = []

    def error(self, config: ArchConfig) -> float:
        return self.error_of(config.launch[KEY])

    def time(self, config: ArchConfig, workload: Workload, repetitions: int) -> float:
        launch = config.launch[KEY]
        self.timed.append((launch_label(launch), repetitions))
        group = workload.groups[0]
        shared = config.gate.min_prefix_by_degree()[min(group.num_requests, 64)]
        milliseconds = float(launch.narrow.block_n + config.split.min_tokens)
        if group.num_requests > 1 and group.num_prefix_tokens >= shared:
            # A merge costs as much as 1000 tokens, and each member but one saves the prefix.
            saved = group.num_prefix_tokens * (group.num_requests - 1)
            milliseconds += 1000 - saved
        return milliseconds + 1e6


class Clock:
    """Seconds that pass only when it is looked at."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def tuner(clock: Clock | None = None) -> Tuner:
    return Tuner(load_config("cpu"), Progress(io.StringIO(), clock or Clock()))


def test_relative_time_is_a_geometric_mean() -> None:
    assert relative_time({"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0}) == pytest.approx(1.0)
    assert relative_time({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 4.0}) == pytest.approx(0.5)
    for timings in ({}, {"a": 1.0, "c": 1.0}):
        with pytest.raises(ValueError, match="baseline"):
            relative_time(timings, {"a": 1.0, "b": 1.0})


def test_faster_half_keeps_the_current_settings() -> None:
    times = {"now": 1.0, "a": 0.9, "b": 2.0, "c": 0.5}
    assert faster_half(times, ["now"]) == ["c", "a", "now"]
    assert faster_half({"now": 1.0, "a": 3.0}, ["now"]) == ["now", "a"]
    assert faster_half({"now": 1.0}, ["now"]) == ["now"]


@pytest.mark.parametrize(
    ("alone", "shared", "expected"),
    [
        (1.0, 0.8, "new"),
        (1.02, 0.8, "new"),
        (1.03, 0.5, "now"),  # a gain with prefixes doesn't pay for a loss without
        (1.0, 0.99, "now"),  # less than the spread of timings
        (0.9, 1.2, "now"),
    ],
)
def test_choice(alone: float, shared: float, expected: str) -> None:
    measured = {"now": {"a": 1.0, "s": 1.0}, "new": {"a": alone, "s": shared}}
    assert choose(measured, "now", ["a"]) == expected


def test_choice_of_the_fastest() -> None:
    measured = {"now": {"a": 4.0}, "x": {"a": 3.0}, "y": {"a": 2.0}, "z": {"a": 5.0}}
    assert choose(measured, "now", []) == "y"


def timings_from(gains: dict[int, dict[int, float]]) -> dict[tuple[int, int], tuple[float, float]]:
    return {(d, n): (1.0 - gain, 1.0) for d, row in gains.items() for n, gain in row.items()}


def test_gate_opens_where_sharing_pays_from_there_on() -> None:
    gains = {
        2: {64: -0.5, 512: 0.1, 1024: 0.02, 2048: 0.2},
        4: {64: -0.1, 512: 0.03, 1024: 0.1, 2048: 0.3},
        8: {64: -0.1, 512: 0.0, 1024: 0.1, 2048: 0.3},
        16: {64: 0.04, 512: 0.1, 1024: 0.2, 2048: 0.4},
    }
    # Degree 8 needs no longer prefix than 4: it is left to its entry.
    assert gate_table(timings_from(gains)) == {2: 2048, 4: 512, 16: 64}


def test_gate_that_never_opens() -> None:
    assert gate_table(timings_from({2: {64: 0.0, 128: -1.0}})) == {}
    assert gate_table(timings_from({2: {64: 0.5, 128: 0.0}, 4: {64: 0.5, 128: 0.5}})) == {4: 64}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_bits", [8, 16])
def test_grid_is_of_settings_that_may_ship(arch: str, head_dim: int, kv_bits: int) -> None:
    grid = grid_for(ARCHITECTURES[arch], head_dim, kv_bits)
    config = load_config(arch)
    for narrow in grid.narrow:
        for wide, num_warps, options in grid.wide:
            launch = LaunchConfig(narrow, wide, num_warps, 1, options)
            entry = {(head_dim, kv_bits): launch}
            to_json(replace(config, launch=entry))  # raises on what config.py refuses
    assert len(grid.narrow) >= 2


def test_steps_ahead() -> None:
    assert [steps_ahead(n, is_amd=False) for n in range(1, 8)] == [0, 0, 1, 2, 3, 4, 5]
    assert [steps_ahead(n, is_amd=True) for n in range(1, 6)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "workload",
    [*launch_workloads(), *split_workloads(), *gate_workloads(), check_workload()],
    ids=lambda workload: workload.name,
)
def test_workloads_fit_their_cache(workload: Workload) -> None:
    blocks = table_blocks_for([workload])
    batch = lay_out(workload, workload.num_blocks, blocks, torch.Generator().manual_seed(0))
    used = [
        row[: -(-length // BLOCK_SIZE)]
        for row, length in zip(batch.block_table, batch.seq_lens.tolist(), strict=True)
    ]
    assert len(torch.cat(used).unique()) == workload.num_blocks
    assert batch.query_start_loc[-1] == workload.num_query_tokens
    assert batch.num_requests == workload.num_requests


def test_names_of_workloads_differ() -> None:
    for workloads in (launch_workloads(), split_workloads(), gate_workloads()):
        assert len({each.name for each in workloads}) == len(workloads)
    assert sum(each.shares_nothing for each in launch_workloads()) == 6


def test_settings_round_trip_byte_for_byte() -> None:
    for arch in ARCHITECTURES:
        assert to_json(load_config(arch)) == config_file(arch).read_text()


def test_whole_tuner_writes_settings_that_parse(tmp_path: Path) -> None:
    """With the kernel checked in Triton's interpreter, and times invented."""
    calls = []

    def timer(run: Callable[[], object], repetitions: int) -> float:
        run()
        calls.append(repetitions)
        return 1.0 + len(calls) / 1000

    shape = replace(shape_for(64, 16), num_q_heads=4, num_kv_heads=2)
    check = Workload("check", (Group(3, 16, 5), Group(1, 0, 7, 3)))
    cpu = torch.device("cpu")
    real = DeviceBench(shape, SMALL, cpu, timer, check=check)
    one = tuner()
    assert real.error(one.config) < 1e-2
    one.tune_launch(*KEY, [FASTER], real, budget_s=100, workloads=SMALL, rounds=(1,))
    assert calls == [1] * 4
    one.tune_launch(*KEY, [FASTER, SLOWER], FakeBench(), budget_s=100)
    one.tune_split(FakeBench(), rules=[SplitRule(32, 2), SplitRule(128, 2)])
    one.tune_gate(FakeBench())
    out = tmp_path / "cpu.json"
    out.write_text(to_json(replace(one.config, tuned_on="a test")))
    config = parse_config(json.loads(out.read_text()))
    assert config == replace(one.config, tuned_on="a test")
    json.dumps(one.raw)


def test_fastest_of_many_is_found_by_halving() -> None:
    bench, one = FakeBench(), tuner()
    current, fastest, *slow = (
        replace(FASTER, narrow=Tiling(16, block_n, 1))
        for block_n in (2**19, 2**16, *range(2**18, 2**18 + 7))
    )
    one.config = replace(one.config, launch={KEY: current})
    assert one.tune_launch(*KEY, [*slow, fastest], bench, budget_s=100) == fastest
    assert one.config.launch[KEY] == fastest
    by_round = [len({label for label, count in bench.timed if count == each}) for each in (3, 6)]
    assert by_round == [9, 5]
    assert (launch_label(fastest), 25) in bench.timed
    assert (launch_label(current), 25) in bench.timed


def test_wrong_results_are_left_out_whatever_their_time() -> None:
    one, bench = tuner(), FakeBench(lambda launch: float("nan") if launch == FASTER else 1e-3)
    before = one.config.launch[KEY]
    assert one.tune_launch(*KEY, [FASTER], bench, budget_s=100) == before
    assert launch_label(FASTER) not in {label for label, _ in bench.timed}


def test_current_settings_that_fail_stop_the_tuner() -> None:
    with pytest.raises(TuningError, match="settings in use"):
        tuner().tune_launch(*KEY, [FASTER], FakeBench(lambda launch: 0.5), budget_s=100)


def test_out_of_time_keeps_what_is_known() -> None:
    bench, one = FakeBench(), tuner(Clock(step=1.0))
    before = one.config.launch[KEY]
    assert one.tune_launch(*KEY, [SLOWER, FASTER], bench, budget_s=0.5) == before
    assert {label for label, _ in bench.timed} == {launch_label(before)}


def test_gate_and_split_from_times() -> None:
    one = tuner()
    one.tune_gate(FakeBench())
    # 3 % are 30000 tokens that aren't read: 15 * 4096 - 1000, 31 * 1024 - 1000.
    member_tokens = load_config("cpu").gate.max_member_tokens
    assert one.config.gate == Gate({16: 4096, 32: 1024}, member_tokens)
    rule = one.tune_split(FakeBench(), rules=[SplitRule(2**15, 2)], workloads=SMALL)
    assert rule == load_config("cpu").split  # slower


def test_timing_without_a_gpu_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tune.main([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err
    monkeypatch.setattr(tune.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["--dry-run"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.fixture
def unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line on an sm100 on which nothing compiles but what is in use."""
    monkeypatch.setattr(tune.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "detect_arch", lambda device: "sm100")
    monkeypatch.setattr(tune, "chip_of", lambda device: None)
    monkeypatch.setattr(tune, "describe_device", lambda device, what: f"a fake: {what}")
    monkeypatch.setattr(tune, "_bench", lambda *_: FakeBench())
    monkeypatch.setattr(tune.Compiler, "shortlist", lambda *_: iter(()))


@pytest.mark.parametrize(("compiling_s", "timing_s"), [(20.0, 70.0), (80.0, 30.0), (200.0, 30.0)])
def test_compiling_counts_in_the_budget_and_the_best_come_first(
    unknown_gpu: None, monkeypatch: pytest.MonkeyPatch, compiling_s: float, timing_s: float
) -> None:
    clock = iter([1000.0, 1000.0 + compiling_s])
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
    found = [SimpleNamespace(launch=f"ranked {rank}", rank=rank) for rank in (1, 3, 2)]
    monkeypatch.setattr(tune.Compiler, "shortlist", lambda *_: iter(found))
    budgets, tried = [], []

    def note(
        one: Tuner, head_dim: int, kv_bits: int, candidates: list[str], *_: object, budget_s: float
    ) -> None:
        budgets.append(budget_s)
        tried.extend(candidates)

    monkeypatch.setattr(Tuner, "tune_launch", note)
    entry = ["--head-dim", "64", "--kv-bits", "16", "--start-from", "sm90", "--step", "launch"]
    assert tune.main([*entry, "--budget-s", "90", "--dry-run"]) == 0
    assert budgets == [timing_s]
    assert tried == ["ranked 3", "ranked 2", "ranked 1"]  # time may run out before the last


def test_command_writes_settings_for_a_new_gpu(unknown_gpu: None, tmp_path: Path) -> None:
    out, raw = tmp_path / "sm100.json", tmp_path / "raw.json"
    entry = ["--head-dim", "64", "--kv-bits", "16", "--out", str(out), "--json", str(raw)]
    assert tune.main(entry) == 2  # nothing to start from
    assert not out.exists()
    assert tune.main([*entry, "--start-from", "sm90", "--dry-run"]) == 0
    assert not out.exists()
    assert tune.main([*entry, "--start-from", "sm90"]) == 0
    config, before = parse_config(json.loads(out.read_text())), load_config("sm90")
    assert config.arch == "sm100"
    assert config.tuned_on == "a fake: launch (64/16), split, gate"
    assert config.launch == before.launch
    assert set(json.loads(raw.read_text())) == {"sm100 64/16", "split", "gate"}
