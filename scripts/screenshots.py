"""The pictures of README.md, taken of a running `make airflow`.

    python scripts/screenshots.py http://127.0.0.1:8080 USER PASSWORD [RUN_ID]

Writes docs/images/jobs.png and docs/images/report.png: the list of jobs, and the report of a run
of daily_snippets (by default the latest that has ended well), as a browser shows them.
Needs Debian's package `chromium`.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
DAG_ID = "daily_snippets"
WIDTH, HEIGHT = 1280, 860
REPORT_HEIGHT = 1040  # down to GPU time and cost


def take(url: str, user: str, password: str, run_id: str | None) -> None:
    """Log in, and take both pictures."""
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, base_url=url)
        page.goto("/batchllm/")
        page.fill("input[name=username]", user)
        page.fill("input[name=password]", password)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("heading", name="BatchLLM jobs").wait_for()
        run_id = run_id or _latest_run(page)

        page.goto("/")
        page.get_by_role("button", name="Browse").click()
        page.get_by_role("menuitem", name="BatchLLM").click()
        frame = page.frame_locator("iframe")
        frame.get_by_text("runs of").first.click()
        page.wait_for_timeout(500)
        page.screenshot(path=IMAGES / "jobs.png")

        page.set_viewport_size({"width": WIDTH, "height": REPORT_HEIGHT})
        page.goto(f"/dags/{DAG_ID}/runs/{run_id}/plugin/batchllm-run")
        # Not the top, with folders of the machine that it is taken on.
        frame.locator("dl.figures").evaluate("each => each.scrollIntoView()")
        page.wait_for_timeout(500)
        page.screenshot(path=IMAGES / "report.png")
        browser.close()


def _latest_run(page: Page) -> str:
    query = "state=success&order_by=-run_after&limit=1"
    answer: Any = page.request.get(f"/api/v2/dags/{DAG_ID}/dagRuns?{query}").json()
    return str(answer["dag_runs"][0]["dag_run_id"])


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    take(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) == 5 else None)
