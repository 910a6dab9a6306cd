"""What `airflow dags test` imports and builds, for the server that forks such processes."""

from importlib import import_module

for _name in (
    "airflow.__main__",
    "airflow.cli.commands.dag_command",
    "batchllm_operator.operators",
):
    import_module(_name)

from airflow.sdk.execution_time.supervisor import in_process_api_server  # noqa: E402

# The API that tasks talk to, with the routes of all its versions: most of a short run's CPU time.
in_process_api_server().app._cadwyn_initialize()
