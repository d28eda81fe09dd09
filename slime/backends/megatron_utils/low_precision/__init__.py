"""Low-precision weights, as a Hugging Face checkpoint's `quantization_config` describes them."""

from slime.backends.megatron_utils.low_precision.config import scheme_from_config, scheme_of_checkpoint
from slime.backends.megatron_utils.low_precision.scheme import Scheme

__all__ = ["Scheme", "scheme_from_config", "scheme_of_checkpoint"]
