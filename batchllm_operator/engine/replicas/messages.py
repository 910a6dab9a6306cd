"""Messages between a run and its replicas: JSON objects with one field, over a socket.

    run -> replica                              replica -> run
    start    rank, spec, job, chain, cores      find_profile, keep_profile  (profile: the answer)
    profile                                     started  limits, link; or failed
    requests                                    outputs; or died
    prefill  groups                             prefilled  tokens computed, failures
    measure  repetitions                        measured  steps

A replica ends when its socket is closed.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from batchllm_operator.answers import PlannedAnswers
from batchllm_operator.engine.protocol import EngineJob, EngineOutput, EngineRequest
from batchllm_operator.vllm_plugin.runahead.plan import ChainLimits, RunaheadGroup
from batchllm_operator.vllm_plugin.scheduler.hints import StepCost

_LENGTH_BYTES: Final = 8
_Flat = TypeVar("_Flat", EngineRequest, EngineOutput, ChainLimits, RunaheadGroup)


class Channel:
    """One end of the socket; one thread may send while another receives.

    A message is its length, eight big-endian bytes, and that many bytes of JSON.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._end.fileno()

    def send(self, kind: str, content: Any) -> None:
        """Send one message; blocks while the other end doesn't read.

        Raises:
            OSError: the other end is gone.
        """
        message = json.dumps({kind: content}).encode()
        self._end.sendall(len(message).to_bytes(_LENGTH_BYTES) + message)

    def receive(self) -> tuple[str, Any]:
        """Wait for a message; returns its kind and content.

        Raises:
            EOFError, OSError: the other end is gone.
        """
        length = int.from_bytes(self._read(_LENGTH_BYTES))
        message: dict[str, Any] = json.loads(self._read(length))
        ((kind, content),) = message.items()
        return kind, content

    def close(self) -> None:
        """Close the socket; the other end notices."""
        self._end.close()

    def _read(self, num_bytes: int) -> bytearray:
        found, num_found = bytearray(num_bytes), 0
        while num_found < num_bytes:
            num_new = self._end.recv_into(memoryview(found)[num_found:])
            if num_new == 0:
                raise EOFError("the other end is gone")
            num_found += num_new
        return found


@dataclass(frozen=True, slots=True)
class Started:
    """A replica's message after its start."""

    max_in_flight: int
    """Most requests that it holds."""
    limits: ChainLimits | None
    """Limits of its engine; None if it isn't in a chain."""
    link_bytes_per_s: float | None
    """Rate of the chain's slowest hop; None without a chain."""
    device: str
    chain_failure: str | None = None
    """Why an intended chain doesn't exist."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Started:
        """From its fields as plain JSON."""
        limits = content["limits"]
        return cls(**{**content, "limits": ChainLimits(**limits) if limits else None})


def flat(value: _Flat) -> dict[str, Any]:
    """The fields of a dataclass, without copying lists."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def job_to_json(job: EngineJob, trace_folder: Path | None) -> dict[str, Any]:
    """The job for a replica, without the placement of groups and without objects of the run."""
    return {
        "max_model_len": job.max_model_len,
        "num_requests": job.num_requests,
        "answers": job.answers.model_dump(),
        "step_cost": asdict(job.step_cost) if job.step_cost is not None else None,
        "trace_folder": str(trace_folder) if trace_folder is not None else None,
    }


def job_from_json(content: Mapping[str, Any]) -> EngineJob:
    """The job from `job_to_json`."""
    step_cost, folder = content["step_cost"], content["trace_folder"]
    return EngineJob(
        max_model_len=content["max_model_len"],
        num_requests=content["num_requests"],
        answers=PlannedAnswers(**content["answers"]),
        step_cost=StepCost(**step_cost) if step_cost is not None else None,
        trace_folder=Path(folder) if folder is not None else None,
    )


def group_from_json(content: Mapping[str, Any]) -> RunaheadGroup:
    """The group from `flat`."""
    return RunaheadGroup(content["group_id"], content["prefix_token_ids"], tuple(content["split"]))
