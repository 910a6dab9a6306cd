"""Airflow's information about this package; the entry point `apache_airflow_provider`.

Airflow loads it at its start, so nothing of Airflow may be imported here.
"""

from typing import Any

from batchllm_operator import __version__


def get_provider_info() -> dict[str, Any]:
    return {
        "package-name": "batchllm-operator",
        "name": "BatchLLM",
        "description": "Offline LLM jobs over data-lake tables, planned by their shared prefixes.",
        "versions": [__version__],
        "integrations": [{"integration-name": "BatchLLM"}],
        "operators": [_modules("operators.stages", "operators.arrival", "operators.spark")],
        "triggers": [_modules("operators.jobs.watch")],
        # The plugin isn't listed: Airflow has it by its entry point, and refuses it a second time.
        "extra-links": ["batchllm_operator.web.links.LiveProgressLink"],
        "config": {
            "batchllm": {
                "description": "The pages of BatchLLM, which the API server serves.",
                "options": {
                    "report_roots": {
                        "description": (
                            "Folders and URIs below which plans are read, as a JSON object: lists"
                            " of them by pattern of DAG ids, or by `team:` and a team's name. For"
                            " DAGs without an entry: where their own job specs put plans.\n"
                        ),
                        "version_added": None,
                        "type": "string",
                        "example": '{"rank_*": ["s3://lake/rank"], "team:ads": ["/lake/ads"]}',
                        "default": None,
                    }
                },
            }
        },
    }


def _modules(*names: str) -> dict[str, Any]:
    modules = [f"batchllm_operator.{name}" for name in names]
    return {"integration-name": "BatchLLM", "python-modules": modules}
