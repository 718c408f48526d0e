"""The reading pages: they show the scripts as they are, with the numbers that these compute, and
what they fold a reader can do without."""
import ast
import copy
import html
import re
from html.parser import HTMLParser
from pathlib import PurePosixPath

import pytest
import torch
from conftest import ROOT

from learn.read import __main__ as read
from learn.read import example, lesson, lines, page, pair, watch, words
from learn.read.lesson import span

NUMBER = re.compile(r"−?\d*\.\d+")
every_script = pytest.mark.parametrize("name", example.QUESTIONS)       # that has a page


@pytest.fixture(scope="module")
def lessons():
    return {name: lesson.Lesson(name) for name in example.QUESTIONS}


@pytest.fixture(scope="module")
def pages(lessons):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "Lesson", lessons.get)          # which takes seconds
        return read.all_pages()


# ---- the pages -------------------------------------------------------------------------------

def test_the_pages_in_docs_are_what_the_scripts_give_today(pages):
    there = [ROOT / "docs/index.html", *(ROOT / "docs/read").iterdir()]
    assert {path.relative_to(ROOT / "docs").as_posix() for path in there} == set(pages)
    for name, text in pages.items():
        old = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert NUMBER.sub("#", old) == NUMBER.sub("#", text), f"{name}: run make read"
        for x, y in zip(NUMBER.findall(old), NUMBER.findall(text)):
            last = 10.0 ** -len(x.partition(".")[2])    # sums may differ there on other machines
            found, wanted = (float(number.replace("−", "-")) for number in (x, y))
            assert found == pytest.approx(wanted, abs=1.1 * last), f"{name}: run make read"


class Reader(HTMLParser):
    """Reads a page: what is open at its end, the anchors, and the addresses that it names."""
    VOID = ("meta", "input", "mspace", "img", "!doctype")

    def __init__(self, text):
        super().__init__()
        self.open, self.anchors, self.addresses, self.tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.open += [] if tag in self.VOID else [tag]
        self.anchors += [attributes["id"]] if "id" in attributes else []
        self.addresses += [attributes[name] for name in ("href", "src") if name in attributes]
        if attributes.get("property") == "og:image":
            self.addresses.append(attributes["content"])

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def test_pages_are_well_formed_and_each_link_leads_to_a_paper_or_to_what_is_there(pages):
    readers = {name: Reader(text) for name, text in pages.items()}
    for name, reader in readers.items():
        assert reader.open == [] and len(reader.anchors) == len(set(reader.anchors))
        for address in reader.addresses:
            path, _, anchor = re.sub(r"\?\w+", "", address).partition("#")
            if path.startswith("https://arxiv.org/abs/"):
                continue
            target = PurePosixPath(name).parent.joinpath(path) if path else PurePosixPath(name)
            target = str(target).replace("read/../", "")
            assert target in pages or (ROOT / "docs" / target).is_file(), f"{name}: {address}"
            assert not anchor or anchor in readers[target].anchors, f"{name}: {address}"
        assert not {"link", "iframe", "object"} & set(reader.tags)
        assert reader.tags.count("script") == (name != "index.html")        # that of the switch
        assert not re.search(r"url\((?!#)|@import|@font-face|javascript:|\son\w+=\"", pages[name])


def test_each_box_of_numbers_belongs_to_an_output_in_a_row(pages):
    for text in pages.values():
        assert len(re.findall('<div class="o[1-4]( whole)?">', text)) == 4 * len(
            re.findall('<div class="v( flagged)?"><b>', text))


@every_script
def test_the_code_on_the_page_is_the_lesson_of_the_script(lessons, pages, name):
    shown = re.findall(r'<a href="#L(\d+)" tabindex=-1>\d+</a><code>(.*?)</code>',
                       pages[f"read/{name}.html"])
    for number, text in shown:
        assert html.unescape(re.sub(r"<[^>]+>", "", text)) == lessons[name].lines[int(number) - 1]
    wanted = {line for of in lessons[name].functions.values() for line in span(of.node)
              if lessons[name].lines[line - 1].strip()}
    assert {int(number) for number, _ in shown} >= wanted


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_a_contrast_of_4_5_on_each_ground(theme):
    blocks = re.findall(r":root \{(.*?)\}", page.STYLE.read_text(), re.S)
    colours = {}
    for block in blocks[:1 if theme == "light" else 2]:
        colours |= dict(re.findall(r"--([\w-]+): #(\w{6})", block))

    def luminance(name):
        parts = [int(colours[name][i:i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
                            for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for ground in ("paper", "panel", "mark", "up-tint", "clip-tint"):
        for text in ("ink", "dim", "keyword", "string", "up", "clip"):
            light, dark = sorted((luminance(ground), luminance(text)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {ground}"


# ---- what is refused, in words ---------------------------------------------------------------

@pytest.mark.parametrize("old, new, said", [
    ("# eq. (5)", "", r"grpo.py: eq. \(5\) is on 0 lines, instead of on one"),
    ("eq. (4)", "eq. (4), eq. (5)", r"grpo.py: eq. \(5\) is on 2 lines, instead of on one"),
    ("eq. (4)", "eq. (4), eq. (12)", r"grpo.py, line \d+: the docstring has no equation \(12\)")])
def test_a_script_whose_equations_and_tags_differ_is_refused(lessons, old, new, said, tmp_path,
                                                             monkeypatch):
    source = lessons["grpo"].source
    assert old in source
    (tmp_path / "grpo.py").write_text(source.replace(old, new))
    monkeypatch.setattr(lesson, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=said):
        lesson.Lesson("grpo")


@pytest.mark.parametrize("old, new, said", [
    ("# aggregate |", "# agregate |", "grpo.py has no agregate"),
    ("# aggregate |", "# score |", "nothing is said about aggregate"),
    ("# advantages |", "# update |", "grpo.txt"),
    ("\n! There is:", "\nThere is:", "no question with its answer"),
    ("deepcopy | 3", "deepcopies | 3", "main has no deepcopies")])
def test_words_that_do_not_fit_their_script_are_refused(lessons, old, new, said, tmp_path,
                                                        monkeypatch):
    text = (words.HERE / "grpo.txt").read_text()
    assert old in text
    (tmp_path / "grpo.txt").write_text(text.replace(old, new))
    monkeypatch.setattr(words, "HERE", tmp_path)
    of = copy.copy(lessons["grpo"])
    with pytest.raises(ValueError, match=said):
        of.read_words()
        page.lesson_page(of, lessons, {})


def test_a_number_in_the_words_is_that_of_the_page_and_leads_there(lessons):
    text = page.prose("{policy_loss.ratio 1,1}, {grpo:policy_loss.weight 3,2 | --loss_type cispo}",
                      {"gspo": lessons["gspo"], "grpo": lessons["grpo"]})
    assert re.sub("<[^>]*>", "", text) == "1.18, 0.74"
    assert f'href="gspo.html#L{lessons["gspo"].where["2"]}"' in text
    with pytest.raises(ValueError, match="gspo.py has no value policy_loss.ration"):
        page.prose("{policy_loss.ration 1,1}", {"gspo": lessons["gspo"]})


@pytest.mark.parametrize("flags", [["--output_dir", __file__], ["--ouput_dir", "x"]])
def test_what_cannot_be_done_gets_one_line(flags, capsys):
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as exit:
        read.main(flags)
    torch.set_num_threads(threads)
    assert exit.value.code == 2 and re.fullmatch("error: .*\n", capsys.readouterr().err)


# ---- the numbers -----------------------------------------------------------------------------

WATCHED = '''
def outer(x):
    total, twice = inner(x), 2
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


def test_a_watch_sees_what_runs_and_what_is_assigned_last(tmp_path):
    path = tmp_path / "watched.py"
    path.write_text(WATCHED)
    scope = {}
    exec(compile(WATCHED, path, "exec"), scope)
    functions = [watch.Function(node) for node in ast.parse(WATCHED).body]
    with watch.Watch(path, functions, {}, None) as seen:
        scope["outer"](torch.tensor([[2.0, 3.0], [6.0, 7.0]]))
    outer, inner = seen.calls
    values = {name: value for names in outer.values.values() for name, value in names.items()}
    assert values["total"].tolist() == [[7.0, 9.0], [15.0, 17.0]]           # of the third time
    assert values["column"].tolist() == [[20, 30, 0], [60, 70, 0]]
    assert (inner.by, inner.site, inner.ran) == ("outer", 3, {15, 18})
    assert inner.values[18]["-> inner"].tolist() == [[4.0, 6.0], [12.0, 14.0]]


@every_script
def test_every_line_runs_with_some_flags_and_each_of_these_lets_some_act(lessons, name):
    of = lessons[name]
    ran = of.ran.union(of.flags)
    missing = [of.lines[statement.lineno - 1].strip() for name, function in of.functions.items()
               if name not in ("main", "kl", "aggregate", "squared_gradient_norms")
               for statement in function.statements.values()
               if statement.lineno not in ran and not lines.is_kept(statement)]
    assert missing == [], "add a flag to VARIANTS in learn/read/example.py"
    used = {flags for of_line in of.flags.values() for flags in of_line}
    assert used >= {flags for flags in example.variants(name)[1:] if "num_iterations" not in flags}


def test_the_numbers_of_grpo_are_those_computed_by_hand(lessons):
    ratio = (example.MOVED * example.MASK).exp()
    A = torch.tensor([-0.5, -0.5, 1.5, -0.5])[:, None]
    taken = torch.zeros(4, 3, dtype=torch.bool)
    taken[1, 0] = taken[2, 0] = True
    behind = (example.REF_LOGPS - example.OLD_LOGPS - example.MOVED).exp()
    gradient = torch.where(taken, 0.0, -ratio * A) + 0.04 * (1 - behind)
    gradient = gradient * example.MASK / example.MASK.sum(dim=1, keepdim=True) / 4
    numbers = {"policy_loss.ratio": ratio, "backward.∂L/∂logπ": gradient}
    for name, wanted in numbers.items():
        value, _ = lessons["grpo"].value(*name.split("."))
        torch.testing.assert_close(value * example.MASK, wanted * example.MASK,
                                   atol=2e-4, rtol=0)
    assert lessons["grpo"].clipped() == [
        of_row[:len(tokens)] for of_row, tokens in zip(taken.tolist(), example.ANSWERS)]


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo"])
def test_ringed_tokens_are_those_that_the_script_calls_clipped(lessons, name):
    call = lessons[name].calls[""]["is_clipped"]
    ((value,),) = [[of["-> is_clipped"]] for of in call.values.values() if "-> is_clipped" in of]
    wanted = lesson.in_batch(value)
    assert lessons[name].clipped() == wanted and any(map(any, wanted))


def test_the_values_of_a_loop_over_tokens_stand_each_in_its_place(lessons):
    A, delta = (lessons["ppo"].rows("gae", name) for name in ("A", "delta"))
    assert A[2][0] == pytest.approx(delta[2][0] + 0.95 * delta[2][1] + 0.95 ** 2 * delta[2][2])


@pytest.mark.parametrize("name, loss, symbol", [
    ("policy_loss", "L_t", "logπ"), ("value_loss", "LV_t", "V"), ("dpo_loss", "L", "logπ")])
def test_below_a_loss_stands_its_derivative(lessons, name, loss, symbol):
    script = lessons["dpo" if name == "dpo_loss" else "ppo"]
    assert script.rows(name, f"∂{loss}/∂{symbol}")


# ---- what is folded --------------------------------------------------------------------------

FOLDED = '''
def double(x):
    seen = [x]
    if x < 0:
        x = 1 / 0
    else:
        x = x + x
    seen.append(x)
    return x, {"seen": seen}
'''


def test_what_is_taken_away_is_what_the_result_can_do_without():
    def train(removed):
        scope = {}
        exec(lines.without(FOLDED, removed, "folded"), scope)
        return [scope["double"](torch.tensor(2.0))[0]]

    assert lines.shorten(train, {3, 4, 5, 7, 8, 9}) == {3, 5, 8, 9}


@every_script
def test_without_the_lines_that_are_folded_a_script_computes_the_same_gradient(lessons, name):
    of = lessons[name]
    folded = frozenset(line for line, statement in of.statements.items() if lines.is_kept(statement)
                       or of.kinds.get(line) and not isinstance(statement, ast.FunctionDef))
    for wanted, found in zip(of.run()[0], of.run("", folded)[0], strict=True):
        torch.testing.assert_close(found, wanted)
    assert len(folded) > 20


def test_a_page_of_two_scripts_has_what_one_of_them_changes(lessons):
    (section,) = (part for part in words.read("course") if part.names == ["grpo", "gspo"])
    text = pair.pair_page(lessons["grpo"], lessons["gspo"], section, {})
    changed = re.findall(r'<section class="part two[^"]*" id=(\w+)>', text)
    assert changed == ["log_ratio", "policy_loss", "backward"]
    new = re.findall(r'class="l[^"]* new"[^>]*>.*?<code>(.*?)</code>', text)
    assert any("log_rho.sum(dim=1" in re.sub("<[^>]*>", "", line) for line in new)


def test_the_door_names_every_page(pages):
    links = Reader(pages["index.html"]).addresses
    assert {name for name in pages if name != "index.html"} <= set(links)
    assert {"play.html", "lab.md", "learning.svg"} <= set(links)
