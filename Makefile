# The targets that have a "## text" are what `make help` lists.
PYTHON ?= python3
# Off-screen rendering for MuJoCo, on a GPU (EGL) or without one (OSMesa).  `make install APT=` leaves them out.
APT ?= libegl1 libegl-mesa0 libgl1-mesa-dri libgl1 libosmesa6
EXTRAS ?= train,report,warp,vla
TORCH := $(shell grep '^torch==' constraints.txt)
# Paths, so that commands work without activating the environment.
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# More threads than cores slow small networks down tenfold.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Three processes for two cores, as many tests wait for others; a file in one of them; in our order, which begins with the
# slow files (tests/conftest.py).
SHARED := -n 3 --dist loadfile --no-loadscope-reorder
# Where nothing compiled is kept, every process compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo demo-gpu compare compare-samplers compare-imagination imagine fleet test pytest test-plain test-full test-sims mutants house soak faults bench peers gpu bundle docs wheel lint types clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

install: .venv/.installed ## make .venv with everything that is needed (instant the second time)

.venv/.installed: pyproject.toml constraints.txt .ci/install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vla-rl needs Python 3.11 or newer, which '$(PYTHON)' is not; run: make install PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || sh .ci/install python3-venv
	@sh .ci/install $(APT)
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt $(TORCH)
	$(PIP) install -c constraints.txt -e '.[all]'
	$(PIP) install -q --no-deps --upgrade --target .cache/harness -r tests/serving/harness.txt
	$(PIP) install -q --no-deps --upgrade --target .cache/low-memory -c constraints.txt torchao
	@touch $@

demo: install ## teach a small policy by RL from pixels on two CPU cores
	$(BIN)/vla-rl demo

demo-gpu: install ## the same on a GPU, with MuJoCo-Warp
	$(BIN)/vla-rl train gpu.py:demo

compare-samplers: install ## compare the flow samplers
	$(BIN)/vla-rl compare samplers

compare: install ## ten ways to improve the same policies, side by side (hours; can be stopped and goes on)
	$(BIN)/vla-rl compare

imagine: install ## train a world model, improve a policy in it by RL, and report both (half an hour)
	$(BIN)/vla-rl imagine

compare-imagination: install ## the same with one part more or less at a time (hours; can be stopped and goes on)
	$(BIN)/vla-rl compare imagination

fleet: install ## a server, a learner, four simulated arms and a scripted person, with a page (a quarter of an hour)
	$(BIN)/vla-rl fleet demo

test: lint ## everything that must hold before a merge (eight minutes on two cores)
	$(MAKE) --no-print-directory -j 2 types pytest

pytest: install
	$(PYTEST) $(SHARED) --durations 10

# The numerical folders again with the instructions that every 64-bit Intel and AMD processor has, whose kernels round
# differently.  Commands, simulators, files and pages do the same on all processors.
NUMERICAL := $(addprefix tests/,algorithms policies training world_models rewards evaluation)
test-plain: install ## the numerical tests as on a plainer processor (three minutes)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) $(SHARED) --durations 5 $(NUMERICAL)

test-full: lint types ## the tests that take minutes as well
	$(PYTEST) $(SHARED) --durations 10 -m ''

test-sims: install ## install the simulators that pin other packages, run all of them, and print a table
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulators

mutants: install ## break what must hold, line by line, and see the tests fail (what changed; WORDS=--all: everything)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(WORDS)

house: install ## how many files and lines there are, and how long the way through them is
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.house

soak: install ## kill and stop two thousand simulator processes while PPO trains (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak

faults: install ## kill a fleet's server, learner and robots a thousand times while records are in flight (three quarters of an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults

bench: install ## measure speed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks

peers: install ## our PPO beside that of three other libraries, to the same return (a quarter of an hour; can be stopped and goes on)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.peers

gpu: install ## what needs a GPU, into runs/gpu; PART=models, warp, learn, imagine or others takes ten minutes (small on the CPU)
	$(BIN)/python -m tests.gpu $(PART)

bundle: install ## the project and its wheels for a machine without a network, into dist/bundle (EXTRAS=train,report,warp,vla)
	sh .ci/bundle $(BIN)/python '$(TORCH)' '$(EXTRAS)'

# mkdocs-material announces its successor at every start; NO_MKDOCS_2_WARNING leaves that out.
docs: install ## build the site into site/ (open site/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: install ## build the wheel into dist/ and check it
	rm -rf build dist
	$(BIN)/python -m build --wheel
	$(BIN)/twine check --strict dist/*.whl

lint: install ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## static types
	$(BIN)/mypy

clean: ## remove caches and build outputs; keeps .venv and runs
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache MUJOCO_LOG.TXT
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
