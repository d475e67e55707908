# make demo    tune the example GPT and train on under the policy it wrote
# make test    format, lint, types, import contracts, and all tests, with branch coverage of tests/unit
# make test-long  the rest of the tests: torch.compile and FSDP2 on many models and settings, about 5 minutes
# make bench   measure what README and reports/ claim
# make gpu     the tests that need a CUDA device, then benchmarks/gpu.py into reports/gpu/
# Each makes .venv if need be; what is pinned stands in requirements.lock.

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
ifndef PYTHON
PYTHON := $(shell for each in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$each -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $$each && break; done)
endif
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile -c requirements.lock
BUDGET ?= 4m
JOBS ?= 2
# Where this is set, every process compiles every module anew: 9 s instead of 3 to import torch and the tuner.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long lint bench gpu lock clean

demo: $(VENV)/.installed
	$(BIN)/autoprec tune examples/char_gpt.py --budget $(BUDGET) --out policy.yaml
	$(BIN)/python examples/train_with_policy.py --policy policy.yaml --steps 40

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not long" --numprocesses=$(JOBS) --dist=worksteal --cov --cov-report=term

test-long: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long --numprocesses=$(JOBS) --dist=worksteal
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/properties --hypothesis-profile=thorough --numprocesses=$(JOBS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/startup.py --json reports/startup.json
	$(BIN)/python benchmarks/recording.py --json reports/recording.json
	$(BIN)/python benchmarks/inspection.py --json reports/inspection.json
	$(BIN)/python benchmarks/overhead.py --json reports/overhead.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/guard.py --json reports/guard.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rollback.py --json reports/rollback.json
	$(BIN)/python benchmarks/storage.py --json reports/storage.json
	$(BIN)/python benchmarks/static_analysis.py --json reports/static_analysis.json
	$(BIN)/python benchmarks/examples.py --json reports/examples.json
	$(BIN)/python benchmarks/planner.py --json reports/planner.json
	$(BIN)/python benchmarks/fidelity.py --json reports/fidelity.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/search_efficiency.py --json reports/search_efficiency.json
	$(BIN)/python benchmarks/cases.py --json reports/cases.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cost_model.py --json reports/cost_model.json
	$(BIN)/python benchmarks/zoo_speed.py --json reports/zoo_speed.json
	$(BIN)/python benchmarks/limit.py --json reports/limit.json
	$(BIN)/python benchmarks/planted_faults.py --json reports/planted_faults.json

gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/python benchmarks/overhead.py --device cuda --json reports/gpu/overhead.json

lock: $(VENV)/.installed-dev
	sed -n '/^#/p' requirements.lock > $(VENV)/lock
	$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/^(torch==[0-9.]+)\+.*/\1/' >> $(VENV)/lock
	mv $(VENV)/lock requirements.lock

clean:
	rm -rf $(VENV) .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(VENV)/.installed: pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "autoprec needs Python 3.11 to 3.14; none of python3, python3.11 ... is one" >&2; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "this Python makes no environments; on Debian: apt-get install python3-venv" >&2; exit 2; }
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --no-build-isolation -e ".[dev]"
	touch $@
