#!/usr/bin/env bash
# The GPU runs of docs/megatron.md: bash benchmarks/megatron_gpu.sh smoke|dense|matched|single|experts|memory [flags]
# On two GPUs with torch 2.11, megatron-core, megatron-bridge, transformer-engine, transformers 5.12, peft and accelerate;
# a case takes up to a minute. The sets are in benchmarks/train_throughput.py.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/core/src:$PWD/services/trainer/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
exec python3 benchmarks/train_throughput.py "$@"
