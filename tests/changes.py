"""Choose the planted mistakes that a change could hide from the tests, for mutants.py --changed.

A module consists of pieces: functions, methods, fields, and statements outside of them. A mistake
is chosen if the change touches the mistake, a piece that contains it, a piece that this piece
mentions, the test that killed it last time, or anything that this test mentions. Docstrings and
comments do not count. tests/all-killed.txt names the last commit at which all mistakes were killed,
and the test that killed each of them.

Pieces are found by name, and outside tests/ only direct callers count, so the choice can miss a
mistake. Some of the others, drawn with the commit's hash, are therefore planted as well.
"""
import ast
import os
import random
import subprocess
from pathlib import Path
from typing import NamedTuple

from mistakes import parse

KILLED = "tests/all-killed.txt"
ANYWHERE = {"requirements.txt", "pyproject.toml"}       # versions of packages: touch everything
SAMPLE = 60                                             # number of others


class Piece(NamedTuple):
    """A part of a module."""
    code: str           # its syntax tree, without docstrings and comments
    uses: set           # the names that it mentions, those of files included
    first: int          # its lines
    last: int


def mentions(node):
    """Collect the names in a piece of code: variables, fixtures, .attributes and /files. -> set"""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, (ast.Attribute, ast.keyword)):
            found.add(f".{getattr(part, 'attr', None) or part.arg}")
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found |= {f"/{part.value}", f"/{part.value.rpartition('/')[2]}"}
        else:
            found |= {getattr(part, field, None) for field in ("id", "arg")}
    return found


def bound(node):
    """List the names that a statement binds; [""] if it has none, but an effect, like a hook."""
    if hasattr(node, "name"):
        decorators = [ast.dump(part) for part in node.decorator_list]
        acts = node.name.startswith("pytest_") or "autouse" in " ".join(decorators)
        return ["" if acts else node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [part.id for target in targets if target for part in ast.walk(target)
            if isinstance(part, ast.Name)] or [""]


def pieces(source):
    """Split a module into its pieces. -> {name: Piece}; a method's name is Class.method"""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            del node.body[0]
    found = {}

    def add(name, node, code):
        first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
        before = found.get(name, Piece("", set(), first, 0))        # a name can be bound twice
        found[name] = Piece(before.code + code, before.uses | mentions(node), before.first,
                            node.end_lineno)

    def split(body, owner):
        for node in body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    add(name, node, f"{getattr(node, 'module', '')}.{alias.name};")
                continue
            if isinstance(node, ast.ClassDef):
                split(node.body, f"{node.name}.")
                node.body = []
            for name in bound(node):
                add(name and owner + name, node, ast.dump(node))

    split(tree.body, "")
    return found


def imported(source):
    """List the modules that a file imports, or names in a string. -> set"""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def is_test(path):
    return path.startswith("tests/")


class Change:
    """The pieces that differ between two versions of the Python files, {path: text}, and those that
    mention them or changed files of another kind."""

    def __init__(self, before, after, data=()):
        self.pieces = {path: pieces(text) for path, text in after.items()}
        self.imports = {path: imported(text) for path, text in after.items()}
        self.plugins = self.imports.get("tests/conftest.py", set()) | {"conftest"}      # fixtures
        data = {(path, f"/{Path(path).name if Path(path).suffix else path}") for path in data}
        self.touched = set(data)                        # (path, name of a piece)
        for path in before.keys() | after.keys():
            if before.get(path) != after.get(path):
                old, new = pieces(before.get(path, "")), self.pieces.get(path, {})
                names = {name for name in old.keys() | new.keys()
                         if name not in old or name not in new or old[name].code != new[name].code}
                self.touched |= {(path, name) for name in (new if "" in names else names)}
        in_tests = {pair for pair in self.touched if is_test(pair[0])}
        self.callers = self.mentioning(self.touched - in_tests, False)
        self.tests = in_tests | self.mentioning(data, True)
        while more := self.mentioning(self.tests, True) - self.tests:
            self.tests |= more

    def mentioning(self, touched, in_tests):
        """Find the pieces that mention touched ones. -> set of (path, name)"""
        found = set()
        for path, name in touched:
            owner, _, last = name.rpartition(".") if path.endswith(".py") else ("", "", name)
            is_hidden = last.startswith("__") or last == "forward"      # calls name the class
            words = {owner} if is_hidden else {f".{last}"} if owner else {last, f".{last}"}
            module = path.removesuffix(".py").removesuffix("/__init__").removeprefix("tests/")
            sees = {other for other in self.pieces if path not in self.pieces or path == other
                    or module.replace("/", ".") in self.imports[other] | self.plugins}
            for other in sees:
                if is_test(other) == in_tests:
                    found |= {(other, user) for user, piece in self.pieces[other].items()
                              if words & piece.uses}
        return found


def git(*words):
    """Run git. -> what it prints; None if it fails"""
    done = subprocess.run(["git", *words], text=True, capture_output=True)
    return done.stdout if done.returncode == 0 else None


def read_killed():
    """Read tests/all-killed.txt. -> the commit, {mistake: the test that killed it}"""
    commit, *rows = (Path(KILLED).read_text().splitlines() if Path(KILLED).exists() else [""])
    return commit, dict(row.split(" | ", 1) for row in rows)


def write_killed(killed):
    """Store the tests that killed all mistakes, {mistake: test}, unless files are not committed."""
    if git("status", "--porcelain", "--", ".", f":!{KILLED}") != "":
        return print(f"{KILLED} is not written, because some changes are not committed")
    rows = [f"{mistake} | {test}" for mistake, test in killed.items()]
    Path(KILLED).write_text("\n".join([git("rev-parse", "HEAD").strip(), *rows, ""]))


def choose(mutants, mistakes):
    """Choose the mistakes that the change since a commit could hide, and print why. The commit is
    that of BASE or of tests/all-killed.txt. mistakes: the file that contains them. -> list"""
    commit, killed = read_killed()
    name = os.environ.get("BASE") or commit
    base = (name and git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") or "").strip()
    if not base:
        print(f"all {len(mutants)} mistakes are planted, because "
              + (f"the history lacks the commit {name}" if name else f"there is no {KILLED}"))
        return mutants
    listed = set(git("ls-files", "--cached", "--others", "--exclude-standard").splitlines())
    listed = {path for path in listed if Path(path).is_file()}
    changed = set(git("diff", "--name-only", "--no-renames", base, "--").splitlines())
    changed |= listed - set(git("ls-tree", "-r", "--name-only", base).splitlines())
    if changed & ANYWHERE:
        print(f"all {len(mutants)} mistakes are planted, because {min(changed & ANYWHERE)} changed")
        return mutants
    after = {path: Path(path).read_text() for path in listed if path.endswith(".py")}
    before = {path: git("show", f"{base}:{path}") for path in changed if path.endswith(".py")}
    before = {path: text for path, text in (after | before).items() if text is not None}
    change = Change(before, after, {path for path in changed if not path.endswith(".py")}
                    - {KILLED, mistakes})
    old = parse(git("show", f"{base}:{mistakes}") or "")
    chosen = {"new or changed": [], "in what changed": [], "in its callers": [],
              "whose test changed": [], "others": []}
    for mutant in mutants:
        source = after.get(mutant.file, "")
        first = source.partition("\n".join(mutant.old))[0].count("\n") + 1
        own = {(mutant.file, name) for name, piece in change.pieces.get(mutant.file, {}).items()
               if first <= piece.last and piece.first < first + len(mutant.old)}
        own = own or {(mutant.file, f"/{Path(mutant.file).name}")}
        path, _, test = killed.get(f"{mutant.file}: {mutant.name}", "").partition("::")
        test = test.partition("[")[0]
        if mutant not in old:
            reason = "new or changed"
        elif own & change.touched:
            reason = "in what changed"
        elif own & change.callers:
            reason = "in its callers"
        elif ((path, test) in change.tests if test in change.pieces.get(path, ())
              else test or {file for file, _ in change.tests} & set(mutant.files)):
            reason = "whose test changed"
        else:
            reason = "others"
        chosen[reason].append(mutant)
    seed = git("rev-parse", "HEAD").strip()
    others = chosen["others"]
    chosen["others"] = random.Random(seed).sample(others, min(SAMPLE, len(others)))
    planted = sum(chosen.values(), [])
    print(f"{len(planted)} of {len(mutants)} mistakes are planted for the change since {base[:9]}: "
          + ", ".join(f"{len(some)} {reason}" for reason, some in chosen.items())
          + f" of {len(others)}, drawn with {seed[:9]}", flush=True)
    return planted
