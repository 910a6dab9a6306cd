"""Who may do what at the double: tokens, denied verbs, and answers that fail on purpose."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from support.kubernetes.listing import Target
from support.kubernetes.status import ApiError, Object, forbidden, unauthorized


@dataclass(slots=True)
class Failure:
    """Requests that are to be answered with an error."""

    method: str
    plural: str
    error: ApiError
    times: int


@dataclass(slots=True)
class AccessRules:
    """Bearer tokens, and what the user's is good for; the administrator's is for everything."""

    user: str = "system:serviceaccount:airflow:worker"
    admin_token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    user_token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    denied: set[tuple[str, str]] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)

    def is_admin(self, authorization: str) -> bool:
        """Whether a request's header is an administrator's.

        Raises:
            ApiError: 401, it is nobody's.
        """
        scheme, _, token = authorization.partition(" ")
        if scheme != "Bearer" or token not in (self.admin_token, self.user_token):
            raise unauthorized()
        return token == self.admin_token

    def authorize(self, verb: str, target: Target) -> None:
        """Check what the user may do.

        Raises:
            ApiError: 403.
        """
        resource = target.resource.plural
        if target.subresource:
            resource = f"{resource}/{target.subresource}"
        if not self.allows(verb, resource):
            where = f' in the namespace "{target.namespace}"' if target.namespace else ""
            where = where or " at the cluster scope"
            why = (
                f'User "{self.user}" cannot {verb} resource "{resource}" in API group '
                f'"{target.resource.group}"{where}'
            )
            raise forbidden(target.resource.qualified, target.name, why)

    def allows(self, verb: str, resource: str) -> bool:
        ways = {(v, r) for v in (verb, "*") for r in (resource, "*")}
        return not ways & self.denied

    def check_failures(self, method: str, plural: str) -> None:
        """Fail a request that a test wants to fail.

        Raises:
            ApiError: The one that the test named.
        """
        for each in self.failures:
            if each.times and each.method in (method, "*") and each.plural in (plural, "*"):
                each.times -= 1
                raise each.error

    def review(self, body: Object) -> Object:
        """The answer to a SelfSubjectAccessReview."""
        wanted = body.get("spec", {}).get("resourceAttributes", {})
        resource = wanted.get("resource", "")
        if wanted.get("subresource"):
            resource = f"{resource}/{wanted['subresource']}"
        allowed = self.allows(wanted.get("verb", ""), resource)
        return {
            "kind": "SelfSubjectAccessReview",
            "apiVersion": "authorization.k8s.io/v1",
            "metadata": {},
            "spec": body.get("spec", {}),
            "status": {"allowed": allowed, "reason": "" if allowed else "denied by a test"},
        }
