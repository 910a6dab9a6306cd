"""One trial: a job that meets one kind of fault, is let finish, and is checked row by row."""

import random
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from batchllm_operator.errors import ExitCode
from benchmarks.faults.damage import damage_parts, small_disk
from benchmarks.faults.inside import read_engine_log
from benchmarks.faults.job import BY_ONE, MAX_IN_FLIGHT, SPILL_ROWS, Job, compare, computed_truth
from benchmarks.faults.place import Onlooker, Place, StuckError
from benchmarks.faults.s3 import FaultyProxy

STAGES: Final = ("plan", "run", "commit")
_ALSO_EARLIER: Final = (
    *("kill_plan", "kill_plan_at_write", "kill_commit", "kill_commit_at_write", "late_commit"),
)
FATAL: Final = (
    *("lost_rows", "duplicate_rows", "half_commits", "wrong_rows", "stuck", "zombies_published"),
    "overpaid_rows",
)
"""Fields of `Outcome` that are zero unless the product is wrong."""
KILL_COSTS: Final = SPILL_ROWS - 1
FENCE_COSTS: Final = 2 * SPILL_ROWS - 1 + MAX_IN_FLIGHT
"""Most finished rows that are generated again, beside those finished while a spill is written: see
the benchmark's docstring."""


@dataclass(slots=True)
class Usual:
    """What commands do when nothing happens to them: measured before the trials."""

    seconds: dict[str, float] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What became of a trial."""

    kind: str
    kills: int = 0
    faults: int = 0
    """Requests to S3 that failed, damaged parts, full disks, runs that a signal stopped, fenced or
    refused zombies; steps of a commit that were watched."""
    lost_rows: int = 0
    duplicate_rows: int = 0
    wrong_rows: int = 0
    half_commits: int = 0
    reads: int = 0
    reader_errors: int = 0
    rows: int = 0
    regenerated_rows: int = 0
    """Rows that were finished before."""
    regenerated_rows_max: int = 0
    """After one kill of a run."""
    overpaid_rows: int = 0
    """Those beyond what kills and fences may cost."""
    zombies_published: int = 0
    """Late commits of an older plan that took the newer one's place for a while."""
    stuck: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the product did what it never may."""
        return any(getattr(self, name) for name in FATAL)


class Trial:
    """A new version of the input, over what the lake holds, with a fault on its way."""

    job: ClassVar[Job] = BY_ONE
    on_disk: ClassVar[Sequence[str]] = (
        *("kill_commit", "kill_run", "stop_run", "kill_run_at_write", "kill_plan", "zombie_run"),
        *("kill_commit_at_write", "damage", "disk_full", "late_commit", "kill_plan_at_write"),
        "watched_commit",
    )
    """Kinds of faults."""
    on_s3: ClassVar[Sequence[str]] = (
        *("s3_lost_response", "s3_kill", "s3_500", "s3_slow_down", "s3_timeout", "zombie_run"),
        *("damage", "stop_run"),
    )

    def __init__(
        self,
        kind: str,
        place: Place,
        usual: Usual,
        proxy: FaultyProxy | None,
        rng: random.Random,
    ) -> None:
        self.place, self.usual, self.proxy, self.rng = place, usual, proxy, rng
        self.outcome = Outcome(kind)
        self.version = self._some_version(but=place.published)
        self.allowed = [place.published, self.version]

    def run(self) -> Outcome:
        """Do it; the place holds the version afterwards, unless the outcome is stuck."""
        self.place.new_input(self.version)
        try:
            self._with_fault(self.outcome.kind)
            self._check()
        except StuckError as error:
            self.outcome.stuck = str(error)
        return self.outcome

    def _some_version(self, but: int | None) -> int:
        """A new version of the input; now and then one that there was, where runs don't matter."""
        earlier = [version for version in range(self.place.num_versions) if version != but]
        if earlier and self.outcome.kind in _ALSO_EARLIER and self.rng.random() < 0.25:
            return self.rng.choice(earlier)
        return self.place.num_versions

    def _with_fault(self, kind: str) -> None:
        if kind.startswith("s3_"):
            self._s3(kind.removeprefix("s3_"))
        elif kind.startswith("kill_"):
            self._killed(kind.split("_")[1], at_write=kind.endswith("at_write"))
        else:
            getattr(self, f"_{kind}")()

    def _job(self, target: str, harm: Callable[[list[str]], object]) -> None:
        """All stages, each until it ends well; `harm` is done before the target."""
        place = self.place

        def finish(stage: str, args: list[str]) -> None:
            if stage == target:
                harm(args)
            place.finish(args)

        finish("plan", place.plan_args())
        stages = place.stages(place.plan_uri())
        finish("run", stages["run"])
        with Onlooker(place, self.allowed) as onlooker:
            finish("commit", stages["commit"])
            onlooker.look()
        self._note(onlooker)

    def _watched_commit(self) -> None:
        """A reader looks before each file operation of the commit, which waits meanwhile."""
        place = self.place
        if place.published is None:  # an empty table is no half commit where there was none
            place.do_all()
            self.allowed = [self.version, place.num_versions]
            self.version = place.num_versions
            place.new_input(self.version)
        place.finish(place.plan_args())
        stages = place.stages(place.plan_uri())
        place.finish(stages["run"])
        onlooker = Onlooker(place, self.allowed)
        self.outcome.faults += place.step_through(stages["commit"], onlooker.look)
        onlooker.look()
        place.finish(stages["commit"])
        self._note(onlooker)

    def _killed(self, target: str, *, at_write: bool) -> None:
        """kill -9 at a random time of the stage, or before a random one of its writes."""

        def kill(args: list[str]) -> None:
            if at_write:
                number = self.rng.randint(1, self.usual.writes[target])
                child = self.place.start(*args, kill_at_write=number)
                self.outcome.kills += self.place.end(child) == -signal.SIGKILL
                return
            child = self.place.start(*args)
            child.wait(self.rng.uniform(0, self.usual.seconds[target]))
            self.outcome.kills += child.kill()

        self._job(target, kill)
        self._count_rows(KILL_COSTS * self.outcome.kills if target == "run" else 0)

    def _stop_run(self) -> None:
        """A run is stopped by a signal, one to three times."""

        def stop(args: list[str]) -> None:
            for _ in range(self.rng.randint(1, 3)):
                number = self.rng.choice([signal.SIGINT, signal.SIGTERM])
                child = self.place.start(*args)
                child.wait(self.rng.uniform(0, self.usual.seconds["run"]))
                child.send(number)
                code = self.place.end(child)
                self.outcome.faults += code == 128 + number
                if code not in (ExitCode.OK, 128 + number, -number):  # the last: before its start
                    raise StuckError(f"a stopped run ended with {code}: see {self.place.log}")

        self._job("run", stop)
        self._count_rows(0)

    def _zombie_run(self) -> None:
        """A run is paused, its owner's next one takes its shards, and the first one goes on."""

        def pause(args: list[str]) -> None:
            seconds = self.usual.seconds["run"]
            first = self.place.start(*args)
            first.wait(self.rng.uniform(0, seconds))
            first.send(signal.SIGSTOP)
            second = self.place.start(*args)
            if self.rng.random() < 0.5:  # side by side
                second.wait(self.rng.uniform(0, seconds))
            elif second.wait(20) is None:  # it may wait for a lock that the first one holds
                first.send(signal.SIGCONT)
            first.send(signal.SIGCONT)
            for child in (second, first):
                if (code := self.place.end(child)) not in (ExitCode.OK, ExitCode.FAILURE):
                    raise StuckError(f"one of two runs ended with {code}: see {self.place.log}")

        self._job("run", pause)
        self.outcome.faults += len(read_engine_log(self.place.engine_log).finished_by) > 1
        self._count_rows(FENCE_COSTS * self.place.job.num_shards)

    def _late_commit(self) -> None:
        """An older plan is committed beside a newer one, or after it."""
        place = self.place
        older = self._some_version(but=self.version)
        self.allowed.append(older)
        plans = []
        for version in (older, self.version):
            place.new_input(version)
            place.finish(place.plan_args())
            plans.append(place.stages(place.plan_uri()))
            place.finish(plans[-1]["run"])
        with Onlooker(place, self.allowed) as onlooker:
            late = place.start(*plans[0]["commit"])
            late.wait(self.rng.uniform(0, self.usual.seconds["commit"]))
            late.send(signal.SIGSTOP)
            newer = place.start(*plans[1]["commit"])
            if newer.wait(self.rng.choice([0.1, 10.0])) is None:
                late.send(signal.SIGCONT)
            place.end(newer)
            late.send(signal.SIGCONT)
            code = place.end(late)
            self.outcome.faults += code != ExitCode.OK
            onlooker.look()
            is_newest = not compare(place.tables.output().to_pylist(), computed_truth(self.version))
            self.outcome.zombies_published += not is_newest
            # As a scheduler would: the day is planned again, and ends with its own input.
            place.do_all()
        self._note(onlooker)

    def _damage(self) -> None:
        """Staged parts are cut off or altered; the commit must see it."""

        def damage(args: list[str]) -> None:
            self.outcome.faults += damage_parts(self.place, args[2], self.rng)
            code = self.place.end(self.place.start(*args))
            # OK if what was damaged wasn't needed, or the rows tell.
            if code not in (ExitCode.OK, ExitCode.INCOMPLETE):
                raise StuckError(f"a damaged part made commit end with {code}: {self.place.log}")

        self._job("commit", damage)

    def _disk_full(self) -> None:
        """The disk fills up somewhere in a stage, which is tried three times before there is room.

        The file system is a small tmpfs; where none may be mounted, files have a size limit.
        """

        def fill(args: list[str]) -> None:
            with small_disk(self.place.root, self.rng) as limits:
                for _ in range(3):
                    self.outcome.faults += self.place.end(self.place.start(*args, **limits)) > 0

        self._job(self.rng.choice(STAGES), fill)

    def _s3(self, kind: str) -> None:
        """A burst of requests fails in a random stage, or the command is killed at one."""
        assert self.proxy is not None, "only on S3"
        proxy, target = self.proxy, self.rng.choice(STAGES)

        def fail(args: list[str]) -> None:
            running: list[Any] = []
            is_running = threading.Event()

            def kill() -> None:
                is_running.wait(10)
                running[0].send(signal.SIGKILL)

            self._arm(kind, self.usual.requests[target], kill)
            running.append(self.place.start(*args))
            is_running.set()
            self.outcome.kills += self.place.end(running[0]) == -signal.SIGKILL
            self.outcome.faults += proxy.num_faults
            proxy.arm()

        self._job(target, fail)
        if kind == "kill":
            self._count_rows(KILL_COSTS * self.outcome.kills if target == "run" else 0)

    def _arm(self, kind: str, num_requests: int, kill: Callable[[], object]) -> None:
        """A burst of requests fails, or the client is killed at one of them."""
        assert self.proxy is not None, "only on S3"
        first = self.rng.randrange(num_requests)
        if kind == "kill":
            when = self.rng.choice(["kill_before", "kill_after"])
            self.proxy.arm(when, range(first, first + 1), kill)
        else:
            length = self.rng.choice([1, 2, 5] if kind == "timeout" else [1, 2, 5, 20, 60])
            self.proxy.arm(kind, range(first, first + length))

    def _count_rows(self, may_cost: int) -> None:
        """How many finished rows were generated again, and how many more than they may."""
        log, outcome = read_engine_log(self.place.engine_log), self.outcome
        finished, beside_spills = log.finished, max(log.beside_spills.values(), default=0)
        requests = self.place.requests(self.place.plan_uri())
        again = sum(max(0, finished[idx] - 1) for idxs in requests.values() for idx in idxs)
        outcome.rows += sum(map(len, requests.values()))
        outcome.regenerated_rows += again
        outcome.overpaid_rows += max(0, again - may_cost - (beside_spills if may_cost else 0))
        if outcome.kills:
            outcome.regenerated_rows_max = outcome.regenerated_rows

    def _check(self) -> None:
        rows = self.place.tables.output().to_pylist()
        found = compare(rows, computed_truth(self.version))
        self.outcome.lost_rows, self.outcome.duplicate_rows = found.lost, found.duplicate
        self.outcome.wrong_rows = found.wrong
        self.place.published = self.version

    def _note(self, onlooker: Onlooker) -> None:
        self.outcome.reads += onlooker.num_reads
        self.outcome.half_commits += onlooker.num_halves
        self.outcome.reader_errors += onlooker.num_errors
