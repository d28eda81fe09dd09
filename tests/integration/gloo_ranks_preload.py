"""What the fork server of `gloo_ranks` loads once for all ranks."""

import warnings

from slime.utils import accelerator

warnings.filterwarnings("ignore")
accelerator.set_current("cpu")
accelerator.current().prepare_megatron()

import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402, F401
