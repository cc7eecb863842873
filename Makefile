# Every target does what it needs from nothing: virtual environment, pinned packages, data, DVC.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true
export PYTHONUNBUFFERED := 1
PORT ?= 5000

.PHONY: repro full test setup data check plan ui sync schema deps bench clean

repro: setup data check          ## train, fine-tune, calibrate, attack and compare every method of params.yaml; JOBS=1: one stage at a time
	python -m moecore.parallel $(if $(JOBS),--jobs $(JOBS))
	python -m moecore.tracking sync
	python -m moecore.report.summary
	@echo "Report: reports/index.html · runs: make ui"

full: setup data                 ## the same with pipelines/full/params.yaml, which trains longer
	cd pipelines/full && python -m moecore.study check && python -m moecore.parallel $(if $(JOBS),--jobs $(JOBS))
	python -m moecore.tracking sync

test: setup data                 ## run the tests
	python -m pytest tests

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch torchvision
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

data: setup                      ## put Fashion-MNIST into data/raw where the machine does not have it
	bash tools/fetch_fashion_mnist.sh

check: setup                     ## validate the whole of params.yaml
	python -m moecore.study check

plan: check                      ## which stages would run, and why
	python -m moecore.plan

ui: setup                        ## MLflow on 127.0.0.1:$(PORT)
	python -m moecore.tracking ui --port $(PORT)

sync: setup                      ## import finished runs into MLflow
	python -m moecore.tracking sync

schema: setup                    ## params.schema.json for editors
	for params in params.yaml pipelines/*/params.yaml; do python -m moecore.study schema $$params; done

deps: setup                      ## write the names of the stages' code files into every dvc.yaml
	python tools/dvc_deps.py

bench: setup                     ## race the MoE layer and the step against dense models, limits and peers; half an hour on an idle machine
	DS_BUILD_OPS=0 $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt 'torch==2.13.0' setuptools wheel ninja '.[bench]'
	python -m benchmarks.race
	python -m benchmarks.table

clean:                           ## delete what can be made again, but not DVC's cache
	rm -rf artifacts .state reports mlruns mlflow.db dvc_plots
