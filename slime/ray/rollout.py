"""The rollout manager: owns data source, router and engines, and turns prompts into training data."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from typing import Any

import ray

from slime.observability import eval_samples, logging_utils, rollout_data_utils, rollout_metrics
from slime.ray.engine_control import CONTROL, EngineControl
from slime.ray.placement_group import Placement
from slime.ray.train_data import convert_samples_to_train_data, flatten_samples, split_train_data_by_dp
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.rm_hub import start_graders
from slime.rollout.sample_checks import check_samples
from slime.utils.garbage import collect_rarely
from slime.utils.misc import Box, load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


class RolloutManager(EngineControl):
    """One per run, on a CPU. Its methods are called by the driver and by trainers, one at a time; those that concern
    engines are answered meanwhile (see `EngineControl`)."""

    def __init__(self, args: Namespace, pg: Placement) -> None:
        super().__init__(args, pg)
        self._train_parallel_config: dict[str, int] = {}

    def start(self) -> None:
        """Open the data, start the engines and wait for them; before any other method. Not part of the constructor,
        for an error there reaches the driver as a text only."""
        args = self.args
        logging_utils.configure_logger(args, "rollout-manager")
        # The data first: a broken file must end the run before any engine starts.
        self.data_source = load_function(args.data_source_path)(args)
        self.generate_rollout = load_function(args.rollout_function_path)
        self.eval_generate_rollout = load_function(args.eval_function_path)
        self.start_servers()
        if not args.debug_train_only:
            start_graders(args)
        self.wait_servers()
        if args.dump_details is not None:
            tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
            tokenizer.save_pretrained(f"{args.dump_details}/tokenizer")
        collect_rarely()

    def get_num_rollout_per_epoch(self) -> int | None:
        """Rollouts that one pass over the prompts takes; None without a prompt set, or one that has no length."""
        if not self.args.rollout_global_dataset or not hasattr(self.data_source, "__len__"):
            return None
        return len(self.data_source) // self.args.rollout_batch_size

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(self, rollout_id: int) -> list[Box] | None:
        """Roll out once. One boxed object reference per data-parallel rank; None with --debug-rollout-only."""
        started = time.monotonic()
        self.health_monitoring_resume()
        samples, metrics = self._rollout_samples(rollout_id)
        if self.args.save_debug_rollout_data:
            rollout_data_utils.save_debug_rollout_data(
                self.args.save_debug_rollout_data, samples, rollout_id=rollout_id, evaluation=False
            )
        elapsed = time.monotonic() - started
        metrics = {**(metrics or {}), **self.pop_failure_counts()}
        rollout_metrics.log_rollout_data(rollout_id, self.args, samples, metrics, elapsed)
        if self.args.debug_rollout_only:
            check_samples(self.args, samples)
            return None
        data = convert_samples_to_train_data(self.args, samples)
        shards = split_train_data_by_dp(self.args, data, self._train_parallel_config)
        return [Box(ray.put(shard)) for shard in shards]

    def _rollout_samples(self, rollout_id: int) -> tuple[list[Sample], dict[str, Any] | None]:
        if self.args.load_debug_rollout_data:
            samples = rollout_data_utils.load_debug_rollout_data(
                self.args.load_debug_rollout_data,
                rollout_id=rollout_id,
                subsample_ratio=self.args.load_debug_rollout_data_subsample,
            )
            return samples, None
        output = call_rollout_fn(self.generate_rollout, self.args, rollout_id, self.data_source, evaluation=False)
        return flatten_samples(output.samples), output.metrics

    def eval(self, rollout_id: int) -> dict[str, Any]:
        """Evaluate on every eval dataset and log; the metrics. Nothing with --debug-train-only."""
        if self.args.debug_train_only:
            return {}
        self.health_monitoring_resume()
        output = call_rollout_fn(self.eval_generate_rollout, self.args, rollout_id, self.data_source, evaluation=True)
        if self.args.save_debug_rollout_data:
            samples = [sample for result in output.data.values() for sample in result.get("samples", [])]
            rollout_data_utils.save_debug_rollout_data(
                self.args.save_debug_rollout_data, samples, rollout_id=rollout_id, evaluation=True
            )
        if self.args.log_dir is not None:
            eval_samples.save_eval_samples(self.args.log_dir, rollout_id, output.data)
        return rollout_metrics.log_eval_rollout_data(rollout_id, self.args, output.data, output.metrics)

    @ray.method(concurrency_group=CONTROL)
    def keeps_generating(self) -> bool:
        """Whether the rollout function generates between its calls too, so that weights must be sent meanwhile."""
        return bool(getattr(self.generate_rollout, "keeps_generating", False))

    # -- state --------------------------------------------------------------------------------------------------------

    def save(self, rollout_id: int) -> None:
        self.data_source.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        self.data_source.load(rollout_id)

    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        """How the trainers are laid out; training data is split for that."""
        self._train_parallel_config = config
