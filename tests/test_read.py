"""The reading pages: they show the scripts as they are, with the numbers that these compute."""
import html
import importlib
import re
from html.parser import HTMLParser

import pytest
import torch
from conftest import ROOT, SCRIPTS

from tools.read import __main__ as read
from tools.read import course, example, page, watch
from tools.read.lesson import Lesson, in_batch

FOLDER = ROOT / "docs" / "read"
NUMBER = re.compile(r"−?\d+\.\d+")
every_script = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(scope="module")
def lessons():
    return {name: Lesson(name) for name in SCRIPTS}


@pytest.fixture(scope="module")
def pages(lessons):
    return course.all_pages(lessons)


def value(lesson, function, label, origin=""):
    """What a function of a script assigned on the example, in the places of the batch."""
    (found,) = (f for f in lesson.functions if f.name == function)
    for line, note in lesson.notes.items():
        if line in found.statements and note.origin == origin and label in note.values:
            return in_batch(note.values[label])
    raise AssertionError(f"no {label} in {function}")


# ---- the pages -------------------------------------------------------------------------------

def test_the_pages_in_docs_are_what_the_scripts_give_today(pages):
    assert {path.name for path in FOLDER.iterdir()} == set(pages)
    for name, text in pages.items():
        there = (FOLDER / name).read_text(encoding="utf-8")
        assert NUMBER.sub("#", there) == NUMBER.sub("#", text), f"{name}: run make read"
        old, new = [[float(x.replace("−", "-")) for x in NUMBER.findall(page)]
                    for page in (there, text)]
        assert old == pytest.approx(new, abs=1.001e-3), f"{name}: run make read"


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

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)


def test_a_page_is_well_formed_without_scripts_and_its_links_lead_somewhere(pages):
    readers = {name: Reader(text) for name, text in pages.items()}
    for name, reader in readers.items():
        assert reader.open == [] and len(reader.anchors) == len(set(reader.anchors))
        for address in reader.addresses:
            target, _, anchor = address.partition("#")
            is_paper = address.startswith("https://arxiv.org/abs/")
            is_there = target in ("", *pages) and (
                not anchor or anchor in readers[target or name].anchors)
            assert is_paper or is_there, address
        assert not reader.tags & {"script", "link", "img", "iframe", "object", "svg"}
        assert not re.search(r"url\(|@import|@font-face|javascript:|\son\w+=", pages[name])


@every_script
def test_the_code_on_the_page_is_the_lesson_of_the_script(lessons, pages, name):
    shown = re.findall(r"<a href=#L(\d+)>\d+</a><code>(.*?)</code>", pages[f"{name}.html"])
    lines = lessons[name].lines
    for number, text in shown:
        assert html.unescape(re.sub(r"<[^>]+>", "", text)) == lines[int(number) - 1]
    wanted = {number for _, first, last in lessons[name].sections
              for number in range(first, last + 1) if lines[number - 1].strip()}
    assert {int(number) for number, _ in shown} >= wanted


@pytest.mark.parametrize("old, new, said", [
    ("# eq. (5)", "", r"grpo.py: eq. \(5\) is on 0 lines, instead of on one"),
    ("eq. (4)", "eq. (4), eq. (5)", r"grpo.py: eq. \(5\) is on 2 lines, instead of on one"),
    ("eq. (4)", "eq. (4), eq. (12)", r"grpo.py, line \d+: the docstring has no equation \(12\)"),
    ("pi_ref / pi - log(pi_ref / pi) - 1", "log(pi_ref / pi -", "a formula ends too early: ")])
def test_a_script_without_a_page_is_refused_in_words(lessons, old, new, said, tmp_path,
                                                     monkeypatch):
    source = lessons["grpo"].source
    assert old in source
    (tmp_path / "grpo.py").write_text(source.replace(old, new))
    monkeypatch.setattr("tools.read.lesson.ROOT", tmp_path)
    with pytest.raises(ValueError, match=said):
        page.docstring(Lesson("grpo"))


@pytest.mark.parametrize("words", [["--output_dir", __file__], ["--ouput_dir", "x"]])
def test_what_cannot_be_done_gets_one_line(words, capsys):
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as exit:
        read.main(words)
    torch.set_num_threads(threads)
    assert exit.value.code == 2 and re.fullmatch("error: .*\n", capsys.readouterr().err)


def test_an_answer_of_the_course_has_the_number_of_the_page_and_leads_there(lessons):
    text = course.fill("{policy_loss.ratio 1,1}, {grpo:policy_loss.weight 3,2 | --loss_type cispo}",
                       lessons, ("gspo",))
    assert re.sub("<[^>]*>", "", text) == "1.181, 0.741"
    (line,) = lessons["gspo"].where["2"]
    assert f'href="gspo.html#L{line}"' in text
    with pytest.raises(ValueError, match="course.txt: gspo.py has no value policy_loss.ration"):
        course.fill("{policy_loss.ration 1,1}", lessons, ("gspo",))


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
    if x.sum() > 100:
        return x
    else:
        return x * 2
'''


def test_a_watch_sees_what_is_assigned_first_and_of_which_rows_it_is(tmp_path):
    path = tmp_path / "watched.py"
    path.write_text(WATCHED)
    scope = {}
    exec(compile(WATCHED, path, "exec"), scope)
    with watch.Watch(path, watch.functions(WATCHED), {}) as seen:
        scope["outer"](torch.tensor([1, 3]), torch.arange(8.0).view(4, 2))
    calls = {call.function.name: call for call in seen.calls}
    values = {}
    for names in calls["outer"].values.values():
        values |= {name: value.tensor for name, value in names.items() if name not in values}
    assert values["total"].tolist() == [[4.0, 6.0], [12.0, 14.0]]
    assert values["sum"].tolist() == [[5.0, 7.0], [13.0, 15.0]]         # not that of the third time
    assert values["column"].tolist() == [[0, 10], [20, 30], [40, 50], [60, 70]]
    assert calls["inner"].caller == "outer"
    ((found,),) = [names.values() for names in calls["inner"].values.values()]
    assert found.rows == [1, 3] and found.tensor.tolist() == [[4.0, 6.0], [12.0, 14.0]]


@every_script
def test_every_line_that_assigns_has_a_value_and_every_flag_lets_a_line_run(lessons, name):
    lesson = lessons[name]
    for function in lesson.functions:
        if function.name in ("kl", "aggregate", *lesson.silent):    # not all reach each branch
            continue
        for line in function.body_lines() & lesson.idle:
            statement = function.statements[line]
            if type(statement).__name__ in ("Assign", "Return"):
                last = lesson.lines[statement.end_lineno - 1].strip()
                has_value = not last.startswith(("batch = ", "no_moves = "))    # that can be shown
                assert statement.end_lineno in lesson.notes or not has_value, (
                    f"no run gets to: {last}; add its flag to VARIANTS in tools/read/example.py")
    origins = {note.origin for note in lesson.notes.values()}
    assert {f"with {flags}" for flags in example.variants(name)[1:]} <= origins


def test_the_numbers_of_grpo_are_those_computed_by_hand(lessons):
    ratio = (example.MOVED * example.MASK).exp()
    A = torch.tensor([-0.5, -0.5, 1.5, -0.5])[:, None]
    taken = torch.zeros(4, 3, dtype=torch.bool)
    taken[1, 0] = taken[2, 0] = True
    gradient = torch.where(taken, 0.0, -ratio * A)
    gradient = gradient * example.MASK / example.MASK.sum(dim=1, keepdim=True) / 4
    lesson = lessons["grpo"]
    torch.testing.assert_close(torch.tensor(value(lesson, "policy_loss", "ratio")), ratio)
    found = torch.tensor(value(lesson, "backward", "∂L/∂log π"))
    torch.testing.assert_close(found, gradient, atol=2e-4, rtol=0)
    assert (lesson.clipped == taken).all()
    cells = re.findall(r"<i( class=\w+)?>", page.strips(lesson, lesson.where["3"][0]))
    assert [cell.removeprefix(" class=") for cell in cells] == [
        "", "", "", "hit", "", "off", "hit", "", "", "", "", "off"]


def test_the_values_of_a_loop_over_tokens_stand_each_in_its_place(lessons):
    torch.testing.assert_close(torch.tensor(value(lessons["ppo"], "gae", "V")), example.VALUES)
    A = torch.tensor(value(lessons["ppo"], "gae", "A"))
    delta = torch.tensor(value(lessons["ppo"], "gae", "delta"))
    torch.testing.assert_close(A[2, 0], delta[2] @ torch.tensor([1.0, 0.95, 0.95 ** 2]))


def test_the_pairs_are_those_that_the_page_of_dpo_names():
    chosen, rejected = importlib.import_module("dpo").preferences(example.GRADED)
    said = re.sub("<[^>]*>", "", page.EXPLAINED["dpo"])
    pairs = re.findall(r"o(\d) (?:chosen )?over o(\d)", said)
    assert [(int(winner) - 1, int(loser) - 1) for winner, loser in pairs] == [
        *zip(chosen.tolist(), rejected.tolist())]
