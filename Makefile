# make demo | test | test-gpu | test-oldest | lint | bench | bench-gpu | train | install | clean
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RANKS ?= 2
STAMP := $(VENV)/.installed
ifneq ($(words $(VENV)),1)
$(error VENV="$(VENV)": name a folder without spaces)
endif

.PHONY: install demo test test-gpu test-oldest lint bench bench-gpu train clean
.DEFAULT_GOAL := demo

install: $(STAMP)

# CPU torch unless a GPU is there: the default wheel of torch brings gigabytes of CUDA packages.
$(STAMP): pyproject.toml
	@command -v '$(PYTHON)' >/dev/null || { echo "there is no $(PYTHON); PYTHON=... make chooses a Python"; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "lopa_dist needs Python 3.10 or newer; PYTHON=... make chooses one"; exit 1; }
	@PYTHON='$(PYTHON)' sh scripts/install.sh $(VENV) torch==2.13.0 -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@RANKS=$(RANKS) BIN=$(BIN) sh scripts/demo.sh

test: $(STAMP)
	@sh scripts/test-packages.sh $(VENV)
	@$(BIN)/python -m pytest -n auto --maxprocesses 5 --dist loadfile --no-loadscope-reorder

test-gpu: $(STAMP)
	@$(BIN)/python -m pytest --gpu

test-oldest:
	@PYTHON='$(PYTHON)' sh scripts/test-oldest.sh

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks.embedded
	$(BIN)/python -m benchmarks.host_time
	$(BIN)/python -m benchmarks.branch_scaling

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu_first --bench --out outputs/bench-gpu

train: $(STAMP)
	$(BIN)/python -m training.train

clean:
	[ ! -e $(VENV)/pyvenv.cfg ] || rm -rf $(VENV)  # only an environment
	rm -rf .venv-oldest outputs multirun build dist
