"""The megatron backend: model, parallel layout, optimizer, state and loop on Megatron-Core and Megatron-Bridge."""
