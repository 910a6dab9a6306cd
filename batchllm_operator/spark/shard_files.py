"""The task of one range: from sorted prompts to the files of its shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.cost import WorkArrays, prompt_work
from batchllm_operator.plan.arrange import Arrangement, arrange, write_shards
from batchllm_operator.plan.estimate import Target
from batchllm_operator.plan.output_lengths import Learned
from batchllm_operator.prefixes import (
    PromptStore,
    RankedPrompts,
    Requests,
    TokenTable,
    describe_sharing,
    make_requests,
)
from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.search.row_sort import num_equal
from batchllm_operator.prompts import TokenIdsDifferError
from batchllm_operator.spark.prompts import Task
from batchllm_operator.spark.ranges import keys_of, tokens_of
from batchllm_operator.spark.staging import scratch_folder
from batchllm_operator.spark.tasks import Batches, said, said_by
from batchllm_operator.stored_plan.manifest import PlanCounts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from batchllm_operator.plan.replicas import ReplicaPlanner
    from batchllm_operator.spec import JobSpec

_ID_BITS: Final = 32
"""The range's number, shifted by this, is the first id of its requests and groups."""


@dataclass(frozen=True, slots=True)
class RangeTask:
    """What the task of each range is given."""

    task: Task
    learned: Learned | None
    target: Target | None
    replicas: ReplicaPlanner | None
    shares_prefixes: bool
    """False for a model whose prompts can't share a prefix."""

    def spec_of(self, range_idx: int) -> JobSpec:
        """The job's, with this range's number of shards."""
        spec = self.task.reading.spec
        num_shards = self.task.ranges.num_shards[range_idx]
        planner = spec.planner.model_copy(update={"num_shards": num_shards})
        return spec.model_copy(update={"planner": planner})


def plan_ranges(prompts: DataFrame, ranges: RangeTask) -> list[dict[str, Any]]:
    """Plan each range; returns what tasks say of each range, and of each file of rows.

    Raises:
        TokenIdsDifferError: ids of the fast library differ.
        BatchLLMError: see `tokenize`.
    """

    def plan(batches: Batches) -> Iterator[Any]:
        batches = iter(batches)
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return
        batches = chain([first], batches)
        range_idx = first.column("range")[0].as_py()
        if range_idx == len(ranges.task.ranges):
            for batch in batches:
                yield said(batch.column("key").to_pylist())
        else:
            yield said([json.dumps(_planned(ranges, range_idx, batches)).encode()])

    found = [json.loads(each) for each in said_by(prompts, plan)]
    if any(each.get("differs") for each in found):
        raise TokenIdsDifferError("a sample's token ids differ")
    return found


def _planned(given: RangeTask, range_idx: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """Write the range's shards; returns what the driver needs to know of them, as JSON."""
    task, spec, target = given.task, given.spec_of(range_idx), given.target
    tokenizer, adapters = task.reading.tokenizer()
    with scratch_folder() as scratch, PromptStore(scratch / "prompts.bin") as store:
        found = _Sorted.read(batches, store)
        requests, ranked = _requests(given, found, store)
        classes = adapters.classes if adapters is not None else None
        length = tokenizer.max_model_len
        chosen = arrange(spec, requests, ranked, given.learned, target, length, classes)
        replicas = given.replicas
        if replicas is not None and range_idx:  # one shard's run measures
            replicas = replace(replicas, wants_profile=False)
        take_out = adapters.take_out if adapters is not None else None
        first_id = range_idx << _ID_BITS
        shards = write_shards(spec, requests, chosen, target, replicas, scratch, take_out, first_id)
        decode = tokenizer.decode if adapters is None else adapters.decode
        files = [
            task.staging.publish(scratch / shard.file, "shard", shard.num_requests)
            for shard in shards.infos
        ]
        return {
            "range": range_idx,
            "shards": [shard.model_dump(mode="json") for shard in shards.infos],
            "files": [file.model_dump(mode="json") for file in files],
            "counts": _counts(requests, chosen, len(store)),
            "sharing": describe_sharing(requests, chosen.groups, decode).model_dump(mode="json"),
            "first": found.first.hex(),
            "last": found.last.hex(),
            **_work(requests, chosen),
        }


@dataclass(slots=True)
class _Sorted:
    """Sorted prompts, as they were read.

    Attributes:
        num_shared: int64 [num_prompts], LCP of each with the one before.
        places: int64 [num_prompts].
        output_tokens: int64 [num_prompts], estimates, if a column holds them.
        first, last: keys.
    """

    num_shared: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64] | None
    first: bytes
    last: bytes

    @classmethod
    def read(cls, batches: Iterator[pa.RecordBatch], store: PromptStore) -> _Sorted:
        """Read them, at least one, into the empty `store`."""
        shared, places, estimates = [], [], []
        first = last = b""
        before = np.zeros(0, dtype=np.int32)
        for batch in batches:
            if batch.num_rows == 0:
                continue
            tokens = _tokens(batch.column("key"))
            shared.append(_num_shared(before, tokens.token_ids, tokens.offsets))
            places.append(batch.column("place").to_numpy().copy())
            estimates.append(batch.column("output_tokens").to_numpy().copy())
            store.append(tokens)
            begin, last = keys_of(tokens.take([0, len(tokens) - 1]))
            first = first or begin
            before = tokens.prompt(len(tokens) - 1)
        expected = np.concatenate(estimates)
        is_expected = bool(expected[0] >= 0)
        return cls(
            np.concatenate(shared),
            np.concatenate(places),
            expected if is_expected else None,
            first,
            last,
        )


def _requests(
    given: RangeTask, found: _Sorted, store: PromptStore
) -> tuple[Requests, RankedPrompts]:
    """As for a local plan, but in the order of the prompts."""
    in_order = np.arange(len(store))
    requests, ranked = make_requests(
        store,
        RankedPrompts.from_exact(in_order, found.num_shared, store.lengths),
        given.task.numbers.of(found.places),
        found.output_tokens,
        merge=given.task.reading.spec.sampling.is_greedy,
    )
    return requests, ranked if given.shares_prefixes else ranked.apart()


def _tokens(keys: pa.Array) -> TokenTable:
    whole = pa.concat_arrays([keys.cast(pa.large_binary())])  # begins where its buffers do
    _, offsets, data = whole.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[whole.offset :][: len(whole) + 1]
    return tokens_of(np.frombuffer(data or b"", dtype=np.uint8), ends)


@compiled
def _num_shared(
    before: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """LCP of each prompt with the one before it; `before` is the one before the first."""
    shared = np.empty(len(offsets) - 1, dtype=np.int64)
    for idx in range(len(shared)):
        prompt = token_ids[offsets[idx] : offsets[idx + 1]]
        most = min(len(before), len(prompt))
        shared[idx] = num_equal(before[:most], prompt[:most])
        before = prompt
    return shared


def _counts(requests: Requests, chosen: Arrangement, num_prompts: int) -> dict[str, Any]:
    counts = PlanCounts(
        num_rows=num_prompts,
        num_rejected_rows=0,
        num_duplicate_rows=num_prompts - len(requests),
        num_requests=len(requests),
        num_groups=len(chosen.groups),
        num_shared_groups=int(np.count_nonzero(chosen.groups.sizes > 1)),
        num_logical_tokens=int((requests.lengths * requests.num_rows).sum()),
        num_planned_tokens=int(chosen.cut.num_prefill_tokens.sum()),
        num_optimal_tokens=chosen.cut.num_optimal_tokens,
        num_algorithm_1_saved_tokens=chosen.num_algorithm_1_saved_tokens,
        num_exact_saved_tokens=chosen.num_exact_saved_tokens,
    )
    return counts.model_dump(mode="json")


def _work(requests: Requests, chosen: Arrangement) -> dict[str, Any]:
    """Sums from which the driver predicts the time of all shards."""
    cut = chosen.cut
    unshared = prompt_work(requests.lengths, chosen.decode_tokens).total(requests.num_rows)
    firsts = cut.bounds[:-1]
    per_shard = {
        field.name: np.add.reduceat(getattr(cut.work, field.name), firsts).tolist()
        for field in fields(WorkArrays)
    }
    return {
        "work": asdict(cut.work.total()),
        "unshared": asdict(unshared),
        "per_shard": per_shard,
        "costs": np.add.reduceat(cut.costs[cut.request_idxs], firsts).tolist(),
    }
