"""Llama 2, 3 and models of the same shape, such as SmolLM2."""

from __future__ import annotations

from slime.backends.megatron_utils.families.blocks import ATTENTION, DENSE_MLP, EMBEDDINGS, PRE_MLP_NORM
from slime.backends.megatron_utils.families.table import Family

LLAMA = Family(("llama",), EMBEDDINGS + ATTENTION + PRE_MLP_NORM + DENSE_MLP)
