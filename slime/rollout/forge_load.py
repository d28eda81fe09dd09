"""A rollout function that replays a dump while the engines stay alive: what follows the rollout runs as in training.

    --rollout-function-path slime.rollout.forge_load.generate_rollout --load-forge-rollout-data dump/{rollout_id}.pt

Beside `--load-debug-rollout-data`, which starts no engines, this exercises weight updates and evaluation too.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.observability.rollout_data_utils import load_debug_rollout_data
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.misc import group_by


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The dumped samples in their groups. A rollout without a dump of its own replays that of rollout 0.

    An evaluation needs a path with {rollout_id} in it, and replays the evaluation's dump under the one name "replay".

    Raises:
        ValueError: --load-forge-rollout-data is not set, or can't say where the evaluation's dump is.
        FileNotFoundError: there is no dump.
    """
    template = args.load_forge_rollout_data
    if template is None:
        raise ValueError(f"{__name__}.generate_rollout replays --load-forge-rollout-data, which is not set")
    if evaluation:
        if "{rollout_id}" not in template:
            raise ValueError(f"--load-forge-rollout-data {template}: evaluations need {{rollout_id}} in it")
        samples = load_debug_rollout_data(template, rollout_id=rollout_id, evaluation=True)
        rewards = [sample.get_reward_value(args) for sample in samples]
        truncated = [sample.status is sample.Status.TRUNCATED for sample in samples]
        return RolloutFnEvalOutput({"replay": {"rewards": rewards, "truncated": truncated, "samples": samples}})
    own = Path(template.format(rollout_id=rollout_id)).is_file()
    samples = load_debug_rollout_data(template, rollout_id=rollout_id if own else 0)
    return RolloutFnTrainOutput(list(group_by(samples, lambda sample: sample.group_index).values()))
