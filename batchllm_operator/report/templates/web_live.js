(() => {
  const { url, everyMs } = document.currentScript.dataset;
  const live = document.getElementById("live");
  const summary = document.getElementById("summary");
  const news = document.getElementById("news");
  const pause = document.getElementById("pause");
  let paused = false;

  const show = (html) => {
    const next = new DOMParser().parseFromString(html, "text/html").body;
    const said = next.querySelector("[data-summary]");
    // Announce only what has changed.
    if (said && said.dataset.summary !== summary.textContent) {
      summary.textContent = said.dataset.summary;
    }
    // Keep focus and scroll positions across the replacement.
    const places = [...live.querySelectorAll("[id]")].map((each) => [each.id, each.scrollLeft]);
    const focused = live.contains(document.activeElement) ? document.activeElement.id : "";
    live.replaceChildren(...next.childNodes);
    for (const [id, left] of places) {
      const each = document.getElementById(id);
      if (each) each.scrollLeft = left;
    }
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  };

  const ask = async () => {
    try {
      const answer = await fetch(url, { credentials: "same-origin", redirect: "error" });
      if (answer.status === 205) return location.reload();
      if (!answer.ok) {
        news.textContent = `No news: ${(await answer.text()).slice(0, 500)}`;
        return answer.status < 500 && answer.status !== 409 ? undefined : later();
      }
      if (!paused) show(await answer.text());
      news.textContent = `As of ${new Date().toLocaleTimeString()}`;
      if (live.querySelector("[data-final]")) return undefined;
    } catch {
      news.textContent = "No news: Airflow can't be reached.";
    }
    return later();
  };
  const later = () => setTimeout(tick, Number(everyMs));
  const tick = () => (paused || document.hidden ? later() : ask());

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    news.textContent = paused ? "Updates are paused." : "";
  });
  later();
})();
