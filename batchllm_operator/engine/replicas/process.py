"""The run's side of a replica: a process, its socket and its requests."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from batchllm_operator.engine.device_profile import DeviceProfile, ProfileStore
from batchllm_operator.engine.gpus import replica_cores, replica_environment, runs_on_cpu
from batchllm_operator.engine.protocol import EngineJob, EngineRequest
from batchllm_operator.engine.replicas.messages import Channel, Started, job_to_json
from batchllm_operator.errors import EngineError, MissingLibraryError, ModelError, SpecError
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.runahead.plan import ChainSettings

_log = logging.getLogger(__name__)
_MODULE: Final = "batchllm_operator.engine.replicas.replica"
_END_S: Final = 60.0
"""Time for all replicas together to end by themselves."""
_END_STARTING_S: Final = 10.0
"""The same before all have started: they may wait for each other, and have nothing to lose."""
_ERRORS: Final = {
    error.__name__: error for error in (SpecError, ModelError, EngineError, MissingLibraryError)
}


class ReplicaGoneError(Exception):
    """A replica's process has ended or its engine has died; the message says how."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(f"replica {rank} {how}")
        self.rank = rank


class PackedRequest:
    """A request whose prompt takes four bytes per token instead of a list's forty."""

    __slots__ = ("_request", "_token_ids")

    def __init__(self, request: EngineRequest) -> None:
        self._token_ids = array("i", request.prompt_token_ids)
        self._request = replace(request, prompt_token_ids=[])

    @property
    def group_id(self) -> int:
        """See `EngineRequest`."""
        return self._request.group_id

    def unpack(self) -> EngineRequest:
        """The request as it was."""
        return replace(self._request, prompt_token_ids=self._token_ids.tolist())


class Replica:
    """One process, from its start to its end.

    Attributes:
        rank: its place among the replicas, from 0.
        in_flight: its requests by request_idx, in the order in which it took them.
        started: its first message; set by `start_replicas`.
    """

    started: Started

    def __init__(self, rank: int, environment: dict[str, str]) -> None:
        self.rank = rank
        self.in_flight: dict[int, PackedRequest] = {}
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                # -P: nothing in the working directory shadows a package.
                [sys.executable, "-P", "-m", _MODULE, str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the run alone
            )
        self._channel = Channel(ours)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._channel.fileno()

    def send(self, kind: str, content: Any) -> None:
        """Send a message; see `engine.replicas.messages`.

        Raises:
            ReplicaGoneError: it has ended.
        """
        try:
            self._channel.send(kind, content)
        except OSError as error:
            raise ReplicaGoneError(self.rank, self._read_reason()) from error

    def receive(self) -> tuple[str, Any]:
        """Wait for a message.

        Raises:
            ReplicaGoneError: it has ended or reports that its engine has died.
        """
        try:
            kind, content = self._channel.receive()
        except (EOFError, OSError) as error:
            raise ReplicaGoneError(self.rank, self._exit_reason()) from error
        if kind == "died":
            raise ReplicaGoneError(self.rank, f"failed: {content}")
        return kind, content

    def close(self, patience_s: float) -> None:
        """Ask it to end, and kill it after `patience_s`."""
        self.disconnect()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            _log.warning("replica %d doesn't end; it is killed", self.rank)
            self._process.kill()
            self._process.wait()

    def disconnect(self) -> None:
        """Close the socket, which asks it to end."""
        self._channel.close()

    def _read_reason(self) -> str:
        """Why it has gone; skips its other messages."""
        try:
            while True:
                kind, content = self._channel.receive()
                if kind == "died":
                    return f"failed: {content}"
        except (EOFError, OSError):
            return self._exit_reason()

    def _exit_reason(self) -> str:
        """How the process ended; kills it if it only closed its socket."""
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"ended {how}"


def close_replicas(replicas: Sequence[Replica], patience_s: float = _END_S) -> None:
    """Ask all to end, and kill those still running after `patience_s`."""
    for replica in replicas:
        replica.disconnect()
    until = time.monotonic() + patience_s
    for replica in replicas:
        replica.close(max(until - time.monotonic(), 0.0))


def with_messages(replicas: Iterable[Replica]) -> list[Replica]:
    """Wait until replicas have sent messages or ended; returns these by rank."""
    with selectors.DefaultSelector() as selector:
        for replica in replicas:
            selector.register(replica, selectors.EVENT_READ, replica)
        return sorted((key.data for key, _ in selector.select()), key=lambda each: each.rank)


def start_replicas(
    spec: JobSpec, job: EngineJob, chains: Sequence[ChainSettings] | None
) -> list[Replica]:
    """Start all replicas of a run side by side, and wait until all can work.

    Args:
        job: their work together.
        chains: each one's place in the chain; None for no chain.

    Raises:
        SpecError, ModelError, EngineError: a replica can't start; none is left running.
    """
    num_replicas = spec.engine.replicas
    with ExitStack() as undo:
        replicas: list[Replica] = []
        undo.callback(close_replicas, replicas, _END_STARTING_S)
        for rank in range(num_replicas):
            replicas.append(Replica(rank, replica_environment(spec, rank)))
        share = job.num_requests and -(-job.num_requests // num_replicas)
        try:
            for replica in replicas:
                own = replace(job, num_requests=share)
                replica.send(
                    "start",
                    {
                        "rank": replica.rank,
                        "spec": spec.model_dump(mode="json"),
                        "job": job_to_json(own, _trace_folder(job, replica.rank)),
                        "chain": asdict(chains[replica.rank]) if chains else None,
                        "cores": replica_cores(num_replicas, replica.rank) if runs_on_cpu() else [],
                    },
                )
            _wait_for_start(replicas, job.profiles)
        except ReplicaGoneError as error:
            raise EngineError(f"vLLM can't start: {error}") from error
        undo.pop_all()
        return replicas


def _wait_for_start(replicas: Sequence[Replica], profiles: ProfileStore | None) -> None:
    starting = set(replicas)
    while starting:
        for replica in with_messages(replicas):
            kind, content = replica.receive()
            if kind == "started":
                replica.started = Started.from_json(content)
                starting.remove(replica)
            elif kind == "failed":
                raise _ERRORS.get(content["kind"], EngineError)(content["message"])
            elif kind == "find_profile":
                found = profiles.find(content) if profiles is not None else None
                replica.send("profile", found.model_dump(mode="json") if found else None)
            elif kind == "keep_profile" and profiles is not None:
                profiles.keep(DeviceProfile.model_validate(content))


def _trace_folder(job: EngineJob, rank: int) -> Path | None:
    if job.trace_folder is None or rank == 0:
        return job.trace_folder
    folder = job.trace_folder / f"replica-{rank}"
    folder.mkdir(exist_ok=True)
    return folder
