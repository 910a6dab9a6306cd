"""What Airflow learns of the pages, and how little that costs."""

import asyncio
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

LOAD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import airflow.plugins_manager as manager
before = set(sys.modules)
plugins, errors = manager._get_plugins()
apps = manager.get_fastapi_plugins()[0]
links = manager.get_operator_extra_links()
(plugin,) = [each for each in plugins if each.name == "batchllm"]
(info,) = [each for each in manager.get_plugin_info() if each["name"] == "batchllm"]
print(json.dumps({
    "errors": {str(k): str(v) for k, v in errors.items()},
    "imported": sorted(set(sys.modules) - before),
    "prefixes": [app["url_prefix"] for app in apps],
    "links": [link.name for link in links],
    "views": plugin.external_views,
    "info": str(info),
}))
"""
HEAVY = {"kubernetes", "numba", "numpy", "pandas", "pyarrow", "s3fs"}


def load(home: Path, **env: str) -> dict[str, Any]:
    """The plugin, loaded by a new process of Airflow's."""
    settings = {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        **env,
    }
    run = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


def test_a_copied_file_beside_the_installed_package_is_one_light_plugin(tmp_path: Path) -> None:
    """Its views lie where Airflow does, and loading it imports little."""
    loaded = load(
        tmp_path,
        AIRFLOW__CORE__PLUGINS_FOLDER=str(ROOT / "plugins"),
        AIRFLOW__API__BASE_URL="https://host.example/air/flow/",
    )
    assert loaded["errors"] == {}
    tops = {name.partition(".")[0] for name in loaded["imported"]}
    assert tops & HEAVY == set()
    ours = {name for name in loaded["imported"] if name.startswith("batchllm_operator.")}
    assert ours == {
        "batchllm_operator.web",
        "batchllm_operator.web.links",
        "batchllm_operator.web.plugin",
    }
    assert (loaded["prefixes"], loaded["links"]) == (["/batchllm"], ["Live progress"])
    assert [view["href"] for view in loaded["views"]] == [
        "/air/flow/batchllm/",
        "/air/flow/batchllm/dags/{DAG_ID}/runs/{RUN_ID}",
    ]
    assert [view["destination"] for view in loaded["views"]] == ["nav", "dag_run"]
    assert len({view["url_route"] for view in loaded["views"]}) == 2


def test_a_copied_file_is_the_plugin_where_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from batchllm_operator.web.plugin import BatchLLMPlugin

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    names = runpy.run_path(str(ROOT / "plugins" / "batchllm_pages.py"))
    assert names["BatchLLMPlugin"] is BatchLLMPlugin


def test_without_the_operators_providers_no_task_has_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Airflow asks for each task of each DAG that it reads."""
    from batchllm_operator.web.links import LiveProgressLink

    monkeypatch.setitem(sys.modules, "batchllm_operator.operators.stages", None)
    assert LiveProgressLink().operators == []


def test_pages_are_built_once_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchllm_operator.web import plugin, routes

    built, answered = [], []

    async def pages(scope: Any, receive: Any, send: Any) -> None:
        answered.append(scope["path"])

    def build() -> Any:
        built.append(1)
        return pages

    async def ask() -> None:
        for idx in range(3):
            await plugin.lazy_app({"type": "test", "path": idx}, None, None)

    plugin._pages.cache_clear()
    monkeypatch.setattr(routes, "create_app", build)
    asyncio.run(ask())
    plugin._pages.cache_clear()
    assert built == [1] and answered == [0, 1, 2]


def test_the_link_of_a_task_needs_nothing_of_the_task() -> None:
    from types import SimpleNamespace

    from batchllm_operator.operators import BatchLLMGenerateOperator
    from batchllm_operator.web.links import LiveProgressLink

    link = LiveProgressLink()
    assert link.operators == [BatchLLMGenerateOperator]
    key = SimpleNamespace(dag_id="j", run_id="a+1/x", task_id="g.generate", map_index=3)
    url = link.get_link(None, ti_key=key)
    assert url == "/batchllm/dags/j/runs/a%2B1%2Fx/tasks/g.generate/3"
