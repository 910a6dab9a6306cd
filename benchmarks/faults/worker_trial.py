"""A trial in which workers of a job come and go; what is lost with them, process by process."""

import json
import re
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow.fs as pafs

from batchllm_operator.errors import ExitCode
from benchmarks.faults.inside import read_engine_log
from benchmarks.faults.job import BY_WORKERS, input_rows
from benchmarks.faults.place import StuckError
from benchmarks.faults.trial import FENCE_COSTS, KILL_COSTS, Trial
from benchmarks.faults.zygote import Child

_ACTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "workers_kill": ("kill",),
    "workers_kill_at_write": ("kill_at_write",),
    "workers_zombie": ("stop",),
    "workers_drain": ("drain", "terminate"),
    "workers_twins": ("twin",),
    "workers_renumbered": ("kill_all",),
    "workers_many": ("kill", "stop"),
    "workers_clocks": ("kill", "stop", "join"),
    "workers_any": ("kill", "kill_at_write", "stop", "drain", "terminate", "twin", "kill_all"),
}
_CLAIM: Final = re.compile(r"attempt-([0-9]+)/claim\.json")
_DRAIN_S: Final = 30.0
_SILENCE_S: Final = 90.0
"""Longer than a worker is silent until others take its shards, at the usual pace."""


@dataclass(slots=True)
class Hand:
    """A worker's process."""

    child: Child
    number: int
    owner: str | None
    may_be_killed: bool = False
    """By kill -9, or by a SIGTERM after two of them."""
    may_be_fenced: bool = False
    """Whether it may look dead while it isn't, to others or to its owner's next try."""
    is_stopped: bool = False
    num_sigterms: int = 0

    def sigterm(self) -> None:
        self.num_sigterms += 1
        self.may_be_killed |= self.num_sigterms > 2
        self.child.send(signal.SIGTERM)

    def overpaid(self, in_vain: Counter[int], beside_spills: int) -> int:
        """Rows that it finished in vain, by shard, beyond those that it may have."""
        if self.may_be_fenced:
            may_cost = FENCE_COSTS + beside_spills
            return sum(max(0, rows - may_cost) for rows in in_vain.values())
        return max(0, in_vain.total() - self.may_be_killed * (KILL_COSTS + beside_spills))


class WorkerTrial(Trial):
    """A job whose shards are run by workers, to which things happen until one does the rest."""

    job = BY_WORKERS
    on_disk = tuple(_ACTIONS)
    on_s3 = (
        *("workers_s3_lost_response", "workers_s3_kill", "workers_zombie", "workers_s3_500"),
        *("workers_any", "workers_s3_slow_down", "workers_s3_timeout", "workers_twins"),
    )

    def _with_fault(self, kind: str) -> None:
        self._hands: list[Hand] = []
        self._num_workers = (
            9 if kind == "workers_many" else self.rng.randint(2, 3 if self.proxy else 4)
        )
        self._job("run", self._run)
        self._count_costs()

    def _run(self, args: list[str]) -> None:
        self._plan_uri = args[args.index("--plan") + 1]
        self._come_and_go()
        self.place.finish(args)
        if left := self._unfinished():
            raise StuckError(f"the last worker ended well, but left shards {left}")

    def _come_and_go(self) -> None:
        kind = self.outcome.kind
        actions = _ACTIONS.get(kind, ("kill", "join"))
        have_started = threading.Event()
        if self._is_s3_fault:
            victim = self.rng.randrange(self._num_workers)

            def kill() -> None:
                have_started.wait(10)
                self._hands[victim].may_be_killed = True
                self._hands[victim].child.send(signal.SIGKILL)

            self._arm(kind.removeprefix("workers_s3_"), self.usual.requests["run"], kill)
        for number in range(self._num_workers):
            self._start(number, **self._faults_at_start())
        have_started.set()
        if self.rng.random() < 0.8:
            self._wait_for_engines()
        for _ in range(self.rng.randint(1, 4)):
            time.sleep(self.rng.uniform(0, 0.5 * self._work_s / self._num_workers))
            getattr(self, f"_{self.rng.choice(actions)}")()
        for hand in self._hands:
            if hand.is_stopped:
                hand.child.send(signal.SIGCONT)
        for hand in self._hands:
            self._end(hand)
        if self.proxy is not None:
            self.outcome.faults += self.proxy.num_faults
            self.proxy.arm()

    def _wait_for_engines(self) -> None:
        """Until one has finished a row."""
        until, log = time.monotonic() + 10, self.place.engine_log
        while not (log.exists() and log.stat().st_size) and time.monotonic() < until:
            time.sleep(0.01)

    @property
    def _work_s(self) -> float:
        """How long one worker's engine is at work on the whole job."""
        return len(input_rows(self.version)) * self.place.job.delay_s

    def _faults_at_start(self) -> dict[str, Any]:
        kind, rng = self.outcome.kind, self.rng
        if kind == "workers_clocks" and rng.random() < 0.5:
            return {"clock_ahead_s": rng.choice([-1, 1]) * rng.choice([1, 60, 3600])}
        if kind == "workers_kill_at_write" and rng.random() < 0.7:
            return {"kill_at_write": self._some_write()}
        return {}

    def _some_write(self) -> int:
        return self.rng.randint(1, max(1, self.usual.writes["run"] // self._num_workers))

    @property
    def _is_s3_fault(self) -> bool:
        return self.outcome.kind.startswith("workers_s3_")

    def _start(self, number: int, owner: str | None = None, **faults: Any) -> Hand:
        """Start a worker; half of them have an owner, as a task's try."""
        if owner is None and self.rng.random() < 0.5:
            owner = f"task-{len(self._hands)}"
        for hand in self._hands:  # its owner's next try takes its shards at once
            hand.may_be_fenced |= hand.owner == owner is not None and hand.child.poll() is None
        args = ["--worker", number, "--num-workers", self._num_workers]
        if owner is not None:
            args += ["--owner", owner]
        child = self.place.start(
            "run", "--plan", self._plan_uri, *args, "--drain-s", _DRAIN_S, **faults
        )
        hand = Hand(child, number, owner, may_be_fenced=self._is_s3_fault)
        if self._is_s3_fault or "kill_at_write" in faults:  # which may end it
            hand.may_be_killed = True
        self._hands.append(hand)
        return hand

    def _some(self) -> Hand | None:
        """A worker at random that still runs."""
        running = [hand for hand in self._hands if hand.child.poll() is None]
        return self.rng.choice(running) if running else None

    def _again(self, hand: Hand) -> None:
        """The task of an ended worker is tried again, or somebody starts another one."""
        if self.rng.random() < 0.7:
            self._start(hand.number, hand.owner if self.rng.random() < 0.7 else None)

    def _kill(self) -> None:
        if (hand := self._some()) is not None:
            hand.may_be_killed = True
            hand.child.kill()
            self._again(hand)

    def _kill_at_write(self) -> None:
        self._start(self.rng.randrange(self._num_workers), kill_at_write=self._some_write())

    def _kill_all(self) -> None:
        """And others start as another number of workers."""
        for hand in self._hands:
            hand.may_be_killed = True
            hand.child.kill()
        self._num_workers = self.rng.randint(1, 5)
        for number in range(self._num_workers):
            self._start(number)

    def _stop(self) -> None:
        """A worker stands still for a while; long enough for others to take its shards, mostly."""
        if (hand := self._some()) is None:
            return
        hand.may_be_fenced = True
        hand.child.send(signal.SIGSTOP)
        hand.is_stopped, silence_s = True, _SILENCE_S / self.place.pace
        if self.rng.random() < 0.5:
            self._again(hand)
        time.sleep(self.rng.choice([0.1, silence_s, silence_s]))
        if self.rng.random() < 0.7:
            hand.child.send(signal.SIGCONT)
            hand.is_stopped = False

    def _drain(self) -> None:
        """Its open parts are finished, so that nothing is done again."""
        if (hand := self._some()) is not None:
            hand.sigterm()
            self._again(hand)

    def _terminate(self) -> None:
        """Two signals: it doesn't finish them, but keeps their finished rows."""
        if (hand := self._some()) is not None:
            hand.sigterm()
            time.sleep(0.01)
            hand.sigterm()
            self._again(hand)

    def _twin(self) -> None:
        """Another worker of the same number, often of the same owner, which takes over."""
        if (hand := self._some()) is not None:
            self._start(hand.number, hand.owner if self.rng.random() < 0.7 else None)
            self.outcome.faults += 1

    def _join(self) -> None:
        self._start(self.rng.randrange(self._num_workers))

    def _end(self, hand: Hand) -> None:
        """Wait for a worker; only one that something has happened to may end with an error."""
        code = self.place.end(hand.child)
        self.outcome.kills += code == -signal.SIGKILL
        self.outcome.faults += code == ExitCode.TERMINATED
        allowed = {ExitCode.OK, ExitCode.TERMINATED, -signal.SIGTERM}
        if hand.may_be_killed:
            allowed |= {-signal.SIGKILL}
        if self._is_s3_fault:
            allowed |= {ExitCode.FAILURE}
        if code not in allowed:
            raise StuckError(f"a worker ended with {code}: see {self.place.log}")

    def _unfinished(self) -> list[int]:
        """Shards without a report."""
        finished = {shard for shard, name in self._files() if name == "report.json"}
        return sorted(set(range(self.place.job.num_shards)) - finished)

    def _count_costs(self) -> None:
        """What each process finished in vain: rows that a later attempt has finished again."""
        log, attempts = read_engine_log(self.place.engine_log), self._attempts()
        outcome, in_vain = self.outcome, defaultdict[int, Counter[int]](Counter)
        for shard, idxs in self.place.requests(self._plan_uri).items():
            outcome.rows += len(idxs)
            for idx in idxs:
                pids = [pid for pid, finished in log.finished_by.items() if finished[idx]]
                latest = max(((attempts[shard, pid], pid) for pid in pids), default=(0, 0))[1]
                for pid in pids:
                    in_vain[pid][shard] += log.finished_by[pid][idx] - (pid == latest)
        hands = {hand.child.pid: hand for hand in self._hands}
        for pid, rows in in_vain.items():
            outcome.regenerated_rows += rows.total()
            hand = hands.get(pid)  # the worker that did the rest isn't among them
            beside_spills = log.beside_spills[pid]
            outcome.overpaid_rows += hand.overpaid(rows, beside_spills) if hand else rows.total()
            if hand and hand.may_be_killed and not hand.may_be_fenced:
                outcome.regenerated_rows_max = max(outcome.regenerated_rows_max, rows.total())

    def _attempts(self) -> dict[tuple[int, int], int]:
        """The latest attempt of each process at each shard, by shard and pid."""
        attempts: dict[tuple[int, int], int] = {}
        for shard, name in sorted(self._files()):
            if match := _CLAIM.fullmatch(name):
                path = f"{self._runs}/shard-{shard:05d}/{name}"
                with self.place.fs.open_input_file(path) as file:
                    attempts[shard, json.loads(file.read())["process_id"]] = int(match[1])
                self.outcome.faults += int(match[1]) > 1
        return attempts

    def _files(self) -> list[tuple[int, str]]:
        """The shard and the path in its folder of each file that runs have written."""
        found = self.place.fs.get_file_info(pafs.FileSelector(self._runs, recursive=True))
        paths = (info.path.partition("/runs/shard-")[2] for info in found if info.is_file)
        return [(int(path[:5]), path[6:]) for path in paths if path]

    @property
    def _runs(self) -> str:
        return f"{self._plan_uri.removeprefix('s3://')}/runs"
