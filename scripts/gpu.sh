#!/usr/bin/env bash
# What a machine with a GPU is for, in this order: the gpu tests, the benchmark, the next unfinished table cells.
# Run it again and again: finished cells are skipped, the one that was stopped goes on from its checkpoint.
# usage: scripts/gpu.sh [SECONDS] [RESULTS]; data under PUBSEL_DATA
set -uo pipefail
cd "$(dirname "$0")/.."
limit=${1:-540}
results=${2:-results}
start=$SECONDS

left() { echo $((limit - SECONDS + start)); }
cell() { [ "$(left)" -gt 20 ] && timeout --signal=INT "$(left)" python -m pubsel run -m "$@" device=cuda \
    download=false "results=$results" training.checkpoint_seconds=20; }

if [ ! -e "$results/gpu_tested" ]; then
    python -m pytest -m gpu && python scripts/benchmark.py --short --device cuda --output "$results/benchmark_gpu.csv" &&
        touch "$results/gpu_tested"
fi
cell +experiment=gep_cifar10 pair.public=cifar10,tiny_imagenet,mnist_m seed=0,1,2
cell +experiment=gep_cifar10 algorithm=dp_sgd seed=0,1,2
cell +experiment=gep_fmnist pair.public=fashion_mnist,flowers5,mnist seed=0,1,2
cell +experiment=gep_fmnist algorithm=dp_sgd seed=0,1,2
python -m pubsel table gsd_table2 "results=$results"
