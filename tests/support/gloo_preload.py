"""What the fork server of `gloo_world` loads once, so that a new rank starts in milliseconds."""

import sys
import warnings
from pathlib import Path

# The fork server starts without the test session's path.
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "integration")]
warnings.filterwarnings("ignore")

from slime.utils import accelerator  # noqa: E402

accelerator.set_current("cpu")
accelerator.current().prepare_megatron()

import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402, F401

import slime.backends.megatron_utils.loss  # noqa: E402
import slime.backends.megatron_utils.model  # noqa: E402
import slime.backends.megatron_utils.optimizer  # noqa: E402
import slime.utils.arguments  # noqa: E402, F401
