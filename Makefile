# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3
CUDA_SOURCES = $(shell find kernels tests bench -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')
.PHONY: test test-gpu lint format docs gpu-check sanitize soak bench package plots clean-cache

test:  # on NumPy arrays; needs no GPU
	$(PYTHON) -m pytest -n auto $(ARGS)
test-gpu:  # the same tests on CuPy arrays
	$(PYTHON) -m pytest --backend gpu $(ARGS)
lint:
	ruff check . && ruff format --check . && pyright
	clang-format --dry-run --Werror $(CUDA_SOURCES)
format:
	ruff check --fix . && ruff format .
	clang-format -i $(CUDA_SOURCES)
docs:  # the site, in build/docs; needs the extra `docs`. Warnings, as of broken links, are errors
	$(PYTHON) -m sphinx -b html -E -q -W --keep-going docs build/docs
gpu-check:  # all of it in one run, recorded in bench/results/gpu-check.json
	$(PYTHON) -m bench.gpu_check $(ARGS)
sanitize:
	$(PYTHON) -m bench.gpu_check --only sanitize $(ARGS)
soak:  # random calls on a GPU for 90 seconds, then some calls a thousand times
	$(PYTHON) tests/soak.py --backend gpu --repeats 1000 $(ARGS)
bench:  # ARGS="d128 --dtype float16"; see docs/benchmarks.md
	$(PYTHON) -m bench $(ARGS)
package:  # wheel and sdist in dist/, tried outside the checkout; needs the extras release and lint
	.ci/package $(PYTHON)
plots:  # README's tables and docs/images, from bench/results; needs the extra bench
	$(PYTHON) -m bench.plots $(ARGS)
clean-cache:
	$(PYTHON) -m cuflash --clear
