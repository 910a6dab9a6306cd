"""A proxy in front of any API server that can be away, be slow, or lose an answer.

It ends TLS, with a certificate of its own, and begins it again: only so does it know which answer
belongs to which request. Client certificates of the kubeconfig are presented to the API server by
the proxy.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from kubernetes import config as kube_config
from support.kubernetes.certificates import make_identity
from support.kubernetes.https_server import stop_accepting
from support.kubernetes.loop_thread import LoopThread

_REQUEST = re.compile(rb"^([A-Z]+) (\S+) HTTP/1\.1\r\n")


@dataclass(slots=True)
class Loss:
    """An answer to lose: of the next request with this method whose path contains `part`."""

    method: str
    part: str
    times: int


class FlakyProxy:
    """Passes bytes on between clients and the API server of `kubeconfig`, until `close`.

    `lost` counts the answers that were lost.
    """

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._source = kubeconfig
        self._identity = make_identity(folder / "proxy", "flaky-proxy")
        configuration = kube_config.new_client_from_config(str(kubeconfig)).configuration
        address = urlsplit(str(configuration.host))
        self._upstream = (address.hostname or "127.0.0.1", address.port or 443)
        self._context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if not configuration.verify_ssl:
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        if configuration.cert_file:
            self._context.load_cert_chain(configuration.cert_file, configuration.key_file)
        self._server_name = configuration.tls_server_name or self._upstream[0]
        self._connections: set[asyncio.Task[None]] = set()
        self._losses: list[Loss] = []
        self._delay_s = 0.0
        self.lost = 0
        self._server: asyncio.Server | None = None
        self._port = 0
        self._thread = LoopThread("flaky-proxy")
        self.up()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def write_kubeconfig(self, path: Path, token: str = "") -> Path:
        """Write the API server's kubeconfig, but for the proxy; `token` replaces its user."""
        config = yaml.safe_load(self._source.read_text("utf-8"))
        authority = str(self._identity.authority)
        for each in config["clusters"]:
            each["cluster"] = {"server": self.url, "certificate-authority": authority}
        if token:
            for each in config["users"]:
                each["user"] = {"token": token}
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    def down(self) -> None:
        """Refuse connections, and cut those that are open."""
        self._thread.run(self._close())

    def up(self) -> None:
        """Listen again, at the same port."""
        if self._server is None:
            self._thread.run(self._listen())

    def slow(self, seconds: float) -> None:
        """Hold each piece of an answer back so long; 0 ends it."""
        self._delay_s = seconds

    def lose_next_response(self, method: str, part: str = "", times: int = 1) -> None:
        """Pass the next such request on, and cut the connection instead of answering it."""
        self._losses.append(Loss(method, part, times))

    def close(self) -> None:
        self.down()
        self._thread.close()

    async def _listen(self) -> None:
        context = self._identity.server_context()
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self._port, ssl=context, limit=2**20
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            await stop_accepting(self._server)
            self._server.close()
            self._server = None
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):  # cut, by either side or by a test
            return
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._upstream
        there, back = await asyncio.open_connection(
            host, port, ssl=self._context, server_hostname=self._server_name
        )
        loses = asyncio.Event()  # the answer that comes next
        try:
            ways = {
                asyncio.create_task(self._requests(reader, back, loses)),
                asyncio.create_task(self._answers(there, writer, loses)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            back.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, back: asyncio.StreamWriter, loses: asyncio.Event
    ) -> None:
        while data := await reader.read(65536):
            found = _REQUEST.match(data)
            if found and self._takes_loss(found[1].decode(), found[2].decode()):
                loses.set()
            back.write(data)
            await back.drain()

    def _takes_loss(self, method: str, path: str) -> bool:
        for each in self._losses:
            if each.times and each.method == method and each.part in path:
                each.times -= 1
                return True
        return False

    async def _answers(
        self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, loses: asyncio.Event
    ) -> None:
        while data := await there.read(65536):
            if loses.is_set():
                self.lost += 1
                return
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            writer.write(data)
            await writer.drain()
