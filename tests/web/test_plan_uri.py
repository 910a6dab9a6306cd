"""What a plan task has noted is read only if it can be the URI of a plan."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.airflow_records import Records

from batchllm_operator.errors import PlanError
from batchllm_operator.web.plan_uri import PlanURI

Browser = Any  # the class in conftest.py
END = "_batchllm/job/2026-01-31/plan-0123456789abcdef"


@pytest.mark.parametrize(
    "uri",
    [
        *(f"s3://lake/out/{END}", f"s3a://lake/{END}", f"/lake/out/{END}", f"file:///out/{END}"),
        *(f"gs://lake/{END}", f"az://lake/{END}", f"abfss://c@a.dfs.core.windows.net/l/{END}"),
    ],
)
def test_uris_of_plans(uri: str) -> None:
    found = PlanURI.parse(uri)
    assert (found.uri, found.job, found.ds) == (uri, "job", "2026-01-31")
    assert found.plan_id == "0123456789abcdef"
    assert (found.local_path is None) == (not uri.startswith(("/", "file:")))


@pytest.mark.parametrize(
    "noted",
    [
        *(None, 17, ["/lake"], "", "/etc/passwd", "/etc", END, f"lake/{END}", f"//lake/{END}"),
        *(f"/lake/../etc/{END}", f"/lake/./{END}", f"/lake//x/{END}", f"/lake/{END}/"),
        *(f"/lake/{END}/..", f"/lake/{END}/../../../../etc", f"/lake/{END}\n", f"/lake/{END}\0"),
        *(f"/lake\0/{END}", f"/lake/{END[:-1]}", f"/lake/{END}0", f"/lake/{END.upper()}"),
        f"/lake/{END.replace('2026-01-31', '..')}",
        f"/lake/{END.replace('2026-01-31', 'a/b')}",
        f"/lake/{END.replace('job', '..')}",
        f"/lake/%2e%2e/{END}?x=1",
        *(f"https://host/{END}", f"http://169.254.169.254/latest/{END}", f"s3:///{END}"),
        *(f"s3://key:secret@lake/{END}", f"file://host/{END}", f"abfss://lake/{END}"),
        *(f"github://a:b@/{END}", f"filecache::s3://lake/{END}"),
        f"simplecache::file:///lake/{END}",
        *(f"{root}/_batchllm/a/link::x/{END}" for root in ("/lake", "file:///lake", "s3://lake")),
        "/lake/" + 5000 * "x" + f"/{END}",
    ],
)
def test_what_is_no_uri_of_a_plan(noted: Any) -> None:
    with pytest.raises(PlanError) as error:
        PlanURI.parse(noted)
    assert "secret" not in str(error.value) and "etc" not in str(error.value)


def test_roots_bound_what_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "lake" / END
    folder.mkdir(parents=True)
    local, remote = PlanURI.parse(str(folder)), PlanURI.parse(f"s3://lake/out/{END}")
    for root in (f"{tmp_path}/lake", f"file://{tmp_path}/lake/", f"{tmp_path}/x/../lake", "/"):
        assert local.place([root]) == str(folder)
    for root in ("s3://lake", "s3://lake/", "s3a://lake/out", "s3://lake/out/_batchllm/job"):
        remote.place(["s3://other", root])
        PlanURI.parse(remote.uri.replace("s3://", "s3a://")).place([root])


@pytest.mark.parametrize(
    "root",
    [
        *("", ".", "lake", "s3://", "s3:///", "s3", "file://", "*", "gs://lake", "//lake"),
        *("{tmp}/la", "{tmp}/lake-secret", "{tmp}/LAKE", "{tmp}/lake/..x", "{tmp}/lake/%2e%2e"),
        *("s3://lake/ou", "s3://lak", "s3://LAKE", "s3://lake/OUT", "s3://other/lake/out"),
        *("s3://lake/out/..", "s3://lake//out", "s3://lake/other", "s3://lake/out/_batchllm/jo"),
    ],
)
def test_what_lies_in_no_root_is_not_read(root: str, tmp_path: Path) -> None:
    folder = tmp_path / "lake" / END
    folder.mkdir(parents=True)
    for uri in (str(folder), f"file://{folder}", f"s3://lake/out/{END}", f"s3a://lake/out/{END}"):
        with pytest.raises(PlanError, match="report_roots"):
            PlanURI.parse(uri).place([root.format(tmp=tmp_path)])


def test_links_out_of_the_roots_are_followed_before_they_are_judged(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside" / END, tmp_path / "lake" / END
    outside.mkdir(parents=True)
    inside.parent.mkdir(parents=True)
    inside.symlink_to(outside)
    assert PlanURI.parse(str(inside)).place([str(tmp_path)]) == str(outside)
    with pytest.raises(PlanError, match="report_roots"):
        PlanURI.parse(str(inside)).place([str(tmp_path / "lake")])
    inside.unlink()
    inside.symlink_to("/etc")
    with pytest.raises(PlanError, match="symbolic link"):
        PlanURI.parse(str(inside)).place(["/"])


@pytest.mark.parametrize("noted", ["/etc", "/etc/passwd", 5, {"a": 1}, f"https://host/{END}"])
def test_a_page_of_what_was_edited_says_so(anna: Browser, records: Records, noted: Any) -> None:
    records.run().job(noted)
    answer = anna.get("/dags/job/runs/a")
    assert answer.status_code == 409 and "root:" not in answer.text


def refused(browser: Browser, path: str = "") -> str:
    """The page that refuses a plan because of symbolic links in its folder."""
    answer = browser.get("/dags/job/runs/a" + path)
    assert answer.status_code == 409 and "symbolic links" in answer.text
    return str(answer.text)


def test_links_to_other_files_show_nothing_of_them(
    anna: Browser, records: Records, committed: Any, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"password": "hunter22"}))
    folder = Path(committed.folder.path)
    records.run().job(str(folder))
    for name in ("report.json", "manifest.json"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        for path in ("", "/jobs/batchllm.plan/-1/report.html"):
            text = refused(anna, path)
            assert "hunter22" not in text and "password" not in text


def test_links_out_of_a_plan_say_nothing_of_where_they_lead(
    anna: Browser, records: Records, plan: Any, tmp_path: Path
) -> None:
    """Neither whether a file is there, nor how many attempts are."""
    records.run().job(plan.folder.uri)
    for name in ("committed.json", "runs"):
        link = Path(plan.folder.path) / name
        for target in ("/absent", "/etc/passwd", tmp_path):
            link.symlink_to(target)
            refused(anna)
            link.unlink()


@pytest.mark.parametrize("is_plan_swapped", [True, False])
def test_a_plan_is_read_where_it_was_when_it_was_judged(
    anna: Browser,
    records: Records,
    committed: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_plan_swapped: bool,
) -> None:
    """Then its folder becomes a link, which isn't followed; or a link to it leads elsewhere."""
    folder, link = Path(committed.folder.path), tmp_path / "link"
    link.symlink_to(tmp_path)
    judge = PlanURI.place

    def judge_and_swap(uri: PlanURI, roots: Iterable[str]) -> str:
        place = judge(uri, roots)
        if is_plan_swapped:
            folder.rename(folder.with_name("aside"))
            folder.symlink_to(folder.with_name("aside"))
        link.unlink()
        link.symlink_to("/absent")
        return place

    monkeypatch.setattr(PlanURI, "place", judge_and_swap)
    records.run().job(str(link / folder.relative_to(tmp_path)))
    path = "/jobs/batchllm.plan/-1/report.html"
    if is_plan_swapped:
        refused(anna, path)
    else:
        assert anna.get("/dags/job/runs/a" + path).status_code == 200


def test_a_pipe_in_place_of_a_file_holds_no_thread(
    anna: Browser, records: Records, committed: Any
) -> None:
    report = Path(committed.folder.path) / "report.json"
    report.unlink()
    os.mkfifo(report)
    records.run().job(committed.folder.uri)
    answer = anna.get("/dags/job/runs/a")
    assert answer.status_code == 503 and "report.json: isn&#39;t a file" in answer.text


def test_a_plan_of_another_place_is_not_shown(
    anna: Browser, records: Records, committed: Any, tmp_path: Path
) -> None:
    folder = Path(committed.folder.path)
    other = folder.with_name("plan-" + 16 * "0")
    folder.rename(other)
    records.run().job(str(other))
    answer = anna.get("/dags/job/runs/a")
    assert answer.status_code == 409 and "belongs elsewhere" in answer.text
