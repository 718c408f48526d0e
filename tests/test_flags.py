"""What may be said on the command line, and how; and what --help says of it."""
import dataclasses
import re

import pytest
from conftest import ROOT, every_script
from small_runs import COMMON_FIELDS, all_fields, other_value, own_fields
from test_base import SHAPES_A_BASE
from test_flags_matter import CHANGES, FILES
from test_run import ACTS

import common

# What these flags do is not for every run, or changes nothing of what a run learns and logs; they
# have tests of their own.
ELSEWHERE = {"device", "num_threads", "output_dir", "save_steps", "micro_batch_size", "init_from",
             "cold_start", "resume_from_checkpoint", "kernel", "numbers", "slip"}


def yes_or_no_flags(script):
    return [name for name, field in all_fields(script).items() if field.type is bool]


# ---- spelling --------------------------------------------------------------------------------

@pytest.fixture
def parse(script, monkeypatch):
    """parse(*words): the Config, whether or not its values can work."""
    monkeypatch.setattr(common, "check_flags", lambda *_: None)

    def run(*words):
        return common.parse_flags(script.Config, words)
    return run


@every_script
def test_a_flag_is_spelled_with_hyphens_or_underscores(script, parse):
    default = dataclasses.asdict(parse())
    for name, field in all_fields(script).items():
        if name == "resume_from_checkpoint":
            continue
        word = other_value(field)
        value = word == "True" if field.type is bool else field.type(word)
        for spelling in (name, name.replace("_", "-")):
            for words in ([f"--{spelling}", word], [f"--{spelling}={word}"]):
                assert dataclasses.asdict(parse(*words)) == default | {name: value}


def test_resume_is_spelled_with_hyphens_too(script, capsys):
    for flag in ("--resume-from-checkpoint", "--resume_from_checkpoint"):
        with pytest.raises(SystemExit):
            script.main([flag, "nowhere"])
        assert "--resume_from_checkpoint nowhere" in capsys.readouterr().err


def test_what_is_no_flag_keeps_its_hyphens(parse):
    cfg = parse("--output-dir", "my-run", "--init-from=a-b/--c-d")
    assert (cfg.output_dir, cfg.init_from) == ("my-run", "a-b/--c-d")


@every_script
def test_a_yes_or_no_flag_stands_alone_or_with_true_or_false(script, parse):
    names = yes_or_no_flags(script)
    expected = {"curriculum", "mask_tool_tokens"}
    expected |= {"dpo": {"online", "average_logps", "save_pairs"}, "ppo": {"length_adaptive"},
                 "reinforce": set()}.get(script.__name__, {"mask_truncated_completions"})
    assert set(names) == expected
    for name in names:
        assert getattr(parse(f"--{name}"), name) is True
        assert getattr(parse(f"--{name}", "--seed", "3"), name) is True
        for word in ("true", "True", "TRUE"):
            assert getattr(parse(f"--{name}", word), name) is True
            assert getattr(parse(f"--{name}={word}"), name) is True
        for word in ("false", "False"):
            assert getattr(parse(f"--{name}", word), name) is False
            assert getattr(parse(f"--{name}={word}"), name) is False


def test_a_config_cannot_be_changed_after_it_was_checked(script):
    with pytest.raises(dataclasses.FrozenInstanceError):
        script.Config().seed = 1


# ---- --help ----------------------------------------------------------------------------------

@pytest.fixture
def help_text(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code in (0, None)
    return capsys.readouterr().out


@pytest.fixture
def help_groups(script, help_text):
    """The text of --help below the docstring: heading -> {flag: what is said of it}."""
    _, _, flags = help_text.partition(script.__doc__.strip().splitlines()[-1])
    groups = {}
    entries = None
    for line in flags.splitlines():
        flag = re.match(r"  (?:-\w, )?--(\w+)", line)
        if re.fullmatch(r"\S.*:", line):
            entries = groups.setdefault(line[:-1], {})
        elif flag:
            name = flag[1]
            entries[name] = line
        elif line.strip():
            entries[name] += " " + line.strip()
    del groups["options"]                           # --help itself
    return groups


@every_script
def test_help_opens_with_the_equations(script, help_text):
    assert script.__doc__.strip() in help_text


@every_script
def test_help_gives_every_flag_in_its_group_with_its_meaning_and_default(script, help_groups):
    fields = all_fields(script)
    by_group = {}
    for name, field in fields.items():
        by_group.setdefault(field.metadata["group"], set()).add(name)
    assert {title: set(entries) for title, entries in help_groups.items()} == by_group
    for entries in help_groups.values():
        for name, entry in entries.items():
            default = fields[name].default
            assert "[None]" not in entry
            assert f"[{default}]" in entry or (default is None and ", else " in entry)
            meaning = re.sub(rf"--[\w-]+|\[[^]]*\]|{name}", "", entry)
            assert re.search("[a-z]{2}", meaning), entry


@every_script
def test_help_lists_the_choices_of_a_flag_that_has_some(script, help_groups):
    entries = {name: entry for group in help_groups.values() for name, entry in group.items()}
    for name, field in all_fields(script).items():
        for choice in field.metadata["choices"]:
            assert re.search(rf"\b{choice}\b", entries[name]), (name, choice)
        if field.type is bool:
            assert f"--{name} [true|false]" in entries[name]


@every_script
def test_the_algorithms_own_flags_come_first_in_help(script, help_groups):
    assert list(help_groups)[0] == "algorithm"
    assert set(help_groups["algorithm"]) == own_fields(script).keys() - COMMON_FIELDS.keys()


# ---- every flag is there for something -------------------------------------------------------

@every_script
def test_every_flag_has_a_test_that_shows_what_it_does(script):
    shown = ACTS.keys() | SHAPES_A_BASE.keys() | CHANGES[script.__name__].keys() | ELSEWHERE
    shown |= FILES.get(script.__name__, set())
    assert shown == all_fields(script).keys()


@every_script
def test_every_flag_is_read_somewhere(script):
    files = [ROOT / f"{script.__name__}.py", ROOT / "common.py", *(ROOT / "tasks").glob("*.py")]
    code = "".join(path.read_text() for path in files)
    dead = [name for name in all_fields(script) if not re.search(rf"\bcfg\.{name}\b", code)]
    assert not dead


def test_every_flag_of_a_task_is_one_that_the_task_understands():
    tasks = []
    for name, field in COMMON_FIELDS.items():
        task, colon, _ = field.metadata["help"].partition(":")      # as it says
        if field.metadata["group"] == "task" and colon and name != "reward":
            assert name in common.find_task(task, task).options
            tasks.append(task)
    assert set(tasks) == {"arithmetic", "countdown", "gridworld"}
