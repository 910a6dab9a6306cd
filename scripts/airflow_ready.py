"""Wait until an Airflow that was just started serves its DAGs, set it up, and say how to log in.

Used by scripts/airflow.sh. Only the standard library: it starts at once.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PASSWORDS_FILE = "simple_auth_manager_passwords.json.generated"
COMPONENTS = ("metadatabase", "scheduler", "triggerer", "dag_processor")


class NotReadyError(Exception):
    """Airflow doesn't come up, or can't run the DAGs; the message says why."""


class Wait:
    """Polls until something is there, as long as Airflow's process lives."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._pid = pid
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    def again(self, awaited: str) -> None:
        """Wait a little. Raises NotReadyError when it's no use any more."""
        if not self._is_alive():
            raise NotReadyError("Airflow ended while it was starting")
        if time.monotonic() > self._deadline:
            raise NotReadyError(f"not ready after {self._limit_s:.0f} s: no {awaited}")
        time.sleep(0.5)

    def _is_alive(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return True


class Api:
    """Airflow's REST API, as one user."""

    def __init__(self, url: str, wait: Wait) -> None:
        self.url = url
        self._wait = wait
        self._headers = {"Content-Type": "application/json"}

    def log_in(self, user: str, password: str) -> None:
        """Raises HTTPError 401 when the password is wrong."""
        token = self.call("POST", "/auth/token", {"username": user, "password": password})
        self._headers["Authorization"] = f"Bearer {token['access_token']}"

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The decoded answer; asks again while the server fails, as it does when SQLite is busy.

        A request may be made several times. Raises HTTPError of less than 500, URLError, and
        NotReadyError when the wait is over.
        """
        request = urllib.request.Request(
            self.url + path,
            method=method,
            headers=self._headers,
            data=None if body is None else json.dumps(body).encode(),
        )
        # Never through a proxy: it is this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            try:
                with opener.open(request, timeout=30) as answer:
                    return json.load(answer)
            except (urllib.error.HTTPError, TimeoutError) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    raise
                self._wait.again(f"answer to {method} {path}: {error}")


def unhealthy_components(api: Api) -> list[str]:
    """What isn't up yet; all of them while nothing answers."""
    try:
        health = api.call("GET", "/api/v2/monitor/health")
    except OSError:
        return ["api-server"]
    return [name for name in COMPONENTS if health.get(name, {}).get("status") != "healthy"]


def read_login(home: Path, wait: Wait) -> tuple[str, str]:
    """The one user that Airflow has made up, and the password."""
    file = home / PASSWORDS_FILE
    while not file.exists() or not file.read_text().strip():
        wait.again(f"file {file.name} with the password")
    ((user, password),) = json.loads(file.read_text()).items()
    return user, password


def set_pool(api: Api, name: str, slots: int) -> None:
    """Make the pool, or change its slots."""
    pool: dict[str, Any] = {
        "name": name,
        "slots": slots,
        "description": "a slot for each GPU",
        "include_deferred": True,
    }
    try:
        api.call("POST", "/api/v2/pools", pool)
    except urllib.error.HTTPError as error:
        if error.code != 409:
            raise
        # Airflow wants the fields that aren't to change as well; in a PATCH, the name is "pool".
        pool["pool"] = pool.pop("name")
        api.call("PATCH", f"/api/v2/pools/{name}?update_mask=slots", pool)


def wait_for_dags(api: Api, dag_ids: Sequence[str], wait: Wait) -> dict[str, bool]:
    """DAG -> whether it's paused, once these have been read; if none is named, once any has."""
    while True:
        dags = {
            dag["dag_id"]: bool(dag["is_paused"]) for dag in api.call("GET", "/api/v2/dags")["dags"]
        }
        missing = [dag_id for dag_id in dag_ids if dag_id not in dags]
        if dags and not missing:
            return {dag_id: dags[dag_id] for dag_id in dag_ids or sorted(dags)}
        for error in api.call("GET", "/api/v2/importErrors")["import_errors"]:
            raise NotReadyError(f"{error['filename']}: {error['stack_trace']}")
        wait.again(f"DAG {', '.join(missing)}".strip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--pid", required=True, type=int, help="Airflow's process")
    parser.add_argument("--limit-s", required=True, type=float)
    parser.add_argument("--pool", required=True, nargs=2, metavar=("NAME", "SLOTS"))
    parser.add_argument("--dags", default=[], nargs="*")
    parser.add_argument("--unpause", nargs="+", default=[])
    args = parser.parse_args()
    wait = Wait(args.pid, args.limit_s)
    api = Api(args.url, wait)
    try:
        while unhealthy := unhealthy_components(api):
            wait.again(f"healthy {', '.join(unhealthy)}")
        user, password = read_login(args.home, wait)
        api.log_in(user, password)
        pool, slots = args.pool
        set_pool(api, pool, int(slots))
        is_paused = wait_for_dags(api, args.dags, wait)
        for dag_id in args.unpause:
            api.call("PATCH", f"/api/v2/dags/{dag_id}?update_mask=is_paused", {"is_paused": False})
            is_paused[dag_id] = False
    except (NotReadyError, OSError) as error:
        print(f"airflow: {error}", file=sys.stderr)
        return 1
    print(f"Airflow is ready at {args.url}")
    print(f"  user        {user}")
    print(f"  password    {password}")
    if not all(is_paused.values()):
        print(f"  DAGs        {', '.join(d for d, paused in is_paused.items() if not paused)}")
    if any(is_paused.values()):
        print(f"  paused      {', '.join(d for d, paused in is_paused.items() if paused)}")
    print(
        f"  pool        {pool}, {slots} slots: generate tasks at a time, over all runs", flush=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
