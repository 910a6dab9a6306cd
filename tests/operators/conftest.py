"""Gives Airflow an empty home before any test module imports it."""

import atexit
import os
import shutil
import tempfile

_airflow_home = tempfile.mkdtemp(prefix="batchllm-airflow-")
atexit.register(shutil.rmtree, _airflow_home, ignore_errors=True)
os.environ["AIRFLOW_HOME"] = _airflow_home
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
