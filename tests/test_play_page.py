"""The playground as a reader uses it, in Chromium: asked, read with the keyboard, and trained. The
page is made of the policies in docs/play.html and today's parts; what it computes is tested in
test_play.py, without a browser."""
import math
import re
import shutil
import time

import pytest

from tools.play import build

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")    # else playwright's own

# A page draws its numbers by Math.random; here, the same ones each time.
SEEDED = """() => {
    Math.random = generator(100);
    pose(sampleProblem(Math.random, true, cfg)); }"""
HOSTILE = "<img src=x onerror='window.hacked=1'>"
WIDTHS = (1300, 400)


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        except sync_api.Error as error:
            if CHROMIUM is not None or "Executable doesn't exist" not in str(error):
                raise
            pytest.skip("Chromium is not installed")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the page is."""
    path = tmp_path_factory.mktemp("play") / "play.html"
    data = build.data_of(build.PAGE.read_text(encoding="utf-8"))
    path.write_text(build.assemble(data), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def open_page(browser, address):
    """open_page(**how the reader looks at it): the page in a window of its own. What goes wrong in
    it, and what it asks of others, is an error at the end of the test."""
    contexts = []
    faults = []

    def listen(page):
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", lambda request: faults.append(f"request: {request.url}"))

    def make(**how):
        options = {"viewport": {"width": 1300, "height": 900}, "reduced_motion": "reduce"}
        context = browser.new_context(**(options | how))
        contexts.append(context)
        page = context.new_page()
        listen(page)
        page.goto(address)
        faults.remove(f"request: {address}")
        if how.get("java_script_enabled", True):
            page.evaluate(SEEDED)
        page.faults = faults
        return page

    yield make
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def page(open_page):
    """The page in a wide window; what moves is there at once."""
    return open_page()


def tokens(page, box):
    """The texts of the tokens in the first line of a box."""
    return page.locator(f"{box} .tokens").first.locator("span").all_text_contents()


def ask(page, prompt):
    """Type a problem and press Enter."""
    page.fill("#problem", prompt)
    page.press("#problem", "Enter")


def draw_signal(page):
    """Draw problems until a group of the base has signal."""
    for _ in range(50):
        if "No signal" not in page.text_content("#group-note"):
            return
        page.click("#group .draw")
    raise AssertionError("50 groups without signal")


def train_until(page, num_steps):
    """Press Train, wait for some steps, and pause."""
    page.click("#train-button")
    end = time.monotonic() + 120
    while page.evaluate("() => log.length") < num_steps and time.monotonic() < end:
        page.wait_for_timeout(50)
    assert page.is_disabled("#start-over") and page.is_disabled("#count")
    page.click("#train-button")
    steps = page.evaluate("() => log.length")
    page.locator("#train-button", has_text="Go on").wait_for(timeout=10_000)
    assert page.evaluate("() => log.length") <= steps + 1


def shown_group(page):
    """Rewards and advantages as they are written in the rows of the group."""
    rows = page.locator("#group-rows .row:not(.head)").all()
    rewards = [int(row.locator(".reward").text_content()[-1]) for row in rows]
    written = [row.locator(".advantage .number").text_content() for row in rows]
    return rewards, [float(text.replace("−", "-")) for text in written]


# ---- it is safe ------------------------------------------------------------------------------

def test_all_sections_are_there_without_a_message_or_a_request(page):
    expected = ["Ask them", "One group, as GRPO sees it", "Train it yourself",
                "Was it there all along?", "Small print"]
    assert page.locator("h2").all_text_contents() == expected
    assert page.locator("#answers .card").count() == 2
    assert page.locator("#group-rows .row:not(.head)").count() == 8


def test_no_script_but_its_own_runs_and_nothing_can_be_fetched(page):
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend", "<p onclick='window.hacked = 1'>x</p>");
        document.body.lastChild.click();
        return fetch("http://127.0.0.1:9/").catch(() => null); }""")
    assert page.evaluate("() => window.hacked") is None
    refused = [fault for fault in page.faults if "Content Security Policy" in fault]
    assert len(refused) >= 3
    assert not [fault for fault in page.faults if fault.startswith("request: http://127")]
    page.faults.clear()


def test_typed_markup_stays_text(page):
    ask(page, "<b>1</b>")
    assert page.input_value("#problem") == "<b>1</b>="
    assert "nobody can check" in page.text_content("#truth")
    assert page.locator("#group-figures dd").first.text_content() == "<b>1</b>="
    assert page.locator("#group-figures b, #live-answer b").count() == 0


def test_markup_in_a_completion_stays_text(page):
    page.evaluate("""(text) => {
        const written = [...utf8.encode(text), cfg.EOS];
        rollout = function* (tree, prompts) {
            const all = prompts.map((prompt) => ({ prompt, tokens: written }));
            const completions = readAgain(tree, all);
            yield completions;
            return completions;
        };
        pose(problem); }""", HOSTILE)
    for box in ("#group-rows", "#live-answer"):
        assert "".join(tokens(page, box)).replace("␣", " ") == HOSTILE + "<|eos|>"
    assert page.locator("img").count() == 0
    assert page.evaluate("() => window.hacked") is None


def test_without_javascript_it_says_what_is_missing(open_page):
    page = open_page(java_script_enabled=False)
    assert page.locator("noscript .note").is_visible()


# ---- it can be read in any window ------------------------------------------------------------

@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_in_a_narrow_or_a_wide_window(open_page, width, scheme):
    page = open_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    for control in page.locator("button, select, input").all():
        box = control.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_dark_and_light_have_other_colours(open_page):
    colours = [open_page(color_scheme=scheme).evaluate(
        "() => getComputedStyle(document.body).backgroundColor") for scheme in ("light", "dark")]
    assert colours == ["rgb(246, 246, 243)", "rgb(22, 24, 27)"]


def test_answers_are_written_token_by_token_or_at_once_if_nothing_may_move(open_page):
    moving = open_page(reduced_motion="no-preference")
    still = open_page()
    at_once = "() => { pose(problem); return byId('answers').textContent; }"
    assert moving.evaluate(at_once).count("tokens ·") == 0
    assert still.evaluate(at_once).count("tokens ·") == 2
    moving.locator("#answers .card:last-child small", has_text="tokens ·").wait_for()


@pytest.mark.parametrize("size", ["100%", "200%"])
def test_large_letters_do_not_make_the_page_wider_than_a_telephone(open_page, size):
    page = open_page(viewport={"width": 400, "height": 800})
    page.evaluate("(size) => { document.documentElement.style.fontSize = size; }", size)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 400


def test_the_policy_allows_nothing_but_its_own_script_and_style(page):
    content = page.get_attribute("meta[http-equiv]", "content")
    assert [part.split("'sha256-")[0].split() for part in content.split(";")] == [
        ["default-src", "'none'"], ["base-uri", "'none'"], ["form-action", "'none'"],
        ["script-src"], ["style-src"]]
    assert content.count("'sha256-") == 2


# ---- ask -------------------------------------------------------------------------------------

def test_a_typed_problem_is_answered_by_both_policies(page):
    ask(page, "((((6-1)-2)*4)+8)")
    assert page.input_value("#problem") == "((((6-1)-2)*4)+8)="
    assert page.text_content("#truth").startswith("The right answer is 20.")
    heads = page.locator("#answers h3").all_text_contents()
    verdicts = page.locator("#answers strong").all_text_contents()
    assert heads == ["base", "trained"]
    assert verdicts[1] == "✓ right: 20"
    assert tokens(page, "#answers .card:nth-child(2)")[0] == "<think>"


def test_the_facts_below_an_answer_are_those_of_its_tokens(page):
    facts = page.locator("#answers .card:nth-child(2) small").text_content()
    found = page.evaluate("""() => {
        const tokens = [...document.querySelectorAll("#answers .card:nth-child(2) .tokens span")];
        return tokens.map(({ token }) => [token.next.p[token.id], token.next.entropy]); }""")
    likelihood = math.prod(p for p, _ in found)
    entropy = sum(entropy for _, entropy in found) / len(found)
    written = re.fullmatch(r"(\d+) tokens · all of it was ([\d.]+)% likely · "
                           r"entropy ([\d.]+) nats a token", facts)
    assert int(written[1]) == len(found)
    assert float(written[2]) == pytest.approx(100 * likelihood, abs=0.5)
    assert float(written[3]) == pytest.approx(entropy, abs=0.005)


def test_greedy_answers_stay_and_those_by_chance_vary(page):
    texts = {}
    for mode in ("greedy", "sampled"):
        page.select_option("#ask-mode", mode)
        texts[mode] = set()
        for _ in range(6):
            page.click("#ask button.main")
            texts[mode].add(page.locator("#answers .tokens").first.text_content())
    assert len(texts["greedy"]) == 1 and len(texts["sampled"]) > 1


def test_what_is_typed_is_kept_until_it_is_asked_and_read_as_people_mean_it(page):
    page.fill("#problem", "2 × 3 − 1")
    page.select_option("#ask-mode", "sampled")
    assert page.input_value("#problem") == "2 × 3 − 1"
    page.press("#problem", "Enter")
    assert page.input_value("#problem") == "2*3-1="
    assert page.text_content("#truth") == "The right answer is 5."


def test_a_verdict_names_what_was_answered_and_what_is_right(page):
    ask(page, "99999+1=")
    for verdict in page.locator("#answers strong").all_text_contents():
        assert re.fullmatch(r"✗ wrong: -?\d+, not 100000|✗ no answer", verdict)


def test_a_token_is_shaded_by_how_unlikely_it_was_and_shows_the_likeliest(page):
    token = page.locator("#answers .card:first-child .tokens span").nth(1)
    p = token.evaluate("(node) => Array.from(node.token.next.p)")
    own = token.evaluate("(node) => node.token.id")
    strength = float(token.evaluate("(node) => node.style.getPropertyValue('--strength')"))
    assert strength == pytest.approx(0.75 * (1 - p[own]), abs=0.001)
    token.hover()
    likeliest = sorted(range(len(p)), key=lambda v: -p[v])[:5]
    labels = page.evaluate("(ids) => ids.map(tokenLabel)", likeliest)
    assert page.locator("#tip code").all_text_contents()[:5] == labels
    written = [float(text.removeprefix("< ").rstrip("%"))
               for text in page.locator("#tip span").all_text_contents()[:5]]
    assert written == pytest.approx([100 * p[v] for v in likeliest], abs=0.5)
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_what_is_shown_of_a_token_stays_inside_the_window(open_page):
    page = open_page(viewport={"width": 400, "height": 500})
    for box in ("#answers .card:last-child .tokens", "#group-rows"):
        for token in page.locator(f"{box} span[tabindex]").all()[::4]:
            token.focus()
            tip = page.locator("#tip").bounding_box()
            assert tip["x"] >= 0 and tip["x"] + tip["width"] <= 400
            assert tip["y"] >= 0


def test_a_problem_that_is_too_long_is_refused_and_the_answers_stay(page):
    before = page.text_content("#answers")
    ask(page, "((((16-1)-2)*4)+8)=")
    assert "This has 19 bytes" in page.text_content("#truth")
    assert page.text_content("#answers") == before


def test_drawn_problems_were_kept_from_training(page):
    for button in page.locator(".draw").all():
        before = page.input_value("#problem")
        button.click()
        assert page.input_value("#problem") != before
        assert "kept from training" in page.text_content("#truth")


def test_the_arrow_keys_go_from_token_to_token_and_show_what_else_might_have_stood_there(page):
    ask(page, "((((6-1)-2)*4)+8)")
    page.focus("#ask-mode")
    page.keyboard.press("Tab")                          # the first token of the first answer
    texts = tokens(page, "#answers")
    focused = "() => document.activeElement.textContent"
    assert page.evaluate(focused) == texts[0]
    assert page.locator("#tip").is_visible()
    chances = page.locator("#tip span").all_text_contents()
    assert page.locator("#tip .own code").text_content() == texts[0]
    assert len(chances) in (5, 6)
    for key, at in (("ArrowRight", 1), ("End", -1), ("Home", 0), ("ArrowLeft", 0)):
        page.keyboard.press(key)
        assert page.evaluate(focused) == texts[at], key
    assert "entropy" in page.text_content("#tip")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_everything_is_reached_by_the_tab_key(page):
    missing = {control.get_attribute("id") for control in
               page.locator("button[id]:enabled, select, input").all()}
    page.evaluate("() => document.activeElement.blur()")
    for _ in range(80):
        page.keyboard.press("Tab")
        missing.discard(page.evaluate("() => document.activeElement.id"))
    assert missing == set()


# ---- one group -------------------------------------------------------------------------------

@pytest.mark.parametrize("method, advantage", [
    ("GRPO", lambda r, mean, std: (r - mean) / (std + 1e-4)),
    ("Dr. GRPO", lambda r, mean, std: r - mean),
    ("RLOO", lambda r, mean, std: r - (8 * mean - r) / 7),
    ("MaxRL", lambda r, mean, std: (r - mean) / mean)])
def test_a_method_gives_the_advantages_of_its_formula(page, method, advantage):
    draw_signal(page)
    page.select_option("#group-method", method)
    rewards, advantages = shown_group(page)
    mean = sum(rewards) / 8
    std = (sum((r - mean) ** 2 for r in rewards) / 7) ** 0.5
    assert advantages == pytest.approx([advantage(r, mean, std) for r in rewards], abs=0.0051)
    figures = dict(zip(page.locator("#group-figures dt").all_text_contents(),
                       page.locator("#group-figures dd").all_text_contents()))
    assert figures["right"] == f"{sum(rewards)} of 8"
    assert figures["mean"] == f"{mean:.3f}" and figures["std"] == f"{std:.3f}"


def test_bars_and_shades_point_where_the_advantage_does(page):
    draw_signal(page)
    rewards, A = shown_group(page)
    of_all = lambda what, body: page.locator(what).evaluate_all(f"(all) => all.map((x) => {body})")
    bars = of_all("#group-rows .track i",
                  "[x.className, parseFloat(x.style.getPropertyValue('--left'))]")
    shades = of_all("#group-rows .tokens", "x.firstChild.className.split(' ')[0]")
    marks = of_all("#group-rows .reward", "x.className")
    for reward, a, (kind, left), shade, mark in zip(rewards, A, bars, shades, marks):
        assert kind == shade == ("up" if a > 0 else "down")
        assert (left == 50) == (a > 0) and left <= 50
        assert mark == ("reward good" if reward else "reward bad")


@pytest.mark.parametrize("method, weight", [
    ("GRPO", lambda length: 1 / length), ("Dr. GRPO", lambda length: 1 / 48),
    ("RLOO", lambda length: 1)])
def test_a_token_of_a_group_is_shaded_by_how_hard_it_is_pushed_and_says_why(page, method, weight):
    page.evaluate("() => { byId('temperature').value = 2; sampleGroup(); }")
    draw_signal(page)
    page.select_option("#group-method", method)
    _, shown = shown_group(page)
    rows = page.evaluate("""() => [...document.querySelectorAll("#group-rows .tokens")].map((row) =>
        [...row.children].map(({ token, style }) => [
            token.next.p[token.id], token.why, style.getPropertyValue("--strength")]))""")
    A = page.evaluate("(method) => advantages(group.rewards, method)", method)
    sizes = [[a * weight(len(row)) * (1 - p) / 2 for p, _, _ in row] for a, row in zip(A, rows)]
    hardest = max(abs(size) for row in sizes for size in row)
    for a, written, row, row_sizes in zip(A, shown, rows, sizes):
        assert written == pytest.approx(a, abs=0.0051)
        for (_, why, strength), size in zip(row, row_sizes):
            assert float(strength) == pytest.approx(0.75 * (abs(size) / hardest) ** 0.5, abs=0.001)
            said = re.fullmatch(r"pushed (up|down): .* = ([+−]?)([\d.]+)", why)
            assert said[1] == ("up" if a > 0 else "down")
            assert float(said[3]) == pytest.approx(abs(size), abs=0.00006)


def test_policy_and_temperature_are_those_that_are_chosen(page):
    page.select_option("#group-policy", "trained")
    assert page.evaluate("() => group.tree.policy === trained")
    assert page.locator("#group-figures dd").nth(1).text_content() == "trained"
    page.fill("#temperature", "0.3")
    assert page.evaluate("() => group.tree.temperature") == 0.3
    assert page.text_content("#temperature-value") == "0.3"


def test_a_group_without_signal_teaches_nothing_and_says_so(page):
    page.select_option("#group-policy", "trained")
    page.evaluate("() => { byId('temperature').value = 0.1; sampleGroup(); }")
    rewards, advantages = shown_group(page)
    assert rewards == [1] * 8 and advantages == [0] * 8
    assert page.text_content("#group-note").startswith("No signal. All eight are right")
    assert page.is_disabled("#learn")


def test_one_step_on_a_group_changes_how_likely_its_answers_are(page):
    draw_signal(page)
    assert page.text_content("#learn") == "Learn from it (yours: base + 1 step)"
    page.click("#learn")
    changes = page.evaluate("() => group.changes")
    shown = page.locator("#group-rows .advantage strong").all_text_contents()
    assert shown == [f"×{math.exp(change):.2f}" for change in changes]
    lengths = page.evaluate("() => group.completions.map(({ tokens }) => tokens.length)")
    _, A = shown_group(page)
    assert sum(a * change / n for a, change, n in zip(A, changes, lengths)) > 0.01
    assert page.locator("#answers h3").all_text_contents() == ["base", "trained", "yours"]
    assert page.is_disabled("#learn")
    page.click("#sample")
    assert page.text_content("#learn") == "Learn from it (yours: base + 2 steps)"


@pytest.mark.parametrize("method, name", [("RLOO", "base"), ("GRPO", "trained")])
def test_what_has_learned_is_a_copy_after_one_step_of_adamw(page, method, name):
    page.evaluate("() => { byId('temperature').value = 1.5; }")
    page.select_option("#group-policy", name)
    page.select_option("#group-method", method)
    page.evaluate("() => { do sampleGroup(); while (!hasSignal(group.rewards)); }")
    differs = page.evaluate("""([method, name]) => {
        const { tree, completions, rewards } = group;
        const expected = copyOf(policies[name]);
        const gradient = zerosLike(expected);
        const A = advantages(rewards, method);
        backward(gradient, tree, completions, pushes(A, completions, method, cfg.T, G));
        adamW(expected, gradient, newOptimizer(expected), cfg.learningRate);
        learnFromGroup();
        const after = new Tree(expected, 1.5);
        const again = readAgain(after, completions);
        const change = logLikelihood(after, again[0]) - logLikelihood(tree, completions[0]);
        return [expected.data.some((x, i) => x !== policies.yours.data[i]),
                change - group.changes[0], yours.from]; }""", [method, name])
    assert differs == [False, 0, name]


def test_another_method_after_a_step_has_a_group_of_its_own(page):
    draw_signal(page)
    page.click("#learn")
    page.select_option("#group-method", "RLOO")
    assert page.locator("#group-rows strong").count() == 0
    assert page.evaluate("() => group.name") == "yours"


# ---- train, and count ------------------------------------------------------------------------

def test_a_step_trains_on_the_problems_and_by_the_method_that_are_chosen(page):
    page.select_option("#num-prompts", "4")
    page.select_option("#train-method", "RLOO")
    assert page.text_content("#train-status").startswith("One step: 4 groups of 8 answers.")
    page.evaluate("""() => {
        window.calls = [];
        const [drawn, pushed, stepped] = [sampleProblem, pushes, adamW];
        sampleProblem = (random, heldOut, cfg) => {
            calls.push(["problem", heldOut]);
            return drawn(random, heldOut, cfg);
        };
        pushes = (A, completions, method, T, B) => {
            if (B > 1) calls.push(["pushes", method, T, B]);
            return pushed(A, completions, method, T, B);
        };
        adamW = (policy, gradient, optimizer, rate) => {
            calls.push(["step", policy === policies.yours, optimizer === yours.optimizer, rate]);
            return stepped(policy, gradient, optimizer, rate);
        }; }""")
    train_until(page, 1)
    steps = page.evaluate("() => log.length")
    calls = page.evaluate("() => calls")
    one = [["problem", False], ["pushes", "RLOO", 48, 32]] * 4 + [["step", True, True, 5e-4]]
    assert calls == one * steps


def test_the_exam_is_of_all_three_policies(page):
    page.evaluate("""() => {
        beginFrom("trained");
        examScore = (policy) => Object.values(policies).indexOf(policy);
        return examine(); }""")
    assert page.locator("#exam tr").all_text_contents() == [
        "base0 of 100 right", "trained1 of 100 right", "yours2 of 100 right"]


def test_the_exam_has_100_different_problems_that_were_kept_from_training(page):
    prompts = page.evaluate("() => examProblems(100).map(({ prompt }) => prompt)")
    assert len(set(prompts)) == 100
    assert page.evaluate("(prompts) => prompts.every(isHeldOut)", prompts)
    again = page.evaluate("() => { Math.random(); return examProblems(100); }")
    assert [problem["prompt"] for problem in again] == prompts


def test_nothing_else_learns_or_counts_while_it_trains(page):
    draw_signal(page)
    assert page.is_enabled("#learn") and page.is_enabled("#count")
    page.click("#train-button")
    for paused in (False, True):
        if paused:
            page.click("#train-button")
        found = page.evaluate("""() => {
            sampleGroup();                              // also in the step that is still under way
            const ids = ["learn", "count", "start-over"];
            return [activity, ids.map((id) => byId(id).disabled)]; }""")
        assert found in (["training", [True, True, True]], [None, [False, False, False]])
    page.locator("#train-button", has_text="Go on").wait_for()


def test_it_pauses_goes_on_and_starts_over(page):
    train_until(page, 2)
    steps = page.evaluate("() => log.length")
    page.wait_for_timeout(200)
    assert page.evaluate("() => [yours.steps, log.length]") == [steps, steps]
    assert page.text_content("#train-status").startswith(f"Step {steps}:")
    train_until(page, steps + 1)
    assert page.evaluate("() => yours.steps") > steps
    page.click("#start-over")
    assert page.text_content("#train-button") == "Train"
    assert page.evaluate("() => [yours.steps, log.length]") == [0, 0]
    assert page.evaluate("() => policies.yours.data.every((x, i) => x === base.data[i])")


def test_the_base_learns_to_answer_95_of_100_held_out_problems(page):
    page.click("#train-button")
    page.locator("#exam").wait_for(timeout=240_000)
    page.locator("#train-button", has_text="Go on").wait_for()
    names = page.locator("#exam th").all_text_contents()
    right = [int(text.split()[0]) for text in page.locator("#exam td").all_text_contents()]
    assert names == ["base", "trained", "yours"]
    assert right[0] <= 25 and right[1] >= 95 and right[2] >= 95
    label = page.locator("#share-chart svg").get_attribute("aria-label")
    shares = dict(re.findall(r"(\w+) (\d\.\d\d)", label))
    assert float(shares["right"]) >= 0.95 and float(shares["think"]) >= 0.9
    assert page.locator("#answers h3").all_text_contents() == ["base", "trained", "yours"]
    assert page.input_value("#group-policy") == "yours"


def test_pass_at_k_is_drawn_as_it_is_sampled_and_can_be_stopped(page):
    page.click("#count")
    page.locator("#num-counted", has_text=re.compile("[1-9]")).wait_for()
    assert page.is_disabled("#train-button") and page.is_disabled("#learn")
    page.click("#count")
    page.locator("#count", has_text="Sample 25 more").wait_for()
    count = int(page.text_content("#num-counted"))
    assert 1 <= count <= 25
    label = page.locator("#passk-chart svg").get_attribute("aria-label")
    ends = {name: float(value) for name, value in re.findall(r"(\w+ \w+) (\d\.\d\d)", label)}
    assert ends.keys() == {"base pass", "base maj", "trained pass", "trained maj"}
    assert ends["trained pass"] >= 0.95
    assert count < 25
    page.click("#count-anew")
    assert "nothing yet" in page.locator("#passk-chart svg").get_attribute("aria-label")


def test_the_chart_of_pass_at_k_has_the_means_over_problems(page):
    page.evaluate("""() => {
        counts = { base: [{ pass: [0, 0, 0, 0.5, 1, 1], maj: [0, 0, 0, 0, 0, 0] },
                          { pass: [0, 0, 0, 0, 0.5, 0.5], maj: [0, 0, 0, 0, 0.5, 0.5] }] };
        showCounts(); }""")
    label = page.locator("#passk-chart svg").get_attribute("aria-label")
    assert label.endswith("base pass 0.75, base maj 0.25")
    assert page.text_content("#num-counted") == "2"


def test_answers_are_counted_by_what_they_say(page):
    found = page.evaluate("""() => {
        const texts = [...Array(8).fill("<answer>07</answer>"),
                       ...Array(12).fill("<answer>8</answer>"), ...Array(12).fill("7")];
        rollout = function* (tree, prompts) {
            return prompts.map((prompt, i) => ({ tokens: [...utf8.encode(texts[i])], nodes: [] }));
        };
        return countOne(base, { prompt: "(3+4)=", answer: "7" }); }""")
    none_right = [math.comb(24, k) / math.comb(32, k) for k in (1, 2, 4, 8, 16, 32)]
    assert found["pass"] == pytest.approx([1 - share for share in none_right])
    assert found["maj"] == pytest.approx([8 / 32, 4 / 16, 2 / 8, 1 / 4, 1 / 2, 0])


def test_what_was_counted_of_a_policy_is_forgotten_when_it_learns(page):
    train_until(page, 1)
    page.click("#count")
    page.locator("#num-counted", has_text=re.compile("[1-9]")).wait_for()
    page.click("#count")
    page.locator("#count", has_text="Sample 25 more").wait_for()
    lengths = page.evaluate("() => Object.values(counts).map((one) => one.length)")
    assert len(lengths) == 3 and len(set(lengths)) == 1
    train_until(page, 2)
    assert page.evaluate("() => counts") == {}
    assert page.text_content("#num-counted") == "0"
    assert page.text_content("#count") == "Sample 25 problems"


def test_a_chart_draws_greater_values_higher_and_its_names_apart(page):
    page.evaluate("""() => {
        const step = { reward: 0.2, thinks: 0.2, signal: 0.21, length: 5 };
        log = [step, { ...step, reward: 0.9 }, { ...step, reward: 1, thinks: 0.25 }];
        showCurves(); }""")
    path = page.get_attribute("#share-chart path.yours", "d")
    heights = [float(point.split()[1]) for point in path[1:].split("L")]
    assert heights == sorted(heights, reverse=True) and heights[0] > heights[-1]
    names = sorted(float(text.get_attribute("y"))
                   for text in page.locator("#share-chart text.label").all())
    assert len(names) == 3
    assert all(below - above >= 14.9 for above, below in zip(names, names[1:]))


def test_the_best_answer_of_a_group_stands_above_the_worst(page):
    draw_signal(page)
    page.evaluate("""() => showExtremes({
        ...group, A: advantages(group.rewards, "GRPO"), method: "GRPO" })""")
    marks = page.locator("#live-group .reward").all_text_contents()
    assert marks == ["✓ 1", "✗ 0"]
