# make quickstart, make test (minutes), make test-all: everything that is needed is set up first.
# Tables: a target that was stopped goes on where it was. ARGS are further settings, PUBLIC other public sets:
# make table2-fmnist ARGS="device=cpu" PUBLIC=fashion_mnist,mnist
PYTHON ?= python3
ARGS ?=
PUBLIC ?=
BIN := .venv/bin
RUN := $(BIN)/pubsel run
TABLE := $(BIN)/pubsel table

.PHONY: venv quickstart test test-all lint docs mutants bench bench-scaling bench-program tables figures report audit table2 table2-cifar10 table2-svhn table2-fmnist \
	gep-table1 gep-table1-mnist gep-table1-svhn gep-table1-cifar10 gep-table3 gep-table5 gep-table6 \
	pillar-table2 pillar-table3 pillar-table4 pillar-table6 pillar-table7 pillar-table8 pillar-table9 \
	pillar-figure4 pillar-figure7 pillar-ours adamix-table1 adamix-figures adamix-figure1-right adamix-ours \
	gsd-table1 gsd-table3 gsd-table10 gsd-table11a gsd-table11b gsd-table12 gsd-table13a gsd-table13b gsd-table14 gsd-table16 \
	gsd-table8 gsd-table9 medical-ours \
	gsd-figure1 gsd-figure3 gsd-lemma41 gep-figure2 gep-figure4 gep-figure5 gep-figure7 during-ours clustermap

venv: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

quickstart: venv
	$(RUN) +experiment=quickstart $(ARGS)

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

gep-table3: venv
	$(RUN) +experiment=gep_table3 $(ARGS)
	$(RUN) +experiment=gep_table3 algorithm=b_gep_k200 $(ARGS)
	$(RUN) +experiment=gep_table3 algorithm=dp_sgd_clip1 $(ARGS)
	$(TABLE) gep_table3

# PILLAR: K are the dimensions that are tried (Appendix B); what is best is chosen by the table.
K ?= 20,40,100,200,500

pillar-table2: venv
	for of in pillar_table2 pillar_table2_byol; do \
		$(RUN) -m +experiment=$$of algorithm.k=$(K) $(ARGS) && \
		$(RUN) -m +experiment=$$of algorithm=jl algorithm.k=$(K) $(ARGS) && \
		$(RUN) -m +experiment=$$of algorithm=dp_pca algorithm.k=$(K) algorithm.share=0.01,0.25,0.5 $(ARGS) && \
		$(RUN) -m +experiment=$$of algorithm=gep_k200 algorithm.k=40,120,200,280,512 $(ARGS) && \
		$(RUN) -m +experiment=$$of algorithm=dp_sgd_clip1 $(ARGS) && \
		$(RUN) -m +experiment=$$of algorithm=adadps algorithm.damping=0.001,0.1,1 $(ARGS) || exit 1; done
	$(TABLE) pillar_table2

pillar-table3 pillar-table4 pillar-table6: pillar-%: venv
	$(RUN) +experiment=pillar_$* $(ARGS)
	$(TABLE) pillar_$*

pillar-table7 pillar-table8: pillar-%: venv
	$(RUN) -m +experiment=pillar_$* algorithm.k=$(K) $(ARGS)
	$(RUN) -m +experiment=pillar_$* algorithm=dp_sgd_clip1 $(ARGS)
	$(TABLE) pillar_$*

pillar-table9: venv
	$(RUN) -m +experiment=pillar_table9 algorithm.k=40,100,200,300,400 $(ARGS)
	$(RUN) -m +experiment=pillar_table9 algorithm=dp_raft $(ARGS)
	$(TABLE) pillar_table9

pillar-figure4: venv
	$(RUN) +experiment=pillar_figure4 $(ARGS)
	$(BIN)/python scripts/figures.py pillar_k

# the four sets at hand, on MobileNetV2 features: a tenth of the training images public
pillar-ours: venv
	for set in cifar10:5000 flowers5:350 ham10000:796 kagchest:456; do \
		cell="-m +experiment=pillar_ours pair.private=$${set%:*} pair.m=$${set#*:} training.learning_rate=0.01,0.1,1"; \
		$(RUN) $$cell epsilon=0.1,0.3,0.7,inf algorithm.k=5,10,20,40,80,160,320 $(ARGS) && \
		$(RUN) $$cell epsilon=0.1,0.3,0.7,inf algorithm=dp_sgd_clip1 $(ARGS) && \
		$(RUN) $$cell epsilon=0.1,0.3,0.7 algorithm=jl algorithm.k=40,160,640 $(ARGS) && \
		$(RUN) $$cell epsilon=0.1,0.3,0.7 algorithm=dp_pca algorithm.share=0.01,0.25,0.5 algorithm.k=10,40 $(ARGS) && \
		$(RUN) $$cell epsilon=0.1,0.3,0.7 algorithm=gep_k200 algorithm.k=40,200 pair.m=300 $(ARGS) && \
		$(RUN) $$cell epsilon=0.1,0.3,0.7 algorithm=adadps algorithm.damping=0.01 $(ARGS) && \
		$(RUN) $$cell epsilon=0.1,0.3,0.7 algorithm=dp_raft training=dp_raft training.epochs=10,50 $(ARGS) && \
		$(RUN) $$cell epsilon=0.1,0.3,0.7 algorithm=dp_raft_pillar training=dp_raft training.epochs=10,50 \
			algorithm.k=10,40 $(ARGS) || exit 1; done
	$(BIN)/python scripts/more_seeds.py pillar_ours 1,2 $(ARGS)
	$(TABLE) pillar_ours
	$(BIN)/python scripts/figures.py pillar_k

pillar-figure7: venv
	$(RUN) +experiment=pillar_figure7 $(ARGS)
	$(RUN) -m +experiment=pillar_figure7 algorithm=dp_sgd_clip1 $(ARGS)
	$(BIN)/python scripts/figures.py pillar_share

# GSD on medical images. ChestX-ray14: Tables 1, 10, 16 (last layer of ResNet-152), 11a, 11b, 12; HAM10000: 3, 13a, 13b.
gsd-table1 gsd-table10: gsd-%: venv
	$(RUN) +experiment=gsd_$* $(if $(PUBLIC),pair.public=$(PUBLIC)) $(ARGS)
	$(RUN) -m +experiment=gsd_$* algorithm=dp_sgd_clip3 pair.public=null distance=none seed=0,1,2 $(ARGS)
	$(TABLE) gsd_$*

gsd-table16: gsd-table1
	$(RUN) +experiment=gsd_table16 $(ARGS)
	$(TABLE) gsd_table16

gsd-table3 gsd-table11a gsd-table11b gsd-table12 gsd-table13a gsd-table13b: gsd-%: venv
	$(RUN) +experiment=gsd_$* $(if $(PUBLIC),pair.public=$(PUBLIC)) $(ARGS)
	$(RUN) -m +experiment=gsd_$* algorithm=dp_sgd_clip01 pair.public=null distance=none seed=0,1,2 $(ARGS)
	$(TABLE) gsd_$*

gsd-table14: gsd-table1 gsd-table3 gsd-table11a gsd-table11b gsd-table12 gsd-table13a gsd-table13b
	$(BIN)/pubsel rank +experiment=gsd_table14 $(ARGS)
	$(BIN)/pubsel rank +experiment=gsd_table14 private=ham10000_224 public=[ham10000_224,kagskin,cifar100,kagchest] \
		distance=gsd_300 $(ARGS)
	$(TABLE) gsd_table14

# GSD, Figure 4: which sets are near each other by Task2Vec and by GSD
CLUSTERED := [ham10000,kagchest,cifar10]

clustermap: venv
	for distance in task2vec gsd_300; do $(BIN)/python scripts/clustermap.py private=ham10000 model=mobilenetv2 \
		public=$(or $(PUBLIC),$(CLUSTERED)) distance=$$distance distance.m=300 $(ARGS) || exit 1; done

# the two sets at hand: MobileNetV2 at 64 pixels, two layers and the head (label layers), or the head alone (label head);
# CHEST=FILE.npz: X-rays of another source, as one more public set for kagchest
medical-ours: venv
	for set in ham10000:ham10000,flowers5,cifar10,kagchest kagchest:kagchest,$(CHEST:%=%,)ham10000,cifar10; do \
	for trained in "label=head model.trained=[classifier]" label=layers; do \
		cell="-m +experiment=medical_ours pair.private=$${set%%:*} $$trained seed=0,1,2 $(ARGS)"; \
		public="pair.public=$${set#*:}"; none="pair.public=null distance=none"; \
		rate="training.learning_rate=0.05 training.momentum=0.9"; \
		$(RUN) $$cell $$public && \
		$(RUN) $$cell $$none algorithm=dp_sgd_clip01 && \
		$(RUN) $$cell $$public algorithm=gep_k100 $$rate && \
		$(RUN) $$cell $$public algorithm=dp_md algorithm.clip_norm=3 $$rate && \
		$(RUN) $$cell $$none algorithm=dp_sgd_clip3 $$rate || exit 1; done; done
	$(TABLE) medical_ours

# AdaMix: rates as in Appendix A.6, chosen on the test set as there (oracle)
RATES := training.learning_rate=0.001,0.0025,0.005

adamix-table1: venv
	for sets in mit67,oxford_pets,caltech256:5 oxford_flowers,cub200,stanford_dogs:2; do \
		cell="-m +experiment=adamix_table1 pair.private=$${sets%:*} pair.shots=$${sets#*:}"; \
		$(RUN) $$cell algorithm.pretrain_rate=0.01,0.05,0.1 $(ARGS) && \
		$(RUN) $$cell algorithm=only_public algorithm.pretrain_rate=0.01,0.05,0.1 $(ARGS) && \
		$(RUN) $$cell algorithm=fully_private $(ARGS) && \
		$(RUN) $$cell algorithm=ppgd algorithm.reuse=0.1,1 algorithm.clip_factor=1,4 $(ARGS) && \
		$(RUN) $$cell algorithm=paragon epsilon=inf training.epochs=300 $(ARGS) || exit 1; done
	$(TABLE) adamix_table1

adamix-figures: venv
	$(RUN) -m +experiment=adamix_figure1 algorithm=adamix,ngd,fully_private $(ARGS)
	$(RUN) -m +experiment=adamix_figure1 algorithm=only_public,ppgd $(ARGS)
	$(RUN) -m +experiment=adamix_figure2 algorithm=adamix,fully_private,only_public $(ARGS)
	for figure in 5 7 8; do $(RUN) +experiment=adamix_figure$$figure $(ARGS) || exit 1; done
	for name in adamix adamix_shots adamix_quantile adamix_sigma; do $(BIN)/python scripts/figures.py $$name || exit 1; done

# AdaMix, Figure 1 (right): AUC of the loss attack on the runs of its other panels, and on the non-private paragon
adamix-figure1-right: adamix-figures
	$(RUN) -m +experiment=adamix_figure1 algorithm=paragon epsilon=inf training.epochs=300 $(ARGS)
	$(BIN)/pubsel attack loss 'run=mit67-*' $(ARGS)
	$(BIN)/python scripts/figures.py adamix_attack

# GSD, Tables 8 and 9: membership inference on the distance itself
gsd-table8: venv
	$(BIN)/pubsel attack gsd_white_box $(ARGS)

gsd-table9: venv
	$(BIN)/pubsel attack gsd_black_box $(ARGS)

adamix-ours: venv
	for set in cifar10:0.1 flowers5:1.0 ham10000:1.0; do \
		cell="-m +experiment=adamix_ours pair.private=$${set%:*} pair.private_share=$${set#*:} $(ARGS)"; \
		$(RUN) $$cell algorithm=only_public algorithm.pretrain_rate=0.01,0.05,0.1 && \
		$(RUN) $$cell algorithm=paragon epsilon=inf training.epochs=300 $(RATES) && \
		$(RUN) $$cell seed=0,1,2 algorithm=fully_private epsilon=1,3 $(RATES) && \
		$(RUN) $$cell seed=0,1,2 algorithm=adamix,adamix_projection algorithm.rank=1250 algorithm.pretrain_rate=0.05 \
			epsilon=1,3 $(RATES) && \
		$(RUN) $$cell seed=0,1,2 algorithm=ngd,adamix_clipping algorithm.pretrain_rate=0.05 epsilon=1,3 $(RATES) && \
		$(RUN) $$cell seed=0,1,2 algorithm=ppgd algorithm.finish_rate=0.05 algorithm.reuse=0.1,1 epsilon=1,3 $(RATES) \
			|| exit 1; done
	$(TABLE) adamix_ours
	$(BIN)/python scripts/figures.py adamix

# What the theory speaks of, measured while a network trains without noise; see scripts/during_training.py
DURING := $(BIN)/python scripts/during_training.py

gsd-figure1 gsd-figure3 gsd-lemma41: gsd-%: venv
	$(DURING) gsd_$* pair.private=cifar10 model=resnet20 algorithm=non_private training.epochs=100 \
		--public $(if $(PUBLIC),$(PUBLIC),cifar10,cifar100,svhn) $(ARGS)

gep-figure2 gep-figure4 gep-figure5 gep-figure7: gep-%: venv
	$(DURING) gep_$* pair.private=cifar10 model=resnet20 algorithm=non_private training.epochs=60 \
		--public $(if $(PUBLIC),$(PUBLIC),cifar10,imagenet) --k $(if $(filter %5,$@),1000,500,1000,2000) $(ARGS)

during-ours: venv
	for name in gsd_figure1 gsd_figure3 gsd_lemma41 gep_figure2 gep_figure4 gep_figure5 gep_figure7; do \
		$(DURING) $$name pair.private=fashion_mnist model=fmnist_cnn algorithm=non_private training.epochs=10 \
		--public fashion_mnist,flowers5,mnist $(ARGS) || exit 1; done

# Whatever the records allow: tables (CSV, Markdown, LaTeX), figures (PNG, SVG, PDF), and one page with both
tables: venv
	$(TABLE) all $(ARGS)

figures: venv
	$(BIN)/python scripts/figures.py all

report: venv
	$(BIN)/pubsel report $(ARGS)
