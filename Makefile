# One place for each thing that is fetched: the Python environment in .venv, everything else in .streamrl.
# A stamp file says that a step is done; a step runs again only when what it was made from has changed.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# The linters need one processor, and the fetching mostly waits: they go side by side.
MAKEFLAGS     += --jobs=4

PYTHON    ?= python3
VENV      := .venv
BIN       := $(VENV)/bin
TORCH     := 2.13.0
DEEPSPEED := deepspeed==0.19.8
UV        := $(BIN)/uv

# A folder of wheels is used if you have one (a torch wheel for CPUs in it saves 5 GB), and never needed.
# pip separates such places by spaces, uv by commas; uv refuses a folder that is not there.
empty      :=
space      := $(empty) $(empty)
comma      := ,
wheel_dirs := $(foreach place,$(PIP_FIND_LINKS),$(if $(findstring ://,$(place)),$(place),$(wildcard $(place))))
ifneq ($(strip $(wheel_dirs)),)
export UV_FIND_LINKS ?= $(subst $(space),$(comma),$(strip $(wheel_dirs)))
endif
cpu_torch := $(foreach place,$(wheel_dirs),$(wildcard $(place)/torch-$(TORCH)+cpu-*.whl))
# Bytecode once for all: importing vLLM takes three times as long without, and PYTHONDONTWRITEBYTECODE may be set.
bytecode  := --compile-bytecode
# The build of torch for CPUs imports none of the CUDA libraries that the plain one needs.
unneeded  := $(if $(cpu_torch),^(nvidia-|cuda-),^$$)

.PHONY: help setup kafka s3 promtool chromium demo test test-all coverage lint docs clean requirements

help:  ## print the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1|\2/' \
		| while IFS='|' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

setup: $(VENV)/.installed  ## make .venv with everything in it

$(VENV)/.packages: requirements/cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(UV) || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	grep -vE '$(unneeded)' requirements/cpu.txt > $(VENV)/requirements.txt
	$(UV) pip install --python $(BIN)/python $(bytecode) --no-deps -r $(VENV)/requirements.txt
	DS_BUILD_OPS=0 $(UV) pip install --python $(BIN)/python $(bytecode) --no-deps --no-build-isolation $(DEEPSPEED)
	touch $@

$(VENV)/.installed: $(VENV)/.packages pyproject.toml
	$(UV) pip install --python $(BIN)/python --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -qq streamrl flows consumers producers schemas infra
	touch $@

kafka: .streamrl/.kafka  ## fetch Apache Kafka's jars into .streamrl/kafka/lib (Java 17, Maven)

.streamrl/.kafka: infra/stack/kafka_jars/pom.xml | setup
	$(BIN)/python -m infra.stack kafka
	touch $@

s3: .streamrl/.s3  ## build the S3 server versitygw into .streamrl/bin (Go); for tests and `streamrl up --s3`

.streamrl/.s3: infra/stack/s3_binary.py | setup
	$(BIN)/python -m infra.stack s3
	touch $@

promtool: .streamrl/bin/promtool  ## fetch promtool and prometheus from Debian; tests of alert rules need them

# The package is unpacked, not installed: no root is needed, and no service is started. Without apt tests skip.
.streamrl/bin/promtool:
	mkdir -p $(@D) && if test "$$(id -u)" = 0; then apt-get update -qq || true; fi
	folder=$$(mktemp -d) && trap 'rm -rf '"$$folder" EXIT \
		&& if (cd $$folder && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb .); \
		then cp $$folder/usr/bin/prometheus $(@D) && cp $$folder/usr/bin/promtool $@; \
		else echo "no promtool: the tests that need it are skipped"; fi

# After promtool: two apt-get at once would exclude each other.
chromium: | .streamrl/bin/promtool  ## install Debian's chromium (as root); tests open the page of a run in it, and skip without it
	@command -v chromium > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null \
		&& apt-get update -qq && apt-get install -yqq --no-install-recommends chromium fonts-dejavu-core; } \
		|| echo "no chromium: the tests that need it are skipped"

demo: setup kafka  ## a whole small run on this machine
	$(BIN)/streamrl demo

beside := --numprocesses 3 --dist loadscope --no-loadscope-reorder tests --ignore tests/unit

test: setup kafka s3 promtool chromium lint  ## the tests, against real services, behind the linters
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile tests/unit
	$(BIN)/python -m pytest $(beside) -m "not thorough"

test-all: test  ## also those that take minutes each, and repeat at length what others show
	$(BIN)/python -m pytest $(beside) -m thorough

coverage: setup  ## lines that no test runs which needs no service
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --cov --cov-report=term-missing:skip-covered \
		tests/unit tests/long tests/kernels

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup  ## the documentation as a site in build/site, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

requirements:  ## compile requirements/cpu.txt again (after a change to cpu.in)
	$(UV) pip compile requirements/cpu.in --override requirements/overrides.txt -c requirements/constraints.txt \
		-o requirements/cpu.txt --python-version 3.11 --quiet --no-annotate \
		--custom-compile-command 'make requirements'

clean:  ## stop the local stack, then remove .venv and .streamrl
	if test -d .streamrl/run && test -x $(BIN)/python; then $(BIN)/python -m infra.stack down; fi
	rm -rf $(VENV) .streamrl build dist .pytest_cache .mypy_cache .ruff_cache
