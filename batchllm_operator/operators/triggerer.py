"""Whether tasks can be deferred here: a triggerer has to run, and no setting says so."""

from __future__ import annotations

import json
from typing import Final
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import urlopen

from airflow.providers.common.compat.sdk import conf

_HEALTH_PATH: Final = "/api/v2/monitor/health"
_LIMIT_S: Final = 5.0


def triggerer_runs() -> bool:
    """Ask the API server, whose health page needs no login; False if it doesn't answer."""
    url = _health_url()
    if url is None:
        return False
    try:
        with urlopen(url, timeout=_LIMIT_S) as response:
            health = json.load(response)
    except (URLError, OSError, ValueError):
        return False
    return isinstance(health, dict) and (health.get("triggerer") or {}).get("status") == "healthy"


def _health_url() -> str | None:
    """From the address that tasks talk to, which is where the API server is."""
    base: str = conf.get("core", "execution_api_server_url", fallback="") or ""
    if base:
        parts = urlsplit(base)
        path = parts.path.rstrip("/").removesuffix("/execution")
    else:
        parts = urlsplit(conf.get("api", "base_url", fallback="http://localhost:8080") or "")
        path = parts.path.rstrip("/")
    if parts.scheme not in ("http", "https"):
        return None
    return urlunsplit((parts.scheme, parts.netloc, path + _HEALTH_PATH, "", ""))
