"""Logs of pods: the API server asks the kubelet of the pod's node, as a real one does."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from aiohttp import web
from support.kubernetes.api_client import abort
from support.kubernetes.status import ApiError, Cause, Object, bad_request, invalid, not_found
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


def check_options(name: str, query: Mapping[str, str]) -> None:
    """Check the query of a request for a log.

    Raises:
        ApiError: 400, a number can't be read; 422, it is out of range.
    """
    causes = []
    for field, least in (("tailLines", 0), ("limitBytes", 1), ("sinceSeconds", 1)):
        text = query.get(field)
        if text is None:
            continue
        try:
            number = int(text)
        except ValueError as error:
            raise bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax') from error
        if number < least:
            rule = "greater than 0" if least else "greater than or equal to 0"
            message = f"Invalid value: {number}: must be {rule}"
            causes.append(Cause(field, "FieldValueInvalid", message))
    if "sinceSeconds" in query and query.get("sinceTime"):
        message = "Forbidden: at most one of `sinceTime` or `sinceSeconds` may be specified"
        causes.append(Cause("[]", "FieldValueForbidden", message))
    if causes:
        raise invalid("PodLogOptions", name, causes)


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


def kubelet_address(store: Store, node_name: str) -> str:
    """Host and port of a node's kubelet.

    Raises:
        ApiError: 404, there is no such node.
    """
    node = store.find(RESOURCES["nodes"], "", node_name)
    if node is None:
        raise not_found("pods", node_name)  # so says a real server, though it means the node
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
    check_options(pod["metadata"]["name"], query)
    container = chosen_container(pod, query.get("container", ""))
    if not pod["spec"].get("nodeName"):
        return web.Response(status=204)
    address = kubelet_address(store, pod["spec"]["nodeName"])
    metadata = pod["metadata"]
    path = f"/containerLogs/{metadata['namespace']}/{metadata['name']}/{container}"
    params = {key: query[key] for key in sorted(_PASSED_ON) if key in query}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        url = f"https://{address}{path}"
        try:
            answer = await session.get(url, params=params, ssl=False)  # its certificate is its own
            try:
                if answer.status != 200:
                    raise _refused(answer.status, await answer.text(), metadata["name"])
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


def _refused(code: int, text: str, name: str) -> ApiError:
    if code == 400:
        return bad_request(text)
    if code == 404:
        message = f"the server could not find the requested resource ( pods/log {name})"
        return ApiError(404, "NotFound", message, {"name": name, "kind": "pods/log"})
    details = {"causes": [{"message": text}]}
    return ApiError(500, "InternalError", f"Internal error occurred: {text}", details)
