"""The playground as a reader uses it, in Chromium, with the policies in docs/play.html and today's
parts."""
import re
import shutil

import pytest

from learn.play import build

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")    # else playwright's own
HOSTILE = "<img src=x onerror='window.hacked=1'>"


@pytest.fixture
def open_page(tmp_path):
    """A function that opens the page, or one of other data, on a telephone. What goes wrong in it,
    and what it asks of others, is an error at the end of the test."""
    data = build.data_of(build.PAGE)
    path = tmp_path / "play.html"
    faults = []
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        except sync_api.Error as error:
            if CHROMIUM is not None or "Executable doesn't exist" not in str(error):
                raise
            pytest.skip("Chromium is not installed")

        def open_one(address="", **changes):
            path.write_text(build.assemble(data | changes), encoding="utf-8")
            page = browser.new_page(viewport={"width": 400, "height": 800}, reduced_motion="reduce")
            page.on("console", lambda message: faults.append(f"console: {message.text}"))
            page.on("pageerror", lambda error: faults.append(f"error: {error}"))
            page.on("request", lambda request: faults.append(f"request: {request.url}"))
            page.goto(path.as_uri() + address)
            return page

        yield open_one
        browser.close()
    assert {fault.partition("#")[0] for fault in faults} == {f"request: {path.as_uri()}"}


def ask(page, prompt):
    """Type a problem and press Enter. -> what the page says of it, and of the answers"""
    page.fill("#typed", prompt)
    page.press("#typed", "Enter")
    page.wait_for_function("() => document.querySelectorAll('#answers .verdict').length > 1")
    return page.text_content("#typed-note"), page.locator("#answers .verdict").all_text_contents()


def finish_training(page):
    page.wait_for_function("() => run.exam !== null && activity === null", timeout=120_000)
    return page.text_content("#headline strong")


def test_the_base_learns_in_the_page_and_a_lever_breaks_it(open_page):
    page = open_page()
    verdicts = page.locator("header .verdict").all_text_contents()
    assert [verdict[0] for verdict in verdicts] == ["✗", "✓"]
    assert page.locator("#begin").bounding_box()["y"] < 700         # on the first screen
    page.click("#begin")
    exam = int(re.fullmatch(r"From \d+ to (\d+) of 100", finish_training(page))[1])
    assert exam >= 95
    counts = [int(count) for count in page.locator("#counts b").all_text_contents()]
    assert sum(counts[:4]) == 64 and counts[0] > 50
    assert counts[4] == page.locator(".group.teaches").count()
    assert page.locator("#same .verdict.right").count() == 1
    assert "python grpo.py" in page.text_content("#end")
    assert page.locator("#events li").count() >= page.locator("#curve g").count() > 2

    # a lever: another run from the base, beside the curve of the first
    page.locator(".lever", has_text="Learning rate × 10").click()
    assert page.url.endswith("#rate=10")
    assert finish_training(page).endswith(" to 0 of 100")
    assert "no group had signal" in page.text_content("#end")
    assert page.locator("#curve path.ghost").count() == page.locator("#curve path.now").count() == 1
    page.locator("#link[href='#rate=10']").click()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 400


def test_an_address_opens_with_its_settings_and_without_measurements_are_all_levers(open_page):
    page = open_page("#method=GSPO&updates=4&seed=3&reward=<b>", measured=None)
    assert page.input_value("#set-method") == "GSPO" and page.input_value("#set-seed") == "3"
    assert page.input_value("#set-reward") == "right"
    assert page.text_content("#recipe").startswith("GSPO, four updates")
    assert "four updates, ratio of the whole answer" in page.text_content("#a-step")
    page.select_option("#set-updates", "1")
    page.select_option("#set-baseline", "-1")
    assert "updates" not in page.url and "push everything up" in page.text_content("#a-step")
    num_levers = page.evaluate("() => LEVERS.length")
    assert page.locator(".lever").count() == num_levers and page.locator("#levers h3").count() == 1


def test_problems_of_ones_own_one_step_by_hand_and_many_samples(open_page):
    page = open_page()
    said, verdicts = ask(page, "((((6-1)-2)*4)+8)")
    assert said.startswith("Inside the task") and verdicts[1] == "✓ 20"
    assert "17 and 23: the models know no numbers but 1 to 9" in ask(page, "17*23")[0]
    assert "never read <" in ask(page, "<b>1</b>")[0]

    # what a policy writes stays text
    page.evaluate("""(text) => {
        const [tree, tokens] = [new Tree(base), [...utf8.encode(text), cfg.EOS]];
        const [completion] = readAgain(tree, [{ prompt: problem.prompt, tokens }]);
        writeAnswer(byId("before"), "1", { tree, completion, text }); }""", HOSTILE)
    page.locator("#before .tokens", has_text=HOSTILE.split()[0]).wait_for()
    assert page.locator("img").count() == 0 and page.evaluate("() => window.hacked") is None

    for _ in range(4):
        page.click("#hand-next")
    assert "times as likely now" in page.text_content("#hand-note")
    assert page.locator("#hand-tree .moved").count() > 2

    # tokens by the keyboard
    page.locator("#after .tokens [tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    assert "entropy" in page.text_content("#tip") and page.is_visible("#tip")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")

    page.click("#count")
    page.wait_for_function("() => activity === null", timeout=60_000)
    rows = [row.split("\t") for row in page.locator("#passk").inner_text().splitlines()]
    base, trained, guesser = [[float(cell.rstrip("%")) for cell in row[1:]] for row in rows[1:]]
    assert base == sorted(base) and guesser[0] < base[0] < 60 < 95 < base[-1] and trained[0] > 90
