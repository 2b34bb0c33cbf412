# What a user types: train, test.   What a developer types: dev, test-quick, test-c, sanitize, lint, bench, fuzz, test-gpu.
PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
RANKS ?= 2
SECONDS ?= 600
# Of the collectives in make bench, all_reduce first; a second call goes on where this one stopped.
BENCH_SECONDS ?= 120
# More packages for the tests; .ci/run adds torch, against which everything that torch has is compared, and what examples use.
EXTRAS ?=
PYTEST ?= $(PY) -m pytest -q

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

train: $(VENV)/.installed-examples   ## everything, from nothing to a trained model on two processes
	$(VENV)/bin/cdistrun --nproc-per-node $(RANKS) examples/digits.py

test: test-c test-python   ## from nothing to the test suite: C and Python, but for the long fault matrix

TESTS ?= tests
test-python: $(VENV)/.installed-test   ## the Python tests; TESTS=… names some
	$(PYTEST) -m "not slow" $(TESTS)

test-all: $(VENV)/.installed-test test-c   ## the same and what is marked slow: the whole fault matrix, some minutes more
	$(PYTEST) tests

QUICK := array collectives collective_calls collectives_doc errors groups layering names objects p2p reducer sampler settings style
test-quick: $(VENV)/.installed-test    ## the tests that take under three minutes together
	$(PYTEST) -m "not slow" $(QUICK:%=tests/test_%.py)

# ---- set-up ----

tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "cdist needs Python 3.11 or newer: sudo apt-get install python3 python3-venv python3-dev"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "Python's venv module is missing: sudo apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	    { echo "Python's headers are missing: sudo apt-get install python3-dev"; exit 1; }
	@command -v $${CC:-cc} >/dev/null || { echo "a C compiler is missing: sudo apt-get install build-essential"; exit 1; }

SOURCES := $(shell find csrc python -name '*.[ch]' -o -name '*.cu' -o -name '*.py' 2>/dev/null)

$(VENV)/bin/python: | tools
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --upgrade pip

$(VENV)/.installed-%: $(SOURCES) setup.py pyproject.toml | $(VENV)/bin/python
	@echo "installing cdist and its $* requirements into $(VENV)"
	@$(PY) -m pip install -q $(EXTRAS) ".[$*]"
	@touch $@

# ---- development ----

dev:            ## build the extension in place; PY=… chooses the interpreter
	@CDIST_WERROR=1 $(PY) setup.py -q build_ext --inplace -j2

test-c:         ## the C tests, plain
	@$(MAKE) -s -j2 -C tests/c JOBS=2

sanitize:       ## the C tests under ASan+UBSan and under TSan
	@$(MAKE) -s -j2 -C tests/c JOBS=2 SAN=address,undefined
	@$(MAKE) -s -j2 -C tests/c JOBS=2 SAN=thread

JOBS ?= 1
soak:           ## random operations, groups and deaths; SECONDS=600 JOBS=1, PYTHONPATH=python after make dev
	@PYTHONPATH=python$${PYTHONPATH:+:$$PYTHONPATH} $(PY) tests/soak/soak.py --seconds $(SECONDS) --jobs $(JOBS) $(SOAK)

test-detail:    ## what CDIST_DEBUG changes: the tests of reducers, wrappers and collectives with all extra checks
	CDIST_DEBUG=DETAIL $(PYTEST) -m "not slow" $(DETAIL:%=tests/test_%.py)
DETAIL ?= collectives collective_calls objects p2p groups reducer ddp_array ddp_hooks ddp_models ddp_precision zero data_parallel

SANITIZED := build/sanitize-python
SANITIZED_TESTS ?= store p2p objects reducer collectives groups queue spawn ddp_array
# Tests of spawn die of SIGSEGV on purpose and look at the signal.
sanitize-python: ## some of the Python tests on an extension under ASan+UBSan (needs gcc)
	@CDIST_SANITIZE=address,undefined CC=gcc $(PY) setup.py -q build_ext -j2 --build-lib $(SANITIZED) --build-temp $(SANITIZED)-objects
	@tar -C python --exclude='*.so' --exclude=__pycache__ -cf - cdist | tar -C $(SANITIZED) -xf -
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" PYTHONPATH=$(SANITIZED) \
	    ASAN_OPTIONS=detect_leaks=0:handle_segv=$(if $(filter spawn,$(SANITIZED_TESTS)),0,1) UBSAN_OPTIONS=print_stacktrace=1,halt_on_error=1 \
	    $(PYTEST) -p no:cacheprovider -p no:faulthandler $(SANITIZED_TESTS:%=tests/test_%.py)

build/delays.so: tests/delays.c
	@mkdir -p $(@D)
	@$${CC:-cc} -std=c11 -O2 -Wall -Wextra -shared -fPIC $< -o $@ -ldl

# How often in a thousand system calls, and how many ms at most.
DELAYS ?= 5 40
DELAYED ?= test_launch.py test_spawn.py test_rendezvous.py test_store.py test_queue.py test_p2p.py test_hosts.py faults
test-delayed: build/delays.so ## some of the Python tests with system calls delayed at random; PYTHONPATH=python after make dev
	LD_PRELOAD=$(CURDIR)/build/delays.so DELAYS="$(DELAYS)" PYTHONPATH=python $(PYTEST) -m "not slow" $(DELAYED:%=tests/%)

lint:           ## ruff and the layering and style tests
	$(PY) -m ruff check python tests benchmarks examples setup.py
	$(PY) -m ruff format --check python tests benchmarks examples setup.py
	$(PYTEST) tests/test_layering.py tests/test_style.py

bench: $(VENV)/.installed-bench        ## the benchmarks, competitors in the same run (torch must be in EXTRAS), some minutes
	for b in store startup sampler ddp; do $(PY) benchmarks/$$b.py || exit 1; done
	$(MAKE) -s -C tests/c OUT=../../build/c ../../build/c/bench_coll_shm
	$(PY) benchmarks/collectives.py --out build/bench --ranks 2 --raw build/c/bench_coll_shm --limit-s $(BENCH_SECONDS)

test-gpu:       ## the suite for real GPUs (two of one host; with one, a part), compute-sanitizer included
	PY=$(PY) tests/gpu/run.sh test

bench-gpu:      ## cdist beside torch.distributed and raw NCCL on real GPUs
	PY=$(PY) tests/gpu/run.sh bench

clean:
	rm -rf build dist $(VENV) python/cdist/*.so python/*.egg-info

.PHONY: help train test test-python test-all test-quick tools dev test-c sanitize sanitize-python soak test-detail test-delayed lint bench test-gpu bench-gpu clean
