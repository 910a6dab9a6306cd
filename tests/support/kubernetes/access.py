"""Who may do what at the double: tokens, denied verbs, and answers that fail on purpose."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from support.kubernetes.status import ApiError, forbidden, unauthorized
from support.kubernetes.store import Target


@dataclass(slots=True)
class AccessRules:
    """Bearer tokens, and what the user's is good for; the administrator's is for everything."""

    user: str = "system:serviceaccount:airflow:worker"
    admin_token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    user_token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    denied: set[tuple[str, str]] = field(default_factory=set)
    failures: list[tuple[str, str, ApiError]] = field(default_factory=list)

    def is_admin(self, authorization: str) -> bool:
        """Whether a request's header is an administrator's.

        Raises:
            ApiError: 401, no user has it.
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
        if self.denied & {(v, r) for v in (verb, "*") for r in (resource, "*")}:
            where = f'in the namespace "{target.namespace}"'
            why = f'User "{self.user}" cannot {verb} resource "{resource}" in API group "" {where}'
            raise forbidden(target.resource.plural, target.name, why)

    def check_failures(self, method: str, plural: str) -> None:
        """Fail a request that a test wants to fail.

        Raises:
            ApiError: The one that the test named.
        """
        for at, (failing, resource, error) in enumerate(self.failures):
            if (method, plural) == (failing, resource):
                del self.failures[at]
                raise error
