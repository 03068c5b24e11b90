# Everything runs in .venv, which is made when it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXAMPLES := quickstart/plain quickstart/elastic quickstart_transformers/plain quickstart_transformers/elastic own_loop other_trainers fleet_of_three/app stream_service own_method/taking_turns
# Where the tests keep their files: in memory, if 4 GB of it are free for that.
IN_MEMORY := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4194304 {print "/dev/shm"}')
ifeq ($(IN_MEMORY),)
IN_MEMORY := $(or $(TMPDIR),/tmp)
endif
export FLWR_TELEMETRY_ENABLED := 0
export RAY_USAGE_STATS_ENABLED := 0
export NO_MKDOCS_2_WARNING := 1
# Tests start hundreds of processes: without bytecode on the disk each compiles the library again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-faults test-aarch64 lint docs format clean

demo: $(READY)
	$(BIN)/fl-elastic simulate simulations/scenarios/demo.toml --output out/demo

# As many processes as cores, each with one thread: with one more process it took longer on two, and so it did where
# each computed on all cores. A file's tests stay together, with what they share, in the order of conftest.py, and
# write tens of thousands of small files.
define PYTEST
@place=$$(mktemp -d $(IN_MEMORY)/fl.XXXXXX) && trap 'rm -rf "$$place"' EXIT && \
OMP_NUM_THREADS=1 TMPDIR=$$place $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
endef

test: $(READY)
	$(PYTEST)

# What takes too long for each time: about 25 minutes on two cores, half of them for real fleets.
SLOW := slow and not faults

test-slow: $(READY)
	$(PYTEST) -m "$(SLOW)"

# A real fleet whose parts are killed, cut off, filled up and deceived: an hour and more.
test-faults: $(READY)
	$(BIN)/python -m pytest -m faults

# Emulated 64-bit ARM: unit tests and one federated round. Needs root; an hour the first time.
test-aarch64: $(READY)
	deploy/aarch64/test.sh

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo 'mypy: a minute or two without a word'
	$(BIN)/mypy
	for example in $(EXAMPLES); do $(BIN)/mypy examples/$$example || exit 1; done
	deploy/lint.sh

# The site of docs/, in out/site. A warning, such as a broken link, is an error.
docs: $(READY)
	$(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(READY): pyproject.toml simulations/pyproject.toml
	@if [ -x $(BIN)/python ] && ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then rm -rf $(VENV); fi
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo 'setting up $(VENV): several minutes and about 7 GB, mostly torch with CUDA; only this once'
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]' --editable ./simulations
	@touch $(READY)
