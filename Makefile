# Developer commands; PY chooses the interpreter of `dev` and `check`.
PY ?= python3

dev:            ## build the extension in place (python/cdist/_core…so)
	@CDIST_WERROR=1 $(PY) setup.py -q build_ext --inplace -j2

test-c:         ## C tests, plain
	$(MAKE) -s -C tests/c

.PHONY: dev test-c
