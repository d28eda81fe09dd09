"""Layers that megatron-core lacks or has without packed sequences."""
