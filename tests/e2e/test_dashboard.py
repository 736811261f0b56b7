"""The dashboard in a real browser, on a real stack: submit, watch, cancel, resume, compare, down to the passages.

Chromium is Debian's; without one these tests are skipped. On the way axe looks for faults of accessibility, nothing may be
asked of another host, and pictures of every page at both widths, light and dark, are left in the test's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, TimeoutError, expect, sync_playwright
from tests.support.processes import wait_for

from tevatron.core.contracts.resources import DatasetRequest, ModelRequest

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}"),
]
WIDTHS = (400, 1280)
SERIOUS = {"serious", "critical"}
WAIT_MS = 240_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


TOO_WIDE = """[...document.querySelectorAll('body *')]
    .filter((element) => !element.parentElement.closest('.scroll')
        && element.getBoundingClientRect().right > window.innerWidth)
    .map((element) => element.outerHTML.slice(0, 100))"""
"""What sticks out of the page, less what may be scrolled by itself."""


class Walk:
    """One visitor's browser, and what it noticed on the way."""

    def __init__(self, context: BrowserContext, url: str, shots: Path) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.url = url
        self.shots = shots
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        self.page.on("request", self._note)
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note(self, request) -> None:
        # data: is content of the page itself.
        if not request.url.startswith("data:"):
            self.hosts.add(urlsplit(request.url).netloc)

    def _hear(self, message) -> None:
        # plotly.js holds the style sheet of a library for maps, which the policy refuses and nothing here draws.
        is_of_maps = "inline style" in message.text and "/plotly-" in message.location["url"]
        if message.type in ("error", "warning") and not is_of_maps:
            self.complaints.append(message.text)

    def open(self, path: str) -> Page:
        self.page.goto(self.url + path)
        return self.page

    def _fits(self, name: str, width: int) -> None:
        """Wait until the page has taken its new width, and say what sticks out where it does not fit."""
        try:
            self.page.wait_for_function(
                "width => document.documentElement.scrollWidth <= width", arg=width, timeout=10_000
            )
        except TimeoutError:
            raise AssertionError((name, width, self.page.evaluate(TOO_WIDE))) from None

    def look(self, name: str) -> None:
        """Check the page with axe and its width, and take its pictures."""
        for width in WIDTHS:
            self.page.set_viewport_size({"width": width, "height": 900})
            self._fits(name, width)
            for scheme in ("light", "dark"):
                self.page.emulate_media(color_scheme=scheme)
                self.page.wait_for_timeout(300)  # plots are drawn again in the other colours
                faults = [
                    f"{fault['id']} at {width}, {scheme}: {fault['nodes'][0]['html'][:200]}"
                    for fault in Axe().run(self.page).response["violations"]
                    if fault["impact"] in SERIOUS
                ]
                assert faults == [], name
                self.page.screenshot(
                    path=self.shots / f"{name}-{width}-{scheme}.png", full_page=True
                )


@pytest.fixture
def walk(browser, stack, tmp_path, tiny_model, sample) -> Iterator[Walk]:
    shots = tmp_path / "shots"
    shots.mkdir()
    with stack.up() as client:
        client.register_model(ModelRequest(name="tiny", path=str(tiny_model)))
        training = sample.parent / "train.jsonl"
        client.register_dataset(DatasetRequest(name="rows", kind="training", path=str(training)))
        client.register_dataset(DatasetRequest(name="sample", kind="beir", path=str(sample)))
        context = browser.new_context()
        yield Walk(context, stack.file["url"], shots)
        context.close()


def points(page: Page, plot: str = "loss", trace: int = 0) -> int:
    """Return how many steps a plot shows; its second trace is the mark of the best."""
    return page.evaluate(
        "([plot, trace]) => document.getElementById(`plot-${plot}`)?.data?.[trace]?.x.length ?? 0",
        [plot, trace],
    )


def wait_for_more_points(page: Page, than: int, plot: str = "loss") -> None:
    # Not wait_for_function: the page's policy allows no eval.
    wait_for(
        lambda: points(page, plot) > than, timeout_s=WAIT_MS / 1000, what=f"another step of {plot}"
    )


def test_from_the_form_to_the_passages(walk: Walk):
    submit(walk)
    clone_into_a_long_training(walk)
    watch_the_loss(walk)
    save_now(walk)
    cancel_and_resume(walk)
    stop_after_this_step(walk)
    look_at_the_checkpoint(walk)
    compare_down_to_the_passages(walk)
    assert walk.hosts == {urlsplit(walk.url).netloc}
    assert walk.complaints == []


def submit(walk: Walk) -> None:
    page = walk.open("/")
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    page.get_by_role("link", name="New run").click()
    page.locator("[name=name]").fill("first")
    fields = {"max_steps": "10", "train_group_size": "2", "rerank_max_len": "128"}
    for name, value in fields.items():
        page.locator(f"[name={name}]").fill(value)
    page.locator("[name=more]").fill('{"save_steps": 5, "logging_steps": 1}')
    page.get_by_label("Publish the last saved state once more").check()
    page.locator("[name=eval_dataset]").select_option("sample")
    walk.look("new")
    page.get_by_role("button", name="Look at the plan").click()
    expect(page.get_by_text("It fits")).to_be_visible()
    walk.look("review")
    page.get_by_role("button", name="Send").click()
    expect(page).to_have_url(re.compile("/ui/jobs$"))
    expect(page.get_by_role("link", name="first-eval")).to_be_visible()
    walk.look("jobs")


def clone_into_a_long_training(walk: Walk) -> None:
    page = walk.page
    page.get_by_role("link", name="first", exact=True).click()
    page.get_by_role("link", name="Clone").click()
    box = page.locator("[name=spec]")
    spec = json.loads(box.input_value())
    spec["name"], spec["validation"] = "long", "rows"
    # Not every step: the page, the browser and the stack would be busy with nothing else.
    steps = {"max_steps": 100_000, "logging_steps": 4, "eval_steps": 20, "save_steps": 20}
    spec["arguments"] |= {**steps, "load_best_model_at_end": True}
    box.fill(json.dumps(spec))
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("long")


def watch_the_loss(walk: Walk) -> None:
    """Its page is not loaded again: the events move the plot."""
    page = walk.page
    wait_for_more_points(page, than=5)
    wait_for_more_points(page, than=points(page))
    expect(page.locator("#steps tbody tr").first).to_be_visible()
    for plot in ("eval_loss", "eval_ndcg@10"):
        wait_for_more_points(page, than=1, plot=plot)
        assert points(page, plot, trace=1) == 1
    expect(page.locator("#validation tr.best")).to_have_count(1)
    expect(page.get_by_text("Loss of the held-out rows; best at step")).to_be_visible()
    walk.look("job")


def save_now(walk: Walk) -> None:
    page = walk.page
    page.get_by_role("button", name="Save now").click()
    expect(page.locator("#events")).to_contain_text("asked to save its state after this step")


def cancel_and_resume(walk: Walk) -> None:
    page = walk.page
    state = page.locator("#status .state")
    page.get_by_role("button", name="Cancel").click()
    expect(state).to_have_text("cancelled", timeout=WAIT_MS)
    page.get_by_role("button", name="Resume").click()
    expect(state).to_have_text("running", timeout=WAIT_MS)
    assert first_step_of_attempt_2(walk) > 1


def stop_after_this_step(walk: Walk) -> None:
    page = walk.page
    page.get_by_role("button", name="Stop after this step").click()
    expect(page.locator("#status .state")).to_have_text("succeeded", timeout=WAIT_MS)
    expect(page.get_by_role("link", name=re.compile("^ckpt_"))).to_be_visible()


def first_step_of_attempt_2(walk: Walk) -> int:
    """Wait for it among the job's newest events, which the page's table of steps shows without their attempt."""
    path, after = f"{walk.url}/ui/jobs/long/events", 0
    while True:
        found = walk.page.request.get(path, params={"after": after, "limit": 1000}).json()
        for event in found["data"]:
            if event["type"] == "metrics" and event["attempt"] == 2:
                return event["data"]["step"]
        after = found["next"]
        walk.page.wait_for_timeout(200)


def look_at_the_checkpoint(walk: Walk) -> None:
    page = walk.open("/ui/jobs/first")
    expect(page.locator("#status .state")).to_have_text("succeeded", timeout=WAIT_MS)
    page.get_by_role("link", name=re.compile("^ckpt_")).click()
    expect(page.get_by_role("heading", name="Probes")).to_be_visible()
    walk.look("checkpoint")


def compare_down_to_the_passages(walk: Walk) -> None:
    page = walk.open("/ui/jobs/first-eval")
    state = page.locator("#status .state")
    expect(state).to_have_text("succeeded", timeout=WAIT_MS)
    page.get_by_role("link", name="Clone").click()
    page.locator("[name=spec]").fill('{"kind": "eval", "name": "bm25", "dataset": "sample"}')
    page.get_by_role("button", name="Send").click()
    expect(state).to_have_text("succeeded", timeout=WAIT_MS)
    page.get_by_role("link", name="Evaluations").click()
    walk.look("evaluations")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("bm25 against first-eval")
    walk.look("compare")
    walk.open("/ui/query?evaluation=bm25&baseline=first-eval&query=q1")
    expect(page.get_by_text("how hot for green tea")).to_be_visible()
    expect(page.get_by_text("Green tea is steeped below boiling point.")).to_be_visible()
    walk.look("query")
    walk.open("/ui/scorers")
    walk.look("scorers")
