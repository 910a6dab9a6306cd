"""What is simulated, of a plan or made up; and the command from arguments to files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.answers_job import asking
from support.fake_job import DS, document_rows, fake_spec, planned, write_table

from batchllm_operator.commands import tools
from batchllm_operator.cost import MODEL_SHAPES, EngineLimits, find_gpu
from batchllm_operator.errors import (
    ExitCode,
    MissingLibraryError,
    ModelError,
    PlanError,
    SpecError,
)
from batchllm_operator.inspect import simulations as simulate_stage
from batchllm_operator.inspect.simulations import (
    SimulationOptions,
    shape_to_simulate,
    shard_to_simulate,
    simulate_policies,
)
from batchllm_operator.plan.estimate import Target
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.simulate.machine import POLICIES
from batchllm_operator.simulate.workload import Shape

Batchllm = Callable[..., Any]  # the fixture in conftest.py
SHAPE = Shape("test", 20, 4, 60, 20, output_tokens=5)
SMALL = ("--requests", 20, "--degree", 4, "--prefix-tokens", 60, "--distinct-tokens", 20)


@pytest.fixture
def plan_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two shards, of a job that is estimated for Qwen2-7B on two H200."""
    target = Target(find_gpu("H200"), MODEL_SHAPES["Qwen2-7B"], EngineLimits())
    monkeypatch.setattr("batchllm_operator.plan.given.find_target", lambda spec: target)
    rows = [{**row, "length": idx % 7 + 1} for idx, row in enumerate(document_rows())]
    write_table(tmp_path / "documents", rows)
    spec = fake_spec(
        tmp_path,
        engine={"tensor_parallel_size": 2, "max_num_seqs": 9, "max_num_batched_tokens": 512},
        planner={"estimated_output_tokens": {"column": "length"}},
    )
    return plan_job(spec, DS).folder.uri


# What is simulated


def test_a_shard_is_read_as_it_was_planned(plan_uri: str) -> None:
    found = [shard_to_simulate(plan_uri, idx, SimulationOptions())[0] for idx in range(2)]
    stored = [pq.read_table(f"{plan_uri}/shard-{idx:05d}.parquet").to_pylist() for idx in range(2)]
    assert sum(map(len, found)) == 30
    for workload, rows in zip(found, stored, strict=True):
        for idx, row in enumerate(rows):
            assert workload.tokens.prompt(idx).tolist() == row["prompt_token_ids"]
        assert workload.group_ids.tolist() == [row["group_id"] for row in rows]
        assert workload.num_prefix_tokens.tolist() == [row["num_prefix_tokens"] for row in rows]
        assert workload.output_tokens.tolist() == [row["row_idxs"][0] % 7 + 1 for row in rows]
        assert workload.max_output_tokens == 8
    assert found[0].name == f"job {DS}, shard 0"


def test_the_plan_says_what_it_runs_on(plan_uri: str) -> None:
    _, machine = shard_to_simulate(plan_uri, 0, SimulationOptions())
    assert (machine.model.name, machine.gpu.name) == ("Qwen2-7B", "H200")
    assert (machine.num_gpus, machine.max_num_batched_tokens, machine.max_num_seqs) == (2, 512, 9)


def test_options_stand_above_the_plan(plan_uri: str) -> None:
    options = SimulationOptions(
        gpu="A100", model="Llama-3-8B", num_gpus=1, num_blocks=77, chunk_size=99, estimate_error=0.5
    )
    workload, machine = shard_to_simulate(plan_uri, 0, options)
    assert (machine.model.name, machine.gpu.name) == ("Llama-3-8B", "A100")
    assert (machine.num_gpus, machine.num_blocks, machine.max_num_batched_tokens) == (1, 77, 99)
    assert not np.array_equal(workload.estimated_tokens, workload.output_tokens)


def test_what_a_plan_cannot_answer_is_an_error(tmp_path: Path, plan_uri: str) -> None:
    with pytest.raises(PlanError, match="has shards 0 to 1, not shard 2"):
        shard_to_simulate(plan_uri, 2, SimulationOptions())
    with pytest.raises(PlanError, match="not a plan"):
        shard_to_simulate(str(tmp_path), 0, SimulationOptions())


def test_a_plan_without_a_model_needs_one(tmp_path: Path) -> None:
    uri = planned(tmp_path, document_rows()).folder.uri
    with pytest.raises(ModelError, match="no model; name one"):
        shard_to_simulate(uri, 0, SimulationOptions())
    _, machine = shard_to_simulate(uri, 0, SimulationOptions(model="Mistral-7B"))
    assert machine.gpu.name == "H100"


def test_made_up_requests_run_on_what_is_asked_for(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = Path(simulate_stage.__file__).parents[1] / "cost" / "gpus.toml"
    (tmp_path / "gpus.toml").write_text(own.read_text().replace("[A100]", "[B9000]"))
    options = SimulationOptions(
        gpu="B9000", gpu_table=tmp_path / "gpus.toml", model=str(tmp_path), num_gpus=2
    )
    _, machine = shape_to_simulate(SHAPE, options)
    assert (machine.model.num_layers, machine.gpu.name, machine.num_gpus) == (2, "B9000", 2)
    _, machine = shape_to_simulate(SHAPE, SimulationOptions())
    assert (machine.model.name, machine.gpu.name) == ("Mistral-7B", "H100")


def test_all_policies_can_be_named_at_once() -> None:
    assert SimulationOptions(policies=("static", "all")).policy_names == tuple(POLICIES)
    twice = SimulationOptions(policies=("static", "batchllm", "static"))
    assert twice.policy_names == ("static", "batchllm")


def test_models_and_gpus_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="built in are Mistral-7B, "):
        shape_to_simulate(SHAPE, SimulationOptions(model=str(tmp_path)))
    with pytest.raises(SpecError, match="no GPU 'B9000'"):
        shape_to_simulate(SHAPE, SimulationOptions(gpu="B9000"))


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("batchllm_operator.simulate.vllm_scheduling", "batchllm_operator.simulate.vllm_config")
    for name in [each for each in sys.modules if each in ours or each.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)  # that another test has imported
    monkeypatch.setitem(sys.modules, "vllm", None)
    options = SimulationOptions()
    with pytest.raises(MissingLibraryError, match="extra `gpu` or `cpu`: pip install"):
        next(simulate_policies(*shape_to_simulate(SHAPE, options), options))


# The command


def test_the_help_names_every_policy_and_default(batchllm: Batchllm) -> None:
    printed = " ".join(batchllm("simulate", "--help").out.split())
    assert f"of {', '.join(POLICIES)}; or all" in printed
    assert f"(default: {' '.join(simulate_stage.DEFAULT_POLICIES)})" in printed
    for name in MODEL_SHAPES:
        assert name in printed
    assert tools._MADE_UP.keys() < {*Shape.__slots__}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shard", 0),
        ("--plan", "x", "--requests", 5),
        ("--requests", "many"),
        ("--requests", 0),
        ("--degree", "nan"),
        ("--policies", "nonsense"),
        ("--num-blocks", 0),
        ("--chunk-size", -1),
        ("--arrivals-per-s", 0),
        ("--arrivals-per-s", "inf"),
        ("--estimate-error", 1.5),
        ("--seed", -1),
    ],
)
def test_arguments_that_do_not_go_together_or_are_out_of_range_are_refused(
    batchllm: Batchllm, arguments: tuple[object, ...]
) -> None:
    outcome = batchllm("simulate", *arguments)
    assert outcome.code == ExitCode.INVALID
    assert "usage: batchllm" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--gpu", "B9000"), ExitCode.INVALID, "no GPU 'B9000'"),
        (("--num-blocks", 3), ExitCode.INVALID, "has room for 32"),
        (("--out", "file/folder"), ExitCode.FAILURE, "folder for timelines can't be made"),
    ],
)
def test_errors_are_one_line(
    batchllm: Batchllm,
    arguments: tuple[object, ...],
    code: ExitCode,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    outcome = batchllm("simulate", *SMALL, *arguments)
    assert outcome.code == code
    [line] = outcome.errors
    assert said in line


def test_a_plan_is_simulated_into_files_and_a_table(
    plan_uri: str, tmp_path: Path, batchllm: Batchllm
) -> None:
    out, result = tmp_path / "made" / "here", tmp_path / "result.json"
    outcome = batchllm(
        *("simulate", "--plan", plan_uri, "--shard", 1, "--policies", "static", "stock_sorted"),
        *("batchllm", "--out", out, "--result", result),
    )
    assert outcome.code == ExitCode.OK, outcome.err
    body = json.loads(result.read_text())
    assert (body["command"], body["gpu"], body["model"]) == ("simulate", "H200", "Qwen2-7B")
    assert [run["policy"] for run in body["runs"]] == ["static", "stock_sorted", "batchllm"]
    assert body["runs"][1]["relative_time"] == 1, "the first stock one is what others compare with"
    assert sorted(path.name for path in out.iterdir()) == [
        "timeline-batchllm.parquet",
        "timeline-static.parquet",
        "timeline-stock_sorted.parquet",
    ]
    for run in body["runs"]:
        table = pq.read_table(out / f"timeline-{run['policy']}.parquet")
        assert table.num_rows == run["steps"]
        seconds = table["step_s"].to_numpy().sum() + table["idle_s"].to_numpy().sum()
        assert seconds == pytest.approx(run["predicted_s"], abs=1e-3)
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"job {DS}, shard 1: 15 requests, ")
    assert lines[1].startswith("Qwen2-7B on 2 x H200: ")
    assert lines[3].split()[:3] == ["policy", "steps", "saved"]
    assert [line.split()[0] for line in lines[4:7]] == ["static", "stock_sorted", "batchllm"]
    assert lines[8] == "attention kernels on H200, slow to fast: predicted, not measured"
    assert [(each["policy"], each["kernels"]) for each in body["attention"]] == [
        ("static", "stock"),
        ("stock_sorted", "stock"),
        ("batchllm", "ours"),
        ("batchllm", "mixed"),
    ]
    assert [line.split()[0] for line in lines[10:]] == [
        each["policy"] for each in body["attention"]
    ]
    for table in (lines[3:7], lines[9:]):
        assert len({len(line) for line in table}) == 1, "columns are aligned"


def test_a_plan_without_decode_is_simulated(tmp_path: Path, batchllm: Batchllm) -> None:
    """Each request ends in the step that ends its prefill."""
    write_table(tmp_path / "documents", document_rows(3, 4))
    spec = asking(tmp_path, task="classify", labels=["yes", "no"], planner={"num_shards": 1})
    plan, result = plan_job(spec, DS), tmp_path / "result.json"
    outcome = batchllm(
        *("simulate", "--plan", plan.folder.uri, "--policies", "stock_sorted", "batchllm"),
        *("--gpu", "H200", "--model", "Qwen2-7B", "--result", result),
    )
    assert outcome.code == ExitCode.OK, outcome.err
    workload, _ = shard_to_simulate(
        plan.folder.uri, 0, SimulationOptions(gpu="H200", model="Qwen2-7B")
    )
    assert workload.output_tokens.tolist() == [1] * 12
    stock, ours = json.loads(result.read_text())["runs"]
    assert plan.manifest.counts.num_logical_tokens < 8192, "all fit into one step"
    assert stock["steps"] == 1
    assert 1 <= ours["steps"] <= plan.manifest.counts.num_groups
