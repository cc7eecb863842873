# Every target does what it needs from nothing: virtual environment, pinned packages, data, DVC.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true
export PYTHONUNBUFFERED := 1
# Set in many containers: each of a run's processes would compile all that it imports, for 7 s
unexport PYTHONDONTWRITEBYTECODE
PORT ?= 5000

.PHONY: repro release dist full test quick-test soak lint setup data check plan ui sync schema pages bench docs notebook clean

repro: setup data check          ## train, fine-tune, calibrate, attack and compare every method of params.yaml; JOBS=1: one stage at a time
	moecore run $(if $(JOBS),--jobs $(JOBS))
	moecore sync

release: repro                   ## the archives of `moecore pull` in dist/: the run of params.yaml, and that of `moecore quick`
	moecore quick
	python -m tools.release
	python -m tools.release .runs/ours.quick

dist: setup                      ## what a release uploads of the last commit: the sdist, and the wheel built from it, in dist/
	python -m tools.distribution

full: setup data                 ## the same with pipelines/ours/trained_longer.yaml, which trains longer
	moecore study run ours/trained_longer $(if $(JOBS),--jobs $(JOBS))
	moecore sync

# Four files at a time, as many wait for processes. The durations of all tests go to a file alone.
PYTEST = mkdir -p .state && python -m pytest tests pipelines conformance --numprocesses $(or $(JOBS),4) --dist loadfile --no-loadscope-reorder --durations=0
DURATIONS = tee .state/tests.txt | sed -u '/ slowest durations /,/ durations < /d'

# models are small: more threads would wait for each other
test quick-test: export OMP_NUM_THREADS := 1

test: setup data lint             ## check format, lint, types, studies and claims, then run all tests; JOBS=1: one file at a time; .state/tests.txt: how long each took
	moecore claims check > /dev/null & moecore study check --all && wait $$!
	set -o pipefail; $(PYTEST) | $(DURATIONS)

quick-test: setup                 ## the parts, one pipeline, one kill, one look at what reruns
	set -o pipefail; $(PYTEST) -m "not slow" | $(DURATIONS)

soak: setup data                 ## a hundred and more kills at random moments, thirty edits of code, hundreds of params.yaml, a hundred drawn studies; SEED=1 draws others
	MOECORE_SOAK=100 MOECORE_SOAK_SEED=$(or $(SEED),0) OMP_NUM_THREADS=1 python -m pytest -s tests/pipeline/test_soak.py tests/pipeline/test_what_reruns.py tests/study/test_writing.py -k "killed or code_that_it_runs or nothing_else or traceback"
	OMP_NUM_THREADS=1 python -m tools.fuzz_studies --first $(or $(SEED),0)000 --accepted 100 --out .state/fuzzed

lint: setup                      ## format, lint, imports, types
	ruff format --check moecore stages conformance/suite conformance/tests pipelines tests benchmarks tools
	ruff check moecore stages conformance/suite conformance/tests pipelines tests benchmarks tools
	lint-imports --no-logo --no-cache
	pyrefly check
	pyrefly check tests tools pipelines --only missing-module-attribute  # names that moved; a conftest is not imported until its tests run

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt torch torchvision
	$(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(VENV)/bin/moecore schema
	$(VENV)/bin/python -c 'import dvc.commands.repro, moecore.pipeline.parallel, moecore.stages.fork_server'  # compiled once
	touch $@

data: setup                      ## put Fashion-MNIST and the Noto fonts into data/raw where the machine does not have them
	bash tools/fetch_fashion_mnist.sh
	bash tools/fetch_fonts.sh

check: setup                     ## validate the whole of params.yaml
	moecore check

plan: check                      ## which stages would run, and why
	moecore plan

ui: setup                        ## MLflow on 127.0.0.1:$(PORT)
	moecore ui --port $(PORT)

sync: setup                      ## import finished runs into MLflow
	moecore sync

schema: setup                    ## params.schema.json for editors
	moecore schema

pages: setup                     ## docs/claims.md, docs/answers.md and the READMEs of pipelines/ from pipelines/results/
	python -m tools.study_pages

bench: setup                     ## race the MoE layer and the step against dense models, limits and peers; three quarters of an hour on an idle machine
	DS_BUILD_OPS=0 $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt 'torch==2.13.0' setuptools wheel ninja --editable '.[bench]'
	python -m benchmarks.race
	python -m benchmarks.table

docs: setup                      ## the docs as a site: site/index.html, which opens without a server
	$(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict

notebook: setup                  ## docs/first_steps.ipynb in Jupyter Lab on 127.0.0.1, after `moecore quick`
	$(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[notebook]'
	jupyter lab --ip 127.0.0.1 docs/first_steps.ipynb

clean:                           ## delete what can be made again and git does not track, but not DVC's cache
	rm -rf {.,.runs/*}/{artifacts,.state,dvc_plots} {.,.runs/*}/reports/{index.html,explorer.html,claims.md,curves,metrics,plots} mlruns mlflow.db site dist
