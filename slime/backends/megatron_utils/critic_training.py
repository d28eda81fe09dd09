"""What the critic does with a rollout: values, returns, optimiser steps on the value loss."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from slime.observability.timer import timer
from slime.utils.types import RolloutBatch

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from torch import Tensor

    from slime.backends.megatron_utils.data import DataIterator


class CriticTraining:
    """The critic's model. Its arguments are those of its role (`parse_megatron_role_args`)."""

    def __init__(
        self,
        args: Namespace,
        model: list[DDP],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
    ) -> None:
        self.args = args
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler

    def train(
        self, rollout_id: int, rollout_data: RolloutBatch
    ) -> tuple[list[dict[str, float]], dict[str, list[Tensor]]]:
        """Train on the returns of this rollout.

        Returns:
            (the metrics of each step, {"values": this rank's values from before the steps, on the host}; the second
            is empty before the last pipeline stage)
        """
        from slime.backends.megatron_utils.data import get_data_iterator, tensors_to_cpu
        from slime.backends.megatron_utils.model import train

        data_iterator = get_data_iterator(rollout_data)
        self.add_values_and_returns(data_iterator, rollout_data)
        result = {"values": tensors_to_cpu(rollout_data["values"])} if "values" in rollout_data else {}
        with timer("value_train"):
            history = train(
                self.args, rollout_id, self._model, self._optimizer, self._scheduler, data_iterator,
                rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], role="critic",
            )  # fmt: skip
        return history, result

    def add_values_and_returns(self, data_iterator: list[DataIterator], rollout_data: RolloutBatch) -> None:
        """Set values, advantages and returns on the last pipeline stage; all ranks take part."""
        from slime.backends.megatron_utils.loss import compute_advantages_and_returns, get_values
        from slime.backends.megatron_utils.model import forward_only

        with timer("values"):
            rollout_data |= forward_only(
                get_values, self.args, self._model, data_iterator, rollout_data["num_microbatches"]
            )
        if "values" in rollout_data:
            compute_advantages_and_returns(self.args, rollout_data)
