"""The tuner: its choices on given times, and the whole of it with a timer that invents them."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_settings import tune
from kernel_settings.compile import Kernel
from kernel_settings.report import CHIPS, Report
from kernel_settings.search import (
    ROUNDS_MS,
    Bench,
    TuningError,
    choose,
    fastest,
    gate_table,
    relative_time,
    tune_gate,
)
from kernel_settings.workloads import (
    Group,
    Workload,
    shape_for,
    workloads_of,
)
from triton.runtime.errors import OutOfResources

from batchllm_kernels.prefix_attention import ArchConfig, Gate, load_config
from batchllm_kernels.prefix_attention.batch import HEAD_DIMS
from batchllm_kernels.prefix_attention.config import (
    LaunchConfig,
    SplitRule,
    Tiling,
    parse_config,
    to_json,
)

CPU, CONFIG, SHAPE = torch.device("cpu"), load_config("cpu"), shape_for(64, 16)
SMALL = [
    Workload("alone", (Group(0, ((20, 1),)), Group(16, ((3, 1),)))),
    Workload("shared", (Group(32, ((5, 1),) * 3),)),
]
FASTER = LaunchConfig(64, 16, Tiling(16, 16, 1), Tiling(32, 16, 1), 4, 4, {})
CURRENT = CONFIG.launch_config(64, 16)


class FakeBench(Bench):
    """Times by the step of the narrow tiling and by who shares; counts what it is asked.

    Settings fail as those do that want too much of a chip, if `fails` says so.
    """

    def __init__(
        self,
        step: str = "launch",
        error: Callable[[LaunchConfig], float] = lambda _: 0.0,
        fails: Callable[[ArchConfig, Workload], bool] = lambda *_: False,
    ) -> None:
        super().__init__(SHAPE, workloads_of(step), CPU)
        self.error_of, self.fails = error, fails
        self.timed: list[tuple[LaunchConfig, float]] = []

    def error(self, config: ArchConfig) -> float:
        return self.error_of(config.launch_config(64, 16))

    def time(self, config: ArchConfig, workload: Workload, milliseconds: float) -> float:
        if self.fails(config, workload):
            raise OutOfResources(300_000, 232_448, "shared memory")
        launch, group = config.launch_config(64, 16), workload.groups[0]
        self.timed.append((launch, milliseconds))
        others = len(group.members) - 1
        least = config.gate.min_prefix_by_degree()[min(others + 1, 64)]
        time = 1e6 + launch.narrow.num_stages + config.split.min_tokens
        if others and group.num_prefix_tokens >= least:
            # A merge costs as much as 1000 tokens, and each member but one saves the prefix.
            time += 1000 - group.num_prefix_tokens * others
        return time


def tuned(
    bench: Bench,
    *tried: LaunchConfig,
    current: LaunchConfig = CURRENT,
    clock: Callable[[], float] = lambda: 0.0,
) -> LaunchConfig:
    """The launch settings that are chosen."""
    configs = {str(launch): tune.with_launch(CONFIG, launch) for launch in (current, *tried)}
    found = fastest("launch", configs, bench, budget_s=0.5, raw={}, clock=clock)
    return found.launch_config(64, 16)


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
def test_a_choice_goes_by_geometric_means(alone: float, shared: float, expected: str) -> None:
    assert relative_time({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 4.0}) == pytest.approx(0.5)
    measured = [("now", {"a": 1.0, "s": 1.0}), ("new", {"a": alone, "s": shared})]
    assert choose(measured, ["a"]) == expected


def test_gate_opens_where_sharing_pays_from_there_on() -> None:
    def table(gains: dict[int, dict[int, float]]) -> dict[int, int]:
        pairs = {(d, n): (1.0 - gain, 1.0) for d, row in gains.items() for n, gain in row.items()}
        return gate_table(pairs)

    gains = {
        2: {64: -0.5, 512: 0.1, 1024: 0.02, 2048: 0.2},
        4: {64: -0.1, 512: 0.03, 1024: 0.1, 2048: 0.3},
        8: {64: -0.1, 512: 0.0, 1024: 0.1, 2048: 0.3},
        16: {64: 0.04, 512: 0.1, 1024: 0.2, 2048: 0.4},
    }
    # Degree 8 needs no longer prefix than 4: it is left to its entry.
    assert table(gains) == {2: 2048, 4: 512, 16: 64}
    assert table({2: {64: 0.0, 128: -1.0}}) == {}
    assert table({2: {64: 0.5, 128: 0.0}, 4: {64: 0.5, 128: 0.5}}) == {4: 64}


@pytest.mark.parametrize("kv_bits", [8, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_shortlist_has_settings_that_may_ship_the_best_first(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, kv_bits: int
) -> None:
    """Wide tilings of 128 rows don't fit, and narrow steps of 64 keys take the most."""
    rows: set[int] = set()

    class Pool(contextlib.nullcontext[Any]):
        def __init__(self, *_: object) -> None:
            super().__init__(self)

        def map(self, _: object, kernels: list[Kernel]) -> list[Report]:
            rows.update(kernel.constants.wide_m for kernel in kernels)
            return [
                Report(
                    kernel.arch,
                    kernel.name,
                    {"programs": 3 if kernel.constants.narrow_n < 64 else 1},
                    fault="too large" if kernel.constants.wide_m > 64 else None,
                )
                for kernel in kernels
            ]

    monkeypatch.setattr(tune, "ProcessPoolExecutor", Pool)
    for arch in ("sm90", "gfx942"):
        found = tune.shortlist(arch, CHIPS[arch], head_dim, kv_bits, count=24, jobs=1)
        assert len(found) == len(set(map(str, found))) == 24
        assert {launch.wide.block_m for launch in found} <= {32, 64}
        programs = [launch.programs_per_processor for launch in found]
        assert programs == sorted(programs, reverse=True)
        config = load_config(arch)
        for launch in found:
            made = parse_config(to_json(tune.with_launch(config, launch)), source="a.json")
            assert made.launch_config(head_dim, kv_bits) == launch
    assert 128 in rows


def test_the_kernel_is_checked_and_timed_and_the_search_ends_with_its_budget() -> None:
    """In Triton's interpreter, with times invented."""
    calls = []

    def timer(run: Callable[[], object], milliseconds: float) -> float:
        run()
        calls.append(milliseconds)
        return 1.0 + len(calls) / 1000

    shape = replace(SHAPE, num_q_heads=4, num_kv_heads=2)
    check = Workload("check", (Group(16, ((5, 1),) * 3), Group(0, ((7, 3),))))
    bench = Bench(shape, SMALL, CPU, timer=timer, checked=check)
    assert bench.error(CONFIG) < 1e-2
    assert tuned(bench, FASTER, clock=iter([0.0, 0.1, 101.0]).__next__) == CURRENT
    assert calls == [ROUNDS_MS[0]] * 4
    late = FakeBench()
    assert tuned(late, FASTER, clock=iter(range(100)).__next__) == CURRENT
    assert {str(launch) for launch, _ in late.timed} == {str(CURRENT)}, "the rest isn't tried"


def test_fastest_of_many_is_found_by_halving() -> None:
    bench = FakeBench()
    current, best, *slow = (
        replace(FASTER, narrow=Tiling(16, 16, num_stages))
        for num_stages in (2**19, 2**16, *(2**num for num in range(20, 27)))
    )
    assert tuned(bench, *slow, best, current=current) == best
    first, second, *_, last = ROUNDS_MS
    by_round = [
        len({str(launch) for launch, time in bench.timed if time == of_round})
        for of_round in (first, second)
    ]
    assert by_round == [9, 5]
    assert (best, last) in bench.timed and (current, last) in bench.timed


def test_wrong_results_and_failures_are_left_out_whatever_their_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = FakeBench(error=lambda launch: float("nan") if launch == FASTER else 1e-3)
    failing = FakeBench(fails=lambda config, _: config.launch_config(64, 16) == FASTER)
    for bench, reason in ((wrong, "the relative error is nan"), (failing, "OutOfResources")):
        assert tuned(bench, FASTER) == CURRENT
        assert FASTER not in [launch for launch, _ in bench.timed]
        assert f"left out, {reason}" in capsys.readouterr().err
    for bench in (FakeBench(error=lambda _: 0.5), FakeBench(fails=lambda *_: True)):
        with pytest.raises(TuningError, match="settings in use"):
            tuned(bench, FASTER)


def test_the_gate_from_times_is_closed_where_sharing_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw: dict[str, Any] = {}
    # 3 % are 30000 tokens that aren't read: 15 * 4096 - 1000, 31 * 1024 - 1000.
    config = tune_gate(CONFIG, FakeBench("gate"), raw)
    assert config.gate == Gate({16: 4096, 32: 1024}, CONFIG.gate.max_member_tokens)
    assert len(raw["gate"]) == 35

    def fails(config: ArchConfig, workload: Workload) -> bool:
        group = workload.groups[0]
        is_shared = bool(config.gate.min_prefix_tokens)
        return is_shared and len(group.members) == 32 and group.num_prefix_tokens == 2048

    config = tune_gate(CONFIG, FakeBench("gate", fails=fails), raw)
    assert config.gate.min_prefix_tokens == {16: 4096}
    assert len(raw["gate"]) == 34 and "left out, OutOfResources" in capsys.readouterr().err
    with pytest.raises(TuningError, match="no timing worked; the first failed with OutOfResources"):
        tune_gate(CONFIG, FakeBench("gate", fails=lambda *_: True), raw)


@pytest.fixture
def unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line on an sm100 on which nothing compiles but what is in use."""
    monkeypatch.setattr(tune.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "detect_arch", lambda device: "sm100")
    monkeypatch.setattr(tune, "chip_of_gpu", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("GPU", (), {"name": "a fake"})
    )
    monkeypatch.setattr(tune, "_bench", lambda arch, key, step: FakeBench(step))
    monkeypatch.setattr(tune, "shortlist", lambda *_, **__: [])


def test_timing_without_a_gpu_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tune.main([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err
    monkeypatch.setattr(tune.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_command_writes_settings_for_a_new_gpu(unknown_gpu: None, tmp_path: Path) -> None:
    out, raw = tmp_path / "sm100.json", tmp_path / "raw.json"
    entry = ["--head-dim", "64", "--kv-bits", "16", "--out", str(out), "--json", str(raw)]
    assert tune.main(entry) == 2  # nothing to start from
    assert not out.exists()
    assert tune.main([*entry, "--start-from", "sm90"]) == 0
    config, before = parse_config(out.read_text(), source=out.name), load_config("sm90")
    assert config.arch == "sm100"
    assert config.tuned_on is not None
    assert config.tuned_on.startswith("a fake, torch ")
    assert config.tuned_on.endswith(": launch (64/16), split, gate")
    assert (config.launch, config.split) == (before.launch, before.split), "others aren't faster"
    assert set(json.loads(raw.read_text())) == {"sm100 64/16", "split", "gate"}


def test_a_faster_split_rule_replaces_a_slow_one(
    unknown_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = replace(load_config("sm90"), split=SplitRule(2**16, 2))
    monkeypatch.setattr(tune, "load_config", lambda arch: slow)
    out = tmp_path / "a.json"
    assert tune.main(["--start-from", "sm90", "--step", "split", "--out", str(out)]) == 0
    assert parse_config(out.read_text(), source=out.name).split.min_tokens == 128
