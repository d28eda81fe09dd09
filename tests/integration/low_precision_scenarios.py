"""What test_low_precision_folders.py runs in gloo processes or several times."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

TOOLS = Path(__file__).parents[2] / "tools"


def tool_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), TOOLS / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call_tool(module: ModuleType, *words: object) -> None:
    """Run a tool in this process as if started with `words`."""
    before, sys.argv = sys.argv, [str(module.__file__), *map(str, words)]
    try:
        module.main()
    finally:
        sys.argv = before


def round_trip(source: str, target: str, flags: str) -> None:
    """Load into Megatron in float32 and export: the bits of the source come back.

    With power-of-two scales only the numbers do: a block whose largest value was rounded down to the next power of two
    gets half the scale.
    """
    from megatron_tiny import init_layout, make_args
    from safetensors.torch import load_file

    from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.hf_to_megatron.dequantizing_reader import open_weights
    from slime.backends.megatron_utils.optimizer import build_model

    args = make_args(source, flags=flags)
    init_layout(args)
    model = build_model(args, "actor")
    load_hf_weights(args, model, source)
    save_hf_model_to_path(args, target, model)
    if dist.get_rank() != 0:
        return
    before, after = (
        {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (source, target)
    )
    assert before.keys() == after.keys()
    if "ue8m0" in source:
        first, second = open_weights(source), open_weights(target)
        assert all(torch.equal(first.get_tensor(name), second.get_tensor(name)) for name in first.names)
        return
    for name, tensor in before.items():
        if tensor.dtype == torch.float32:
            torch.testing.assert_close(after[name], tensor, rtol=2e-7, atol=0)
        else:
            assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert (Path(target) / "config.json").read_text() == (Path(source) / "config.json").read_text()
