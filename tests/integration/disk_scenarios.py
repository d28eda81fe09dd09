"""Trainer ranks of test_weights_disk.py: they write updates to a folder, from which an engine's host takes them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron_tiny import init_layout, make_args

from slime.backends.megatron_utils.hf_checkpoint_saver import HfWriter
from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
from slime.backends.megatron_utils.safetensors_file import write_safetensors
from slime.backends.megatron_utils.update_weight import engine_calls, from_disk_delta
from slime.backends.megatron_utils.update_weight.base import create_updater
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
from slime.backends.megatron_utils.update_weight.errors import WeightUpdateError
from slime.utils.checkpoint_folder import version_folder
from slime.utils.distributed_utils import init_gloo_group
from tests.support.folder_engine import FolderEngine, Handle, results_of

SETTINGS: dict[str, Any] = {
    "update_weight_transport": "disk",
    "update_weight_disk_keep_files": False,
    "check_weight_update_equal": False,
    "offload_train": False,
}


class Trainer:
    """One rank and, on the first, the engines; the folders are under `root`."""

    def __init__(self, source: str, root: str, flags: str, engines: int = 1, **settings: Any) -> None:
        self.root = Path(root)
        folders = {
            "update_weight_disk_dir": f"{root}/shared",
            "update_weight_local_checkpoint_dir": f"{root}/host/local" if settings.pop("local", False) else None,
        }
        self.args = make_args(source, flags=flags, **{**SETTINGS, **folders, **settings})
        self.args.update_weight_buffer_size = 60_000  # about ten chunks
        init_layout(self.args)
        init_gloo_group()
        self.model, *_ = initialize_model_and_optimizer(self.args)
        self.updater = create_updater(self.args, self.model, self.weights)
        self.engines: list[FolderEngine] = []
        self.connect(engines)

    def connect(self, new: int) -> None:
        """New engines on the host, in place of as many of those before."""
        if dist.get_rank() == 0:
            self.engines = [*self.engines[new:], *(FolderEngine(self.args) for _ in range(new))]
        self.updater.connect_rollout_engines([Handle(engine) for engine in self.engines], None)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(named_params_and_buffers(self.args, self.model))

    @torch.no_grad()
    def change(self) -> None:
        """A few values of each weight."""
        for weight in self.weights().values():
            weight.data.view(-1)[:: max(7, weight.numel() // 5)] *= 1.5

    def send(self) -> dict[str, float]:
        """An update, after which the engines must have the trainer's weights; its metrics."""
        with (
            mock.patch.object(engine_calls, "get_all", results_of),
            mock.patch.object(from_disk_delta, "get_all", results_of),
        ):
            self.updater.update_weights()
        expected = dict(named for chunk in self.updater._iterator.chunks(self.weights()) for named in chunk)
        for engine in self.engines:
            assert engine.version == str(self.updater.weight_version)
            assert expected.keys() <= engine.weights.keys()
            for name, tensor in expected.items():
                assert torch.equal(tensor.cpu(), engine.weights[name]), name
        assert all(weight.untyped_storage().resizable() for weight in self.weights().values())
        return self.updater.pop_metrics()

    def failure(self) -> str:
        """What an update that must fail says."""
        try:
            self.send()
        except WeightUpdateError as error:
            return str(error)
        raise AssertionError("the update did not fail")

    @property
    def folder(self) -> Path:
        """Of the last update."""
        return version_folder(self.args.update_weight_disk_dir, self.updater.weight_version)


def send_full(source: str, root: str, flags: str, local: bool) -> list[str]:
    """Two updates; all is removed at the end. The paths of an update's requests."""
    trainer = Trainer(source, root, flags, engines=2, local=local)
    trainer.send()
    for engine in trainer.engines:
        engine.calls.clear()
    trainer.change()
    trainer.send()
    dist.barrier()
    assert not list(Path(trainer.args.update_weight_disk_dir).iterdir())
    return trainer.engines[0].calls if trainer.engines else []


def send_deltas(source: str, root: str, flags: str, encoding: str) -> list[dict[str, float]]:
    """All, a delta, an empty one, one after a host has lost its copy, a delta again, with an engine that was started
    anew; the metrics of each."""
    trainer = Trainer(
        source, root, flags, engines=2, local=True, update_weight_mode="delta", update_weight_delta_encoding=encoding
    )
    trainer.updater.weight_version = 4  # as on a run that resumes: the loaded weights are not those of the source
    trainer.change()
    metrics = [trainer.send()]
    trainer.change()
    metrics += [trainer.send(), trainer.send()]
    trainer.change()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(trainer.args.update_weight_local_checkpoint_dir)
    metrics.append(trainer.send())
    trainer.change()
    trainer.connect(1)
    metrics.append(trainer.send())
    return metrics


def fail_to_write(source: str, root: str, mode: str) -> tuple[str, list[str]]:
    """The second rank's disk is full at the second update; a third one repairs all. The error, and what the engine
    was asked during the update that failed."""
    delta = {"update_weight_mode": "delta", "local": True} if mode == "delta" else {}
    trainer = Trainer(source, root, "--tensor-model-parallel-size 2", **delta)
    trainer.send()
    trainer.change()
    for engine in trainer.engines:
        engine.calls.clear()
    with no_room(mode) if dist.get_rank() == 1 else mock.patch.dict({}):
        message = trainer.failure()
    calls = [call for engine in trainer.engines for call in engine.calls]
    dist.barrier()
    assert not list(Path(trainer.args.update_weight_disk_dir).iterdir())
    trainer.send()
    return message, calls


def no_room(mode: str) -> Any:
    """Files go to a device that is full."""

    def write(self: Any, chunk: Any, number: int | None = None) -> None:
        write_safetensors(Path("/dev/full"), chunk)

    def save(self: Any, path: Path) -> None:
        Path("/dev/full").write_bytes(b"delta")

    if mode == "delta":
        return mock.patch.object(from_disk_delta._Part, "save", save)
    return mock.patch.object(HfWriter, "write", write)


def damage_what_was_written(args: Any, version_dir: str, rollout_engines: Any) -> None:
    """A hook: from the second update on, the first rank takes a file away."""
    if dist.get_rank() == 0 and version_dir.endswith("2"):
        next(iter(sorted(Path(version_dir).glob("model*.safetensors")))).unlink()


def lose_a_file(source: str, root: str, mode: str) -> tuple[str, list[str]]:
    """As `fail_to_write`, but a file is missing when the host takes the update."""
    settings = {"update_weight_mode": "delta", "local": True} if mode == "delta" else {}
    hook = f"{__name__}.damage_what_was_written"
    trainer = Trainer(
        source, root, "--tensor-model-parallel-size 2", custom_update_weight_post_write_path=hook, **settings
    )
    trainer.send()
    trainer.change()
    for engine in trainer.engines:
        engine.calls.clear()
    message = trainer.failure()
    calls = [call for engine in trainer.engines for call in engine.calls]
    trainer.send()
    return message, calls
