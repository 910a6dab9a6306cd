"""Nobody may do more than the design says: Roles, accounts, secrets, and the network."""

from typing import Any

import pytest
from helm_chart.rendering import (
    NAMESPACE,
    Rendered,
    examples,
    notes,
    of_kind,
    pod_specs,
    pod_templates,
    render,
)

WORKER = {
    "jobs.batch": {"create", "get", "patch", "delete"},
    "pods": {"list", "patch", "delete"},
    "pods/log": {"get"},
    "events": {"list"},
}
TRIGGERER = WORKER | {"jobs.batch": {"get", "delete"}}
APPLICATIONS = {
    "sparkapplications.sparkoperator.k8s.io": {"create", "delete"},
    "sparkapplications/status.sparkoperator.k8s.io": {"get"},
}
DRIVER = {
    name: {"create", "get", "list", "watch", "patch", "delete", "deletecollection"}
    for name in ("pods", "services", "configmaps", "persistentvolumeclaims")
}
OF_DRIVERS = {"pods": {"get", "list", "patch", "delete"}}
SECRETS = {"secrets": {"create", "delete"}}
EXAMPLES = sorted(examples())


def verbs(role: dict[str, Any]) -> dict[str, set[str]]:
    """Verbs by resource, with its API's group if that isn't the core; no rule names an object."""
    found: dict[str, set[str]] = {}
    for rule in role["rules"]:
        assert set(rule) == {"apiGroups", "resources", "verbs"}
        [group] = rule["apiGroups"]
        for resource in rule["resources"]:
            name = f"{resource}.{group}" if group else resource
            found.setdefault(name, set()).update(rule["verbs"])
    return found


@pytest.mark.parametrize("example", EXAMPLES)
def test_roles_hold_exactly_the_verbs_that_airflow_needs(example: str) -> None:
    values = examples()[example]
    objects = render(values)
    roles = of_kind(objects, "Role")
    creates_secrets = values.get("connections", {}).get("createSecrets", False)
    has_spark = values.get("spark", {}).get("enabled", False)
    secrets = SECRETS if creates_secrets else {}
    applications = APPLICATIONS | OF_DRIVERS if has_spark else {}
    assert verbs(roles["batchllm-worker"]) == WORKER | secrets | applications
    assert ("batchllm-spark" in roles) is has_spark
    if has_spark:
        assert verbs(roles["batchllm-spark"]) == DRIVER
    assert verbs(roles["batchllm-triggerer"]) == TRIGGERER
    assert not {each.kind for each in objects} & {"ClusterRole", "ClusterRoleBinding", "Secret"}


def test_without_a_triggerer_the_notes_say_what_operators_need() -> None:
    """It would watch pods wherever one is healthy, and be refused each look."""
    values: dict[str, Any] = {"airflow": {"serviceAccounts": {"triggerer": []}}}
    assert set(of_kind(render(values), "Role")) == {"batchllm-worker"}
    assert "deferrable=False" in notes(values)
    assert "deferrable" not in notes({})


@pytest.mark.parametrize("example", EXAMPLES)
def test_only_accounts_of_airflow_and_sparks_driver_are_bound(example: str) -> None:
    values = examples()[example]
    airflow = {"namespace": "airflow"} | dict(values.get("airflow", {}))
    bindings = of_kind(render(values), "RoleBinding")
    assert "batchllm-triggerer" in bindings
    for name, binding in bindings.items():
        assert binding["metadata"]["namespace"] == NAMESPACE
        assert binding["roleRef"]["name"] == name
        assert binding["subjects"]
        if name == "batchllm-spark":
            [subject] = binding["subjects"]
            assert (subject["name"], subject["namespace"]) == (name, NAMESPACE)
            continue
        for subject in binding["subjects"]:
            assert subject["kind"] == "ServiceAccount"
            assert subject["namespace"] == airflow["namespace"] != NAMESPACE


@pytest.mark.parametrize("example", EXAMPLES)
def test_no_pod_gets_a_token_but_sparks(example: str) -> None:
    objects = render(examples()[example])
    accounts = of_kind(objects, "ServiceAccount")
    assert "batchllm-gpu" in accounts
    for name, account in accounts.items():
        assert account["automountServiceAccountToken"] is (name == "batchllm-spark")
    specs = pod_specs(objects)
    assert specs
    assert all(spec["automountServiceAccountToken"] is False for spec in specs)


def test_bindings_name_the_accounts_that_were_given() -> None:
    bindings = of_kind(render(examples()["connections"]), "RoleBinding")
    names = [subject["name"] for subject in bindings["batchllm-worker"]["subjects"]]
    assert names == ["airflow-worker", "airflow-scheduler"]


def test_workload_identity_is_an_annotation_of_the_account() -> None:
    accounts = of_kind(render(examples()["workload-identity"]), "ServiceAccount")
    [annotation] = accounts["batchllm-gpu"]["metadata"]["annotations"].items()
    assert annotation == (
        "eks.amazonaws.com/role-arn",
        "arn:aws:iam::123456789012:role/batchllm-run",
    )


def secrets_of(pod: Rendered) -> list[str]:
    [container] = pod.content["spec"]["containers"]
    return [source["secretRef"]["name"] for source in container.get("envFrom", [])]


@pytest.mark.parametrize(
    ("cache", "gpu", "cpu"),
    [
        ({"enabled": False}, ["lake", "hub"], ["lake", "catalog", "hub"]),
        ({"enabled": True, "existingClaim": "models"}, ["lake"], ["lake", "catalog"]),
        ({"enabled": True, "readOnly": False}, ["lake", "hub"], ["lake", "catalog", "hub"]),
    ],
)
def test_pods_get_the_secrets_that_they_need(
    cache: dict[str, Any], gpu: list[str], cpu: list[str]
) -> None:
    values = {
        "cpu": {"enabled": True},
        "modelCache": cache,
        "secrets": {"s3": "lake", "catalog": "catalog", "huggingFace": "hub"},
    }
    pods = {each.name: secrets_of(each) for each in pod_templates(render(values))}
    assert pods == {"batchllm-nvidia": gpu, "batchllm-cpu": cpu}


@pytest.mark.parametrize("example", EXAMPLES)
def test_nobody_connects_to_pods(example: str) -> None:
    policies = of_kind(render(examples()[example]), "NetworkPolicy")
    tasks = policies["batchllm-tasks"]["spec"]
    assert set(tasks["policyTypes"]) == {"Ingress", "Egress"}
    if example == "monitoring":
        [rule] = tasks["ingress"]
        assert rule["ports"] == [{"protocol": "TCP", "port": 9400}]
        [source] = rule["from"]
        assert source["namespaceSelector"]["matchLabels"] == {
            "kubernetes.io/metadata.name": "monitoring"
        }
    else:
        assert tasks["ingress"] == []
    assert all(each["spec"]["ingress"] == [] for name, each in policies.items() if "pull" in name)


def test_pods_connect_to_dns_and_the_given_addresses() -> None:
    policies = of_kind(render(examples()["hardened"]), "NetworkPolicy")
    dns, storage = policies["batchllm-tasks"]["spec"]["egress"]
    assert {(port["protocol"], port["port"]) for port in dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert storage == {
        "to": [{"ipBlock": {"cidr": "10.20.0.0/24"}}],
        "ports": [{"protocol": "TCP", "port": 9000}],
    }


def test_dns_pods_may_listen_on_other_ports() -> None:
    """OpenShift's do; a policy is about the pod's port. A node-local cache has its own."""
    dns = {
        "namespace": "openshift-dns",
        "podLabels": {"k8s-app": None, "dns.operator.openshift.io/daemonset-dns": "default"},
        "ports": [5353],
        "cidrs": ["169.254.20.10/32"],
    }
    policies = of_kind(render({"networkPolicy": {"dns": dns}}), "NetworkPolicy")
    pods, node_local, _ = policies["batchllm-tasks"]["spec"]["egress"]
    assert pods == {
        "to": [
            {
                "namespaceSelector": {
                    "matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}
                },
                "podSelector": {
                    "matchLabels": {"dns.operator.openshift.io/daemonset-dns": "default"}
                },
            }
        ],
        "ports": [{"protocol": "UDP", "port": 5353}, {"protocol": "TCP", "port": 5353}],
    }
    assert node_local == {
        "to": [{"ipBlock": {"cidr": "169.254.20.10/32"}}],
        "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
    }


def test_every_pod_is_under_exactly_one_policy() -> None:
    objects = render(examples()["monitoring"])
    selectors = [each["spec"]["podSelector"] for each in of_kind(objects, "NetworkPolicy").values()]
    [job] = of_kind(objects, "Job").values()
    labels = [each.content["metadata"]["labels"] for each in pod_templates(objects)]
    for pod in [*labels, job["spec"]["template"]["metadata"]["labels"]]:
        assert sum(_selects(selector, pod) for selector in selectors) == 1


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(each["key"]) not in each["values"]
        for each in selector.get("matchExpressions", [])
    )
