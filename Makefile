SHELL := /bin/bash
PYTHON ?= python3.11
export PYTHON
# Imported modules are compiled once, not in each of a thousand processes.
export PYTHONDONTWRITEBYTECODE :=
BIN := .venv/bin
PACKAGES := batchllm_operator kernels/batchllm_kernels scripts
# Tests pass doubles and wrong values on purpose, so arg-type and union-attr are off.
MYPY_OF_TESTS := --explicit-package-bases --implicit-reexport --allow-untyped-calls --no-warn-unused-ignores \
  --disable-error-code arg-type --disable-error-code union-attr
COMPAT_TESTS := $(addprefix tests/engine/test_,arguments.py chat_template.py vllm_arguments.py vllm_logs.py) tests/vllm_plugin \
  tests/simulate/test_vllm_scheduling.py tests/e2e/test_greedy_outputs.py tests/e2e/test_vllm_settings.py \
  tests/e2e/test_attention_outputs.py tests/e2e/test_classify.py tests/e2e/test_samples.py tests/e2e/test_adapters.py \
  tests/e2e/test_chat.py tests/engine/test_vllm_formats.py tests/e2e/test_structured.py \
  tests/e2e/test_embed.py
# Of what plugs into vLLM, those that need none of its compiled code: they also run on the newest vLLM's Python sources.
SOURCES_TESTS := tests/vllm_plugin tests/simulate/test_vllm_scheduling.py
# Tests that call Airflow itself: its scheduler, triggerer and API server run DAGs, also in pods, with the oldest release
# and the newest.
STANDALONE_TESTS := tests/dags/test_standalone.py
AIRFLOW_TESTS := tests/dags/test_dags.py \
  $(addprefix tests/operators/test_,arrival.py credentials.py metrics.py operators.py partitions.py tries.py) \
  $(addprefix tests/web/test_,access.py jobs.py lake_access.py plugin.py roots.py)
# Tests that call Airflow's Kubernetes provider, with the oldest Airflow and the newest. All locks have the same version of
# the provider (tests/tooling/test_environment.py).
POD_TESTS := $(addprefix tests/operators/kubernetes/test_,generate.py kills.py credentials_of_pods.py) \
  tests/operators/jobs/test_pod.py
# Of planner, lake and spec, with the Python of Debian 13.
NEWER_TESTS := $(addprefix tests/,answers cost lake plan prefixes prompts storage stored_plan test_cli.py test_spec.py)
LONG_TESTS := $(addprefix tests/,e2e dags tooling kernels)
FULL_TESTS := $(addsuffix /full,$(LONG_TESTS)) $(sort $(shell find tests -type d -name full))
# A process gets whole files, because fixtures are slow. Files keep their order: those with few, long tests come early
# (LONG_TESTS, browser). Sorted by number of tests they would come last, while other processes idle.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# Three processes on two cores, because tests wait a quarter of the time; a fourth makes it slower. Each has engines of
# its own, and more threads than cores would only wait for each other.
PYTEST = OMP_NUM_THREADS=1 $(1)/pytest $(PARALLEL) --durations=10 --durations-min=0
# Airflow parses DAGs again and again, and each of its processes loads plugins: no heavy import may
# run at module level.
DAG_CODE := batchllm_operator/operators dags plugins \
  $(addprefix batchllm_operator/web/,__init__.py links.py plugin.py)
DAG_BAN := lint.flake8-tidy-imports.banned-module-level-imports = \
  ["numba", "numpy", "obstore", "pandas", "pyarrow", "s3fs", "tokenizers", "torch", "transformers", "vllm"]

.DEFAULT_GOAL := help
.PHONY: help setup setup-light demo airflow docs site dist images test test-all test-rest mutants test-times test-python test-compat test-airflow lint helm helm-readme screenshots format bench lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with the CPU builds of torch and vLLM, Airflow and this package
	@scripts/setup.sh

setup-light: ## Make .venv-light for planner, lake and spec, without an engine and Airflow, in less than a minute
	$(PYTHON) -m venv .venv-light
	sed 's/ --hash=.*//' requirements/cpu-py311-linux-x86_64.lock >.venv-light/constraints.txt
	.venv-light/bin/pip install -q uv
	.venv-light/bin/uv pip install -q -p .venv-light -c .venv-light/constraints.txt -e '.[plan,s3,clouds,delta,iceberg]' \
	  hypothesis 'moto[server]' mypy 'pyiceberg[sql-sqlite]' pytest pytest-xdist ruff

demo: setup ## Run two jobs for one date on a small lake table: snippets, and a ranking (MODEL=, DS=)
	@bash scripts/demo.sh

airflow: setup ## Run Airflow with the example DAGs here until Ctrl-C (PORT=8080)
	@bash scripts/airflow.sh

docs: ## Serve the documentation here until Ctrl-C, and make it again at each change (PORT=8000)
	@scripts/setup.sh docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve --dev-addr 127.0.0.1:$(or $(PORT),8000)

site: ## Make the documentation as a site in build/site, without a warning; it needs no network
	@scripts/setup.sh docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

dist: ## Build sdist and wheel in build/dist, and test the wheel in an environment that has nothing else
	@scripts/dist.sh

images: ## Build the container images, and run a small job in each (IMAGES=, REGISTRY=, BUILDER=, BUILD_ARGS=)
	@scripts/images.sh

test-python: ## Make dist on Debian 13, whose Python is 3.13, with tests of planner, lake and spec; as root, with debootstrap
	@scripts/debian13.sh env PYTHON=python3.13 scripts/dist.sh $(NEWER_TESTS)

test: setup ## Run the tests for every change: each promise once, on real parts
	$(call PYTEST,$(BIN))

build/other-programs: requirements/other-programs.lock
	rm -rf $@
	$(BIN)/python -m pip install -q --no-deps --require-hashes --target $@ -r $<

test-all: setup build/other-programs ## Run all tests
	$(call PYTEST,$(BIN)) --hypothesis-profile=full -o norecursedirs='.*' $(LONG_TESTS) \
	  $(filter-out $(LONG_TESTS),$(patsubst %/,%,$(wildcard tests/[!_]*/)) $(wildcard tests/test_*.py))

test-rest: setup build/other-programs ## Run what test leaves out: tests/**/full, and all examples of property tests
	$(call PYTEST,$(BIN)) --hypothesis-profile=full -k 'full or hypothesis' $(FULL_TESTS) \
	  $(shell grep -rl '^from hypothesis' tests --include='test_*.py' | grep -v /full/)

mutants: setup ## Plant 15 faults, others each day, and run the tests that must notice them
	$(BIN)/python scripts/mutants.py --sample 15

test-times: setup ## Run make test and name the files over their budgets (tests/budgets.toml)
	$(call PYTEST,$(BIN)) -o junit_family=xunit1 --junit-xml=build/test-times.xml
	$(BIN)/python scripts/test_times.py build/test-times.xml

test-compat: setup ## Run what touches vLLM with the oldest version that is tested, in .venv-compat, and with the newest one's sources
	@scripts/setup.sh compat
	$(call PYTEST,.venv-compat/bin) $(COMPAT_TESTS)
	@scripts/newest_vllm.sh
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(CURDIR)/build/newest-vllm $(call PYTEST,$(BIN)) $(SOURCES_TESTS)

test-airflow: ## Run what touches Airflow with the oldest that is tested, 3.2, in .venv-airflow32
	@scripts/setup.sh airflow32
	$(call PYTEST,.venv-airflow32/bin) $(STANDALONE_TESTS) $(POD_TESTS) $(AIRFLOW_TESTS)

lint: setup ## Check style, types and who imports whom
	$(BIN)/ruff check
	$(BIN)/ruff check --select TID253 --config '$(DAG_BAN)' $(DAG_CODE)
	$(BIN)/ruff format --check
	$(BIN)/mypy $(PACKAGES)
	MYPYPATH=kernels:tests:scripts $(BIN)/mypy $(MYPY_OF_TESTS) tests benchmarks
	$(BIN)/lint-imports

helm: setup ## Lint, render and validate the Helm chart; lint the Dockerfiles
	PYTHONPATH=scripts $(BIN)/python -m helm_chart check
	$(BIN)/hadolint --failure-threshold info docker/*.Dockerfile

helm-readme: setup ## Write the table of values in the chart's README
	PYTHONPATH=scripts $(BIN)/python -m helm_chart readme

screenshots: setup ## Take README's pictures of a running `make airflow` (URL=, LOGIN=, PASSWORD=)
	$(BIN)/python scripts/screenshots.py $(URL) $(LOGIN) $(PASSWORD)

format: setup ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup ## Run the main benchmarks that need no GPU; each ends with one JSON line
	$(BIN)/python -m benchmarks.planner
	$(BIN)/python -m benchmarks.shards
	$(BIN)/python -m benchmarks.workers
	$(BIN)/python -m benchmarks.plan_stage
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.faults
	$(BIN)/python -m benchmarks.lake
	$(BIN)/python -m benchmarks.kernel

lock: ## Pin the newest versions that pyproject.toml allows (KEEP=1: only what must change)
	[[ -x $(BIN)/python ]] || $(PYTHON) -m venv .venv
	for name in cpu compat airflow32 docs; do \
	  $(BIN)/python scripts/environment.py lock $$name $(if $(KEEP),--keep) || exit; \
	done
	$(BIN)/python scripts/environment.py image

clean: ## Remove caches, demo output and build products, but no environment
	rm -rf .demo .airflow .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +
