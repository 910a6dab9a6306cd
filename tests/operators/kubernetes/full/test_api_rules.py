"""What the operators rely on in an API server, the double or a real one."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from support.kubernetes.api_client import MERGE_PATCH
from support.kubernetes.cluster import Cluster

Ask = Callable[..., tuple[int, Any]]
GPU = "nvidia.com/gpu"


def job(name: str = "job", **spec: Any) -> dict[str, Any]:
    """An Indexed Job that is suspended, so that no controller changes it."""
    container = {"name": "base", "image": "job:1", "resources": spec.pop("resources", {})}
    pod = {"restartPolicy": "Never", "containers": [container]}
    sizes = {"completionMode": "Indexed", "completions": 2, "parallelism": 2}
    template = {"metadata": {"labels": spec.pop("labels", {})}, "spec": pod}
    body = {"suspend": True, **sizes, "template": template, **spec}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": body}


@pytest.fixture
def ask(cluster: Cluster) -> Ask:
    """Sends a request about the namespace's objects."""

    def send(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        root = "/apis/batch/v1" if path.startswith("jobs") else "/api/v1"
        kind = MERGE_PATCH if method == "PATCH" else ""
        where = f"{root}/namespaces/{cluster.namespace}/{path}"
        return cluster.plain.ask(method, where, body, kind)

    return send


def refused(answer: tuple[int, Any]) -> tuple[int, str, str]:
    """Code, reason and message of a `Status` that reports a failure."""
    code, body = answer
    assert (body["kind"], body["status"], body["code"]) == ("Status", "Failure", code)
    return code, body["reason"], body["message"]


def make_pod(cluster: Cluster, name: str, **metadata: Any) -> dict[str, Any]:
    """A pod that no node takes."""
    container = {"name": "base", "image": "job:1"}
    spec = {"containers": [container], "nodeSelector": {"no": "such-node"}}
    path = f"/api/v1/namespaces/{cluster.namespace}/pods"
    body = {"metadata": {"name": name, **metadata}, "spec": spec}
    return dict(cluster.plain.must("POST", path, body))


def make_job(cluster: Cluster, ask: Ask) -> dict[str, Any]:
    """The metadata of a Job that no controller changes any more."""
    ask("POST", "jobs", job())
    cluster.wait_for(lambda: ask("GET", "jobs/job")[1]["status"].get("conditions"), "its status")
    return dict(ask("GET", "jobs/job")[1]["metadata"])


def test_a_name_is_taken_once(ask: Ask) -> None:
    code, made = ask("POST", "jobs", job())
    assert code == 201 and made["metadata"]["uid"] and made["metadata"]["resourceVersion"]
    conflict = 409, "AlreadyExists", 'jobs.batch "job" already exists'
    assert refused(ask("POST", "jobs", job())) == conflict


def test_what_is_not_there(cluster: Cluster, ask: Ask) -> None:
    for method in ("GET", "DELETE", "PATCH"):
        assert refused(ask(method, "jobs/no", {})) == (404, "NotFound", 'jobs.batch "no" not found')
    answer = cluster.plain.ask("POST", "/apis/batch/v1/namespaces/no/jobs", job())
    assert refused(answer) == (404, "NotFound", 'namespaces "no" not found')


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (job(resources={"requests": {"memory": "much"}}), 400),
        (job(parallelism="two"), 400),
        (job("A_b"), 422),
        (job("a" * 64), 422),
        (job(labels={"a": "b c"}), 422),
        (job(labels={"a": "b" * 64}), 422),
    ],
)
def test_jobs_that_are_refused(ask: Ask, body: Any, code: int) -> None:
    assert refused(ask("POST", "jobs", body))[:2] == (
        code,
        {400: "BadRequest", 422: "Invalid"}[code],
    )


def test_patches(cluster: Cluster, ask: Ask) -> None:
    version = {"resourceVersion": make_job(cluster, ask)["resourceVersion"]}
    labels = {"labels": {"a": "1", "b": "2"}}
    assert ask("PATCH", "jobs/job", {"metadata": {**version, **labels}})[0] == 200
    assert refused(ask("PATCH", "jobs/job", {"metadata": version}))[:2] == (409, "Conflict")
    code, patched = ask("PATCH", "jobs/job", {"metadata": {"labels": {"a": None}}})
    assert (code, patched["metadata"]["labels"]["b"]) == (200, "2")
    assert "a" not in patched["metadata"]["labels"]
    assert ask("PATCH", "jobs/job", {"status": {"active": 7}})[1]["status"].get("active") != 7


@pytest.mark.parametrize(
    ("spec", "is_allowed"),
    [
        ({"parallelism": 1}, True),
        ({"completions": 3, "parallelism": 3}, True),
        ({"completions": 3}, False),
        ({"backoffLimitPerIndex": 1}, False),
    ],
)
def test_only_the_size_of_a_job_changes(ask: Ask, spec: Any, is_allowed: bool) -> None:
    ask("POST", "jobs", job())
    code, answer = ask("PATCH", "jobs/job", {"spec": spec})
    assert code == (200 if is_allowed else 422), answer


def test_lists(cluster: Cluster, ask: Ask) -> None:
    for name, labels in {"a": {"x": "1", "y": "1"}, "b": {"x": "1"}, "c": {}}.items():
        make_pod(cluster, name, labels=labels)
    expected = {
        "": "abc",
        "limit=2": "ab",
        "labelSelector=x%3D1": "ab",
        "labelSelector=x%3D1,y!%3D1": "b",
        "labelSelector=x,!y": "b",
        "fieldSelector=status.phase%3DPending": "abc",
        "fieldSelector=status.phase%3DRunning": "",
        "fieldSelector=metadata.name%3Dc": "c",
    }
    for query, names in expected.items():
        items = ask("GET", f"pods?{query}")[1]["items"]
        assert "".join(pod["metadata"]["name"] for pod in items) == names, query


def test_a_watch_sees_each_change_after_a_list(cluster: Cluster, ask: Ask) -> None:
    revision = ask("GET", "jobs")[1]["metadata"]["resourceVersion"]
    ask("POST", "jobs", job())
    ask("PATCH", "jobs/job", {"metadata": {"labels": {"a": "1"}}})
    ask("DELETE", "jobs/job")
    path = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs"
    kinds = []
    for kind, body in cluster.plain.watch(path, revision, 30):
        assert body["metadata"]["name"] == "job"
        kinds.append(kind)
        if kind == "DELETED":
            break
    assert kinds[0] == "ADDED" and "MODIFIED" in kinds


def test_deletions_that_meet_no_precondition(cluster: Cluster, ask: Ask) -> None:
    made = make_job(cluster, ask)
    for field in ("uid", "resourceVersion"):
        options = {"preconditions": {field: "1"}}
        assert refused(ask("DELETE", "jobs/job", options))[:2] == (409, "Conflict")
    kept = {"uid": made["uid"], "resourceVersion": made["resourceVersion"]}
    assert ask("DELETE", "jobs/job", {"preconditions": kept})[0] == 200


def test_a_grace_period_only_gets_shorter(cluster: Cluster, ask: Ask) -> None:
    make_pod(cluster, "job")
    target = {"apiVersion": "v1", "kind": "Node", "name": cluster.agent.default_node}
    cluster.agent.lose_node()
    binding = {"metadata": {"name": "job"}, "target": target}
    assert ask("POST", "pods/job/binding", binding)[0] == 201
    seen = []
    for grace_s in (20, 40, 5):
        _, pod = ask("DELETE", f"pods/job?gracePeriodSeconds={grace_s}")
        seen.append(pod["metadata"]["deletionGracePeriodSeconds"])
    assert seen == [20, 20, 5]
    ask("DELETE", "pods/job?gracePeriodSeconds=0")
    assert ask("GET", "pods/job")[0] == 404


def test_a_finalizer_keeps_what_is_deleted(cluster: Cluster, ask: Ask) -> None:
    make_pod(cluster, "job", finalizers=["batchllm.io/a"])
    assert ask("DELETE", "pods/job")[0] == 200
    assert ask("GET", "pods/job")[1]["metadata"]["deletionTimestamp"]
    ask("PATCH", "pods/job", {"metadata": {"finalizers": None}})
    assert ask("GET", "pods/job")[0] == 404


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
def test_a_secret_goes_with_its_job(cluster: Cluster, ask: Ask, policy: str) -> None:
    uid = ask("POST", "jobs", job())[1]["metadata"]["uid"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": uid}
    metadata = {"name": "mine", "ownerReferences": [owner]}
    code, secret = ask("POST", "secrets", {"metadata": metadata, "stringData": {"a": "b"}})
    assert (code, secret["data"]) == (201, {"a": "Yg=="})
    ask("POST", "secrets", {"metadata": {"name": "free"}})
    time.sleep(0.5)  # long enough for a collector that is too eager
    assert ask("GET", "secrets/mine")[0] == 200
    ask("DELETE", "jobs/job", {"propagationPolicy": policy})
    cluster.wait_for(lambda: ask("GET", "secrets/mine")[0] == 404, "the Secret to go")
    cluster.wait_for(lambda: ask("GET", "jobs/job")[0] == 404, "the Job to go")
    assert ask("GET", "secrets/free")[0] == 200


@pytest.mark.parametrize(
    ("plural", "quota"), [("secrets", "secrets"), ("jobs", "count/jobs.batch"), ("pods", "pods")]
)
def test_quotas(cluster: Cluster, ask: Ask, plural: str, quota: str) -> None:
    cluster.set_quota({quota: "0"})
    bodies = {
        "secrets": {"metadata": {"name": "x"}},
        "jobs": job("x"),
        "pods": {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "a", "image": "a"}]}},
    }
    code, reason, message = refused(ask("POST", plural, bodies[plural]))
    assert (code, reason) == (403, "Forbidden")
    over = f"exceeded quota: quota, requested: {quota}=1, used: {quota}=0, limited: {quota}=0"
    assert message.endswith(f'"x" is forbidden: {over}')


def test_a_quota_of_gpus_is_free_again_when_a_pod_goes(cluster: Cluster, ask: Ask) -> None:
    cluster.set_quota({f"requests.{GPU}": "1"})
    container = {"name": "a", "image": "a", "resources": {"limits": {GPU: 1}}}
    spec = {"containers": [container], "nodeSelector": {"no": "such-node"}}
    one, two = ({"metadata": {"name": name}, "spec": spec} for name in ("one", "two"))
    assert ask("POST", "pods", one)[0] == 201
    assert refused(ask("POST", "pods", two))[0] == 403
    ask("DELETE", "pods/one")
    cluster.wait_for(lambda: ask("POST", "pods", two)[0] == 201, "room in the quota")
