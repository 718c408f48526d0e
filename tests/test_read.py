"""The reading pages: they show the scripts as they are, with the numbers that these compute."""
import dataclasses
import html
import importlib
import re
import unicodedata
from html.parser import HTMLParser

import pytest
import torch
from conftest import ROOT, SCRIPTS

from tools import sync
from tools.read import __main__ as read
from tools.read import course, example, page, paper, watch
from tools.read.lesson import Lesson, in_batch
from tools.read.watch import Value

FOLDER = ROOT / "docs" / "read"
LESSONS = {name: Lesson(name) for name in SCRIPTS}
PAGES = course.all_pages(LESSONS)
OF_POLICY = example.OLD_LOGPS + example.MOVED
NUMBER = re.compile(r"−?\d+\.\d+")


def plain(fragment):
    """HTML as a reader sees it."""
    return html.unescape(re.sub(r"<[^>]+>", "", fragment))


def value(name, function, label, origin=""):
    """What a function of a script assigned on the example, in the places of the batch."""
    lesson = LESSONS[name]
    (found,) = (f for f in lesson.functions if f.name == function)
    for line, note in lesson.notes.items():
        if line in found.statements and note.origin == origin and label in note.values:
            return in_batch(note.values[label])
    raise AssertionError(f"no {label} in {function}")


# ---- the files -------------------------------------------------------------------------------

@pytest.mark.parametrize("name", PAGES)
def test_a_page_in_docs_is_what_the_scripts_give_today(name):
    there = (FOLDER / name).read_text(encoding="utf-8")
    assert NUMBER.sub("#", there) == NUMBER.sub("#", PAGES[name]), "run make read"
    numbers = [[float(x.replace("−", "-")) for x in NUMBER.findall(text)]
               for text in (there, PAGES[name])]
    for old, new in zip(*numbers):
        assert old == pytest.approx(new, abs=1.001e-3), "run make read"


def test_there_are_no_other_pages_in_docs():
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_the_command_writes_the_same_bytes_each_time(tmp_path, capsys):
    threads = torch.get_num_threads()
    paths = read.main(["--output_dir", str(tmp_path / "new")])
    first = [path.read_bytes() for path in paths]
    again = read.main(["--output_dir", str(tmp_path / "new")])
    torch.set_num_threads(threads)
    assert [path.read_bytes() for path in again] == first
    assert {path.name for path in paths} == set(PAGES)
    assert "grpo.html" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--output_dir", __file__], ["--ouput_dir", "x"], ["x"]])
def test_what_cannot_be_done_gets_one_line(words, capsys):
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as exit:
        read.main(words)
    torch.set_num_threads(threads)
    assert exit.value.code == 2
    assert re.fullmatch("error: .*\n", capsys.readouterr().err)


class Reader(HTMLParser):
    """Reads a page: what is open at its end, the anchors, and the addresses that it names."""

    def __init__(self, text):
        super().__init__()
        self.open, self.anchors, self.addresses, self.tags = [], [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        if tag not in ("meta", "input", "mspace"):
            self.open.append(tag)
        self.anchors += [attributes["id"]] if "id" in attributes else []
        self.addresses += [attributes[name] for name in ("href", "src") if name in attributes]

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


READERS = {name: Reader(text) for name, text in PAGES.items()}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_well_formed_and_its_links_lead_somewhere(name):
    reader = READERS[name]
    assert reader.open == []
    assert len(reader.anchors) == len(set(reader.anchors))
    for address in reader.addresses:
        if address.startswith("https://arxiv.org/abs/"):
            continue
        target, _, anchor = address.partition("#")
        assert not anchor or anchor in READERS[target or name].anchors, address
        assert target in ("", *PAGES), address


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_script_no_font_and_no_picture_and_is_not_large(name):
    assert not READERS[name].tags & {"script", "link", "img", "iframe", "object", "svg"}
    assert not re.search(r"url\(|@import|@font-face|javascript:|\son\w+=", PAGES[name])
    assert len(PAGES[name].encode()) < 150_000


# ---- the text --------------------------------------------------------------------------------

@pytest.mark.parametrize("name", SCRIPTS)
def test_the_code_on_the_page_is_the_lesson_of_the_script(name):
    shown = re.findall(r"<a href=#L(\d+)>\d+</a><code>(.*?)</code>", PAGES[f"{name}.html"])
    lines = LESSONS[name].source.split("\n")
    for number, text in shown:
        assert plain(text) == lines[int(number) - 1]
    lesson = sync.split(LESSONS[name].source)[0].split("\n")
    first = next(i for i, line in enumerate(lesson) if line.startswith("# ---- 1."))
    wanted = {i for i, line in enumerate(lesson, 1) if line.strip() and i > first + 1}
    heads = {i for i, line in enumerate(lesson, 1) if line.startswith("# ----")}
    assert {int(number) for number, _ in shown} >= wanted - heads


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_equation_has_one_line_and_each_tag_an_equation(name):
    lesson = LESSONS[name]
    assert lesson.where.keys() == lesson.equations.keys()
    for number, lines in lesson.where.items():
        assert len(lines) == 1, f"({number}) is on the lines {lines}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_equation_and_its_line_light_up_together(name):
    text = PAGES[f"{name}.html"]
    for number, (line,) in LESSONS[name].where.items():
        classes = rf'class="[^"]*\be{number}\b[^"]*"'
        assert re.search(rf"{classes} id=L{line}>", text)
        assert re.search(rf'{classes} id="eq{number}">', text)
        assert f"body:has(.e{number}:is(:hover," in text
        block = text.partition(f'id="eq{number}">')[2].partition('class="at"')[2]
        assert block.startswith(f' href="#L{line}">line {line}</a>')


@pytest.mark.parametrize("old, new, said", [
    ("# eq. (5)", "", r"grpo.py: eq. \(5\) is on 0 lines, instead of on one"),
    ("eq. (4)", "eq. (4), eq. (5)", r"grpo.py: eq. \(5\) is on 2 lines, instead of on one"),
    ("eq. (4)", "eq. (4), eq. (12)", r"grpo.py, line \d+: the docstring has no equation \(12\)"),
    ("pi_ref / pi - log(pi_ref / pi) - 1", "log(pi_ref / pi -", "a formula ends too early: ")])
def test_a_script_without_a_page_is_refused_in_words(old, new, said, tmp_path, monkeypatch):
    source = LESSONS["grpo"].source
    assert old in source
    (tmp_path / "grpo.py").write_text(source.replace(old, new))
    monkeypatch.setattr("tools.read.lesson.ROOT", tmp_path)
    with pytest.raises(ValueError, match=said):
        page.docstring(Lesson("grpo"))


def test_a_question_without_an_answer_is_refused():
    with pytest.raises(ValueError, match="course.txt: no question with its answer: [?] Why[?]"):
        course.read("# grpo\nWhat it adds.\n\n? Why?\n")


def letters(text):
    """Its letters, digits, sums and gradients, sorted."""
    return sorted(re.findall(r"[^\W_]|[∑∇]", text))


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_letter_of_an_equation_is_lost(name):
    for block in LESSONS[name].blocks:
        if block.kind not in ("equation", "formula"):
            continue
        wanted = re.sub(r"sqrt", "", block.text)
        wanted = re.sub(r"(\d)e-(\d)", r"10 \2" if "1e-" in block.text else r"\1 10 \2", wanted)
        for word, letter in {**paper.GREEK, "sum": "∑"}.items():
            wanted = re.sub(rf"(?<![A-Za-z]){word}(?![A-Za-z])", letter, wanted)
        shown = plain(page.typeset(block.text))
        assert letters(shown) == letters(wanted)


def test_equations_hold_symbols_only_but_for_remarks():
    words = set()
    for lesson in LESSONS.values():
        for text in lesson.equations.values():
            words |= set(re.findall(r"<mtext>&nbsp;(\w+)&nbsp;", page.typeset(text)))
    assert words == {"if", "else"}


LEFT, RIGHT = '<mo stretchy="false">(</mo>', '<mo stretchy="false">)</mo>'
BEFORE = '<mo lspace="0" rspace="0">&lt;</mo>'


@pytest.mark.parametrize("ascii, mathml", [
    ("a / b c", f"<mfrac><mi>a</mi><mi>b</mi></mfrac>{paper.THIN_SPACE}<mi>c</mi>"),
    ("log p / n", f'<mfrac><mrow><mi mathvariant="normal">log</mi>{paper.THIN_SPACE}<mi>p</mi>'
                  "</mrow><mi>n</mi></mfrac>"),
    ("(a - b)^2", f"<msup><mrow>{LEFT}<mi>a</mi><mo>−</mo><mi>b</mi>{RIGHT}</mrow><mn>2</mn>"
                  "</msup>"),
    ("(a - b) / c", "<mfrac><mrow><mi>a</mi><mo>−</mo><mi>b</mi></mrow><mi>c</mi></mfrac>"),
    ("o_<t", f"<msub><mi>o</mi><mrow>{BEFORE}<mi>t</mi></mrow></msub>"),
    ("sqrt(a b)", f"<msqrt><mi>a</mi>{paper.THIN_SPACE}<mi>b</mi></msqrt>")])
def test_a_formula_becomes_the_mathml_that_it_means(ascii, mathml):
    assert paper.Formula(ascii).row() == mathml


def test_in_a_sentence_symbols_are_set_as_such_and_words_are_not():
    text = paper.prose("A sampler of mu has a lag K, see (3), (44), LOSS_TYPES, k3_ratio and "
                       "--delta (2402.03300).", {"3": ""})
    assert re.findall(r"<math>(.*?)</math>", text) == ["<mi>μ</mi>", "<mi>K</mi>"]
    assert '<a class="ref e3" href="#eq3">(3)</a>' in text
    assert "(44), LOSS_TYPES, k3_ratio and <code>--delta</code>" in text
    assert 'href="https://arxiv.org/abs/2402.03300"' in text


def test_the_letters_are_those_of_the_names():
    names = {"lam": "lamda", "eps": "epsilon", "sigmoid": "sigma", "grad": "nabla"}
    for name, letter in paper.GREEK.items():
        assert unicodedata.name(letter).lower().split()[-1] == names.get(name, name)
    shown = plain(paper.math("a <= b - c >= d .. e || f"))
    assert shown == "a≤b−c≥d…e∥f"
    assert paper.number("1e-4") == "<msup><mn>10</mn><mn>−4</mn></msup>"
    assert plain(paper.math("2e3")) == "2·103"


def test_an_equation_says_with_which_flag_its_value_is():
    text = PAGES["grpo.html"].partition('id="eq6">')[2].partition('id="eq7">')[0]
    assert "with --loss_type cispo</div>" in text
    text = PAGES["grpo.html"].partition('id="eq3">')[2].partition('id="eq4">')[0]
    assert "with --" not in text


def test_lines_that_do_not_run_by_default_are_pale():
    text = PAGES["grpo.html"]
    idle = {int(line) for line in re.findall(r'class="l[^"]* idle" id=L(\d+)>', text)}
    assert idle == {line for line in LESSONS["grpo"].idle if LESSONS["grpo"].lines[line - 1]}
    (cispo,), (clip,) = LESSONS["grpo"].where["6"], LESSONS["grpo"].where["3"]
    assert cispo in idle and clip not in idle


def test_the_right_answer_has_a_tick_and_the_switch_of_the_numbers_acts():
    assert re.findall(r"<sub>(\d)</sub>: (\d+)( ✓)?</div>", PAGES["grpo.html"])[:4] == [
        ("1", "12", ""), ("2", "9", ""), ("3", "13", " ✓"), ("4", "7", "")]
    for text in PAGES.values():
        assert "body:not(:has(#numbers:checked)) :is(.eq, section, .pair > div) > .v" in text
    assert 'id="numbers" checked' in PAGES["grpo.html"]


# ---- the numbers -----------------------------------------------------------------------------

WATCHED = '''
def outer(rows, x):
    part = rows
    total, twice = inner(x[part]), 2
    found = {}
    for _ in range(3):
        total = total + 1
        found["sum"] = total
    for t in reversed(range(2)):
        column = x[:, t] * 10
        x[:, t] = 0 * column
    return total, found


def inner(x):
    def nested():
        return 1
    if x.sum() > 100:
        return nested()
    else:
        return x * 2
'''


@pytest.fixture
def calls(tmp_path):
    """What is seen of the functions above, for the rows 1 and 3 of a tensor."""
    path = tmp_path / "watched.py"
    path.write_text(WATCHED)
    scope = {}
    exec(compile(WATCHED, path, "exec"), scope)
    with watch.Watch(path, watch.functions(WATCHED), {}) as seen:
        scope["outer"](torch.tensor([1, 3]), torch.arange(8.0).view(4, 2))
    return {call.function.name: call for call in seen.calls}


def test_a_watch_sees_what_is_assigned_first_and_the_columns_of_a_loop_over_tokens(calls):
    values = {}
    for names in calls["outer"].values.values():
        values |= {name: value.tensor for name, value in names.items() if name not in values}
    assert values["total"].tolist() == [[4.0, 6.0], [12.0, 14.0]]
    assert values["sum"].tolist() == [[5.0, 7.0], [13.0, 15.0]]         # not that of the third time
    assert values["column"].tolist() == [[0, 10], [20, 30], [40, 50], [60, 70]]
    assert values["x"].tolist() == torch.zeros(4, 2).tolist()           # when the loop is over
    assert values["-> outer, 1"].tolist() == [[7.0, 9.0], [15.0, 17.0]]
    assert "twice" in values and "found" not in values


def test_a_watch_knows_who_calls_and_which_rows_a_value_is_of(calls):
    assert calls["outer"].caller == "" and calls["inner"].caller == "outer"
    ((value,),) = [names.values() for names in calls["inner"].values.values()]
    assert value.rows == [1, 3]
    assert value.tensor.tolist() == [[4.0, 6.0], [12.0, 14.0]]


def test_a_function_in_a_function_is_one_statement(calls):
    function = calls["inner"].function
    lines = WATCHED.split("\n")
    first = lines.index("    def nested():") + 1
    assert function.statements[first] is function.statements[first + 1]
    ran = {lines[line - 1].strip() for line in calls["inner"].ran}
    assert ran == {"def nested():", "if x.sum() > 100:", "return x * 2"}


def test_what_is_given_on_the_page_is_what_the_functions_get():
    for name in ("reinforce", "ppo", "grpo", "gspo"):
        inputs = example.INPUTS[name]
        assert inputs["rewards"] is example.REWARDS
        label = "log_ratio" if name == "reinforce" else "log_rho"
        found = value(name, "backward", label)
        moved = (inputs["logps"] - inputs["old_logps"]).tolist()
        for row, numbers in enumerate(found):
            assert numbers is None or numbers == pytest.approx(moved[row])
    lagged = torch.tensor(value("grpo", "correct_for_lag", "sampler_logps", "with --sampler_lag 1"))
    torch.testing.assert_close(lagged, example.INPUTS["grpo"]["sampler_logps"])
    values = torch.tensor(value("ppo", "fit_critic", "values"))
    torch.testing.assert_close(values, example.INPUTS["ppo"]["values"] * example.MASK)
    rewards = torch.tensor(value("reinforce", "compute_advantages", "rewards", "with --beta 0.02"))
    given = example.INPUTS["reinforce"]
    last = torch.zeros(4, 3)
    last[2, 2] = 1.0
    wanted = last - 0.02 * (given["old_logps"] - given["ref_logps"])
    torch.testing.assert_close(rewards, wanted)
    chosen = torch.tensor(value("dpo", "dpo_loss", "h_chosen")[:2]).flatten()
    h = (example.INPUTS["dpo"]["logps"] - example.INPUTS["dpo"]["ref_logps"]).sum(dim=1)
    torch.testing.assert_close(chosen, h[:2])


def test_the_pairs_are_those_that_the_page_of_dpo_names():
    chosen, rejected = importlib.import_module("dpo").preferences(example.GRADED)
    said = re.findall(r"o(\d) (?:chosen )?over o(\d)", plain(page.EXPLAINED["dpo"]))
    assert [(int(winner) - 1, int(loser) - 1) for winner, loser in said] == [
        *zip(chosen.tolist(), rejected.tolist())]


def test_the_answers_have_as_many_tokens_as_the_mask():
    assert [len(tokens) for tokens in example.ANSWERS] == example.MASK.sum(dim=1).tolist()
    for name, question in example.QUESTIONS.items():
        right = example.INPUTS[name]["rewards"].argmax()
        assert "".join(example.ANSWERS[right][:-1]) == str(eval(question.rstrip("=")))


def test_the_tokens_that_the_clip_takes_are_marked_and_those_behind_the_end_are_pale():
    (line,) = LESSONS["grpo"].where["3"]
    cells = re.findall(r"<i( class=\w+)?>", page.strips(LESSONS["grpo"], line))
    kinds = [cell.removeprefix(" class=") for cell in cells]
    assert kinds == ["", "", "", "hit", "", "off", "hit", "", "", "", "", "off"]



def results(name, flags, watched, monkeypatch):
    """All that the lesson's functions return while the example runs."""
    script = importlib.import_module(name)
    found = []

    def recording(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            found.append(vars(result) if dataclasses.is_dataclass(result) else result)
            return result
        return call

    with monkeypatch.context() as patch:
        for function in LESSONS[name].functions:
            original = getattr(script, function.name)
            patch.setattr(script, function.name, recording(original))
        calls = example.run(name, flags, watched)
    return found, calls


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_return_the_same_when_they_are_watched(name, monkeypatch):
    for flags in example.variants(name):
        found, calls = results(name, flags, LESSONS[name].functions, monkeypatch)
        alone, none = results(name, flags, (), monkeypatch)
        assert none == []
        assert len(calls) == len(found) > 0
        torch.testing.assert_close(found, alone, rtol=0, atol=0)


def test_functions_without_numbers_are_those_that_need_a_network_or_an_optimizer():
    assert {name: lesson.silent for name, lesson in LESSONS.items()} == {
        "reinforce": ["squared_gradient_norms", "update", "main"],
        "ppo": ["trpo_update", "update", "main"],
        "grpo": ["update", "main"],
        "gspo": ["update", "main"],
        "dpo": ["evaluate_pairs", "update", "main"]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_pale_lines_that_assign_have_the_values_of_a_flag_but_in_functions_for_all_scripts(name):
    lesson = LESSONS[name]
    for function in lesson.functions:
        if function.name in ("kl", "aggregate"):            # not every script reaches each branch
            continue
        for line in function.body_lines() & lesson.idle:
            statement = function.statements[line]
            if type(statement).__name__ in ("Assign", "Return"):
                last = lesson.lines[statement.end_lineno - 1]
                is_shown = statement.end_lineno in lesson.notes
                is_empty = "return {}" in last or "batch = " in last
                assert is_shown or is_empty, (
                    f"no run gets to: {last.strip()}; add its flag to VARIANTS in "
                    "tools/read/example.py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_of_the_example_lets_a_line_run(name):
    origins = {note.origin for note in LESSONS[name].notes.values()}
    for flags in example.variants(name)[1:]:
        assert f"with {flags}" in origins, flags


def test_the_ratios_and_the_gradients_of_grpo_are_those_computed_by_hand():
    ratio = (example.MOVED * example.MASK).exp()
    A = torch.tensor([-0.5, -0.5, 1.5, -0.5])[:, None]
    taken = torch.zeros(4, 3, dtype=torch.bool)
    taken[1, 0] = taken[2, 0] = True
    gradient = torch.where(taken, 0.0, -ratio * A)
    gradient = gradient * example.MASK / example.MASK.sum(dim=1, keepdim=True) / 4
    torch.testing.assert_close(torch.tensor(value("grpo", "policy_loss", "ratio")), ratio)
    found = torch.tensor(value("grpo", "backward", "∂L/∂log π"))
    torch.testing.assert_close(found, gradient, atol=2e-4, rtol=0)
    assert (LESSONS["grpo"].clipped == taken).all()


def test_gspo_clips_whole_answers_and_their_gradients_are_0():
    assert LESSONS["gspo"].clipped.tolist() == [
        [False] * 3, [True, True, False], [True] * 3, [False] * 3]
    gradient = value("gspo", "backward", "∂L/∂log π")
    assert gradient[1] == gradient[2] == [0.0, 0.0, 0.0]
    assert gradient[0][0] > 0


def test_the_values_of_a_loop_over_tokens_stand_each_in_its_place():
    (line,) = LESSONS["reinforce"].where["1"]
    assert in_batch(LESSONS["reinforce"].notes[line].values["G_t"]) == [
        [0.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3]
    V = torch.tensor(value("ppo", "gae", "V"))
    torch.testing.assert_close(V, example.VALUES)
    A = torch.tensor(value("ppo", "gae", "A"))
    delta = torch.tensor(value("ppo", "gae", "delta"))
    torch.testing.assert_close(A[2, 0], delta[2] @ torch.tensor([1.0, 0.95, 0.95 ** 2]))


def test_rows_that_are_left_out_have_an_empty_box():
    loss = value("reinforce", "policy_loss", "-> policy_loss")
    assert loss[:2] == [None, None] and loss[3] is None
    assert loss[2] == pytest.approx([1.0, 0.8, 0.2])
    strip = page.strip("x", Value(torch.tensor([[1.5, 2.0, 2.5]]), [2]))
    assert strip.count("<div></div>") == 3
    assert "<i>1.500</i><i>2.000</i><i>2.500</i>" in strip


@pytest.mark.parametrize("numbers, text", [
    ([1.0, 0.0], ["1", "0"]), ([0.25, -0.5], ["0.250", "−0.500"]), ([0.9997, 0.5], ["0.9997",
     "0.5000"]), ([1e-9, -1e-9], ["0.000", "0.000"]), ([True, False], ["yes", "no"]),
    ([float("nan"), float("-inf"), 1.5], ["nan", "-inf", "1.500"])])
def test_numbers_have_as_many_digits_as_tell_them_apart(numbers, text):
    assert [page.number_text(x, numbers) for x in numbers] == text


@pytest.mark.parametrize("tensor, rows", [
    (torch.tensor([[1.0, 2.0, 3.0, 4.0]]), [[1.0], [2.0], [3.0], [4.0]]),
    (torch.tensor([5.0, 6.0]), [[5.0], [6.0], None, None]),
    (torch.tensor([[0.25]]), None), (torch.tensor([0, 1, 3]), None), (torch.ones(4, 4), None),
    (torch.arange(1.0, 11.0), [[1, 2, 3], [4, 5, 0], [6, 7, 8], [9, 10, 0]])])
def test_a_value_stands_in_boxes_only_if_its_rows_are_answers(tensor, rows):
    assert in_batch(Value(tensor, None)) == rows


def test_values_of_a_function_fit_each_other():
    """kl of ppo.py is called with other arguments, too: k3 has to be that of the x above it."""
    x = torch.tensor(value("ppo", "kl", "x"))
    torch.testing.assert_close(x, OF_POLICY - example.REF_LOGPS)
    k3 = torch.tensor(value("ppo", "kl", "k3"))
    torch.testing.assert_close(k3, torch.expm1(-x) + x, atol=1e-6, rtol=0)
    k1 = torch.tensor(value("ppo", "kl", "-> kl", "called by compute_advantages"))
    torch.testing.assert_close(k1, example.OLD_LOGPS - example.REF_LOGPS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_kl_of_the_equation_is_the_same_in_all_scripts(name):
    origin = "with --beta 0.04" if name in ("grpo", "gspo") else ""
    x = OF_POLICY - example.REF_LOGPS
    found = torch.tensor(value(name, "kl", "k3", origin))
    torch.testing.assert_close(found, torch.expm1(-x) + x, atol=1e-6, rtol=0)


def test_only_where_the_clip_acts_are_its_tokens_marked():
    text = PAGES["ppo.html"]
    strips = re.findall(r"<b>([^<]*?) <small>.*?</div></div>", text)
    marked = {label for label in strips if re.search(
        rf"<b>{re.escape(label)} <small>[^<]*</small></b>(?:(?!</div></div>).)*class=hit", text)}
    assert {"ratio", "clipped_ratio", "token_loss", "clipped"} <= marked
    assert not marked & {"V", "delta", "returns", "near", "error", "∂LV/∂V", "rewards", "values"}


# ---- two scripts, and the course -------------------------------------------------------------

@pytest.mark.parametrize("part", [part for part in course.COURSE if len(part.names) == 2],
                         ids=lambda part: part.title)
def test_the_page_of_two_scripts_has_every_line_that_differs(part):
    one, two = (LESSONS[name] for name in part.names)
    text = PAGES[part.address]
    shown = [plain(code).strip() for code in re.findall(r"<code>(.*?)</code>", text)]
    changed = sync.difference(one.source, two.source)
    assert f"{len(changed)} lines of code differ" in text
    for line in changed:
        text = line[2:]
        is_comment = text.startswith("#")                   # which belongs to no function
        is_moved = text in one.lines and text in two.lines
        assert is_comment or is_moved or text.strip() in shown, line


def test_equal_lines_with_other_numbers_stand_beside_each_other():
    pairs = PAGES["grpo-gspo.html"].split('<div class="pair ')
    (pair,) = [text for text in pairs if "clipped_ratio = " in text]
    assert pair.startswith("same")
    assert "<i>1.280</i>" in pair and "<i>1.0004</i>" in pair


def test_the_course_has_every_page_and_three_questions_on_each():
    assert [part.title for part in course.COURSE] == [
        "reinforce", "grpo", "reinforce | grpo", "grpo | gspo", "gspo", "ppo", "ppo | grpo", "dpo"]
    assert course.links().keys() == {"course", *(part.title for part in course.COURSE)}
    assert sorted(course.scripts()) == sorted(SCRIPTS)
    for part in course.COURSE:
        assert len(part.questions) == 3
        assert any(course.REFERENCE.search(answer) for _, answer in part.questions)
    assert "{" not in plain(PAGES["index.html"].partition("</style>")[2])


def test_each_page_ends_with_its_questions():
    for part in course.COURSE:
        asked = PAGES[part.address].partition("<h2>Questions</h2>")[2]
        assert asked.count("<summary>") == 3


def test_an_answer_has_the_number_of_the_page_and_leads_there():
    text = course.fill("{policy_loss.ratio 1,1}, {grpo:policy_loss.weight 3,2 | --loss_type cispo}",
                       LESSONS, ("gspo",))
    assert plain(text) == "1.181, 0.741"
    (line,) = LESSONS["gspo"].where["2"]
    assert f'href="gspo.html#L{line}"' in text
    with pytest.raises(ValueError, match="course.txt: gspo.py has no value policy_loss.ration"):
        course.fill("{policy_loss.ration 1,1}", LESSONS, ("gspo",))
