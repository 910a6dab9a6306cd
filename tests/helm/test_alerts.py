"""Alerts and their runbooks."""

from typing import Any

import pytest
from helm_chart import check
from helm_chart.rendering import ALERTS, NAMESPACE, RUNBOOKS, examples, of_kind, render

VALUES = examples()["monitoring"]
FILES = sorted(path.stem for path in ALERTS.glob("*.yaml"))


def rules(**alerts: Any) -> dict[str, Any]:
    """The rendered rules by name."""
    monitoring = {**VALUES["monitoring"], "alerts": {**VALUES["monitoring"]["alerts"], **alerts}}
    objects = render({**VALUES, "monitoring": monitoring})
    [found] = of_kind(objects, "PrometheusRule").values()
    [group] = found["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_a_file_is_an_alert_and_has_a_runbook() -> None:
    assert sorted(rules()) == FILES
    assert sorted(path.stem for path in RUNBOOKS.glob("BatchLLM*.md")) == FILES


@pytest.mark.parametrize("alert", FILES)
def test_an_alert_says_where_its_runbook_is(alert: str) -> None:
    rule = rules(runbookBaseUrl="https://example.com/runbooks/")[alert]
    assert rule["annotations"]["runbook_url"] == f"https://example.com/runbooks/{alert}.md"


@pytest.mark.parametrize("alert", FILES)
def test_an_alert_is_about_the_releases_namespace(alert: str) -> None:
    expression = rules()[alert]["expr"]
    assert f'namespace="{NAMESPACE}"' in expression
    selectors = expression.count("{")
    assert selectors == expression.count("}") == expression.count(f'namespace="{NAMESPACE}"')


@pytest.mark.parametrize("alert", FILES)
def test_a_runbook_says_what_where_and_how(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text(encoding="utf-8")
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [f"# {alert}", "## What it means", "## Where to look", "## What to do"]


def test_alerts_can_be_left_out() -> None:
    assert sorted(rules(disabled=FILES[:2])) == FILES[2:]


def test_alerts_of_what_isnt_there_are_left_out() -> None:
    minimal = {"monitoring": VALUES["monitoring"]}
    [found] = of_kind(render(minimal), "PrometheusRule").values()
    names = {rule["alert"] for rule in found["spec"]["groups"][0]["rules"]}
    assert set(FILES) - names == {
        "BatchLLMModelCacheAlmostFull",
        "BatchLLMPrePullFailed",
        "BatchLLMQuotaExhausted",
    }


def test_a_missing_runbook_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(check, "RUNBOOKS", tmp_path)
    (tmp_path / f"{FILES[0]}.md").write_text(f"# {FILES[0]}\n")
    (tmp_path / "BatchLLMGone.md").write_text("# BatchLLMGone\n")
    problems = check.check().problems
    assert f"{FILES[1]} has no runbook" in problems
    assert "BatchLLMGone has no alert" in problems
    assert not any(problem.startswith(f"{FILES[0]} has no runbook") for problem in problems)


def test_the_pre_pull_job_is_not_left_behind() -> None:
    """It stays for a day, so that it can be looked at."""
    rule = rules(finishedHours=3)["BatchLLMPodLeftBehind"]
    assert rule["for"] == "3h"
    assert rule["expr"].count('job_name!~".*-pre-pull-.*"') == 2
