"""Where metrics are to be read: `[HOST:]PORT`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

ADDRESS_VARIABLE: Final = "BATCHLLM_METRICS_PORT"
"""Environment variable with the address, for `batchllm run` without `--metrics-port`."""

_LOCAL: Final = "127.0.0.1"
_ADDRESS: Final = re.compile(r"(?:(?P<host>[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """An address to listen on."""

    host: str
    """0.0.0.0 for all IPv4 addresses of the machine, :: for all of IPv6."""
    port: int

    @classmethod
    def parse(cls, text: str) -> MetricsAddress | None:
        """Read `[HOST:]PORT`; an IPv6 HOST stands in brackets. None for no text and for port 0.

        Without a host it's this machine alone that can read them.

        Raises:
            ValueError: it is no such address.
        """
        if not text:
            return None
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise ValueError(
                f"{text!r} isn't [HOST:]PORT with a port from 1 to 65535, such as 9400 or"
                " 0.0.0.0:9400; 0 is for none"
            )
        port = int(match["port"])
        host = (match["host"] or _LOCAL).strip("[]")
        return cls(host, port) if port else None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
