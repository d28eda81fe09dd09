"""Masked importance sampling under the name that run scripts give; see `slime.backends.megatron_utils.loss.mis`."""

from __future__ import annotations

from slime.backends.megatron_utils.loss import mis_function

# context-parallel ranks gather whole responses inside, so both names are one function
compute_mis_weights_with_cp = compute_mis_weights = mis_function
