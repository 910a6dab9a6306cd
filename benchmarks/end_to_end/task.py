"""What one engine is to run: its spec, its requests, and where its rows go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from batchllm_operator.simulate.workload import Shape
from batchllm_operator.spec import JobSpec, parse_spec
from benchmarks.end_to_end.models import TINY, model_config, write_model
from benchmarks.end_to_end.policies import MOST_CAPTURED, POLICIES, SETTINGS, TINY_SETTINGS
from benchmarks.end_to_end.requests import PlannedRequests, make_requests, prompts_as_given
from benchmarks.workloads import WORKLOADS, scaled, shrunk

_TINY_KV_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """What one engine is to run."""

    policy: str
    settings: str
    runs: Sequence[tuple[str, int]] = ()
    """Workloads and the numbers of their repetitions, in order."""
    rows_file: str = ""
    """Gets a line of JSON appended for each finished run."""
    model: str = "Mistral-7B"
    share: float = 1.0
    """Of each workload's requests."""
    budget_s: float | None = None
    """No run begins that would end after so many seconds if it took as long as the longest one."""
    engine: Mapping[str, Any] | None = None
    """More fields of the spec's `engine`."""

    @classmethod
    def from_json(cls, text: str) -> Task:
        """What `to_json` made."""
        fields = json.loads(text)
        return cls(**{**fields, "runs": [tuple(run) for run in fields["runs"]]})

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    def spec(self, **sampling: Any) -> JobSpec:
        """Of a job that an operator would run: only its model, engine and sampling matter here."""
        policy = POLICIES[self.policy]
        engine: dict[str, Any] = {
            "scheduler": policy.scheduler,
            "attention": policy.attention,
            **(TINY_SETTINGS if self.model == TINY else SETTINGS)[self.settings],
            **(self.engine or {}),
        }
        if self.model == TINY:
            engine = {"kv_cache_memory_bytes": _TINY_KV_BYTES, "profile": False, **engine}
        engine["extra_args"] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_cudagraph_capture_size": MOST_CAPTURED,
            **policy.extra_args,
            **engine.get("extra_args", {}),
        }
        fields = {
            "spec_version": 1,
            "name": "end-to-end",
            "input": {"uri": "unused", "key": "key"},
            "prompt": {"template": "{text}"},
            "model": {"path": str(write_model(self.model))},
            "sampling": sampling,
            "output": {"uri": "unused-out"},
            "engine": engine,
        }
        return parse_spec(fields, source="benchmarks.end_to_end")

    def shape(self, workload: str) -> Shape:
        """A workload as large as the task and its model say."""
        shape = scaled(WORKLOADS[workload], self.share)
        return shrunk(shape) if self.model == TINY else shape

    def requests(self, workload: str, block_size: int) -> PlannedRequests:
        """A workload's requests in the policy's order, for a KV cache of such blocks."""
        shape = self.shape(workload)
        prompts = prompts_as_given(shape, model_config(self.model)["vocab_size"])
        order = POLICIES[self.policy].order
        return make_requests(prompts, order, shape.output_tokens, block_size)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Write a run's row, and print the most of it."""
    with path.open("ab+") as file:
        is_empty = file.seek(0, os.SEEK_END) == 0
        if not is_empty:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a run was killed while it wrote
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")
    shown = ("workload", "policy", "settings", "requests_per_s", "saving_ratio", "num_steps")
    print(" ".join(str(row[name]) for name in shown), flush=True)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that runs append to; a last line cut short by a kill is left out."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
