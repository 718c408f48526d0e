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

.PHONY: run test lint mutants sync diff seeds compare tasks r1 zero rlhf passk report screenshot bench clean

run: $(READY)            ## the main job: warm start, GRPO on arithmetic, a run folder under runs/
	$(PY) grpo.py --task arithmetic

test: $(READY)           ## every test
	$(PY) -m pytest

lint: $(READY)
	$(PY) -m ruff check .

mutants: $(READY)        ## 340 mistakes, one at a time in a copy: do the tests see each?
	$(PY) tests/mutants.py

sync:                    ## make sync FROM=grpo.py: its shared functions into the other scripts
	$(PYTHON) tools/sync.py $(FROM)

diff:                    ## make diff A=grpo B=gspo: the lesson, in removed and added lines
	$(PYTHON) tools/sync.py --diff $(A) $(B)

seeds: $(READY)          ## the table of seeds in README.md, each seed from nothing: its own base, its own problems
	$(PY) tools/seeds.py $(SEEDS)

compare: $(READY)        ## all five scripts from one base, three seeds each: table in README.md, docs/compare.png
	$(PY) -m tools.compare --task $(TASK)

tasks: $(READY)          ## countdown, gridworld and lookup, three seeds each: tables in README.md
	$(PY) -m tools.tasks

r1: $(READY)             ## the four stages of R1 on three tasks: table in README.md
	$(PY) -m tools.r1

zero: $(READY)           ## R1-Zero, format and accuracy: table in README.md, docs/zero.png
	$(PY) -m tools.zero

rlhf: $(READY)           ## PPO against a reward model: table in README.md, docs/rlhf.png
	$(PY) -m tools.rlhf

passk: $(READY)          ## pass@k and maj@k before and after, k to 64: table in README.md, docs/passk.png
	$(PY) -m tools.passk

report: $(READY)         ## make report RUN="runs/a runs/b": report.html of runs, side by side
	$(PY) -m tools.report $(RUN)

screenshot:              ## make screenshot RUN=runs/a: docs/report.png, by Chromium, which has to be installed
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1400,2096 \
	  --screenshot=docs/report.png "file://$(abspath $(RUN))/report.html"

bench: $(READY)          ## speed, beside others where they are installed: tables in README.md, docs/bench-DEVICE.json
	$(PY) -m kernels.bench

clean:                   ## all that the targets above made, but the docs
	rm -rf .venv runs .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@
