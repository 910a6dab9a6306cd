"""Finds out whether a triggerer runs, which no setting tells: tasks can be deferred only then."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit
from urllib.request import urlopen

from airflow.providers.common.compat.sdk import conf

_HEALTH_PATH: Final = "/api/v2/monitor/health"
_LIMIT_S: Final = 5.0
_ASK_EVERY_S: Final = 120.0


class UnknownTriggererError(Exception):
    """It is unknown whether a triggerer runs; the message has the reason."""


def defers_by_default(log: Callable[[str], None]) -> bool:
    """Whether to defer a task without a setting of its own: if a triggerer runs.

    If that is unknown, Airflow's setting `[operators] default_deferrable` decides.
    """
    try:
        runs = triggerer_runs()
    except UnknownTriggererError as unknown:
        runs = conf.getboolean("operators", "default_deferrable", fallback=False)
        log(
            f"Can't tell whether a triggerer runs ({unknown});"
            f" [operators] default_deferrable is {runs}"
        )
    log(
        f"{'The triggerer' if runs else 'This worker'} watches the pod (deferrable isn't given)"
        + ("" if runs else f"; it asks for a triggerer every {_ASK_EVERY_S:.0f} s")
    )
    return runs


@contextmanager
def when_triggerer_runs(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell`, from another thread, as soon as a triggerer runs."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(_ASK_EVERY_S):
            try:
                runs = triggerer_runs()
            except UnknownTriggererError:
                continue
            if runs:
                tell()
                return

    threading.Thread(target=ask, name="triggerer", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def triggerer_runs() -> bool:
    """Whether a triggerer runs, by the API server's health page, which needs no login.

    Raises:
        UnknownTriggererError: there is no answer, or one without the triggerer's health.
    """
    url = _health_url()
    try:
        with urlopen(url, timeout=_LIMIT_S, context=_trust()) as response:
            health = json.load(response)
    except (OSError, HTTPException, ValueError) as error:
        raise UnknownTriggererError(f"{url}: {error}") from error
    if _status(health, "metadatabase") != "healthy" or "triggerer" not in health:
        raise UnknownTriggererError(f"{url}: the answer doesn't say it")
    return bool(_status(health, "triggerer") == "healthy")


def _status(health: Any, component: str) -> Any:
    part = health.get(component) if isinstance(health, dict) else None
    return part.get("status") if isinstance(part, dict) else None


def _health_url() -> str:
    """The health page at the API server's address that tasks use."""
    base: str = conf.get("core", "execution_api_server_url", fallback="") or ""
    if base:
        parts = urlsplit(base)
        path = parts.path.rstrip("/").removesuffix("/execution")
    else:
        parts = urlsplit(conf.get("api", "base_url", fallback="http://localhost:8080") or "")
        path = parts.path.rstrip("/")
    if parts.scheme not in ("http", "https"):
        raise UnknownTriggererError(f"{base or parts.geturl()!r} is no address of an API server")
    return urlunsplit((parts.scheme, parts.netloc, path + _HEALTH_PATH, "", ""))


def _trust() -> ssl.SSLContext:
    """The certificates with which tasks talk to the API server, and those of the machine."""
    names = ("ssl_ca_file", "ssl_cert", "client_ssl_cert", "client_ssl_key")
    ca_file, cert, client_cert, client_key = (
        conf.get("api", name, fallback=None) or None for name in names
    )
    context = ssl.create_default_context()
    for file in (ca_file, cert):
        if file:
            context.load_verify_locations(file)
    if client_cert:
        context.load_cert_chain(client_cert, client_key)
    return context
