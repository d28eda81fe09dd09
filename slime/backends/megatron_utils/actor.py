"""The training actor: one rank that holds a shard of the model, trains it, and hands its weights on."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime.observability.timer import Timer, inverse_timer, timer
from slime.ray.train_actor import TrainRayActor
from slime.utils import accelerator
from slime.utils.misc import Box, load_function
from slime.utils.types import RolloutBatch

if TYPE_CHECKING:
    from torch import Tensor

    from slime.backends.megatron_utils.data import DataIterator

logger = logging.getLogger(__name__)

MANAGER_TIMEOUT_S = 600.0


class MegatronTrainRayActor(TrainRayActor):
    """See `TrainRayActor`. With `args.offload_train` it sleeps between calls: its memory is off the device and its
    process groups are gone; every method that needs them wakes it up and puts it back to sleep."""

    def preload(self) -> None:
        """Import torch, Megatron and what trains while the engines start."""
        accelerator.current().prepare_megatron()
        import slime.backends.megatron_utils.loss
        import slime.backends.megatron_utils.model
        import slime.backends.megatron_utils.optimizer
        import slime.backends.megatron_utils.update_weight.base  # noqa: F401

    # -- set-up -------------------------------------------------------------------------------------------------------

    def init(self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        """Build and load the model; the rollout id to go on from.

        Args:
            with_ref: keep the weights of `args.ref_load` (default: of `args.hf_checkpoint`) as the reference.

        Raises:
            ValueError: a role or a teacher that is not supported.
        """
        super().init(args, role, with_ref, with_opd_teacher)
        if role != "actor" or with_opd_teacher:
            raise ValueError(f"role {role!r}, with_opd_teacher={with_opd_teacher}: only the actor is supported so far")
        from slime.backends.megatron_utils import initialize
        from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
        from slime.observability import logging_utils

        self._asleep = False
        self._memory_saver = accelerator.current().memory_saver()
        initialize.init(args)
        self._is_main_rank = initialize.is_megatron_main_rank()
        if self._is_main_rank:
            logging_utils.init_tracking(args, primary=False)
        self.model, self.optimizer, self.opt_param_scheduler, iteration = initialize_model_and_optimizer(args, role)
        self.train_parallel_config = self._describe_parallelism()
        self._init_weights(with_ref)
        self.clear_memory()
        if args.offload_train:
            self.sleep()
        Timer().start("train_wait")
        return iteration + 1

    def _describe_parallelism(self) -> dict[str, int]:
        from megatron.core import parallel_state as mpu

        return {
            "dp_size": mpu.get_data_parallel_world_size(with_context_parallel=False),
            "cp_size": mpu.get_context_parallel_world_size(),
            "vpp_size": mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
            "microbatch_group_size_per_vp_stage": self.model[0].config.microbatch_group_size_per_vp_stage,
        }

    def _init_weights(self, with_ref: bool) -> None:
        """Host copies of the weights (the actor's, the reference's) and the updater that sends them to engines."""
        from slime.backends.megatron_utils.update_weight.base import create_updater
        from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
        from slime.backends.megatron_utils.weights_backuper import WeightsBackuper

        self._weights = WeightsBackuper(lambda: named_params_and_buffers(self.args, self.model))
        self._weights.backup("actor")
        if with_ref:
            self.load_other_checkpoint("ref", self.args.ref_load or self.args.hf_checkpoint)
        self._live_tag = "actor"
        self._updater = None
        if not self.args.debug_train_only:
            self._updater = create_updater(self.args, self.model, self._actor_weights)

    def load_other_checkpoint(self, model_tag: str, path: str) -> None:
        """Keep another checkpoint's weights under `model_tag`; the model goes back to the actor's."""
        from slime.backends.megatron_utils.checkpoint import load_checkpoint

        step = self.args.ref_ckpt_step if model_tag == "ref" else None
        load_checkpoint(self.args, self.model, None, None, path, ckpt_step=step, weights_only=True)
        self._weights.backup(model_tag)
        self._weights.restore("actor")

    def _actor_weights(self) -> Mapping[str, Tensor]:
        return self._weights.get("actor")

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        """Whom to ask for engines; it learns from rank 0 how the trainers are laid out."""
        import ray

        self.rollout_manager = rollout_manager
        if self._rank == 0:
            config = rollout_manager.set_train_parallel_config.remote(self.train_parallel_config)
            ray.get(config, timeout=MANAGER_TIMEOUT_S)

    # -- sleeping -----------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Take weights, gradients and optimiser state off the device and destroy the process groups."""
        from slime.utils.memory_utils import clear_memory
        from slime.utils.reloadable_process_group import destroy_process_groups

        if self._asleep:
            return
        with timer("sleep"):
            clear_memory(clear_host_memory=True)
            destroy_process_groups()
            freed = self._memory_saver.pause(self.model, self.optimizer)
            clear_memory(clear_host_memory=True)
        logger.info("asleep: %.1f MiB off the device", freed / 2**20)
        self._asleep = True

    def wake_up(self) -> None:
        """Bring everything back that `sleep` took."""
        from slime.utils.reloadable_process_group import reload_process_groups

        if not self._asleep:
            return
        with timer("wake_up"):
            self._memory_saver.resume()
            reload_process_groups()
        self._asleep = False

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Awake for the block; asleep afterwards if training is offloaded."""
        self.wake_up()
        yield
        if self.args.offload_train:
            self.sleep()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Process groups for the block, but the model stays off the device: engines may be using it."""
        from slime.utils.reloadable_process_group import destroy_process_groups, reload_process_groups

        if self._asleep:
            reload_process_groups()
        with self._memory_saver.disable():
            yield
        if self._asleep:
            destroy_process_groups()

    def clear_memory(self) -> None:
        """Give back what no tensor uses."""
        from slime.utils.memory_utils import clear_memory

        clear_memory(clear_host_memory=True)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, rollout_data_ref: list[Box], external_data: Any = None) -> dict[str, Any]:
        """Train on the rollout; the last step's metrics on the main rank, nothing on others."""
        with inverse_timer("train_wait"), timer("train"):
            self.wake_up()
            with timer("data_preprocess"):
                rollout_data = self._fetch(rollout_data_ref)
            history = self.train_actor(rollout_id, rollout_data, external_data)
        self._report(rollout_id, rollout_data, history)
        if self.args.offload_train:
            self.sleep()
        return history[-1] if self._is_main_rank else {}

    def _fetch(self, rollout_data_ref: list[Box]) -> RolloutBatch:
        """This data-parallel rank's share of the rollout, on the device."""
        import torch.distributed as dist
        from megatron.core import parallel_state as mpu

        from slime.backends.megatron_utils.data import prepare_rollout_data
        from slime.utils.data import process_rollout_data

        dp_rank, dp_size = mpu.get_data_parallel_rank(), self.train_parallel_config["dp_size"]
        rollout_data = process_rollout_data(self.args, rollout_data_ref, dp_rank, dp_size)
        lengths: list[list[int]] = [[] for _ in range(dp_size)]
        dist.all_gather_object(lengths, rollout_data["total_lengths"], group=mpu.get_data_parallel_group_gloo())
        Timer().seq_lens = [length for of_rank in lengths for length in of_rank]
        return prepare_rollout_data(rollout_data, accelerator.current().device())

    def train_actor(
        self, rollout_id: int, rollout_data: RolloutBatch, external_data: Any = None
    ) -> list[dict[str, float]]:
        """Log-probs, advantages, optimiser steps; the metrics of each step."""
        from slime.backends.megatron_utils.data import get_data_iterator
        from slime.backends.megatron_utils.model import train

        args = self.args
        data_iterator = get_data_iterator(rollout_data)
        if args.compute_advantages_and_returns:
            self._add_log_probs_and_advantages(data_iterator, rollout_data)
        if args.rollout_data_postprocess_path:
            load_function(args.rollout_data_postprocess_path)(args, rollout_id, rollout_data)
        with timer("actor_train"):
            history = train(
                args,
                rollout_id,
                self.model,
                self.optimizer,
                self.opt_param_scheduler,
                data_iterator,
                rollout_data["num_microbatches"],
                rollout_data["global_batch_sizes"],
            )
        self._weights.backup("actor")
        if args.ref_update_interval is not None and (rollout_id + 1) % args.ref_update_interval == 0:
            with timer("ref_model_update"):
                self._weights.backup("ref")
            logger.info("rollout %d: the reference is now the actor", rollout_id)
        return history

    def _add_log_probs_and_advantages(self, data_iterator: list[DataIterator], rollout_data: RolloutBatch) -> None:
        from megatron.core import parallel_state as mpu

        from slime.backends.megatron_utils.loss import compute_advantages_and_returns
        from slime.backends.megatron_utils.loss.passes import can_skip_own_log_probs

        num_microbatches = rollout_data["num_microbatches"]
        if "ref" in self._weights.tags:
            self._switch_weights("ref")
            with timer("ref_log_probs"):
                rollout_data |= self.compute_log_prob(data_iterator, num_microbatches, "ref_")
        self._switch_weights("actor")
        if not can_skip_own_log_probs(self.args, num_steps=len(num_microbatches)):
            with timer("log_probs"):
                rollout_data |= self.compute_log_prob(data_iterator, num_microbatches)
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            compute_advantages_and_returns(self.args, rollout_data)

    def compute_log_prob(
        self, data_iterator: list[DataIterator], num_microbatches: list[int], store_prefix: str = ""
    ) -> dict[str, list[Tensor]]:
        """Log-probs of all responses under the weights that the model holds now, as `{store_prefix}log_probs`."""
        from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
        from slime.backends.megatron_utils.model import forward_only

        collect = functools.partial(get_log_probs_and_entropy, with_entropy=self.args.use_rollout_entropy)
        return forward_only(collect, self.args, self.model, data_iterator, num_microbatches, store_prefix)

    def _switch_weights(self, tag: str) -> None:
        if self._live_tag != tag:
            self._weights.restore(tag)
            self._live_tag = tag

    def _report(self, rollout_id: int, rollout_data: RolloutBatch, history: list[dict[str, float]]) -> None:
        from slime.observability import logging_utils, train_metric_utils

        train_metric_utils.log_rollout_data(rollout_id, self.args, rollout_data)
        if self.args.log_multi_turn:
            train_metric_utils.log_multi_turn_data(rollout_id, self.args, rollout_data)
        if self.args.log_passrate:
            train_metric_utils.log_passrate(rollout_id, self.args, rollout_data)
        if self._is_main_rank:
            for metrics in history:
                logging_utils.log(self.args, metrics, step_key="train/step")
        sending = {} if self._updater is None else self._updater.pop_metrics()
        train_metric_utils.log_perf_data(rollout_id, self.args, sending)

    # -- handing weights on -------------------------------------------------------------------------------------------

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of iteration `rollout_id`, and with `args.save_hf` the Hugging Face export."""
        from slime.backends.megatron_utils.checkpoint import save_checkpoint
        from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path

        with self._awake(), timer("save_model"):
            if self.args.save is not None:
                save_checkpoint(self.args, rollout_id, self.model, self.optimizer, self.opt_param_scheduler)
            if self.args.save_hf is not None:
                save_hf_model_to_path(self.args, self.args.save_hf.format(rollout_id=rollout_id), self.model)

    def update_weights(self) -> None:
        """Send the actor's weights, from their host copy, to the engines; nothing where there are none."""
        import ray

        if self._updater is None:
            return
        engines, lock, num_new, gpu_counts, gpu_offsets, parallel_configs = ray.get(
            self.rollout_manager.get_updatable_engines_and_lock.remote(), timeout=MANAGER_TIMEOUT_S
        )
        if not engines:
            return
        with self._connected(), timer("update_weights"):
            if num_new > 0:
                self._updater.connect_rollout_engines(engines, lock, gpu_counts, gpu_offsets, parallel_configs)
            self._updater.update_weights()
        if num_new > 0 and self._rank == 0:
            clear = self.rollout_manager.clear_updatable_num_new_engines.remote()
            ray.get(clear, timeout=MANAGER_TIMEOUT_S)
