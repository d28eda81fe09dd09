"""Megatron is made ready for the CPU before any module here imports it: also in this process, by its scenarios."""

from slime.utils import accelerator

accelerator.current().prepare_megatron()
