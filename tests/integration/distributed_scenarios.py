"""Trainer ranks of test_weights_distributed.py: they send changed weights to engines and let the engines compare."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron_tiny import init_layout, make_args

from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
from slime.backends.megatron_utils.update_weight.base import create_updater
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
from slime.backends.megatron_utils.update_weight.engine_calls import WeightUpdateError
from slime.backends.megatron_utils.weights_backuper import WeightsBackuper
from slime.backends.sglang_utils.control_client import ControlClient
from slime.utils.distributed_utils import init_gloo_group

NAMESPACE = "distributed-weights"


class Trainer:
    """One rank: a tiny model whose weights change, and the updater of a route (broadcast, tensor, disk, delta)."""

    def __init__(
        self, context: dict[str, Any], model: str, flags: str, engines: list[str], route: str = "broadcast"
    ) -> None:
        if not ray.is_initialized():
            ray.init(address=context["address"], namespace=NAMESPACE, log_to_driver=False)
        source = Path(context[model])
        self.args = make_args(
            source,
            flags=flags,
            check_weight_update_equal=True,
            log_dir=context["out"],
            offload_train=False,
            colocate=route == "tensor",
            update_weight_transport="disk" if route in ("disk", "delta") else "nccl",
            update_weight_mode="delta" if route == "delta" else "full",
            update_weight_disk_dir=f"{context['out']}/{route}-shared",
            update_weight_local_checkpoint_dir=f"{context['out']}/local" if route == "delta" else None,
        )
        self.args.update_weight_buffer_size = 60_000  # about ten buckets
        init_layout(self.args)
        init_gloo_group()
        self.model, *_ = initialize_model_and_optimizer(self.args)
        self._weights = WeightsBackuper(lambda: named_params_and_buffers(self.args, self.model))
        self.updater: Any = create_updater(self.args, self.model, lambda: self._weights.get("actor"))
        self._sizes = context["sizes"]
        self.connect(engines)

    def connect(self, engines: list[str]) -> None:
        self.engines = [ray.get_actor(name) for name in engines]
        folders = self.args.update_weight_disk_dir, self.args.update_weight_local_checkpoint_dir
        ray.get([engine.use_folders.remote(*folders) for engine in self.engines])
        counts = [self._sizes[name] for name in engines]
        configs = [{"tp_size": count, "pp_size": 1} for count in counts]
        self.updater.connect_rollout_engines(self.engines, ray.get_actor("lock"), counts, [0] * len(counts), configs)

    @property
    def is_sender(self) -> bool:
        return mpu.get_data_parallel_rank() == mpu.get_tensor_model_parallel_rank() == 0

    @torch.no_grad()
    def send_changed(self) -> None:
        """An update with other weights, after which the engines prove that they have them bit for bit."""
        for _, weight in named_params_and_buffers(self.args, self.model):
            weight.data.mul_(1.01)
        self._weights.backup("actor")
        self.updater._verified = False
        self.updater.update_weights()

    def versions(self) -> list[str]:
        return ray.get([engine.get_weight_version.remote() for engine in self.engines])


def send_twice(context: dict[str, Any], model: str, flags: str, engines: list[str], sleeps: bool) -> list[str]:
    """Two updates, over the same groups unless trainers sleep in between; the engines' version."""
    trainer = Trainer(context, model, flags, engines)
    trainer.args.offload_train = sleeps
    trainer.send_changed()
    assert (trainer.updater._group is not None) == (trainer.is_sender and not sleeps)
    trainer.send_changed()
    trainer.updater.disconnect_rollout_engines()
    return trainer.versions()


def send_by_tensor(context: dict[str, Any]) -> tuple[str, list[str]]:
    """Two updates to an engine on both ranks' devices, with one between them that it refuses; the error."""
    trainer = Trainer(context, "dense", "--tensor-model-parallel-size 2", ["dense_tp2"], "tensor")
    trainer.send_changed()
    ray.get(trainer.engines[0].fail_next_bucket.remote("refuse"))
    dist.barrier()
    try:
        trainer.send_changed()
    except WeightUpdateError as error:
        message = str(error)
    else:
        raise AssertionError("the update did not fail")
    assert trainer.versions() == ["1"], "weights that are only partly there bear no new version"
    trainer.send_changed()
    return message, trainer.versions()


def send_by_disk(context: dict[str, Any], model: str, flags: str, engines: list[str], route: str) -> list[str]:
    """Three updates, of which the engines prove that they have them; the engines' version."""
    trainer = Trainer(context, model, flags, engines, route)
    densities = []
    for _ in range(3):
        trainer.send_changed()
        densities.append(trainer.updater.pop_metrics().get("update_weights_density"))
    if route == "delta" and dist.get_rank() == 0:
        assert densities[0] == 1.0 and all(0 < density < 1 for density in densities[1:]), densities
    return trainer.versions()


def fail_and_repair(context: dict[str, Any], flags: str, engines: list[str], fault: str) -> tuple[str, float]:
    """An update that fails at the first engine, and others that don't; the error and how long it took."""
    trainer = Trainer(context, "dense", flags, engines)
    trainer.send_changed()
    if trainer.updater._group is not None and fault == "hang":
        trainer.updater._group._seconds = 2.0
    ray.get(trainer.engines[0].fail_next_bucket.remote(fault))
    started = time.monotonic()
    try:
        trainer.send_changed()
    except WeightUpdateError as error:
        message, seconds = str(error), time.monotonic() - started
    else:
        raise AssertionError("the update did not fail")
    assert set(trainer.versions()) == {"1"}, "weights that are only partly there bear no new version"
    trainer.send_changed()
    assert set(trainer.versions()) == {"3"}
    trainer.connect(engines[:1])
    trainer.send_changed()
    assert trainer.versions() == ["4"]
    trainer.updater.disconnect_rollout_engines()
    return message, seconds


def send_while_generating(context: dict[str, Any], mode: str, route: str) -> dict[str, Any]:
    """The answer of a request that was running when the weights came."""
    trainer = Trainer(context, "dense", "--tensor-model-parallel-size 2", ["dense"], route)
    trainer.args.pause_generation_mode, trainer.args.check_weight_update_equal = mode, False
    trainer.send_changed()
    client = ControlClient(context["urls"]["dense"])
    sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/generate", body, timeout=60.0) if dist.get_rank() == 0 else None
        time.sleep(0.7)
        trainer.send_changed()
        trainer.updater.disconnect_rollout_engines()
        return answer.result()["meta_info"] if answer is not None else {}
