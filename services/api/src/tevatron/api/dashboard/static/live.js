// Keeps the parts of a page that are marked data-live as the server has them now; data-live="5" means every five seconds.

export async function refresh() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok || answer.redirected) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const other = fresh.getElementById(part.id);
    // What the reader is in is left alone: a button must not go away under a finger, nor a text under a selection.
    const isInUse = part.contains(document.activeElement) || document.getSelection().containsNode(part, true) && !document.getSelection().isCollapsed;
    if (other && !isInUse && other.innerHTML !== part.innerHTML) {
      part.replaceChildren(...other.childNodes);
      for (const name of ["data-state", "data-seq"]) {
        if (other.hasAttribute(name)) part.setAttribute(name, other.getAttribute(name));
      }
    }
  }
}

const timed = document.querySelector("[data-live]:not([data-live=''])");
if (timed) {
  setInterval(() => {
    if (!document.hidden) refresh().catch(() => {}); // the next turn tries again
  }, Number(timed.dataset.live) * 1000);
}
