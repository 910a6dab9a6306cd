"""Jobs of several prompts, and the jobs that would ask each of them alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.answers_job import published
from support.fake_job import DS, job_fields

from batchllm_operator.spec import JobSpec, parse_spec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

PROMPTS: dict[str, Any] = {
    "topic": {
        "template": "{document}\n\nTopic of {query}:",
        "response_format": {"type": "choice", "choices": ["cars", "music", "other"]},
    },
    "summary": {"template": "{document}\n\nSummarise:", "sampling": {"max_tokens": 8}},
    "relevant": {
        "template": "{document}\n\nQuery: {query}. Relevant?",
        "task": "classify",
        "labels": {"yes": "y", "no": "n"},
    },
}
OF_PLACE = {"num_cached_tokens"}
"""What depends on the requests before, not on the prompt."""


def several(folder: Path | str, prompts: Mapping[str, Any] = PROMPTS, **changes: Any) -> JobSpec:
    fields = job_fields(str(folder), **changes)
    del fields["prompt"], fields["sampling"]
    return parse_spec({**fields, "prompts": prompts}, source="test spec")


def alone(spec: JobSpec, name: str) -> JobSpec:
    """The job that asks one of the prompts, with an output of its own."""
    question = spec.questions[list(spec.prompts).index(name)]
    output = spec.output.model_copy(update={"uri": f"{spec.output.uri}_{name}"})
    return question.model_copy(update={"name": name, "output": output})


def asks_of(plan: StoredPlan) -> list[tuple[list[int], list[int]]]:
    """Token ids and asks of each request, in the plan's order."""
    found = list[tuple[list[int], list[int]]]()
    for shard_idx in range(len(plan.manifest.shards)):
        with plan.open_shard(shard_idx) as file:
            table = file.read(["prompt_token_ids", "row_idxs"])
        columns = (table[name].to_pylist() for name in table.column_names)
        found += zip(*columns, strict=True)
    return found


def rows_by_key(spec: JobSpec, ds: str = DS) -> dict[str, dict[str, Any]]:
    """The published rows, with the columns that the job writes, by `row_key`."""
    return {row.pop("row_key"): row for row in published(spec, ds)}
