"""A small client of any Kubernetes API server, for the node agent and the controllers."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes import config as kube_config
from support.kubernetes.status import Object

_LAST_ANSWER_S = 2.0
MERGE_PATCH = "application/merge-patch+json"


class RequestFailedError(Exception):
    """An answer that isn't a success; `code` is its HTTP status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class ApiClient:
    """Requests with the credentials of a kubeconfig. Must be made and closed in an event loop."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = kube_config.new_client_from_config(str(kubeconfig)).configuration
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if not configuration.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        token = configuration.get_api_key_with_prefix("BearerToken") or (
            configuration.get_api_key_with_prefix("authorization")
        )
        self.host = str(configuration.host)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": token} if token else {},
            connector=aiohttp.TCPConnector(ssl=context, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        )

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)

    async def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> Object:
        """Send a request and return the object that is answered.

        Raises:
            RequestFailedError: The answer is an error.
            aiohttp.ClientError: There is no answer.
        """
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type}
        async with await self._send(method, self.host + path, data=data, headers=headers) as answer:
            text = await answer.text()
            if answer.status >= 300:
                raise RequestFailedError(answer.status, text)
            return dict(json.loads(text))

    async def _send(self, method: str, url: str, **options: Any) -> aiohttp.ClientResponse:
        """Send a request; one that is cancelled meanwhile leaves no half-open connection."""
        sending = asyncio.ensure_future(self._session.request(method, url, **options))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait({sending}, timeout=_LAST_ANSWER_S)
            if not sending.done():
                sending.cancel()
            elif not sending.exception():
                abort(sending.result())
            raise

    async def get(self, path: str) -> Object | None:
        """The object, or None if there is none."""
        try:
            return await self.request("GET", path)
        except RequestFailedError as error:
            if error.code == 404:
                return None
            raise

    async def patch(self, path: str, body: Object) -> Object | None:
        """Merge-patch an object; None if it is gone."""
        try:
            return await self.request("PATCH", path, body, MERGE_PATCH)
        except RequestFailedError as error:
            if error.code == 404:
                return None
            raise

    async def delete(self, path: str, uid: str = "", grace_s: int | None = None) -> None:
        """Delete an object, if it is still the one with this uid."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self.request("DELETE", path, options)
        except RequestFailedError as error:
            if error.code not in (404, 409):
                raise

    async def follow(self, path: str) -> AsyncIterator[tuple[str, Object]]:
        """All objects of a list, then their changes, for ever.

        Yields (type, object); the type is ADDED, MODIFIED, DELETED or LISTED.

        LISTED comes after each list, with the list: whatever isn't in it is gone. Outages are
        waited out.
        """
        revision = ""
        while True:
            try:
                if not revision:
                    listed = await self.request("GET", path)
                    for each in listed["items"]:
                        yield "ADDED", each
                    yield "LISTED", listed
                    revision = listed["metadata"]["resourceVersion"]
                async for kind, body in self._watch(path, revision):
                    if kind == "ERROR":
                        revision = ""
                        break
                    revision = body["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        yield kind, body
            except (aiohttp.ClientError, RequestFailedError, TimeoutError, OSError):
                revision = ""
                await asyncio.sleep(0.1)

    async def _watch(self, path: str, revision: str) -> AsyncIterator[tuple[str, Object]]:
        query = f"watch=true&resourceVersion={revision}&timeoutSeconds=300"
        url = f"{self.host}{path}?{query}&allowWatchBookmarks=true"
        answer = await self._send("GET", url, read_bufsize=2**22)
        try:
            if answer.status != 200:
                raise RequestFailedError(answer.status, await answer.text())
            async for line in answer.content:
                event = json.loads(line)
                yield event["type"], event["object"]
        finally:
            abort(answer)


def abort(answer: aiohttp.ClientResponse) -> None:
    """Drop an answer's connection at once: closing it would wait for the server's farewell."""
    connection = answer.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    answer.close()
