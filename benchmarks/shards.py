"""What the shards of a plan keep of its sharing: computed, balanced, and found by vLLM's cache.

    python -m benchmarks.shards                  # a minute

About 10,000 prompts of each shape are cut as `plan` does it for Mistral-7B on an H100, with outputs
of 64 tokens. Prompts are random tokens that share prefixes on several levels, and all begin with
the same 60 tokens. Lengths vary around those given:

    sites           200 sites (220 tokens) x 10 documents (380) x 5 questions (40)
    few_shot        8 tasks with examples (800), 1,250 inputs (200) each
    conversations   the turns (115) of conversations of 1 to 11, each with those before
    documents       1,000 documents (1,500) with 2 to 18 questions (40)

A row has

    extra_prefill   prompt tokens to compute in all shards over those in one, - 1
    imbalance       predicted time of the costliest shard / mean
    planned_saving  what the plan says
    cached_saving   the share of prompt tokens that vLLM's own KV cache manager finds, with as many
                    blocks as an H100 has beside the model, one prompt after the other in the
                    order of each shard

There are no figures if a prompt is missing or twice, or if more is found than planned.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.cost import (
    BLOCK_SIZE,
    MODEL_SHAPES,
    EngineLimits,
    find_gpu,
    prompt_work,
    rates,
)
from batchllm_operator.plan.arrange import arrange
from batchllm_operator.plan.estimate import Target
from batchllm_operator.prefixes import (
    PrefixGroups,
    RankedPrompts,
    Requests,
    TokenTable,
    imbalance,
    make_requests,
    saving_ratio,
    sort_prompts,
)
from batchllm_operator.simulate.machine import POLICIES, Machine
from batchllm_operator.simulate.workload import Workload
from batchllm_operator.spec import JobSpec, parse_spec
from benchmarks.provenance import print_last_line, provenance

NUM_SHARDS: Final = (1, 4, 16, 64)
OUTPUT_TOKENS: Final = 64
MAX_MODEL_LEN: Final = 32_768
TARGET: Final = Target(find_gpu("H100"), MODEL_SHAPES["Mistral-7B"], EngineLimits())
MACHINE: Final = Machine.of(TARGET.model, TARGET.gpu)

Prompts = list[NDArray[np.int32]]


class Tokens:
    """Random tokens."""

    def __init__(self, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)
        self.instruction = self(60, 60)

    def __call__(self, low: int, high: int) -> NDArray[np.int32]:
        size = self.numbers.integers(low, high + 1)
        return self.numbers.integers(0, 32_000, size, dtype=np.int32)

    def behind(self, prefix: NDArray[np.int32], low: int, high: int) -> NDArray[np.int32]:
        return np.concatenate([prefix, self(low, high)])


def sites(tokens: Tokens, num_prompts: int) -> Prompts:
    prompts = []
    for _ in range(num_prompts // 50):
        site = tokens.behind(tokens.instruction, 180, 260)
        for _ in range(10):
            document = tokens.behind(site, 320, 440)
            prompts += [tokens.behind(document, 20, 60) for _ in range(5)]
    return prompts


def few_shot(tokens: Tokens, num_prompts: int) -> Prompts:
    examples = [tokens.behind(tokens.instruction, 700, 900) for _ in range(8)]
    return [tokens.behind(each, 100, 300) for each in examples for _ in range(num_prompts // 8)]


def conversations(tokens: Tokens, num_prompts: int) -> Prompts:
    prompts: Prompts = []
    while len(prompts) < num_prompts:
        turns = tokens.instruction
        for _ in range(tokens.numbers.integers(1, 12)):
            turns = tokens.behind(turns, 30, 200)
            prompts.append(turns)
    return prompts


def documents(tokens: Tokens, num_prompts: int) -> Prompts:
    prompts = []
    for _ in range(num_prompts // 10):
        document = tokens.behind(tokens.instruction, 500, 2500)
        prompts += [tokens.behind(document, 20, 60) for _ in range(tokens.numbers.integers(2, 19))]
    return prompts


SHAPES: Final[Mapping[str, Callable[[Tokens, int], Prompts]]] = {
    shape.__name__: shape for shape in (sites, few_shot, conversations, documents)
}


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Distinct prompts, sorted, with their output lengths."""

    tokens: TokenTable
    requests: Requests
    ranked: RankedPrompts
    output_tokens: NDArray[np.int64]

    @classmethod
    def of(cls, prompts: Prompts, output_tokens: int = OUTPUT_TOKENS) -> Job:
        order = np.random.default_rng(0).permutation(len(prompts))
        tokens = TokenTable.from_lists([prompts[idx] for idx in order])
        rows, outputs = np.arange(len(tokens)), np.full(len(tokens), output_tokens)
        requests, ranked = make_requests(tokens, sort_prompts(tokens), rows, outputs, merge=[False])
        return cls(tokens, requests, ranked, outputs)

    def spec(self, num_shards: int) -> JobSpec:
        """Only what `arrange` reads of it counts."""
        fields = {
            "spec_version": 1,
            "name": "shards",
            "input": {"uri": "/no/input", "key": "key"},
            "prompt": {"template": "{prompt}"},
            "model": {"path": "no-model"},
            "output": {"uri": "/no/output"},
            "engine": {"backend": "fake", "block_size": BLOCK_SIZE},
            "planner": {"num_shards": num_shards},
        }
        return parse_spec(fields, source="benchmark")

    def workload(self, name: str, shard: PrefixGroups) -> Workload:
        """For the simulator, in the order of the shard."""
        idxs = shard.member_idxs
        return Workload(
            name,
            self.tokens.take(idxs),
            np.repeat(np.arange(len(shard)), shard.sizes),
            np.repeat(shard.num_prefix_tokens, shard.sizes),
            self.output_tokens[idxs],
            self.output_tokens[idxs],
        )


def cut(job: Job, num_shards: int) -> list[PrefixGroups]:
    """As `plan` does it."""
    spec = job.spec(num_shards)
    return arrange(spec, job.requests, job.ranked, None, TARGET, MAX_MODEL_LEN).shards


def found_in_cache(job: Job, shard: PrefixGroups) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The shard's prompts by rank, and what an engine with enough memory finds of each."""
    rank_of_prompt = np.empty(len(job.tokens), dtype=np.int64)
    rank_of_prompt[job.ranked.prompt_idxs] = np.arange(len(job.tokens))
    at = np.sort(rank_of_prompt[shard.member_idxs])
    shared = np.zeros(len(at), dtype=np.int64)
    if len(at) > 1:  # the least LCP between neighbours of the shard
        lcps = job.ranked.num_shared_tokens[: at[-1] + 1]
        shared[1:] = np.minimum.reduceat(lcps, at[:-1] + 1)
    idxs = job.ranked.prompt_idxs[at]
    cached = RankedPrompts(idxs, shared).cached_tokens(job.requests.lengths, BLOCK_SIZE)
    return idxs, cached


def measure(job: Job, shards: list[PrefixGroups], cache: KVCache) -> dict[str, float]:
    """The figures of some shards."""
    members = np.concatenate([shard.member_idxs for shard in shards])
    if not np.array_equal(np.sort(members), np.arange(len(job.tokens))):
        sys.exit("the shards don't hold every prompt exactly once")
    found = [found_in_cache(job, shard) for shard in shards]
    lengths, num_tokens = job.requests.lengths, job.tokens.num_tokens
    works = [prompt_work(lengths[i], job.output_tokens[i], cached) for i, cached in found]
    total = sum((work.total() for work in works[1:]), start=works[0].total())
    rate = rates(total, TARGET.model, TARGET.gpu, EngineLimits())
    num_planned = int(sum(cached.sum() for _, cached in found))
    num_cached = sum(cache.find(shard.member_idxs) for shard in shards)
    if num_cached > num_planned:
        sys.exit(f"vLLM found {num_cached} tokens in its cache, but {num_planned} were planned")
    return {
        "prefill_tokens": num_tokens - num_planned,
        "imbalance": imbalance(np.array([work.nanoseconds(rate).sum() for work in works])),
        "planned_saving": saving_ratio(num_tokens - num_planned, num_tokens),
        "cached_saving": saving_ratio(num_tokens - num_cached, num_tokens),
    }


class KVCache:
    """vLLM's KV cache manager, which computes one prompt after the other."""

    def __init__(self, tokens: TokenTable) -> None:
        from batchllm_operator.simulate.vllm_config import make_scheduler  # isort: split

        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        from batchllm_operator.vllm_plugin.scheduler.hints import SchedulerSettings

        policy, settings = POLICIES["stock_sorted"], SchedulerSettings()
        self._manager = make_scheduler(policy, MACHINE, MAX_MODEL_LEN, settings).kv_cache_manager
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        params = SamplingParams(max_tokens=1)
        self._requests = [
            Request(str(idx), tokens.prompt(idx).tolist(), params, None, block_hasher=hasher)
            for idx in range(len(tokens))
        ]

    def find(self, prompt_idxs: NDArray[np.int64]) -> int:
        """Tokens that it finds, beginning with an empty cache."""
        if not self._manager.reset_prefix_cache():
            sys.exit("vLLM's cache isn't idle")
        num_found = 0
        for idx in prompt_idxs.tolist():
            request = self._requests[idx]
            blocks, num_cached, *_ = self._manager.get_computed_blocks(request)
            num_new = request.num_tokens - num_cached
            if self._manager.allocate_slots(request, num_new, num_cached, blocks) is None:
                sys.exit(f"prompt {idx} doesn't fit into the cache")
            self._manager.free(request)
            num_found += num_cached
        return num_found


def compare(name: str, num_prompts: int) -> Iterator[dict[str, Any]]:
    """The rows of a shape."""
    job = Job.of(SHAPES[name](Tokens(0), num_prompts))
    cache = KVCache(job.tokens)
    least = 0.0
    for num_shards in NUM_SHARDS:
        figures = measure(job, cut(job, num_shards), cache)
        prefill_tokens = figures.pop("prefill_tokens")
        least = least or prefill_tokens
        extra_prefill = round(prefill_tokens / least - 1, 5)
        rounded = {field: round(value, 5) for field, value in figures.items()}
        yield {"shape": name, "num_shards": num_shards, "extra_prefill": extra_prefill, **rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=10_000, help="of a shape, about")
    parser.add_argument("--json", type=Path, help="a file for the last line, too")
    args = parser.parse_args()
    rows = []
    for name in SHAPES:
        for row in compare(name, args.num_prompts):
            rows.append(row)
            print(json.dumps(row), flush=True)
    report = {
        "benchmark": "shards",
        "model": TARGET.model.name,
        "gpu": TARGET.gpu.name,
        "num_blocks": MACHINE.num_blocks,
        "rows": rows,
        "num_prompts": args.num_prompts,
        **provenance(),
    }
    print_last_line(report, args.json)


if __name__ == "__main__":
    main()
