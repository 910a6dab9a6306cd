"""The setting: `[HOST:]PORT`."""

from __future__ import annotations

import pytest

from batchllm_operator.metrics import MetricsAddress


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("9400", "127.0.0.1", 9400),
        ("0.0.0.0:9400", "0.0.0.0", 9400),
        ("pod-1.svc:1", "pod-1.svc", 1),
        ("[::]:65535", "::", 65535),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int) -> None:
    address = MetricsAddress.parse(text)
    assert address == MetricsAddress(host, port)
    assert address is not None
    assert str(address) == (text if ":" in text else f"127.0.0.1:{text}")


@pytest.mark.parametrize("text", ["", "0", "0.0.0.0:0", "00"])
def test_nothing_and_port_0_are_none(text: str) -> None:
    assert MetricsAddress.parse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "metrics",
        "-1",
        "65536",
        "99999",
        "9400:",
        ":9400",
        "::1:9400",
        "[x]:1",
        "a b:1",
        "9400 ",
        "٣",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PORT") as caught:
        MetricsAddress.parse(text)
    assert repr(text) in str(caught.value)
