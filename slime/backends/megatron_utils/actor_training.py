"""What the actor does with a rollout: forward passes under several weights, advantages, optimiser steps."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.backends.megatron_utils.profiling import profiled
from slime.observability.timer import timer
from slime.utils.misc import load_function
from slime.utils.types import RolloutBatch

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from torch import Tensor

    from slime.backends.megatron_utils.data import DataIterator
    from slime.backends.megatron_utils.lora.weights import LoraWeights
    from slime.backends.megatron_utils.moe.routing_replay import RoutingReplay
    from slime.backends.megatron_utils.weights_backuper import WeightsBackuper

logger = logging.getLogger(__name__)


@dataclass
class SendLog:
    """When the actor's weights went to the engines: tells which copy of them sampled a rollout.

    Attributes:
        last_trained: the rollout that the actor learned from last.
        sent_after: the rollout that it had learned from when it sent its weights last.
    """

    last_trained: int
    sent_after: int

    def note_sent(self) -> None:
        self.sent_after = self.last_trained

    def sampling_tag(self, rollout_id: int, rollouts_ahead: int) -> str:
        """`rollout_actor`, what the engines got last, or `old_actor`, what they got before.

        Sampling of a rollout begins `rollouts_ahead` rollouts before the usual moment, which is right after training
        on the rollout before it; weights that were sent later can't be in it.
        """
        began_after = rollout_id - 1 - rollouts_ahead
        return "rollout_actor" if self.sent_after <= began_after else "old_actor"


class ActorTraining:
    """The actor's model with host copies of its weights and of others of the same architecture.

    With LoRA only the adapters are copied, and the reference is the base (`lora.weights`).

    Tags of the copies: `actor`; `ref` and `teacher` where they were added; with `args.keep_old_actor` also
    `rollout_actor`, what the engines got last, and `old_actor`, what they got before.
    """

    def __init__(
        self,
        args: Namespace,
        model: list[DDP],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        last_rollout: int,
    ) -> None:
        self.args = args
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._weights = host_copies(args, model)
        self._weights.backup("actor")
        self._replay: RoutingReplay | None = None
        if args.use_routing_replay:
            from slime.backends.megatron_utils.moe.routing_replay import RoutingReplay

            self._replay = RoutingReplay(args, model)
        self._live_tag = "actor"
        self._send_log = SendLog(last_rollout, last_rollout)
        if args.keep_old_actor:
            for tag in ("rollout_actor", "old_actor"):
                self._weights.copy("actor", tag)

    def load_other_checkpoint(self, model_tag: str, path: str, ckpt_step: int | None = None) -> None:
        """Keep another checkpoint's weights under `model_tag`; the model goes back to the actor's."""
        from slime.backends.megatron_utils.checkpoint import load_checkpoint

        def load() -> None:
            load_checkpoint(self.args, self._model, None, None, path, ckpt_step=ckpt_step, weights_only=True)

        self._weights.backup_other(model_tag, path, load)
        self._weights.restore("actor")

    def actor_weights(self) -> Mapping[str, Tensor]:
        return self._weights.get("actor")

    def note_weights_sent(self) -> None:
        """The engines have the actor's weights now."""
        if self.args.keep_old_actor:
            self._weights.copy("rollout_actor", "old_actor")
            self._weights.copy("actor", "rollout_actor")
            self._send_log.note_sent()

    def train(
        self, rollout_id: int, rollout_data: RolloutBatch, external_data: Mapping[str, Any] | None
    ) -> list[dict[str, float]]:
        """Log-probs, advantages, optimiser steps; the metrics of each step.

        Args:
            external_data: the critic's `values` of this rank's samples, where there is a critic.
        """
        from slime.backends.megatron_utils.data import get_data_iterator, tensors_to_gpu
        from slime.backends.megatron_utils.model import train

        args = self.args
        data_iterator = get_data_iterator(rollout_data)
        if external_data and "values" in external_data:
            rollout_data["values"] = tensors_to_gpu(external_data["values"])
        self.fill_routing_replay(data_iterator, rollout_data)
        if args.compute_advantages_and_returns:
            with profiled(args, "train_log_probs", rollout_id):
                self._add_log_probs(rollout_id, data_iterator, rollout_data)
            add_advantages(args, rollout_data)
        if args.rollout_data_postprocess_path:
            load_function(args.rollout_data_postprocess_path)(args, rollout_id, rollout_data)
        with timer("actor_train"), profiled(args, "train_actor", rollout_id):
            history = train(
                args, rollout_id, self._model, self._optimizer, self._scheduler, data_iterator,
                rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], replay=self._replay,
            )  # fmt: skip
        if self._replay is not None:
            self._replay.clear()
        self._weights.backup("actor")
        self._send_log.last_trained = rollout_id
        if args.ref_update_interval is not None and (rollout_id + 1) % args.ref_update_interval == 0:
            with timer("ref_model_update"):
                self._weights.backup("ref")
            logger.info("rollout %d: the reference is now the actor", rollout_id)
        return history

    def _add_log_probs(self, rollout_id: int, data_iterator: list[DataIterator], rollout_data: RolloutBatch) -> None:
        """The reference's, the teacher's and the old policy's, as far as they are needed."""
        from slime.backends.megatron_utils.loss.passes import can_skip_own_log_probs

        args, num_microbatches = self.args, rollout_data["num_microbatches"]
        for tag in ("ref", "teacher"):
            if tag in self._weights.tags:
                self._switch_weights(tag)
                with timer(f"{tag}_log_probs"):
                    rollout_data |= self.compute_log_prob(data_iterator, num_microbatches, f"{tag}_")
        if not can_skip_own_log_probs(args, num_steps=len(num_microbatches)):
            old = self._send_log.sampling_tag(rollout_id, args.rollouts_ahead) if args.keep_old_actor else "actor"
            self._switch_weights(old)
            with timer("log_probs"), self._routing_of_own_pass():
                rollout_data |= self.compute_log_prob(data_iterator, num_microbatches, replay=self._replay)
        self._switch_weights("actor")

    def fill_routing_replay(self, data_iterator: list[DataIterator], rollout_data: RolloutBatch) -> None:
        """With `args.use_rollout_routing_replay`: the engine's expert choices, out of the rollout data."""
        if self._replay is not None and self._replay.from_engine:
            self._replay.fill(data_iterator)
            del rollout_data["rollout_routed_experts"]  # the largest column, and the only copy that is still needed

    def _routing_of_own_pass(self) -> AbstractContextManager[None]:
        """The own log-prob pass replays the engine's choices, or records its own for the training passes."""
        if self._replay is None:
            return nullcontext()
        return self._replay.replay(measure=False) if self._replay.from_engine else self._replay.record()

    def compute_log_prob(
        self,
        data_iterator: list[DataIterator],
        num_microbatches: list[int],
        store_prefix: str = "",
        replay: RoutingReplay | None = None,
    ) -> dict[str, list[Tensor]]:
        """Log-probs of all responses under the weights that the model holds now, as `{store_prefix}log_probs`."""
        from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
        from slime.backends.megatron_utils.model import forward_only

        collect = functools.partial(get_log_probs_and_entropy, with_entropy=self.args.use_rollout_entropy)
        return forward_only(collect, self.args, self._model, data_iterator, num_microbatches, store_prefix, replay)

    def _switch_weights(self, tag: str) -> None:
        if self._live_tag != tag:
            self._weights.restore(tag)
            self._live_tag = tag


def host_copies(args: Namespace, model: list[DDP]) -> WeightsBackuper | LoraWeights:
    """Copies of the weights; with LoRA of the adapters, and of the base where the trainer sleeps."""
    from slime.backends.megatron_utils.lora.weights import LoraWeights
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
    from slime.backends.megatron_utils.weights_backuper import WeightsBackuper

    if args.lora_rank is not None:
        return LoraWeights(args, model, copy_base=args.offload_train)
    return WeightsBackuper(lambda: named_params_and_buffers(args, model))


def add_advantages(args: Namespace, rollout_data: RolloutBatch) -> None:
    """Set advantages, returns and what weights are normalised with, on the last pipeline stage: it has the log-probs.

    All ranks of the stage take part.
    """
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.loss import compute_advantages_and_returns
    from slime.backends.megatron_utils.loss.mis import mean_weights_of_steps

    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return
    compute_advantages_and_returns(args, rollout_data)
    if args.tis_batch_normalize:
        group = mpu.get_data_parallel_group()
        rollout_data["tis_weight_means"] = mean_weights_of_steps(args, rollout_data, rollout_data["log_probs"], group)
