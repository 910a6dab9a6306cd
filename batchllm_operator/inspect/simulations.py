"""Simulates a plan's shard or made-up requests, with vLLM's scheduler, step by step."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.cost import BLOCK_SIZE, MODEL_SHAPES, EngineLimits, ModelShape, find_gpu
from batchllm_operator.errors import (
    EngineError,
    MissingLibraryError,
    ModelError,
    StorageError,
)
from batchllm_operator.named_file import write_file
from batchllm_operator.plan.estimate import engine_limits, read_shape, shape_of
from batchllm_operator.prefixes import PromptClasses, TokenTable
from batchllm_operator.simulate.machine import ARRIVALS_PER_S, POLICIES, Machine
from batchllm_operator.simulate.run import Run
from batchllm_operator.simulate.workload import Shape, Workload
from batchllm_operator.stored_plan.shard_files import ADAPTER_FIELD

if TYPE_CHECKING:
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

DEFAULT_POLICIES: Final = ("stock_shuffled", "stock_sorted", "batchllm")
ALL_POLICIES: Final = "all"
_log = logging.getLogger(__name__)
_DEFAULT_GPU: Final = "H100"
_DEFAULT_MODEL: Final = "Mistral-7B"


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Options of a simulation; None: as in the plan, else H100 and Mistral-7B."""

    policies: Sequence[str] = DEFAULT_POLICIES
    """Names of `POLICIES`, or "all"."""
    gpu: str | None = None
    gpu_table: Path | None = None
    """A table like `cost/gpus.toml`."""
    model: str | None = None
    """A built-in shape, or a folder or hub id with a `config.json`."""
    num_gpus: int | None = None
    num_blocks: int | None = None
    """Blocks of the KV cache; None: as many as the GPU has room for."""
    chunk_size: int | None = None
    arrivals_per_s: float = ARRIVALS_PER_S
    seed: int = 0
    estimate_error: float = 0.0
    """Estimated output lengths are off by up to this share, at random."""

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Each policy once, in the order given."""
        names = POLICIES if ALL_POLICIES in self.policies else self.policies
        return tuple(dict.fromkeys(names))

    def limits(self, usual: EngineLimits) -> EngineLimits:
        """An engine's limits, with those given here."""
        return replace(
            usual,
            num_gpus=self.num_gpus or usual.num_gpus,
            max_num_batched_tokens=self.chunk_size or usual.max_num_batched_tokens,
        )


def shard_to_simulate(
    plan_uri: str, shard_idx: int, options: SimulationOptions
) -> tuple[Workload, Machine]:
    """A shard's requests, and the machine by its plan and the options.

    Outputs have the plan's estimated lengths.

    Raises:
        PlanError: the plan or the shard is absent, corrupted or of another version, or the
            model leaves no room for KV.
        ModelError: the model's shape is unknown.
        SpecError: the table of GPUs is broken, or lacks the GPU.
    """
    from batchllm_operator.stored_plan.stored_plan import StoredPlan  # made-up requests need none

    plan = StoredPlan.open(plan_uri)
    workload = _read_workload(plan, shard_idx)
    spec, estimate = plan.manifest.spec, plan.manifest.estimate
    if spec.engine.replicas > 1:
        _log.warning(
            "the shard is played on one engine; a run shares it between %d", spec.engine.replicas
        )
    if options.model is not None:
        model = find_model(options.model)
    elif estimate is not None:
        model = estimate.model
    elif spec.engine.backend == "fake":
        raise ModelError(f"plan {plan_uri}: its job has no model; name one to simulate")
    else:
        model = shape_of(spec)
    table = options.gpu_table or (Path(spec.planner.gpu_table) if spec.planner.gpu_table else None)
    if estimate is not None and options.gpu is None and options.gpu_table is None:
        gpu = estimate.gpu
    else:
        gpu = find_gpu(options.gpu or spec.planner.target_gpu or _DEFAULT_GPU, table)
    machine = Machine.of(
        model,
        gpu,
        options.limits(engine_limits(spec)),
        spec.engine.block_size or BLOCK_SIZE,
        num_blocks=options.num_blocks,
        max_num_seqs=spec.engine.max_num_seqs,
    )
    return workload.with_estimate_error(options.estimate_error, options.seed), machine


def shape_to_simulate(shape: Shape, options: SimulationOptions) -> tuple[Workload, Machine]:
    """Made-up requests, and the machine by the options; raises like `shard_to_simulate`."""
    model = find_model(options.model or _DEFAULT_MODEL)
    gpu = find_gpu(options.gpu or _DEFAULT_GPU, options.gpu_table)
    limits = options.limits(EngineLimits())
    machine = Machine.of(model, gpu, limits, num_blocks=options.num_blocks)
    workload = shape.make(options.seed)
    return workload.with_estimate_error(options.estimate_error, options.seed), machine


def simulate_policies(
    workload: Workload, machine: Machine, options: SimulationOptions
) -> Iterator[Run]:
    """Run the workload under each policy, one after the other.

    Raises `PlanError`: a request doesn't fit into the KV cache; `SpecError`: vLLM's scheduler
    refuses a setting; `MissingLibraryError`, `EngineError`: vLLM isn't there, or doesn't end.
    """
    _log.info("loading vLLM's scheduler, which takes some seconds")
    try:
        from batchllm_operator.simulate.vllm_scheduling import simulate  # imports vLLM: seconds
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, "vLLM's scheduler") from error
    except ImportError as error:
        raise EngineError(f"vLLM can't be imported ({error})") from error
    for name in options.policy_names:
        yield simulate(
            workload,
            POLICIES[name],
            machine,
            arrivals_per_s=options.arrivals_per_s,
            seed=options.seed,
        )


def find_model(name: str) -> ModelShape:
    """A built-in shape, or that of a folder's or hub id's `config.json`.

    Raises `ModelError`: there is none, or its kind is unknown.
    """
    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    try:
        return read_shape(name)
    except ModelError as error:
        raise ModelError(f"{error}; built in are {', '.join(MODEL_SHAPES)}") from error


def make_folder(folder: Path) -> None:
    """Create a writable folder for timelines, with its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the folder for timelines can't be made: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"no timelines can be written to {folder}: no permission")


def write_timeline(run: Run, folder: Path) -> None:
    data = io.BytesIO()
    pq.write_table(run.timeline.to_table(), data)
    write_file(folder / f"timeline-{run.policy}.parquet", data.getvalue())


def _read_workload(plan: StoredPlan, shard_idx: int) -> Workload:
    manifest = plan.manifest
    with plan.open_shard(shard_idx) as file:
        table = file.read()
    prompts = table["prompt_token_ids"]
    ends = np.cumsum(pc.list_value_length(prompts).to_numpy(), dtype=np.int64)
    tokens = TokenTable(pc.list_flatten(prompts).to_numpy(), np.append(0, ends))
    if ADAPTER_FIELD.name in table.column_names:
        tokens = _with_adapters(tokens, table[ADAPTER_FIELD.name])
    outputs = table["num_output_tokens"].to_numpy()
    return Workload(
        f"{manifest.spec.name} {manifest.ds}, shard {shard_idx}",
        tokens,
        table["group_id"].to_numpy(),
        table["num_prefix_tokens"].to_numpy().astype(np.int64),
        outputs,
        outputs,
        max_output_tokens=max(q.sampling.max_tokens for q in manifest.spec.questions),
    )


def _with_adapters(tokens: TokenTable, adapters: pa.ChunkedArray) -> TokenTable:
    """Prompts whose KV is their adapter's, so that no two adapters share any."""
    numbers = adapters.combine_chunks().dictionary_encode(null_encoding="encode").indices
    classes = numbers.to_numpy().astype(np.int64)
    bound = int(tokens.token_ids.max()) + 1
    return PromptClasses(bound, int(classes.max()) + 1).mark(tokens, classes)
