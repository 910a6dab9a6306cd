"""Three of kube-controller-manager's controllers, for API servers that run without it.

They work through the API, in one namespace: Jobs get their pods (`job_controller`), objects whose
owners are gone go too, and the status of quotas follows the pods (a real API server refuses pods
while it isn't there).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from support.kubernetes.api_client import ApiClient, RequestFailedError
from support.kubernetes.job_controller import JobController, has_finished, owner_uid
from support.kubernetes.loop_thread import LoopThread
from support.kubernetes.quantities import quantity, told
from support.kubernetes.quotas import usage
from support.kubernetes.status import Object
from support.kubernetes.store import RESOURCES

_WATCHED = ("pods", "secrets", "configmaps", "resourcequotas", "jobs")
_PERIOD_S = 0.5  # for what time brings about: deadlines, quotas that have room again
_PLURALS = {each.kind: each for each in RESOURCES.values()}


def has_ended(pod: Object) -> bool:
    """Whether a pod uses nothing any more."""
    return pod["status"].get("phase") in ("Succeeded", "Failed")


class Controllers:
    """Runs from construction until `close`."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._namespace = namespace
        self._objects: dict[str, dict[str, Object]] = {plural: {} for plural in _WATCHED}
        self._frees_quota = False
        self._failures: list[BaseException] = []
        self._thread = LoopThread("controllers")
        self._thread.run(self._start(kubeconfig))

    def close(self) -> None:
        """End; raise what went wrong inside."""
        self._thread.run(self._stop())
        self._thread.close()
        if self._failures:
            raise self._failures[0]

    async def _start(self, kubeconfig: Path) -> None:
        self._api = ApiClient(kubeconfig)
        self._jobs = JobController(self._api, self._namespace)
        self._changed = asyncio.Event()
        work = [*map(self._follow, _WATCHED), self._reconcile()]
        self._tasks = [asyncio.create_task(each) for each in work]

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._failures += [
            each
            for each in ended
            if isinstance(each, BaseException) and not isinstance(each, asyncio.CancelledError)
        ]
        await self._api.close()

    async def _follow(self, plural: str) -> None:
        path, known = f"{self._path(plural)}", self._objects[plural]
        changes: AsyncIterator[tuple[str, Object]] = self._api.follow(path)
        async for kind, body in changes:
            if kind == "LISTED":
                listed = {each["metadata"]["uid"] for each in body["items"]}
                for uid in known.keys() - listed:
                    self._jobs.note_gone(known.pop(uid))
            elif kind == "DELETED":
                known.pop(body["metadata"]["uid"], None)
                self._jobs.note_gone(body)
            else:
                known[body["metadata"]["uid"]] = body
            if plural == "pods" and (kind in ("LISTED", "DELETED") or has_ended(body)):
                self._frees_quota = True
            self._changed.set()

    async def _reconcile(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _PERIOD_S)
            self._changed.clear()
            with contextlib.suppress(aiohttp.ClientError, RequestFailedError, OSError):
                await self._collect_garbage()
                await self._update_quotas()
                await self._run_jobs()

    async def _run_jobs(self) -> None:
        pods = list(self._objects["pods"].values())
        for job in list(self._objects["jobs"].values()):
            metadata = job["metadata"]
            if "deletionTimestamp" in metadata:
                left = [pod for pod in pods if owner_uid(pod) == metadata["uid"]]
                for pod in left:
                    if "deletionTimestamp" not in pod["metadata"]:
                        await self._api.delete(f"{self._path('pods')}/{pod['metadata']['name']}")
                if not left:
                    gone = {"metadata": {"finalizers": None}}
                    await self._api.patch(f"{self._path('jobs')}/{metadata['name']}", gone)
            elif not has_finished(job):
                await self._jobs.reconcile(job, pods)

    def _path(self, plural: str) -> str:
        version = RESOURCES[plural].version
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        return f"{root}/namespaces/{self._namespace}/{plural}"

    async def _collect_garbage(self) -> None:
        for plural, objects in self._objects.items():
            for each in list(objects.values()):
                metadata = each["metadata"]
                owners = metadata.get("ownerReferences", [])
                if owners and not [owner for owner in owners if await self._exists(owner)]:
                    path = f"{self._path(plural)}/{metadata['name']}"
                    await self._api.delete(path, metadata["uid"])

    async def _exists(self, owner: Object) -> bool:
        """Whether an owner is there; kinds that aren't known here are taken to be."""
        resource = _PLURALS.get(owner["kind"])
        if resource is None or owner["apiVersion"] != resource.version:
            return True
        if owner["uid"] in self._objects.get(resource.plural, {}):
            return True
        path = self._path(resource.plural) if resource.namespaced else f"/api/v1/{resource.plural}"
        found = await self._api.get(f"{path}/{owner['name']}")
        return found is not None and found["metadata"]["uid"] == owner["uid"]

    async def _update_quotas(self) -> None:
        """Count again for a quota that is new, and whenever a pod has ended: as the real one does.

        In between the API server counts by itself, also for pods that it then doesn't make.
        """
        counts, self._frees_quota = self._frees_quota, False
        quotas = [
            each
            for each in self._objects["resourcequotas"].values()
            if counts or each["spec"].get("hard") != each.get("status", {}).get("hard")
        ]
        if not quotas:
            return
        listed = await self._api.request("GET", f"/api/v1/namespaces/{self._namespace}/pods")
        pods = listed["items"]
        for quota in quotas:
            hard = quota["spec"].get("hard", {})
            amounts = {name: quantity(value) for name, value in hard.items()}
            used = {name: told(name, amount) for name, amount in usage(pods, amounts).items()}
            status = {"hard": hard, "used": used}
            if quota.get("status", {}) != status:
                name = quota["metadata"]["name"]
                path = f"/api/v1/namespaces/{self._namespace}/resourcequotas/{name}/status"
                await self._api.patch(path, {"status": status})
