"""Logs of pods: the API server asks the kubelet of the pod's node, as a real one does."""

from __future__ import annotations

import aiohttp
from aiohttp import web
from support.kubernetes.api_client import abort
from support.kubernetes.status import ApiError, Object, bad_request
from support.kubernetes.store import RESOURCES, Store


def chosen_container(pod: Object, asked: str) -> str:
    """The container that a request means.

    Raises:
        ApiError: 400, the pod has several and none is named, or hasn't the one that is.
    """
    name, spec = pod["metadata"]["name"], pod["spec"]
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    names = [str(each["name"]) for each in containers]
    if not asked:
        if len(spec["containers"]) == 1:
            return names[-1]
        listed = " ".join(names)
        raise bad_request(
            f"a container name must be specified for pod {name}, choose one of: [{listed}]"
        )
    if asked not in names:
        raise bad_request(f"container {asked} is not valid for pod {name}")
    return asked


async def answer_log(store: Store, pod: Object, request: web.Request) -> web.StreamResponse:
    """Pass a log on from the kubelet.

    Raises:
        ApiError: What the kubelet answered, or 500: it doesn't.
    """
    container = chosen_container(pod, request.query.get("container", ""))
    if not pod["spec"].get("nodeName"):
        return web.Response(status=204)
    node = store.get(RESOURCES["nodes"], "", pod["spec"]["nodeName"])
    address = f"127.0.0.1:{node['status']['daemonEndpoints']['kubeletEndpoint']['Port']}"
    metadata = pod["metadata"]
    path = f"/containerLogs/{metadata['namespace']}/{metadata['name']}/{container}"
    params = {key: value for key, value in request.query.items() if key != "container"}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        url = f"https://{address}{path}"
        try:
            answer = await session.get(url, params=params, ssl=False)  # its certificate is its own
            try:
                if answer.status == 400:
                    raise bad_request(await answer.text())
                if answer.status != 200:
                    raise ApiError(answer.status, "", await answer.text())
                return await _stream(answer, request)
            finally:
                abort(answer)
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            refused = isinstance(error, aiohttp.ClientConnectorError)
            why = f"dial tcp {address}: connect: connection refused" if refused else "EOF"
            raise ApiError(500, "", f'Get "{url}": {why}') from error


async def _stream(answer: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    try:
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    except (aiohttp.ClientPayloadError, ConnectionError):  # the kubelet or the client went away
        if request.transport is not None:
            request.transport.abort()
    return response
