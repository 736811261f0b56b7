#!/usr/bin/env bash
# The GPU runs of docs/megatron.md, one part a call: bash benchmarks/megatron_gpu.sh smoke|dense|experts|matched|lora1
# On two GPUs with torch 2.11, megatron-core, megatron-bridge, transformer-engine and transformers 5.12; minutes each.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/core/src:$PWD/services/trainer/src:$PWD/benchmarks"
run() { python3 -m torch.distributed.run --standalone --nproc-per-node "$1" benchmarks/train_throughput.py "${@:2}"; }
case ${1:?smoke, dense, experts, matched or lora1} in
  smoke) # Seconds: does every path run at all? A tiny shape, packed and padded, one and two GPUs.
    run 1 --model qwen3-tiny --methods reference,ours --tokens 4096
    run 2 --model qwen3-tiny --tensor 2 --methods reference,ours --tokens 4096
    run 2 --model qwen3-tiny --pipeline 2 --methods ours --tokens 4096
    run 2 --model qwen3-tiny --lora --methods ours --tokens 4096 ;;
  dense) # Each method in processes of its own: both do not fit one after the other. Then with recomputation, for the plan.
    run 2 --model qwen3-8b --tensor 2 --methods ours --tokens 8192 16384
    run 2 --model qwen3-8b --tensor 2 --methods reference --micro_batch 4
    run 2 --model qwen3-8b --tensor 2 --methods ours --tokens 16384 --recompute ;;
  experts)
    run 2 --model qwen3-30b-a3b --expert 2 --lora --methods ours --tokens 8192
    run 2 --model qwen3-30b-a3b --expert 2 --lora --micro_batch 1 --methods reference --steps 2 --warmup 1
    run 2 --model qwen3-30b-a3b --expert 2 --lora --methods ours --tokens 8192 --permute_fusion ;;
  matched) # TP=1, DP=2, recomputation on both: what is framework and what is layout. 4B, since 8B's states do not fit twice.
    run 2 --model qwen3-4b --recompute --methods reference,ours --tokens 16384 ;;
  lora1) # 8B LoRA on one GPU, for the plan.
    run 1 --model qwen3-8b --lora --methods ours --tokens 16384 ;;
  *) echo "unknown part: $1" >&2; exit 2 ;;
esac
