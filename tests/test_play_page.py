"""The playground as a reader uses it, in Chromium: asked, sampled from, trained, counted, with the
policies in docs/play.html and today's parts."""
import re
import shutil

import pytest

from tools.play import build

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")    # else playwright's own
HOSTILE = "<img src=x onerror='window.hacked=1'>"


@pytest.fixture
def page(tmp_path):
    """The page on a telephone, where its random numbers are the same each time. What goes wrong in
    it, and what it asks of others, is an error at the end of the test."""
    path = tmp_path / "play.html"
    data = build.data_of(build.PAGE.read_text(encoding="utf-8"))
    path.write_text(build.assemble(data), encoding="utf-8")
    faults = []
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        except sync_api.Error as error:
            if CHROMIUM is not None or "Executable doesn't exist" not in str(error):
                raise
            pytest.skip("Chromium is not installed")
        page = browser.new_page(viewport={"width": 400, "height": 800}, reduced_motion="reduce")
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", lambda request: faults.append(f"request: {request.url}"))
        page.goto(path.as_uri())
        page.evaluate("""() => {
            Math.random = generator(100);
            pose(sampleProblem(Math.random, true, cfg)); }""")
        yield page
        browser.close()
    assert faults == [f"request: {path.as_uri()}"]


def ask(page, prompt):
    """Type a problem and press Enter. -> what the page says of it, and of the answers"""
    page.fill("#problem", prompt)
    page.press("#problem", "Enter")
    return page.text_content("#truth"), page.locator("#answers strong").all_text_contents()


def test_the_page_answers_and_the_base_learns_in_it(page):
    assert page.locator("#answers h3").all_text_contents() == ["base", "trained"]
    truth, verdicts = ask(page, "((((6-1)-2)*4)+8)")
    assert truth.startswith("The right answer is 20.") and verdicts[1] == "✓ right: 20"
    assert "19 bytes" in ask(page, "((((16-1)-2)*4)+8)=")[0]
    page.click("#ask .draw")
    assert "kept from training" in page.text_content("#truth")

    # what is typed, and what a policy writes, stays text
    assert "nobody can check" in ask(page, "<b>1</b>")[0]
    assert page.locator("#group-figures dd").first.text_content() == "<b>1</b>="
    page.evaluate("""(text) => {
        window.original = rollout;
        rollout = function* (tree, prompts) {
            const tokens = [...utf8.encode(text), cfg.EOS];
            const completions = readAgain(tree, prompts.map((prompt) => ({ prompt, tokens })));
            yield completions;
            return completions;
        };
        pose(problem);
        rollout = original; }""", HOSTILE)
    shown = page.locator("#group-rows .tokens").first.text_content()
    assert HOSTILE in shown.replace("␣", " ")
    assert page.locator("img").count() == 0 and page.evaluate("() => window.hacked") is None

    # one group: advantages by the formula, and a step on it
    ask(page, "(((3+4)-5)*4)")
    page.evaluate("() => { do sampleGroup(); while (!hasSignal(group.rewards)); }")
    rows = page.locator("#group-rows .row:not(.head)").all()
    rewards = [int(row.locator(".reward").text_content()[-1]) for row in rows]
    written = [row.locator(".advantage .number").text_content() for row in rows]
    mean = sum(rewards) / 8
    std = (sum((r - mean) ** 2 for r in rewards) / 7) ** 0.5
    assert [float(text.replace("−", "-")) for text in written] == pytest.approx(
        [(r - mean) / (std + 1e-4) for r in rewards], abs=0.0051)
    page.click("#learn")
    assert page.locator("#group-rows .advantage strong").count() == 8
    assert page.locator("#answers h3").all_text_contents() == ["base", "trained", "yours"]

    # training: by chance, the base is right one time in three
    page.click("#start-over")
    page.click("#train-button")
    page.wait_for_function("() => log.length >= 30", timeout=120_000)
    page.click("#train-button")
    page.locator("#train-button", has_text="Go on").wait_for()
    assert page.evaluate("() => mean(log.slice(25, 30).map(({ reward }) => reward))") > 0.7
    assert page.locator("#share-chart path").count() > 0

    # pass@k, as it is sampled
    page.click("#count")
    page.locator("#num-counted", has_text=re.compile("[1-9]")).wait_for()
    page.click("#count")
    page.locator("#count", has_text="Sample 25 more").wait_for()
    label = page.locator("#passk-chart svg").get_attribute("aria-label")
    ends = {name: float(value) for name, value in re.findall(r"(\w+ \w+) (\d\.\d\d)", label)}
    assert ends["trained pass"] >= 0.95
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 400
