# make quickstart, make test (minutes), make test-all: everything that is needed is set up first.
# make gsd-table2, pillar-ours, gsd-figure1, ...: any table or figure; `pubsel make gsd_table2` is the same, and its help
# says more. A target that was stopped goes on where it was. ARGS are further settings, PUBLIC other public sets:
# make gsd-table2-fmnist ARGS="device=cpu" PUBLIC=fashion_mnist,mnist; ARGS=dry=true only lists the cells.
PYTHON ?= python3
ARGS ?=
PUBLIC ?=
BIN := .venv/bin

.PHONY: venv quickstart test test-all lint docs mutants bench bench-scaling bench-program gpu audit tables figures report

venv: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

quickstart: venv
	$(BIN)/pubsel run +experiment=quickstart $(ARGS)

# claimed epsilon beside what attacks on a training measure: make audit ARGS="+experiment=gep_cifar10"
audit: venv
	$(BIN)/pubsel audit $(if $(ARGS),$(ARGS),+experiment=quickstart)

# a process of tests for each core
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8

test: venv
	$(BIN)/ruff check pubsel hydra_plugins scripts tests docs
	$(BIN)/mypy
	$(PYTEST) --dist loadfile -m "not slow and not long" $(ARGS)

# everything: what test leaves out comes after it
test-all: test
	$(PYTEST) --dist worksteal -m "slow and not long" $(ARGS)

lint: venv
	$(BIN)/ruff check --fix pubsel hydra_plugins scripts tests docs
	$(BIN)/ruff format pubsel hydra_plugins scripts tests docs

# the site, in build/site: index.html opens without a server
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# faults planted in privacy and numerics, each of which a test must find: make mutants ARGS="--only selection"
mutants: venv
	$(BIN)/python scripts/mutants.py $(ARGS)

bench: venv
	$(BIN)/python scripts/benchmark.py $(ARGS)

bench-scaling: venv
	$(BIN)/python scripts/scaling.py $(ARGS)

bench-program: venv
	$(BIN)/python scripts/program.py $(ARGS)

# what a machine with a GPU is for: its tests and the benchmark, once, and then the runs of gpu.yaml in conf/work
gpu: results/benchmark_gpu.csv
	$(BIN)/pubsel make gpu $(ARGS)

results/benchmark_gpu.csv: | venv
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python scripts/benchmark.py --short --device cuda --to $@

# whatever the records allow: tables (CSV, Markdown, LaTeX), figures (SVG, PDF), and one page with both
tables figures: venv
	$(BIN)/pubsel $(@:s=) all $(ARGS)

report: venv
	$(BIN)/pubsel report $(ARGS)

# any other target: what `runs` lists in conf/tables and conf/work; GSD's Table 2 has a short name
Makefile pyproject.toml: ;

%: venv
	$(BIN)/pubsel make $(subst -,_,$(@:table2%=gsd-table2%)) $(if $(PUBLIC),public=$(PUBLIC)) $(ARGS)
