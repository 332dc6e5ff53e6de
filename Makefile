# One command for each habit.  Every target sets up what it needs by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRAIN := .venv-train
STAMP := $(VENV)/.stamp
ANSIBLE := .venv-ansible
ANSIBLE_STAMP := $(ANSIBLE)/.stamp
TRAIN_STAMP := $(TRAIN)/.stamp
TOOLS := $(CURDIR)/.tools
PROGRAMS_STAMP := .tools/.stamp
HOSTS_STAMP := .tools/.hosts
INTEGRATIONS := .venv-integrations
INTEGRATIONS_STAMP := $(INTEGRATIONS)/.stamp
API := .venv-api
API_STAMP := $(API)/.stamp
BOOK := .venv-docs
BOOK_STAMP := $(BOOK)/.stamp
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
export PATH := $(TOOLS):$(PATH)
unexport PYTHONPATH

.PHONY: all setup bytecode demo test pythons breaks chaos lint format bench faults soak science acceptance nightly docs clean

all: lint test

# All that `make test` needs.
setup: bytecode $(TRAIN_STAMP) $(INTEGRATIONS_STAMP) $(ANSIBLE_STAMP) $(PROGRAMS_STAMP)

# An interpreter that may not write bytecode would otherwise compile every agent and command anew at each start.
bytecode: $(STAMP)
	$(BIN)/python -m compileall -q swarmsched agent client

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $@

$(TRAIN_STAMP): $(STAMP) tests/train-requirements.txt
	$(PYTHON) -m venv $(TRAIN)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(TRAIN)/bin/python -r tests/train-requirements.txt
	touch $@

$(INTEGRATIONS_STAMP): $(STAMP) tests/integrations-requirements.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(INTEGRATIONS)/bin/python -r tests/integrations-requirements.txt
	touch $@

$(ANSIBLE_STAMP): $(STAMP)
	$(PYTHON) -m venv $(ANSIBLE)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(ANSIBLE)/bin/python 'ansible-core~=2.19.0' 'ansible-lint>=26,<27'
	touch $@

$(PROGRAMS_STAMP): tests/testbed/programs.sh
	tests/testbed/programs.sh $(TOOLS)
	touch $@

$(HOSTS_STAMP): $(PROGRAMS_STAMP)
	tests/testbed/programs.sh $(TOOLS) hosts
	touch $@

$(API_STAMP): $(STAMP)
	$(PYTHON) -m venv $(API)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(API)/bin/python 'schemathesis>=4.32,<5'
	touch $@

$(BOOK_STAMP): $(STAMP)
	$(PYTHON) -m venv $(BOOK)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BOOK)/bin/python 'mkdocs==1.6.1'
	touch $@

# The manual, as pages under site/; a link that leads nowhere, or a page that no group names, is an error.
docs: $(BOOK_STAMP)
	$(BOOK)/bin/mkdocs build --strict

demo: bytecode $(TRAIN_STAMP)
	$(BIN)/python docs/examples/demo.py --venv $(CURDIR)/$(TRAIN)

test: setup
	$(BIN)/pytest -n 3 --dist loadgroup -m 'not acceptance and not chaos and not breaks' $(PYTEST_ARGS)

# The same code on the other versions of Python that it is declared for, as far as they are found.  PYTHONS=one: on one.
pythons: bytecode
	tests/testbed/pythons.sh .pythons $(PYTHONS)

# Each rule of the protocol, broken on purpose, is missed by a checker.
breaks: bytecode
	$(BIN)/pytest -n 2 --dist worksteal -m breaks tests/swarmsched/simulator $(PYTEST_ARGS)

# Agents on hosts of their own are killed, cut off and filled up; root only.
chaos: bytecode $(TRAIN_STAMP) $(PROGRAMS_STAMP)
	$(BIN)/pytest -n 2 --dist loadgroup -m 'chaos and not acceptance' tests/chaos $(PYTEST_ARGS)

# What takes minutes: thirty agents, kills under load and training, the demo from a fresh clone, hosts that boot, drawn
# stories of workers that come and go, half a million hostile inputs to codec and sealing, hostile requests, and the
# longest of the papers' experiments.
acceptance: bytecode $(TRAIN_STAMP) $(ANSIBLE_STAMP) $(API_STAMP) $(HOSTS_STAMP)
	$(BIN)/pytest -m acceptance tests $(PYTEST_ARGS)

# All that is too long for each change: every interpreter, and two thousand swarms under faults.
nightly: acceptance pythons
	$(BIN)/swarm simulate faults --seeds 2000

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Two hundred swarms under seeded faults, in virtual time; FAULT_SEEDS=60 as many.
faults: bytecode
	$(BIN)/swarm simulate faults --seeds $(or $(FAULT_SEEDS),200)

# Twenty thousand seeds of this commit; goes on where it was stopped.  SOAK_SEEDS=0:20000 SOAK_SHARD=1/4
soak: bytecode
	$(BIN)/python -m tests.soak

# Every table and picture of docs/research/results.md from the recorded workloads; goes on where it was stopped.
# QUICK=1: one workload of each, in minutes.  SCIENCE_JOBS=4 SCIENCE_RESULTS=.science SCIENCE_TRACES=FOLDER
# FOLDER has workloads/, profiles/ and reference/, as docs/research/results.md says; ../shared/traces where none is named.
# Where that is missing too, or with SCIENCE_TRACES=generated, the same rows of workloads that are drawn.
science: bytecode
	$(BIN)/python -m tests.science

bench: bytecode
	$(BIN)/python -m tests.benchmarks

clean:
	rm -rf $(VENV) $(TRAIN) $(INTEGRATIONS) $(ANSIBLE) $(API) $(BOOK) site .pythons .tools dist .mypy_cache .ruff_cache .pytest_cache
