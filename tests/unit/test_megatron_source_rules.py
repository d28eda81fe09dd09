"""The rules that rewrite megatron-core's CUDA for the CPU: each on a small source, all on the installed package."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from slime.backends.megatron_utils.cpu import import_hook, source_rules
from slime.backends.megatron_utils.cpu.source_rules import PATCHES, RULES, UNTOUCHED, rewrite

MODULE = "megatron.core.some.module"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = torch.empty(3, device=torch.cuda.current_device())", "x = torch.empty(3, device=torch.device('cpu'))"),
        ("x = torch.zeros(1, device='cuda')", "x = torch.zeros(1, device='cpu')"),
        ('x = torch.zeros(1, device="cuda:0", dtype=d)', "x = torch.zeros(1, device='cpu', dtype=d)"),
        ("x = torch.zeros(1, device='cuda:1')", "x = torch.zeros(1, device='cuda:1')"),
        ('sh_ten.init_data("cuda")', "sh_ten.init_data('cpu')"),
        ("if p.type() == 'torch.cuda.FloatTensor':", "if p.type() == 'torch.FloatTensor':"),
        ("['torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor']", "['torch.HalfTensor', 'torch.BFloat16Tensor']"),
        ("torch.cuda.synchronize()", "None"),
        ("s = torch.cuda.current_stream()", "s = None"),
        ("torch.tensor([0], device='cuda', pin_memory=True)", "torch.tensor([0], device='cpu')"),
        ("t = torch.stack(a).cuda()", "t = torch.stack(a)"),
        ("t = a[0].cuda(non_blocking=True)", "t = a[0]"),
        ("t = v.cuda(torch.cuda.current_device())", "t = v"),
        ("torch.cuda.manual_seed(s)", "torch.manual_seed(s)"),
        ("state = torch.cuda.get_rng_state()", "state = torch.get_rng_state()"),
        ("torch.cuda.get_rng_state_all()", "torch.cuda.get_rng_state_all()"),
        ("if torch.cuda.is_available():", "if torch.cuda.is_available():"),
    ],
)
def test_each_expression(before, after):
    assert rewrite(before, MODULE) == after


def test_modules_that_the_trainer_never_runs_are_left_alone():
    source = "x = torch.zeros(1, device='cuda')"
    assert rewrite(source, "megatron.core.inference.engines.engine") == source
    assert rewrite(source, "megatron.core.inference_params") != source


def test_a_patch_that_no_longer_fits_stops_the_import():
    with pytest.raises(ImportError, match=r"megatron.core.jit no longer contains 'def disable_jit_fuser\('"):
        rewrite("jit_fuser = None\n", "megatron.core.jit")


def test_a_patch_replaces_and_appends():
    source = "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n"
    assert "raise ImportError" in rewrite(source, "megatron.core.timers")
    source = "def disable_jit_fuser():\n    pass\n\nenable_jit_fuser()"
    assert rewrite(source, "megatron.core.jit").endswith("\ndisable_jit_fuser()\n")


def _installed_sources() -> dict[str, str]:
    """Sources by module name, found without importing the package."""
    root = Path(importlib.metadata.distribution("megatron-core").locate_file("megatron/core"))
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = ("megatron", "core", *path.relative_to(root).with_suffix("").parts)
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return sources


SOURCES = _installed_sources()


def test_the_installed_version_is_the_one_that_the_rules_were_written_for():
    assert importlib.metadata.version("megatron-core") == source_rules.WRITTEN_FOR


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_is_still_needed(rule):
    assert any(re.search(rule.pattern, text) for name, text in SOURCES.items() if not UNTOUCHED.match(name))


def test_every_patched_module_exists_and_fits():
    for patch in PATCHES:
        ast.parse(rewrite(SOURCES[patch.module], patch.module))


def test_the_whole_package_compiles_and_the_hard_coded_devices_are_gone():
    for name, text in SOURCES.items():
        if UNTOUCHED.match(name):
            continue
        new = rewrite(text, name)
        ast.parse(new)
        assert "torch.cuda.current_device()" not in new and not re.search(r"device=['\"]cuda['\"]", new), name


@pytest.fixture
def toy_package(tmp_path, monkeypatch):
    """A `megatron.core` of two lines, found by our finder alone."""
    package = tmp_path / "site" / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "toy.py").write_text("import builtins\nvalue = builtins.str('device') + str(dict(device='cuda'))\n")
    finder = import_hook.MegatronFinder(tmp_path / "cache")

    def load() -> object:
        spec = finder.find_spec("megatron.core.toy", [str(package)])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return package / "toy.py", tmp_path / "cache", load


def test_rewritten_byte_code_is_cached_apart_from_the_package(toy_package):
    source, cache, load = toy_package
    assert load().value == "device{'device': 'cpu'}"
    assert [path.name for path in cache.iterdir()] == [f"megatron.core.toy.{sys.implementation.cache_tag}.pyc"]
    assert not (source.parent / "__pycache__").exists()
    assert load().value == "device{'device': 'cpu'}"


def test_a_changed_source_is_compiled_again(toy_package):
    source, _, load = toy_package
    load()
    source.write_text("value = dict(device='cuda', changed=True)\n")
    assert load().value == {"device": "cpu", "changed": True}


def test_the_finder_leaves_other_packages_alone(tmp_path):
    finder = import_hook.MegatronFinder(tmp_path)
    assert finder.find_spec("megatron", None) is None
    assert finder.find_spec("megatron.corelike", None) is None
    assert finder.find_spec("torch", None) is None


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    with pytest.raises(RuntimeError, match=r"megatron-core 0.17.0 is installed; its CPU adaptation .* for 0.16.1"):
        import_hook.install()


def test_megatron_imported_too_early_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(RuntimeError, match="imported before slime prepared it"):
        import_hook.install()
