# Every target does its own set-up from a fresh clone: a virtual environment in .venv, made with
# $(PYTHON), holding the versions of constraints.txt. The second time the set-up is skipped; it is
# done again when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
# Options of the demo; `make demo DEMO_ARGS=--help` lists them.
DEMO_ARGS ?=
# Options of `make cage2`; `make cage2 CAGE2_ARGS=--help` lists them.
CAGE2_ARGS ?=
# Options of `make cage4`.
CAGE4_ARGS ?=
# Options of the fuzzers; `make fuzz FUZZ_ARGS=--help` lists them.
FUZZ_ARGS ?=
# Processes that `make test`, `test-slow` and `docs` run at a time; 0 for one that a debugger can stop.
# One more than two cores, as tests wait for a third of their time.
JOBS ?= 3
# More pytest arguments, as in `make test PYTEST_ARGS="-k sync -x"`.
PYTEST_ARGS ?=
# More arguments of `uv pip install` in check-lowest: `--torch-backend cpu` takes torch without CUDA,
# `--override FILE` other versions than the lowest.
LOWEST_ARGS ?=
# The revision that `make against` measures this tree against, and options of benchmarks/against.py.
REV ?= HEAD
AGAINST_ARGS ?=
# Rows and options of benchmarks/margins.py, as in MARGINS_ARGS="'replay*' --quick".
MARGINS_ARGS ?=
# Options of benchmarks/gpu_envs.py, gpu_ppo.py and device.py: each takes its own of them.
GPU_ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PYTEST = $(RUN) -m pytest $(PYTEST_ARGS)
# A process of tests that dies fails its test and ends the run: xdist 3.8 may wait for ever otherwise.
ONCE := --max-worker-restart=0
FAST := not slow and not learn and not gpu and not cuda and not ray and not snippets
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Tests start many processes, each of which would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

# Large pages for what malloc gives: tests fork large processes hundreds of times, and each fork
# copies the table of their pages. Nothing happens where the system has none.
test test-slow: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.PHONY: help demo cage2 cage4 page test test-slow test-portable fuzz test-gpu bench-gpu check-cuda test-ray test-adapters \
	test-real coverage lint format format-check typecheck docs check-wheel check-lowest bench against margins constraints clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo  ## train a CAGE 2 defender, compare it with others, film it
	$(VENV)/bin/vecenv demo $(DEMO_ARGS)

cage2: $(VENV)/.installed-demo  ## train a CAGE 2 defender for the leaderboard
	$(RUN) -m vecenv train Cage2-v0 $(CAGE2_ARGS)

cage4: $(VENV)/.installed-demo  ## train a defender for CAGE 4, half an hour
	$(RUN) -m vecenv train Cage4-v0 $(CAGE4_ARGS)

page: $(VENV)/.installed-demo  ## write an episode of CAGE 2 as a page, build/page.html
	mkdir -p build
	$(VENV)/bin/vecenv watch --policy defender --steps 30 --html build/page.html

test: $(VENV)/.installed-test  ## the fast tests and the doctests
	$(PYTEST) -n $(JOBS) $(ONCE) -m "$(FAST)"

test-slow: $(VENV)/.installed-test  ## the slow tests and those that train an agent
	$(PYTEST) -n $(JOBS) $(ONCE) -m "(slow or learn) and not gpu and not cuda and not ray and not real" \
		|| test $$? -eq 5  # 5: there are none

# Many start processes, each of which imports anew: about ten minutes.
test-portable: $(VENV)/.installed-test  ## workers without what only Linux has (VECENV_PORTABLE=1)
	VECENV_PORTABLE=1 $(PYTEST) -n $(JOBS) $(ONCE) --timeout=300 -m "$(FAST)" \
		tests/test_backends.py tests/test_protocol.py tests/workers

fuzz: $(VENV)/.installed-test  ## random cases, a minute of each fuzzer
	PYTHONPATH=.:tests $(RUN) -m fuzz $(FUZZ_ARGS)

test-gpu: $(VENV)/.installed-test $(VENV)/.installed-cuda  ## the tests that need a CUDA device
	$(PYTEST) -m gpu || test $$? -eq 5

bench-gpu: $(VENV)/.installed-test $(VENV)/.installed-cuda  ## time envs and buffers on a CUDA device
	PYTHONPATH=. $(RUN) benchmarks/gpu_envs.py $(GPU_ARGS)
	PYTHONPATH=. $(RUN) benchmarks/gpu_ppo.py $(GPU_ARGS)
	PYTHONPATH=. $(RUN) benchmarks/device.py $(GPU_ARGS)

# What a device would run, without one: compiled for devices and measured, and run by the processor.
check-cuda: $(VENV)/.installed-test $(VENV)/.installed-cuda  ## kernels compiled for GPUs, without a GPU
	$(PYTEST) -m cuda

test-ray: $(VENV)/.installed-test $(VENV)/.installed-ray  ## the tests that need the `ray` package
	$(PYTEST) -m ray || test $$? -eq 5

# In an environment of its own and without constraints.txt: these libraries bring other versions.
test-adapters: $(VENV)/.python  ## the tests of the adapters, against the real libraries
	test -d .venv-adapters || $(RUN) -m venv .venv-adapters
	.venv-adapters/bin/python -m pip install --quiet "$$(grep ^torch== constraints.txt)" \
		sb3-contrib pandas -e ".[test,sb3,torchrl,tianshou,datasets,agents]"
	OMP_NUM_THREADS=1 .venv-adapters/bin/python -m pytest -m "not learn" $(PYTEST_ARGS) tests/adapters

# In an environment of its own too: what these envs need does not go with constraints.txt.
test-real: $(VENV)/.python  ## envs that others wrote, beside Gymnasium's own vector envs
	test -d .venv-real || $(RUN) -m venv .venv-real
	.venv-real/bin/python -m pip install --quiet "$$(grep ^torch== constraints.txt)" \
		-r tests/real/requirements.txt -e ".[test]"
	.venv-real/bin/python -m pytest -m real $(PYTEST_ARGS) tests/real

coverage: $(VENV)/.installed-test  ## line and branch coverage, kernels included (JIT off; slow)
	NUMBA_DISABLE_JIT=1 $(PYTEST) -m "$(FAST)" --timeout=600 --cov --cov-report=term

lint: $(VENV)/.installed-dev  ## ruff check
	$(RUN) -m ruff check .

format: $(VENV)/.installed-dev  ## rewrite the files in the project's format
	$(RUN) -m ruff check --select I --fix .
	$(RUN) -m ruff format .

format-check: $(VENV)/.installed-dev  ## fail if `make format` would change a file
	$(RUN) -m ruff format --check .

typecheck: $(VENV)/.installed-dev  ## basedpyright
	$(RUN) -m basedpyright

docs: $(VENV)/.installed-docs $(VENV)/.installed-test  ## build the site, build/site; run its snippets
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet & site=$$!; $(PYTEST) -n $(JOBS) $(ONCE) \
		-m "snippets and not slow" $$(grep -rl --include="*.py" mark.snippets tests) && wait $$site
	@echo "build/site/index.html"

# In an environment of its own, so that nothing of the clone is found by accident.
check-wheel: $(VENV)/.python  ## build wheel and sdist, install and try the wheel elsewhere
	rm -rf dist build/wheel && mkdir -p build/wheel
	$(RUN) -m pip install --quiet -c constraints.txt build
	$(RUN) -m build --outdir dist .
	$(PYTHON) -m venv build/wheel/venv || { $(PYTHON) -m venv --clear --without-pip build/wheel/venv && \
		$(PYTHON) -m pip --python build/wheel/venv/bin/python install pip; }
	build/wheel/venv/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)"
	cd build/wheel && venv/bin/python -c "import buffers" 2>&1 | grep 'not installed: pip install "vecenv\[torch\]"'
	cd build/wheel && venv/bin/vecenv evaluate --policy defender --episodes 50
	build/wheel/venv/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[demo]" pytest
	build/wheel/venv/bin/python -m pip check
	cd build/wheel && venv/bin/vecenv demo --total-steps 100000 --episodes 50
	cd build/wheel && venv/bin/vecenv train CartPole-v1 --total-steps 5000
	cd build/wheel && venv/bin/vecenv play CartPole-v1 --policy runs/CartPole-v1-ppo
	cd build/wheel && venv/bin/python -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider -W error --doctest-modules \
		-o doctest_optionflags="NORMALIZE_WHITESPACE ELLIPSIS" --ignore-glob "*/vecenv/examples/*" \
		--ignore-glob "*/vecenv/adapters/[pst]*" --pyargs vecenv buffers

# The oldest versions that pyproject.toml allows, on the oldest Python; with uv, which can resolve so.
# What these need in turn is new, and deprecates how they use it: such warnings are no errors here.
check-lowest: $(VENV)/.python  ## the fast tests with the oldest versions that are allowed
	rm -rf build/lowest && mkdir -p build/lowest
	$(RUN) -m pip install --quiet uv
	$(VENV)/bin/uv venv --quiet --python $(RUN) build/lowest/venv
	$(VENV)/bin/uv pip install --quiet --python build/lowest/venv/bin/python --resolution lowest-direct \
		$(LOWEST_ARGS) -e ".[test]"
	build/lowest/venv/bin/python -m pytest -n $(JOBS) $(ONCE) -W ignore::DeprecationWarning \
		$(PYTEST_ARGS) -m "$(FAST)"

bench: $(VENV)/.installed-test  ## time CAGE 2 beside what bounds it, and this machine
	PYTHONPATH=. $(RUN) benchmarks/cage2.py
	$(RUN) -m vecenv bench

against: $(VENV)/.installed-test  ## time this tree against revision REV (AGAINST_ARGS for more)
	$(RUN) benchmarks/against.py $(REV) $(AGAINST_ARGS)

# In an environment of its own too: the peers and envs that it compares with bring other versions.
margins: $(VENV)/.python  ## whether speed and memory keep their margins, half an hour
	test -d .venv-margins || $(RUN) -m venv .venv-margins
	.venv-margins/bin/python -m pip install --quiet "$$(grep ^torch== constraints.txt)" \
		-r benchmarks/requirements-margins.txt -e ".[train,mujoco]"
	.venv-margins/bin/python benchmarks/margins.py $(MARGINS_ARGS)

constraints: $(VENV)/.python  ## take the newest versions of everything but torch
	rm -rf $(VENV)-pins && $(RUN) -m venv $(VENV)-pins
	$(VENV)-pins/bin/python -m pip install "$$(grep ^torch== constraints.txt)" -e ".[dev,docs]"
	{ sed -n '/^#/p' constraints.txt; \
	  $(VENV)-pins/bin/python -m pip freeze --all --exclude-editable --exclude pip \
	  | grep -Ev '^(nvidia-|cuda-|triton)' | sed 's/+cpu$$//' | LC_ALL=C sort -f; } > $(VENV)-pins/new
	mv $(VENV)-pins/new constraints.txt && rm -rf $(VENV)-pins

clean:  ## remove .venv, caches and build products
	rm -rf $(VENV) $(VENV)-adapters $(VENV)-real $(VENV)-margins $(VENV)-pins build dist *.egg-info .pytest_cache .ruff_cache .coverage .coverage.*
	find vecenv buffers tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The environment, then one stamp for each extra of pyproject.toml (demo, test, dev).
# Where the venv module lacks ensurepip, the pip that is there puts itself into the environment.
$(VENV)/.python:
	@echo "== making $(VENV) with $(PYTHON) (PYTHON=... takes another)"
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
		sys.exit(f"vecenv needs Python 3.11 or newer, this is {v}: make PYTHON=/path/to/python3.11" \
		if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(RUN) install pip; }
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt $(VENV)/.python
	@echo "== installing vecenv[$*] into $(VENV), a few minutes the first time"
	$(RUN) -m pip install -c constraints.txt -e ".[$*]"
	@touch $@
.PRECIOUS: $(VENV)/.python $(VENV)/.installed-%
