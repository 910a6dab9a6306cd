"""What other libraries say, without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from batchllm_operator.lake.masking import masked, shown_cause


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("user:SECRET", {"uri": "x://user:SECRET@host/db"}, "<hidden>"),
        ("user, SECRET", {"uri": "x://user:SECRET@host/db"}, "user, <hidden>"),
        ("a%2Fb and a/b", {"uri": "x://user:a%2Fb@host"}, "<hidden> and <hidden>"),
        ("b and SECRET", {"uri": "x://host?a=b&sig=SECRET"}, "b and <hidden>"),
        ("s3://bucket/a@b", {}, None),
        ("x://user:SECRET@host/db", {}, "x://<hidden>@host/db"),
        ("b'Bearer SECRET\\n'", {"token": "SECRET\n"}, "b'Bearer <hidden>\\n'"),
        ("it's SECRET", {"credential": "id:SECRET"}, "it's <hidden>"),
        ("SECRET", {"auth": {"basic": {"password": "SECRET"}}}, "<hidden>"),
        ("the tests: test", {"s3.secret-access-key": "test"}, "the tests: <hidden>"),
        ("not true", {"token-refresh-enabled": "true", "warehouse": "not"}, None),
        ("aSECRETSECRETb", {"adls.sas-token": "SECRETSECRET"}, "a<hidden>b"),
    ],
)
def test_masked(text: str, settings: dict[str, Any], expected: str | None) -> None:
    assert masked(text, settings) == (text if expected is None else expected)


def test_the_environments_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    assert masked("it's SECRET") == "it's <hidden>"


def test_a_cause_is_shown_unless_it_tells_a_secret() -> None:
    error = ValueError("a")
    assert shown_cause(error, {"token": "SECRET"}) is error
    error.__cause__ = ValueError("SECRET")
    assert shown_cause(error, {"token": "SECRET"}) is None
