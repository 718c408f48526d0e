"""A plugin of pytest, which records for each test how long it takes and which lines of ours it
runs: pytest -p contexts, with PYTHONPATH=tests. tests/mutants.py chooses tests by what it recorded.

Lines are counted from the first line of their function, so that a change above it does not move
them. What a fixture runs that several tests share, and what the import of a file of tests runs,
counts for each of these tests, and what a helper of the tests keeps in a cache is computed again in
each test. Lines that only processes started by a test run are not recorded.
"""
import ast
import collections
import functools
import hashlib
import json
import os
import time
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".contexts"


@functools.cache
def digest(path):
    """Hash a file; "" if it is gone."""
    path = Path(ROOT, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def units(source):
    """Split a file into functions, such as "GPT.forward", and the statements outside functions,
    named by what they set, such as "=A B". Functions inside a function are a part of it.
    -> [(name, node)]"""
    found = []

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                found.append((prefix + child.name, child))
            elif isinstance(child, ast.If | ast.Try | ast.With):
                visit(child, prefix)
            elif isinstance(child, ast.Assign | ast.AnnAssign) and child.value:
                targets = getattr(child, "targets", None) or [child.target]
                names = {one.id for target in targets for one in ast.walk(target)
                         if isinstance(one, ast.Name)}
                found.append((f"={' '.join(sorted(names))}", child))
    visit(ast.parse(source), "")
    return found


@functools.cache
def owners(path):
    """Map each line in a function of a file to the function and the line's number in it."""
    return {line: (name, line - node.lineno)
            for name, node in units(Path(path).read_text("utf-8")) if not name.startswith("=")
            for line in range(node.body[0].lineno, node.end_lineno + 1)}


def seconds():
    """The seconds that this process and those it started have computed, which do not depend on
    what else runs on the machine."""
    return sum(os.times()[:4])


def ran_in(data):
    """Find what was run in each context. -> {context: {(file, function, number of its line)}}"""
    found = collections.defaultdict(set)
    for path in filter(os.path.exists, data.measured_files()):          # not those of a test
        for line, contexts in data.contexts_by_lineno(path).items():
            if line in owners(path):
                place = (Path(path).relative_to(ROOT).as_posix(), *owners(path)[line])
                for context in contexts:
                    found[context].add(place)
    return found


class Recorder:
    def __init__(self):
        self.coverage = coverage.Coverage(
            data_file=None, config_file=False, messages=False, include=[f"{ROOT}/**"],
            omit=[f"{ROOT}/tests/*", f"{ROOT}/.*/**"])
        self.tests = {}                 # test -> seconds, contexts
        self.current = ""

    def pytest_sessionstart(self):
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_make_collect_report(self, collector):
        if isinstance(collector, pytest.Module):
            self.coverage.switch_context(f"import {collector.nodeid}")
        yield
        self.coverage.switch_context("")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        for module in (item.module, *map(__import__, ("small_runs", "small_vectors"))):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
        self.current = item.nodeid
        self.coverage.switch_context(self.current)
        start = seconds()
        fixtures = [one for defs in item._fixtureinfo.name2fixturedefs.values() for one in defs]
        shared = [f"fixture {one.baseid} {one.argname}" for one in fixtures
                  if one.scope != "function"]
        imported = f"import {item.nodeid.partition('::')[0]}"
        yield
        self.tests[item.nodeid] = seconds() - start, [item.nodeid, imported, *shared]
        self.coverage.switch_context("")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope != "function":
            self.coverage.switch_context(f"fixture {fixturedef.baseid} {fixturedef.argname}")
        yield
        if fixturedef.scope != "function":
            self.coverage.switch_context(self.current)

    def pytest_sessionfinish(self):
        self.coverage.stop()
        found = ran_in(self.coverage.get_data())
        FOLDER.mkdir(parents=True, exist_ok=True)
        with open(FOLDER / f"{time.time():.0f}-{os.getpid()}.jsonl", "w") as file:
            for test, (seconds, contexts) in self.tests.items():
                ran = {}
                for path, function, number in set().union(*(found[one] for one in contexts)):
                    ran.setdefault(path, {}).setdefault(function, []).append(number)
                file.write(json.dumps({
                    "test": test, "digest": digest(test.partition("::")[0]),
                    "seconds": round(seconds, 3), "ran": ran}) + "\n")


def pytest_configure(config):
    # a process without a test of our code has no data
    config.addinivalue_line("filterwarnings", "ignore::coverage.exceptions.CoverageWarning")
    config.pluginmanager.register(Recorder())
