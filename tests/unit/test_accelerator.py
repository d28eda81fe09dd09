"""The accelerator seam: which one is chosen, what each tells Ray and SGLang.

CUDA and Ascend are asked without devices: what needs one is answered by stand-ins for `torch.cuda`,
torch_memory_saver, MindSpeed and Ray's runtime context.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime.utils import accelerator
from slime.utils.accelerator import cuda as cuda_module
from slime.utils.accelerator.cpu import CpuAccelerator
from slime.utils.accelerator.cuda import CudaAccelerator
from slime.utils.accelerator.npu import NpuAccelerator

ALL = [CpuAccelerator, CudaAccelerator, NpuAccelerator]


@pytest.fixture(autouse=True)
def _choose_anew(monkeypatch):
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    accelerator.set_current(None)
    yield
    accelerator.set_current(None)


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    assert accelerator.current().name == "cpu"
    assert accelerator.get_accelerator() is accelerator.current()


def test_an_unknown_name_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "gpu")
    with pytest.raises(ValueError, match="expected auto or one of npu, cuda, cpu"):
        accelerator.current()


def test_a_missing_device_is_an_error_when_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLIME_ACCELERATOR", "cuda")
    with pytest.raises(RuntimeError, match="SLIME_ACCELERATOR=cuda, but no such device"):
        accelerator.current()


def test_the_best_available_one_is_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert accelerator.current().name == "cpu"
    accelerator.set_current(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert accelerator.current().name == "cuda"


def test_choosing_does_not_load_torch_where_there_is_no_gpu():
    if any(map(os.path.exists, cuda_module._DEVICE_FILES)):
        pytest.skip("this machine has a GPU")
    code = "import sys; from slime.utils import accelerator; print(accelerator.current().name, 'torch' in sys.modules)"
    env = {**os.environ, "SLIME_ACCELERATOR": "auto"}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["cpu", "False"]


def test_a_registered_kind_comes_first(monkeypatch):
    from slime.utils.accelerator import registry

    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    class Toy(CpuAccelerator):
        name = "toy"

    accelerator.register_accelerator("toy", Toy)
    assert accelerator.current().name == "toy"
    assert accelerator.accelerator_names() == ["toy", "npu", "cuda", "cpu"]


def test_cpu_answers_like_a_device():
    cpu = CpuAccelerator()
    assert cpu.device() == cpu.device(3) == torch.device("cpu")
    assert cpu.device_count() >= 1
    free, total = cpu.mem_get_info()
    assert 0 < free <= total
    before = cpu.memory_allocated()
    held = torch.ones(20_000_000)
    assert cpu.memory_allocated() - before > 70_000_000
    del held
    cpu.manual_seed(5)
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.rand(3).equal(first)


@pytest.mark.parametrize(
    ("kind", "bundle", "options"),
    [
        (CpuAccelerator, {"CPU": 1.0}, {"num_cpus": 0.4}),
        (CudaAccelerator, {"GPU": 1.0, "CPU": 1.0}, {"num_gpus": 0.4, "num_cpus": 0.4}),
        (NpuAccelerator, {"NPU": 1.0, "CPU": 1.0}, {"resources": {"NPU": 0.4}, "num_cpus": 0.4}),
    ],
)
def test_ray_resources(kind, bundle, options):
    """An actor's fraction must fit into the bundle of its device."""
    assert kind().bundle() == bundle
    assert kind().actor_options(0.4) == options


def test_device_ids_of_a_worker_are_integers(monkeypatch):
    """P8: Ray gives ids as text."""
    import ray

    context = SimpleNamespace(get_accelerator_ids=lambda: {"NPU": ["10", "2"], "GPU": []})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: ["11"])
    assert NpuAccelerator().assigned_device_ids() == [10, 2]
    assert CudaAccelerator().assigned_device_ids() == [11]
    assert CpuAccelerator().assigned_device_ids() == []


def test_a_device_id_is_looked_up_among_the_visible_ones():
    cuda = CudaAccelerator()
    assert cuda.local_index(3, env={}) == 3
    assert cuda.local_index(6, env={"CUDA_VISIBLE_DEVICES": "4,6,10"}) == 1
    with pytest.raises(ValueError, match="cuda device 5 is not among CUDA_VISIBLE_DEVICES=4,6"):
        cuda.local_index(5, env={"CUDA_VISIBLE_DEVICES": "4,6"})
    assert CpuAccelerator().local_index(1, env={}) == 1


def test_trainers_on_one_node_share_its_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpu = CpuAccelerator()
    monkeypatch.setattr(cpu, "device_count", lambda: 8)
    assert cpu.trainer_env(Namespace(actor_num_gpus_per_node=2))["OMP_NUM_THREADS"] == "4"
    assert cpu.trainer_env(Namespace(actor_num_gpus_per_node=16))["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cpu.trainer_env(Namespace(actor_num_gpus_per_node=2))["OMP_NUM_THREADS"] == "3"
    assert cpu.trainer_env(Namespace(actor_num_gpus_per_node=2))["OMP_WAIT_POLICY"] == "PASSIVE"


def test_deterministic_trainers_get_deterministic_libraries():
    args = Namespace(deterministic_mode=True, offload_train=False)
    assert CudaAccelerator().trainer_env(args)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert NpuAccelerator().trainer_env(args)["HCCL_DETERMINISTIC"] == "true"


@pytest.mark.parametrize("kind", [CudaAccelerator, NpuAccelerator])
def test_offloaded_trainers_preload_the_memory_saver(kind, monkeypatch):
    package, utils = ModuleType("torch_memory_saver"), ModuleType("torch_memory_saver.utils")
    utils.get_binary_path_from_package = lambda stem: f"/lib/{stem}.so"
    monkeypatch.setitem(sys.modules, "torch_memory_saver", package)
    monkeypatch.setitem(sys.modules, "torch_memory_saver.utils", utils)
    monkeypatch.setenv("LD_PRELOAD", "/lib/jemalloc.so")
    env = kind().trainer_env(Namespace(offload_train=True))
    assert env["LD_PRELOAD"] == "/lib/torch_memory_saver_hook_mode_preload.so:/lib/jemalloc.so"
    assert env["TMS_INIT_ENABLE"] == env["TMS_INIT_ENABLE_CPU_BACKUP"] == "1"
    assert "LD_PRELOAD" not in kind().trainer_env(Namespace(offload_train=False))


def test_cuda_pauses_through_torch_memory_saver(monkeypatch):
    """What is freed is read from the device, whose free memory the stand-in changes as the real saver would."""
    calls, free = [], [10]
    saver = SimpleNamespace(
        pause=lambda: (calls.append("pause"), free.append(70)),
        resume=lambda: (calls.append("resume"), free.append(12)),
    )
    module = ModuleType("torch_memory_saver")
    module.torch_memory_saver = saver
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    monkeypatch.setenv("TMS_INIT_ENABLE", "1")
    cuda = CudaAccelerator()
    device = SimpleNamespace(
        synchronize=lambda: None, empty_cache=lambda: calls.append("empty"), mem_get_info=lambda: (free[-1], 80)
    )
    monkeypatch.setattr(cuda, "_module", lambda: device)
    assert cuda.memory_saver() is cuda.memory_saver()
    assert cuda.memory_saver().pause([]) == 60
    with pytest.raises(RuntimeError, match="paused already"):
        cuda.memory_saver().pause([])
    assert cuda.memory_saver().resume() == 58
    assert calls == ["empty", "pause", "resume"]
    with pytest.raises(RuntimeError, match="not paused"):
        cuda.memory_saver().resume()


def test_a_trainer_that_is_not_offloaded_has_no_saver(monkeypatch):
    monkeypatch.delenv("TMS_INIT_ENABLE", raising=False)
    saver = CudaAccelerator().memory_saver()
    with saver.disable(), saver.region():
        pass
    with pytest.raises(RuntimeError, match="started without torch_memory_saver"):
        saver.pause([])


def test_mindspeed_is_loaded_before_megatron_and_told_the_arguments_after(monkeypatch):
    """The adaptor is a stand-in: MindSpeed needs an Ascend host."""
    told = []
    package, adaptor = ModuleType("mindspeed"), ModuleType("mindspeed.megatron_adaptor")
    package.megatron_adaptor = adaptor
    adaptor.repatch = told.append
    monkeypatch.setitem(sys.modules, "mindspeed", package)
    monkeypatch.setitem(sys.modules, "mindspeed.megatron_adaptor", adaptor)
    npu = NpuAccelerator()
    npu.prepare_megatron()
    npu.after_megatron_init(Namespace(use_flash_attn=True))
    assert told == [{"use_flash_attn": True}]


@pytest.mark.parametrize("kind", ALL)
def test_engine_arguments_are_fields_of_server_args(kind):
    """A field that SGLang renamed would be refused only when a server starts; its list is read without an import."""
    path = Path(importlib.metadata.distribution("sglang").locate_file("sglang/srt/arg_groups/field_order.py"))
    fields = set(re.findall(r'"(\w+)",', path.read_text()))
    assert set(kind().engine_server_args()) <= fields
