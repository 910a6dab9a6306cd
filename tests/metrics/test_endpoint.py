"""The endpoint over HTTP: formats, refusals, faults of the snapshot, addresses."""

import gc
import json
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.error import HTTPError

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.shard_progress import shard_progress

from batchllm_operator.metrics import MetricsAddress, ShardCollector, serving_metrics
from batchllm_operator.shards.attempts import ShardProgress

LABELS = {"job_name": "snippets", "ds": "2026-01-31", "worker": "5"}
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def endpoint(snapshot: Callable[[], ShardProgress] = shard_progress) -> Iterator[str]:
    """The base URL of an endpoint on a free port."""
    collector = ShardCollector(job="snippets", ds="2026-01-31", worker=5)
    address = MetricsAddress("127.0.0.1", 0)
    with serving_metrics(address, collector) as served, collector.watching(snapshot):
        yield f"http://{served}"


def get(url: str, **headers: str) -> tuple[str, str]:
    """Content type and body."""
    request = urllib.request.Request(url, headers=headers)
    with NO_PROXY.open(request, timeout=10) as response:
        return response.headers["Content-Type"], response.read().decode()


def values(text: str) -> dict[str, float]:
    """By name, with what labels there are besides the constant ones."""
    found = {}
    for family in parse_text(text):
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items()
            more = {key: sample.labels[key] for key in sample.labels.keys() - LABELS.keys()}
            assert more.pop("shard", "3") == "3"
            found[sample.name + (json.dumps(more, sort_keys=True) if more else "")] = sample.value
    return found


def test_the_text_holds_what_the_snapshot_says() -> None:
    with endpoint() as url:
        kind, text = get(f"{url}/metrics")
    assert kind.startswith("text/plain; version=")
    assert values(text) == {
        "batchllm_rows_done_total": 50,
        "batchllm_rows_failed_total": 1,
        "batchllm_parts_done_total": 4,
        "batchllm_logical_tokens_total": 1000,
        "batchllm_prompt_tokens_total": 900,
        "batchllm_cached_tokens_total": 500,
        "batchllm_output_tokens_total": 77,
        "batchllm_shard_rows": 100,
        "batchllm_shard_parts": 10,
        "batchllm_saving_ratio": pytest.approx(0.6),
        "batchllm_computed_tokens_per_second": 12.5,
        "batchllm_output_tokens_per_second": 2.5,
        "batchllm_eta_seconds": 590,
        "batchllm_elapsed_seconds": 600.5,
        "batchllm_engine_start_seconds": 40,
        "batchllm_gpus": 2,
        'batchllm_shard_state{"state": "starting"}': 0,
        'batchllm_shard_state{"state": "running"}': 1,
        'batchllm_shard_state{"state": "finished"}': 0,
        'batchllm_shard_state{"state": "stopped"}': 0,
        'batchllm_shard_state{"state": "failed"}': 0,
        'batchllm_shard_info{"attempt": "2", "plan_id": "plan-abc"}': 1,
        "batchllm_worker_shards_finished_total": 0,
        "batchllm_worker_shards_running": 1,
    }


def test_openmetrics_is_given_to_those_who_ask() -> None:
    with endpoint() as url:
        kind, text = get(f"{url}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert {family.name for family in parse_openmetrics(text)} > {"batchllm_rows_done"}


def test_each_scrape_asks_anew_and_an_unknown_eta_is_absent() -> None:
    asked = iter([shard_progress(num_rows_done=1, eta_s=None), shard_progress(num_rows_done=2)])
    with endpoint(lambda: next(asked)) as url:
        first, second = (values(get(f"{url}/metrics")[1]) for _ in range(2))
    assert (first["batchllm_rows_done_total"], second["batchllm_rows_done_total"]) == (1, 2)
    assert "batchllm_eta_seconds" not in first
    assert "batchllm_eta_seconds" in second


def test_a_snapshot_that_fails_is_an_error_of_that_scrape(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def snapshot() -> ShardProgress:
        raise RuntimeError("half made")

    with endpoint(snapshot) as url:
        with pytest.raises(HTTPError) as caught:
            get(f"{url}/metrics")
        with caught.value:
            assert caught.value.code == 500
            assert b"half made" not in caught.value.read()
    assert "half made" in capfd.readouterr().err
    assert "the metrics lack a shard's end: half made" in caplog.text


def warning_of(address: MetricsAddress, caplog: pytest.LogCaptureFixture) -> str:
    """What is logged where nothing can be served at the address."""
    collector = ShardCollector(job="j", ds="d", worker=5)
    with caplog.at_level(logging.WARNING), serving_metrics(address, collector) as served:
        assert served is None
    return caplog.text


def test_an_address_that_cannot_be_used_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = MetricsAddress("127.0.0.1", taken.getsockname()[1])
        assert f"no metrics: can't listen on {address}" in warning_of(address, caplog)
    caplog.clear()
    assert "no metrics" in warning_of(MetricsAddress(f"{'a' * 64}.example", 9400), caplog)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_machine_without_threads_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert "can't start new thread" in warning_of(MetricsAddress("127.0.0.1", 0), caplog)
    caplog.clear()  # which holds the error, and so the socket that the library leaves
    gc.collect()


def test_the_port_is_free_again_afterwards() -> None:
    collector = ShardCollector(job="j", ds="d", worker=5)
    with serving_metrics(MetricsAddress("127.0.0.1", 0), collector) as address:
        assert address is not None
    with serving_metrics(address, collector) as again:
        assert again == address
    with serving_metrics(None, collector) as none:
        assert none is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9400", MetricsAddress("127.0.0.1", 9400)),
        ("0.0.0.0:9400", MetricsAddress("0.0.0.0", 9400)),
        ("pod-1.svc:1", MetricsAddress("pod-1.svc", 1)),
        ("[::]:65535", MetricsAddress("::", 65535)),
        *((none, None) for none in ("", "0", "0.0.0.0:0", "00")),
    ],
)
def test_an_address_is_read(text: str, expected: MetricsAddress | None) -> None:
    assert MetricsAddress.parse(text) == expected
    if expected is not None:
        assert str(expected) == (text if ":" in text else f"127.0.0.1:{text}")


@pytest.mark.parametrize(
    "text",
    [
        *["metrics", "-1", "65536", "99999", "9400:", ":9400", "::1:9400", "[x]:1", "٣"],
        *["a b:1", "9400 "],
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PORT") as caught:
        MetricsAddress.parse(text)
    assert repr(text) in str(caught.value)
