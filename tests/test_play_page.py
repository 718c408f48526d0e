"""The playground as a reader uses it, in Chromium, with the policies in docs/play.html and today's
parts."""
import re

import pytest

from learn.play import build

HOSTILE = "<img src=x onerror='window.hacked=1'>"


@pytest.fixture
def open_page(browser, tmp_path):
    """A function that opens the page at an address, on a telephone. Any error on the page, and any
    request except for the page, is an error at the end of the test."""
    path = tmp_path / "play.html"
    path.write_text(build.assemble(build.data_of(build.PAGE)), encoding="utf-8")
    faults = []

    def open_one(address=""):
        page = browser.new_page(viewport={"width": 390, "height": 800}, reduced_motion="reduce")
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", lambda request: faults.append(f"request: {request.url}"))
        page.goto(path.as_uri() + address)
        return page

    yield open_one
    site = tmp_path.parent.as_uri() + "/site/docs/zoo.svg"     # looks whether site/ exists
    assert {re.split("[#?]", fault)[0] for fault in faults} - {
        f"request: {site}", "console: Failed to load resource: net::ERR_FILE_NOT_FOUND"} == {
            f"request: {path.as_uri()}"}


def test_a_reader_trains_the_base_pulls_a_lever_and_asks_both_policies(open_page):
    page = open_page()
    page.evaluate("() => { reasonToStop = ({ log }) => log.length < 2 ? null : 'learned' }")
    ended = "() => run.exam !== null && activity === null"
    page.click("#begin")
    page.wait_for_function(ended, timeout=600_000)
    assert re.fullmatch(r"From \d+ to \d+ of 100", page.text_content("#headline strong"))
    assert "python grpo.py" in page.text_content("#end")
    page.locator(".experiment", has_text="Learning rate × 10").click()
    page.wait_for_function(ended, timeout=600_000)
    assert page.url.endswith("#rate=10") and page.locator("#curve path.ghost").count() == 1
    page.fill("#typed", "((((6-1)-2)*4)+8)")
    page.press("#typed", "Enter")
    page.locator("#answers .verdict").nth(1).wait_for()
    assert page.locator("#answers .verdict").nth(1).text_content() == "✓ 20"
    for _ in range(8):                          # two groups; the second is an exception
        page.click("#hand-next")
    assert page.locator("#hand-tree .moved").count() > 2
    assert page.locator(".moved:has(.up):has(.wrong), .moved:has(.down):has(.right)").count() == 0
    page.click("#count")
    page.wait_for_function("() => activity === null", timeout=600_000)
    assert page.locator("#passk").inner_text().count("%") > 20


def test_any_text_of_a_policy_stays_text(open_page):
    page = open_page("#method=GSPO&reward=<b>")
    assert page.input_value("#set-method") == "GSPO" and page.input_value("#set-reward") == "right"
    page.evaluate("""(text) => {
        const [tree, tokens] = [new Tree(base), [...utf8.encode(text), cfg.EOS]];
        const [completion] = readAgain(tree, [{ prompt: problem.prompt, tokens }]);
        writeAnswer(byId("before"), "1", { tree, completion, text }); }""", HOSTILE)
    page.locator("#before .tokens", has_text=HOSTILE.split()[0]).wait_for()
    assert page.locator("img").count() == 0 and page.evaluate("() => window.hacked") is None
