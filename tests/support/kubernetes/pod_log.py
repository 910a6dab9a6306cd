"""Logs of pods: the API server asks the kubelet of the pod's node, as a real one does."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import aiohttp
from aiohttp import web
from support.kubernetes.api_client import abort
from support.kubernetes.status import ApiError, Object, bad_request, not_found
from support.kubernetes.store import RESOURCES, Store

_PASSED_ON = (
    "follow",
    "tailLines",
    "sinceSeconds",
    "sinceTime",
    "timestamps",
    "limitBytes",
    "previous",
)


def chosen_container(pod: Object, asked: str) -> str:
    """The container that a request means.

    Raises:
        ApiError: 400, the pod has several and none is named, or hasn't the one that is.
    """
    name, spec = pod["metadata"]["name"], pod["spec"]
    names = [each["name"] for each in spec["containers"]]
    if not asked:
        if len(names) == 1:
            return str(names[0])
        listed = " ".join(names)
        init = " ".join(each["name"] for each in spec.get("initContainers", []))
        more = f" or one of the init containers: [{init}]" if init else ""
        raise bad_request(
            f"a container name must be specified for pod {name}, choose one of: [{listed}]{more}"
        )
    if asked not in names and asked not in [e["name"] for e in spec.get("initContainers", [])]:
        raise bad_request(f"container {asked} is not valid for pod {name}")
    return asked


def kubelet_address(store: Store, node_name: str) -> str:
    """Host and port of a node's kubelet.

    Raises:
        ApiError: 404, there is no such node.
    """
    node = store.get(RESOURCES["nodes"], "", node_name)
    status = node.get("status", {})
    for wanted in ("InternalIP", "ExternalIP", "Hostname"):
        for each in status.get("addresses", []):
            if each["type"] == wanted:
                port = status.get("daemonEndpoints", {}).get("kubeletEndpoint", {}).get("Port")
                return f"{each['address']}:{port or 10250}"
    raise not_found("nodes", node_name)


async def answer_log(
    store: Store, pod: Object, query: Mapping[str, str], request: web.Request
) -> web.StreamResponse:
    """Pass a log on from the kubelet.

    Raises:
        ApiError: What the kubelet answered, or 500: it doesn't.
    """
    container = chosen_container(pod, query.get("container", ""))
    if not pod["spec"].get("nodeName"):
        return web.Response(status=204)
    address = kubelet_address(store, pod["spec"]["nodeName"])
    metadata = pod["metadata"]
    path = f"/containerLogs/{metadata['namespace']}/{metadata['name']}/{container}"
    params = {key: query[key] for key in _PASSED_ON if key in query}
    trusting = ssl.create_default_context()  # kubelets' certificates are their own
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        url = f"https://{address}{path}"
        try:
            answer = await session.get(url, params=params, ssl=trusting)
            try:
                if answer.status != 200:
                    raise _refused(answer.status, await answer.text(), metadata["name"])
                return await _stream(answer, request)
            finally:
                abort(answer)
        except aiohttp.ClientConnectorError as error:
            message = f'Get "{url}": dial tcp {address}: connect: connection refused'
            raise ApiError(500, "InternalError", message) from error


async def _stream(answer: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    except (aiohttp.ClientPayloadError, ConnectionError):  # the kubelet or the client went away
        if request.transport is not None:
            request.transport.abort()
    return response


def _refused(code: int, text: str, name: str) -> ApiError:
    if code == 400:
        return bad_request(text)
    if code == 404:
        message = f"the server could not find the requested resource ( pods/log {name})"
        return ApiError(404, "NotFound", message, {"name": name, "kind": "pods/log"})
    message = f"an error on the server ({text!r}) has prevented the request from succeeding"
    return ApiError(code, "InternalError", message, {"name": name, "kind": "pods/log"})
