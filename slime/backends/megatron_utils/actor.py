"""The training actor: one rank that holds a shard of a model, trains it, and hands its weights on."""

from __future__ import annotations

import gc
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from slime.backends.megatron_utils.ci_checks import check_steps
from slime.backends.megatron_utils.profiling import profiled
from slime.observability.timer import Timer, inverse_timer, timer
from slime.ray.train_actor import TrainRayActor
from slime.utils import accelerator
from slime.utils.misc import Box
from slime.utils.types import RolloutBatch

if TYPE_CHECKING:
    from slime.backends.megatron_utils.update_weight.base import WeightUpdater

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
            role: "actor" or "critic"; `args` are those of the role.
            with_ref: keep the weights of `args.ref_load` (default: of `args.hf_checkpoint`) as the reference.
            with_opd_teacher: keep those of `args.opd_teacher_load` as the teacher.
        """
        super().init(args, role, with_ref, with_opd_teacher)
        from slime.backends.megatron_utils import initialize
        from slime.backends.megatron_utils.checkpoint_saving import CheckpointSaver
        from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
        from slime.backends.megatron_utils.sleeper import Sleeper
        from slime.observability import logging_utils

        initialize.init(args)
        self._is_main_rank = initialize.is_megatron_main_rank()
        if self._is_main_rank:
            logging_utils.init_tracking(args, primary=False)
        self.model, self.optimizer, self.opt_param_scheduler, iteration = initialize_model_and_optimizer(args, role)
        self._saver = CheckpointSaver(args, self.model, self.optimizer, self.opt_param_scheduler)
        self._sleeper = Sleeper(args, self.model, self.optimizer)
        self.train_parallel_config = self._describe_parallelism()
        self._updater: WeightUpdater | None = None
        if role == "critic":
            self._init_critic()
        else:
            self._init_actor(iteration, with_ref, with_opd_teacher)
        self.clear_memory()
        gc.freeze()  # the libraries' objects live as long as the process: later collections need not walk them
        self._sleeper.rest()
        Timer().start("train_wait")
        return iteration + 1

    def _init_critic(self) -> None:
        from slime.backends.megatron_utils.critic_training import CriticTraining

        self._critic = CriticTraining(self.args, self.model, self.optimizer, self.opt_param_scheduler)

    def _init_actor(self, iteration: int, with_ref: bool, with_opd_teacher: bool) -> None:
        """Host copies of the weights (the actor's, the reference's, the teacher's) and the updater of the engines."""
        from slime.backends.megatron_utils.actor_training import ActorTraining
        from slime.backends.megatron_utils.checkpoint import saved_weight_version
        from slime.backends.megatron_utils.update_weight.base import create_updater

        args = self.args
        self._actor = ActorTraining(args, self.model, self.optimizer, self.opt_param_scheduler, iteration)
        if with_ref:
            self.load_other_checkpoint("ref", args.ref_load or args.hf_checkpoint)
        if with_opd_teacher:
            self.load_other_checkpoint("teacher", args.opd_teacher_load)
        if not args.debug_train_only:
            self._updater = create_updater(args, self.model, self._actor.actor_weights)
            self._updater.weight_version = saved_weight_version(args)

    def load_other_checkpoint(self, model_tag: str, path: str) -> None:
        """Keep another checkpoint's weights under `model_tag` ("ref", "teacher"); the model stays the actor's."""
        steps = {"ref": self.args.ref_ckpt_step, "teacher": self.args.opd_teacher_ckpt_step}
        self._actor.load_other_checkpoint(model_tag, path, steps.get(model_tag))

    def _describe_parallelism(self) -> dict[str, int]:
        from megatron.core import parallel_state as mpu

        return {
            "dp_size": mpu.get_data_parallel_world_size(with_context_parallel=False),
            "cp_size": mpu.get_context_parallel_world_size(),
            "vpp_size": mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
            "microbatch_group_size_per_vp_stage": self.model[0].config.microbatch_group_size_per_vp_stage,
        }

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        """Whom to ask for engines; it learns from rank 0 how the trainers are laid out."""
        import ray

        self.rollout_manager = rollout_manager
        if self._rank == 0:
            config = rollout_manager.set_train_parallel_config.remote(self.train_parallel_config)
            ray.get(config, timeout=MANAGER_TIMEOUT_S)

    # -- memory -------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Take weights, gradients and optimiser state off the device and destroy the process groups."""
        self._sleeper.sleep()

    def wake_up(self) -> None:
        """Bring everything back that `sleep` took."""
        self._sleeper.wake_up()

    def clear_memory(self) -> None:
        """Give back what no tensor uses."""
        from slime.utils.memory_utils import clear_memory

        clear_memory(clear_host_memory=True)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, rollout_data_ref: list[Box], external_data: Any = None) -> dict[str, Any]:
        """Train on the rollout.

        Args:
            external_data: for the actor, what the critic's rank returned.

        Returns:
            The actor: the last step's metrics on the main rank, nothing on others. The critic: {"values": per sample,
            local response tokens, on the host} on the last pipeline stage, nothing on others.
        """
        with inverse_timer("train_wait"), timer("train"):
            self._sleeper.wake_up()
            self._saver.advance()
            with timer("data_preprocess"):
                rollout_data = self._fetch(rollout_data_ref)
            with profiled(self.args, "train_overall", rollout_id):
                history, result = self._train(rollout_id, rollout_data, external_data)
        self._report(rollout_id, rollout_data, history)
        self._sleeper.rest()
        return result

    def _train(
        self, rollout_id: int, rollout_data: RolloutBatch, external_data: Any
    ) -> tuple[list[dict[str, float]], dict[str, Any]]:
        """The metrics of each step, and what `train` returns."""
        if self.role == "critic":
            return self._critic.train(rollout_id, rollout_data)
        history = self._actor.train(rollout_id, rollout_data, external_data)
        return history, dict(history[-1]) if self._is_main_rank else {}

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
        return prepare_rollout_data(
            rollout_data, accelerator.current().device(), takes_images=self.args.vision_tower != "off"
        )

    def _report(self, rollout_id: int, rollout_data: RolloutBatch, history: list[dict[str, float]]) -> None:
        from slime.observability import logging_utils, train_metric_utils
        from slime.observability.train_data_dump import save_debug_train_data

        if self.role == "actor":  # the critic has the same data
            if self.args.save_debug_train_data is not None:
                save_debug_train_data(self.args, rollout_id, rollout_data)
            train_metric_utils.log_rollout_data(rollout_id, self.args, rollout_data)
            if self.args.log_multi_turn:
                train_metric_utils.log_multi_turn_data(rollout_id, self.args, rollout_data)
            if self.args.log_passrate:
                train_metric_utils.log_passrate(rollout_id, self.args, rollout_data)
        if self._is_main_rank:
            for metrics in history:
                logging_utils.log(self.args, metrics, step_key="train/step")
            check_steps(self.args, rollout_id, history, self.role)
        sending = {} if self._updater is None else self._updater.pop_metrics()
        train_metric_utils.log_perf_data(rollout_id, self.args, sending, role=self.role)

    # -- handing weights on -------------------------------------------------------------------------------------------

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of iteration `rollout_id`, with `args.save_hf` the Hugging Face export and with
        `args.lora_save_adapter` the adapter's.

        With `args.async_save` the checkpoint is written while training goes on, unless `force_sync`; an error of the
        writer is raised by the next `train` or `save_model`.
        """
        from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
        from slime.backends.megatron_utils.lora.peft_format import save_adapter

        with self._sleeper.awake(), timer("save_model"):
            if self.args.save is not None:
                self._saver.save(
                    rollout_id,
                    in_background=self.args.async_save and not force_sync,
                    weight_version=0 if self._updater is None else self._updater.weight_version,
                )
            if self.args.save_hf is not None:
                save_hf_model_to_path(self.args, self.args.save_hf.format(rollout_id=rollout_id), self.model)
            if self.args.lora_save_adapter is not None:
                save_adapter(self.args, self.args.lora_save_adapter.format(rollout_id=rollout_id), self.model)

    def update_weights(self) -> None:
        """Send the actor's weights, from their host copy, to the engines; nothing where there are none."""
        if self._updater is not None:
            self._send_weights()
        self._actor.note_weights_sent()

    def _send_weights(self) -> None:
        import ray

        assert self._updater is not None
        engines, lock, num_new, gpu_counts, gpu_offsets, parallel_configs = ray.get(
            self.rollout_manager.get_updatable_engines_and_lock.remote(), timeout=MANAGER_TIMEOUT_S
        )
        if not engines:
            return
        with self._sleeper.connected(), timer("update_weights"):
            if num_new > 0:
                self._updater.connect_rollout_engines(engines, lock, gpu_counts, gpu_offsets, parallel_configs)
            self._updater.update_weights()
        if num_new > 0 and self._rank == 0:
            clear = self.rollout_manager.clear_updatable_num_new_engines.remote()
            ray.get(clear, timeout=MANAGER_TIMEOUT_S)
