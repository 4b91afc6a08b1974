# make quickstart, make test: everything that is needed is set up first.
# Tables: a target that was stopped goes on where it was. ARGS are further settings, PUBLIC other public sets:
# make table2-fmnist ARGS="device=cpu" PUBLIC=fashion_mnist,mnist
PYTHON ?= python3
ARGS ?=
PUBLIC ?=
BIN := .venv/bin
RUN := $(BIN)/pubsel run
TABLE := $(BIN)/pubsel table

.PHONY: venv quickstart test lint bench bench-scaling tables table2 table2-cifar10 table2-svhn table2-fmnist \
	gep-table1 gep-table1-mnist gep-table1-svhn gep-table1-cifar10 gep-table5 gep-table6

venv: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

quickstart: venv
	$(RUN) +experiment=quickstart $(ARGS)

test: venv
	$(BIN)/ruff check pubsel scripts tests
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

lint: venv
	$(BIN)/ruff check --fix pubsel scripts tests
	$(BIN)/ruff format pubsel scripts tests

bench: venv
	$(BIN)/python scripts/benchmark.py $(ARGS)

bench-scaling: venv
	$(BIN)/python scripts/scaling.py $(ARGS)

# GSD, Table 2: GEP on each public set, and DP-SGD twice: in the paper's setting, and over a grid (label tuned)
table2: table2-cifar10 table2-svhn table2-fmnist

table2-cifar10 table2-svhn table2-fmnist: table2-%: venv
	$(RUN) +experiment=table2_$* $(if $(PUBLIC),pair.public=$(PUBLIC)) $(ARGS)
	$(RUN) -m +experiment=gep_$* algorithm=dp_sgd seed=0,1,2 $(ARGS)
	$(RUN) -m +experiment=gep_$* algorithm=dp_sgd label=tuned algorithm.clip_norm=0.1,1 \
		training.learning_rate=0.1,0.3,1 seed=0,1,2 $(ARGS)
	$(TABLE) gsd_table2

# GEP, Table 1: epochs for epsilon 2, 5, 8 as in Section 4
gep-table1: gep-table1-mnist gep-table1-svhn gep-table1-cifar10

gep-table1-mnist gep-table1-cifar10: gep-table1-%: venv
	$(RUN) +experiment=gep_table1_$* epsilon=2 training.epochs=50 $(ARGS)
	$(RUN) +experiment=gep_table1_$* epsilon=5 training.epochs=100 $(ARGS)
	$(RUN) +experiment=gep_table1_$* epsilon=8 training.epochs=200 $(ARGS)
	$(TABLE) gep_table1

gep-table1-svhn: venv
	$(RUN) +experiment=gep_table1_svhn epsilon=2 training.epochs=5 $(ARGS)
	$(RUN) +experiment=gep_table1_svhn epsilon=5 training.epochs=10 $(ARGS)
	$(RUN) +experiment=gep_table1_svhn epsilon=8 training.epochs=20 $(ARGS)
	$(TABLE) gep_table1

gep-table5: venv
	$(RUN) +experiment=gep_table5 $(ARGS)
	$(RUN) -m +experiment=gep_table5 pair.public=cifar10 algorithm.labels=given $(ARGS)
	$(TABLE) gep_table5

gep-table6: venv
	$(RUN) +experiment=gep_table6 $(ARGS)
	$(TABLE) gep_table6

tables: venv
	$(TABLE) gsd_table2
	$(TABLE) gep_table1
	$(TABLE) gep_table5
	$(TABLE) gep_table6
