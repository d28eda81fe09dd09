"""Megatron-core on a CPU: an import hook for its source, and layers and an optimizer that replace CUDA-only ones."""
