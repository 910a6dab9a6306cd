"""Reading a pod's log: each line once, whatever clocks and connections do."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from batchllm_operator.operators.pods.pod_log import LogReader


class LogApi:
    """Answers with a log, as kubernetes_asyncio does with `_preload_content=False`."""

    def __init__(self, *texts: str, status: int = 200) -> None:
        self.texts, self.status = list(texts), status
        self.asked: list[dict[str, Any]] = []

    async def read_namespaced_pod_log(self, *names: str, **options: Any) -> Any:
        self.asked.append(options)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]

        async def read() -> bytes:
            return text.encode()

        return SimpleNamespace(read=read, status=self.status)


def lines_of(api: Any, polls: int, request_s: float = 10.0) -> list[str]:
    lines: list[str] = []
    reader = LogReader("p", "n", "base", lines.append)

    async def poll() -> None:
        for _ in range(polls):
            await reader.pass_on(api, request_s)

    asyncio.run(poll())
    return lines


def test_a_line_that_comes_again_is_passed_on_once() -> None:
    one, two, three = (f"2026-01-31T10:00:00.00000000{n}Z line {n}\n" for n in (1, 2, 3))
    api = LogApi(one, one + two, two + three)
    assert lines_of(api, polls=4) == ["line 1", "line 2", "line 3"]


def test_a_log_of_a_node_with_another_time_zone_is_passed_on_once() -> None:
    """Runtimes stamp with the node's local time; kubelet passes the offset on."""
    api = LogApi(
        "2026-01-31T10:00:00.000000001+02:00 one\n2026-01-31T10:00:01.5+02:00 two\n",
        "2026-01-31T10:00:01.5+02:00 two\n2026-01-31T08:00:02Z three\n",
    )
    assert lines_of(api, polls=3) == ["one", "two", "three"]


def test_of_a_progress_bar_the_last_state_is_passed_on_once() -> None:
    """tqdm, as vLLM has it: one line of the log with carriage returns in it."""
    bar = "Loading:   0%\rLoading:  50%\rLoading: 100%"
    odd = "a\x85b\u2028c"
    api = LogApi(f"2026-01-31T10:00:00.000000001Z {bar}\r\n2026-01-31T10:00:01Z {odd}\n")
    assert lines_of(api, polls=5) == ["Loading: 100%", odd]


def test_a_reader_goes_on_where_another_has_stopped() -> None:
    one, two = (f"2026-01-31T10:00:00.00000000{n}Z line {n}\n" for n in (1, 2))
    first = LogReader("p", "n", "base", lambda line: None)
    asyncio.run(first.pass_on(LogApi(one), 10.0))
    lines: list[str] = []
    asyncio.run(
        LogReader("p", "n", "base", lines.append, first.last_ns).pass_on(LogApi(one + two), 10.0)
    )
    assert lines == ["line 2"]


def test_a_line_that_was_cut_off_is_not_passed_on() -> None:
    api = LogApi("2026-01-31T10:00:00.000000001Z one\n2026-01-3")
    assert lines_of(api, polls=2) == ["one"]


def test_a_log_that_may_not_be_read_is_told_of_once() -> None:
    """No exception is raised for a status with `_preload_content=False`."""
    body = json.dumps({"kind": "Status", "code": 403, "message": 'pods "p" is forbidden'})
    (line,) = lines_of(LogApi(body, status=403), polls=5)
    assert "may this Airflow read pods' logs?" in line and "kind" not in line


def test_a_log_that_times_out_is_told_of_once() -> None:
    class Slow(LogApi):
        async def read_namespaced_pod_log(self, *names: str, **options: Any) -> Any:
            raise TimeoutError

    assert len(lines_of(Slow(""), polls=5)) == 1


def test_the_age_that_is_asked_for_does_not_depend_on_any_clock() -> None:
    """The line's time is years ahead; what is asked for is the time since the read before."""
    api = LogApi("2099-01-31T10:00:30.000000000Z one\n")
    lines_of(api, polls=3, request_s=10.0)
    first, second, third = api.asked
    assert first["tail_lines"] == 2000 and "since_seconds" not in first
    assert 12 <= second["since_seconds"] < 60 and 12 <= third["since_seconds"] < 60


def test_a_log_is_read_with_a_limit() -> None:
    api = LogApi("2026-01-31T10:00:30.000000000Z one\n")
    lines_of(api, polls=2)
    assert all(asked["limit_bytes"] == 4 << 20 for asked in api.asked)
    text = "2026-01-31T10:00:30.000000000Z " + "x" * (4 << 20)
    assert "lines were left out" in lines_of(LogApi(text), polls=1)[-1]
