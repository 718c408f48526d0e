# make run, make test: all there is to know. PYTHON=python3.12 chooses the interpreter;
# VENV=none uses its packages as they are (torch, tiktoken, pytest ... already installed) and makes no .venv.
PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 0 1 2 3 4
TASK ?= arithmetic

ifeq ($(VENV),none)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/installed
endif

.PHONY: run test lint mutants sync diff seeds compare bench clean

run: $(READY)            ## the main job: warm start, GRPO on arithmetic, a run folder under runs/
	$(PY) grpo.py --task arithmetic

test: $(READY)           ## every test
	$(PY) -m pytest

lint: $(READY)
	$(PY) -m ruff check .

mutants: $(READY)        ## 250 mistakes, one at a time in a copy: do the tests see each?
	$(PY) tests/mutants.py

sync:                    ## make sync FROM=grpo.py: its shared functions into the other scripts
	$(PYTHON) tools/sync.py $(FROM)

diff:                    ## make diff A=grpo B=gspo: the lesson, in removed and added lines
	$(PYTHON) tools/sync.py --diff $(A) $(B)

seeds: $(READY)          ## the table of seeds in README.md, each seed from nothing: its own base, its own problems
	$(PY) tools/seeds.py $(SEEDS)

compare: $(READY)        ## all five scripts from one base, three seeds each: table in README.md, docs/compare.png
	$(PY) -m tools.compare --task $(TASK)

bench: $(READY)          ## speed, beside others where they are installed: tables in README.md, docs/bench-DEVICE.json
	$(PY) -m kernels.bench

clean:                   ## all that the targets above made, but the docs
	rm -rf .venv runs .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@
