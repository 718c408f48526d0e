"""A plugin of pytest, which records for each test how long it takes and which lines of ours it
runs: pytest -p contexts, with PYTHONPATH=tests. tests/mutants.py chooses tests by what it recorded.

Lines are counted from the first line of their function, so that a change above it does not move
them; line 0, with the defaults, counts if a test reads the signature. What a fixture runs that
several tests share, and what the import of a file of tests runs, counts for each of these tests,
and what a helper of the tests keeps in a cache is computed again in each test. Lines that only
processes started by a test run are not recorded.
"""
import ast
import functools
import hashlib
import inspect
import json
import os
import time
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".contexts"
OURS = ("", "tasks", "kernels", "examples", "vectors", "report", "engines", "measuring", "learn",
        "lab")


def digest(path):
    return hashlib.sha256(Path(ROOT, path).read_bytes()).hexdigest()[:16]


def functions_of(tree):
    """Map the name of each function of a module to its node: {"GPT.forward": node}. Functions
    inside a function are a part of it."""
    found = {}

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                found[prefix + child.name] = child
            elif isinstance(child, (ast.If, ast.Try, ast.With)):
                visit(child, prefix)
    visit(tree, "")
    return found


@functools.cache
def owners(path):
    """Map each line in a function of a file to the function and the line's number in it."""
    tree = ast.parse(Path(path).read_text("utf-8"))
    return {line: (name, line - node.lineno) for name, node in functions_of(tree).items()
            for line in range(node.body[0].lineno, node.end_lineno + 1)}


def seconds():
    """The seconds that this process and those it started have computed, which do not depend on
    what else runs on the machine."""
    return sum(os.times()[:4])


class Recorder:
    def __init__(self):
        self.imports = {}               # file of tests -> seconds that its import takes
        self.coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[
                str(ROOT / folder / pattern) for folder in OURS
                for pattern in (["*.py"] if not folder else ["*.py", "*/*.py"])],
            omit=[str(ROOT / "tests/*")], messages=False)
        self.tests = {}                 # test -> seconds, contexts
        self.signatures = set()         # (context, file, function)
        self.current = ""
        inspect.signature = self.recorded(inspect.signature)

    def recorded(self, signature):
        @functools.wraps(signature)
        def of(function, *args, **options):
            inner = inspect.unwrap(function)
            if inspect.isfunction(inner):
                path = inner.__code__.co_filename
                self.signatures.add((self.current, path, inner.__qualname__))
            return signature(function, *args, **options)
        return of

    def pytest_sessionstart(self):
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_make_collect_report(self, collector):
        start = seconds()
        if isinstance(collector, pytest.Module):
            self.coverage.switch_context(f"import {collector.nodeid}")
        yield
        self.coverage.switch_context("")
        if isinstance(collector, pytest.Module):
            self.imports[collector.nodeid] = round(seconds() - start, 3)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        for module in (item.module, *map(__import__, ("small_runs", "small_vectors"))):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
        self.current = item.nodeid
        self.coverage.switch_context(self.current)
        start = seconds()
        shared = [self.context(one) for defs in item._fixtureinfo.name2fixturedefs.values()
                  for one in defs if one.scope != "function"]
        imported = f"import {item.nodeid.partition('::')[0]}"
        self.tests[item.nodeid] = [0.0, [item.nodeid, imported, *shared], False]
        yield
        self.tests[item.nodeid][0] = seconds() - start
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed and report.nodeid in self.tests:
            self.tests[report.nodeid][2] = True

    @staticmethod
    def context(fixture):
        return f"fixture {fixture.baseid} {fixture.argname}"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope != "function":
            self.coverage.switch_context(self.context(fixturedef))
        yield
        if fixturedef.scope != "function":
            self.coverage.switch_context(self.current)

    def ran(self, data, contexts):
        """Find what was run in these contexts. -> {file: {function: [number of a line in it]}}"""
        found = {}
        for path in filter(os.path.exists, data.measured_files()):      # not those of a test
            numbers = sorted({line for context in contexts for line in self.lines(data, path,
                                                                                 context)})
            functions = {name: [0] for context, file, name in self.signatures
                         if context in contexts and file == path}
            for name, number in filter(None, map(owners(path).get, numbers)):
                functions.setdefault(name, []).append(number)
            if functions:
                found[Path(path).relative_to(ROOT).as_posix()] = functions
        return found

    @functools.cache                    # noqa: B019
    def lines(self, data, path, context):
        data.set_query_context(context)
        return tuple(data.lines(path) or ())

    def pytest_sessionfinish(self):
        self.coverage.stop()
        data = self.coverage.get_data()
        FOLDER.mkdir(parents=True, exist_ok=True)
        with open(FOLDER / f"{time.time():.0f}-{os.getpid()}.jsonl", "w") as file:
            for test, (seconds, contexts, has_passed) in self.tests.items():
                path = test.partition("::")[0]
                if has_passed:
                    file.write(json.dumps({
                        "test": test, "digest": digest(path), "import": self.imports[path],
                        "seconds": round(seconds, 3), "ran": self.ran(data, contexts)}) + "\n")


def pytest_configure(config):
    # a process without a test of our code has no data
    config.addinivalue_line("filterwarnings", "ignore::coverage.exceptions.CoverageWarning")
    config.pluginmanager.register(Recorder())
