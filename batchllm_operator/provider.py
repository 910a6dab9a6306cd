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
