"""What a watch asks of the API server, and when it ends: its Job is a stand-in."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientError
from kubernetes.client import ApiClient, V1Job, V1Pod
from kubernetes_asyncio.client.exceptions import ApiException
from support.watched_jobs import watched_job

from batchllm_operator.operators.jobs import cluster_job
from batchllm_operator.operators.jobs import watch as watch_module
from batchllm_operator.operators.jobs.cluster_job import ClusterJob
from batchllm_operator.operators.jobs.end import EndKind, JobEnd
from batchllm_operator.operators.jobs.owner import WatchedJob
from batchllm_operator.operators.jobs.watch import JobWatch

LIMITS = watched_job(uid="u")
SHORT = replace(LIMITS, queue_s=60, start_s=60, stuck_s=60)
START = datetime(2026, 1, 31, tzinfo=UTC)


def model(body: Any, of: Any) -> Any:
    return ApiClient()._ApiClient__deserialize(body, of)


def pod(name: str, phase: str, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": name, "creationTimestamp": "2026-01-31T00:00:00Z"}
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def queued(name: str = "waits") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return pod(name, "Pending", conditions=[{**condition, "message": "Insufficient gpu"}])


def starting(reason: str) -> dict[str, Any]:
    scheduled = {"type": "PodScheduled", "status": "True"}
    scheduled["lastTransitionTime"] = "2026-01-31T00:00:00Z"
    state = {"waiting": {"reason": reason, "message": "no such image"}}
    container: dict[str, Any] = {"name": "base", "state": state, "image": "", "imageID": ""}
    container |= {"ready": False, "restartCount": 0}
    return pod("waits", "Pending", conditions=[scheduled], containerStatuses=[container])


def failed(name: str, code: int) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code, "reason": "Error", "message": f"said {name}"}}
    container = {"name": "base", "state": ended, "image": "", "imageID": "", "ready": False}
    return pod(name, "Failed", containerStatuses=[{**container, "restartCount": 0}])


class Time:
    """A clock that only sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_s = 0.0
        clock = self

        class Now(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return START + timedelta(seconds=clock.passed_s)

        async def sleep(seconds: float) -> None:
            self.passed_s += seconds

        monkeypatch.setattr(watch_module, "datetime", Now)
        monkeypatch.setattr(watch_module.time, "monotonic", lambda: 1e6 + self.passed_s)
        monkeypatch.setattr(watch_module.asyncio, "sleep", sleep)


class StandIn(ClusterJob):
    """A Job whose status and pods a test says; counts the requests."""

    def __init__(self, **status: Any) -> None:
        self.lines: list[str] = []
        log = SimpleNamespace(warning=print, info=lambda _, line: self.lines.append(line))
        super().__init__(LIMITS, log)
        self.patience_s = 0.0
        self.status: dict[str, Any] = {"active": 1, "ready": 0, **status}
        self.spec: dict[str, Any] = {"parallelism": 2, "template": {}}
        self.in_phase: dict[str, list[Any]] = {}
        self.messages: list[str] = []
        self.errors: Iterator[Exception] = iter(())
        self.num_requests = 0
        self.removed: list[str] = []

    async def call(self, api: Any, method: str, *args: Any, **options: Any) -> Any:
        self.num_requests += 1
        for error in self.errors:
            raise error
        if method == "read_namespaced_job":
            labels = {"batchllm.io/num-pods": "2"}
            metadata = {"name": "job", "uid": "u", "labels": labels}
            return model({"metadata": metadata, "spec": self.spec, "status": self.status}, V1Job)
        if method == "list_namespaced_pod":
            phase = options.get("field_selector", "").partition("=")[2]
            pods = self.in_phase.get(phase, [])[: options["limit"]]
            return SimpleNamespace(items=[model(each, V1Pod) for each in pods])
        if method == "list_namespaced_event":
            event = SimpleNamespace(reason="FailedCreate", last_timestamp=START)
            return SimpleNamespace(
                items=[SimpleNamespace(**vars(event), message=text) for text in self.messages]
            )
        if method == "delete_namespaced_pod":
            assert options["body"]["gracePeriodSeconds"] == 0
            self.removed.append(args[0])
            self.in_phase.clear()
            return None
        if method == "patch_namespaced_pod":
            assert args == ("p", "ns", {"metadata": {"finalizers": []}})
            return None
        assert method == "read_namespaced_pod_log"
        return "worker 3: 12/30 rows\r" + "worker 3: 13/30 rows\n"


def watched(
    job: StandIn,
    of: WatchedJob = LIMITS,
    before: JobEnd | None = None,
    masked: Callable[[str], str] = str,
) -> tuple[JobEnd, list[str]]:
    job.lines = []
    job.of = replace(of, before=before.as_event() if before else None)
    return asyncio.run(JobWatch(job, masked).until_end()), job.lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.mark.parametrize("num_workers", [8, 64, 1000])
def test_requests_do_not_depend_on_the_number_of_workers(clock: Time, num_workers: int) -> None:
    """An hour of the default settings, while some run, some wait, some have failed."""
    third = num_workers // 4
    job = StandIn(active=2 * third, ready=third, failed=third)
    job.in_phase = {
        "Running": [pod(f"r{i}", "Running") for i in range(third)],
        "Pending": [queued(f"w{i}") for i in range(third)],
        "Failed": [failed(f"f{i}", 1) for i in range(third)],
    }
    watched(job, replace(LIMITS, pause_s=3600))
    assert clock.passed_s == 3600
    assert job.num_requests / 60 <= 30


def test_a_line_a_minute_tells_what_runs_and_what_waits(clock: Time) -> None:
    job = StandIn(active=2, ready=1)
    job.in_phase = {"Running": [pod("r", "Running")], "Pending": [queued()]}
    _, lines = watched(job, replace(SHORT, pause_s=300))
    assert lines == [
        "Job job: 1 of 2 workers run; waiting: queued (Unschedulable): Insufficient gpu;"
        " worker 3: 13/30 rows"
    ]


def test_secrets_are_masked(clock: Time) -> None:
    job = StandIn(failed=1, active=0, conditions=[ended("Failed", "FailedIndexes")])
    job.in_phase = {"Failed": [failed("secret", 1)]}
    end, lines = watched(job, masked=lambda text: text.replace("secret", "***"))
    assert "secret" not in f"{lines} {end.text} {end.last_lines}"
    end, _ = watched(job, masked=lambda _: "(left out)")  # the trigger knows no secret to mask
    assert end.text == "Job job failed: (left out)"


def ended(kind: str, reason: str) -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": reason, "message": "so it ended"}


@pytest.mark.parametrize(
    ("condition", "pods", "said"),
    [
        (ended("Failed", "FailedIndexes"), [failed("p", 1)], "pod p failed with exit code 1"),
        (
            ended("Failed", "PodFailurePolicy"),
            [failed("final", 2), failed("stopped", 143)],
            "pod final failed with exit code 2; it said: said final",
        ),
        (ended("Failed", "PodFailurePolicy"), [failed("p", 1)], "PodFailurePolicy: so it ended"),
        (ended("Failed", "DeadlineExceeded"), [failed("p", 143)], "active_deadline_seconds"),
        (ended("Failed", "FailedIndexes"), [], "FailedIndexes: so it ended"),
        (ended("Complete", "CompletionsReached"), [], "ended well, but its results aren't"),
    ],
)
def test_how_a_job_ended(clock: Time, condition: Any, pods: list[Any], said: str) -> None:
    job = StandIn(active=0, failed=len(pods), conditions=[condition])
    job.in_phase = {"Failed": pods}
    end, _ = watched(job)
    assert said in end.text
    assert end.is_final == (condition["reason"] == "PodFailurePolicy")
    assert JobEnd.from_event(end.as_event()) == end


@pytest.mark.parametrize(
    ("status", "pods", "text", "limit_s"),
    [
        ({}, [queued()], "(queue_timeout): queued (Unschedulable): Insufficient", 6 * 3600),
        ({"active": 0}, [], "(queue_timeout): exceeded quota", 6 * 3600),
        ({}, [starting("ContainerCreating")], "(start_timeout): ContainerCreating no such", 1800),
        ({}, [starting("ImagePullBackOff")], "start (ImagePullBackOff): no such image", 600),
        ({}, [starting("InvalidImageName")], "start (InvalidImageName): no such image", 0),
    ],
)
def test_a_job_of_which_nothing_runs_ends_at_a_limit(
    clock: Time, status: Any, pods: list[Any], text: str, limit_s: float
) -> None:
    job = StandIn(**status)
    job.in_phase, job.messages = {"Pending": pods}, ["exceeded quota"]
    end, _ = watched(job)
    assert end.kind is EndKind.LATE and text in end.text
    assert limit_s <= clock.passed_s <= limit_s + 2 * 60
    assert end.is_final == (limit_s == 0)


def test_a_job_of_which_something_runs_ends_at_no_limit(clock: Time) -> None:
    job = StandIn(active=2, ready=1)
    job.in_phase = {"Pending": [starting("ImagePullBackOff")]}
    end, _ = watched(job, replace(SHORT, pause_s=7200))
    assert end.kind is EndKind.PAUSED


def test_a_pod_that_never_gets_ready_runs(clock: Time) -> None:
    """A template may have a readiness probe that never passes."""
    job = StandIn(active=2, ready=0)
    job.in_phase = {"Running": [pod("r", "Running")], "Pending": [queued()]}
    end, lines = watched(job, replace(SHORT, pause_s=7200))
    assert (end.kind, end.num_running, end.num_waiting) == (EndKind.PAUSED, 1, 1)
    assert "1 of 2 workers run; waiting: queued (Unschedulable)" in lines[0]


def test_the_time_that_nothing_runs_goes_on_over_pauses(clock: Time) -> None:
    job = StandIn()
    job.in_phase = {"Pending": [queued()]}
    short, before = replace(LIMITS, queue_s=1000, pause_s=300), None
    for _ in range(4):
        before, _ = watched(job, short, before)
    assert before is not None and before.kind is EndKind.LATE
    assert clock.passed_s < 1200


def test_a_worker_that_succeeds_ends_a_watch_soon_but_not_again(clock: Time) -> None:
    job = StandIn(ready=1, succeeded=1)
    short = replace(LIMITS, queue_s=1000, pause_s=300)
    before, _ = watched(job, short)
    assert (before.kind, clock.passed_s <= 30) == (EndKind.PAUSED, True)
    watched(job, short, before)
    assert clock.passed_s > 300


def test_lines_of_a_failed_pod_are_logged_once_over_pauses(clock: Time) -> None:
    job = StandIn(ready=1, failed=1)
    job.in_phase = {"Failed": [failed("p", 1)]}
    short = replace(LIMITS, queue_s=1000, pause_s=300)
    before, lines = watched(job, short)
    _, again = watched(job, short, before)
    assert [line for line in lines if "p" in line and "ended (Error)" in line] != []
    assert not [line for line in again if "ended (Error)" in line]


def api_error(status: int, body: str = "") -> ApiException:
    error: Any = ApiException(status=status, reason="no")
    error.body = body
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (api_error(403), EndKind.UNSEEN, "lacks a right"),
        (api_error(503), EndKind.UNSEEN, "503"),
        (ClientError("no answer"), EndKind.UNSEEN, "no answer"),
        (api_error(404, "a proxy's: not found"), EndKind.UNSEEN, "404"),
        (
            api_error(404, '{"kind": "Status", "reason": "NotFound"}'),
            EndKind.FAILED,
            "deleted from",
        ),
    ],
)
def test_an_api_that_does_not_answer_leaves_the_job_alone(
    clock: Time, error: Exception, kind: EndKind, text: str
) -> None:
    job = StandIn()
    job.errors = iter([error])
    end, _ = watched(job)
    assert end.kind is kind and text in end.text


def test_another_job_of_the_name_is_not_the_jobs(clock: Time) -> None:
    assert watched(StandIn(), replace(LIMITS, uid="another"))[0].kind is EndKind.FAILED


def test_the_tasks_deadline_ends_the_watch(clock: Time) -> None:
    deadline = (START + timedelta(seconds=65)).isoformat()
    end, _ = watched(StandIn(ready=1), replace(LIMITS, deadline=deadline))
    assert end.kind is EndKind.LATE and 65 <= clock.passed_s < 80


def test_a_watch_does_not_pause_while_a_pod_is_ending(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new watch would restart the grace period, after which the pod is removed by force."""
    monkeypatch.setattr(cluster_job.time, "monotonic", lambda: 1e6 + clock.passed_s)
    ending = pod("p", "Running")
    ending["metadata"] |= {"deletionTimestamp": "2026-01-31T00:00:00Z"}
    ending["metadata"]["deletionGracePeriodSeconds"] = 330
    job = StandIn(ready=1, terminating=1)
    job.in_phase = {"": [ending]}
    watched(job, replace(LIMITS, pause_s=60))
    assert job.removed == ["p"] and 390 <= clock.passed_s <= 600
