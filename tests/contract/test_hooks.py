"""Every hook: the right signature is accepted, a wrong one is an error that shows the right one.

For tests of your own hooks see test_template_own_hooks.py.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from slime.utils.arguments.hooks import HOOKS, assert_hook, hook_problems
from slime.utils.arguments.table import flag_table

HOOK = {hook.dest: hook for hook in HOOKS}


# One example of each, with the names that the documentation uses.
def rollout_function_path(args, rollout_id, data_source, evaluation=False): ...
def eval_function_path(args, rollout_id, data_source, evaluation=False): ...
def buffer_filter_path(args, rollout_id, buffer, num_samples): ...
async def custom_generate_function_path(args, sample, sampling_params): ...
def rollout_sample_hook_path(args, sample, *, rollout_id=None): ...
async def custom_rm_path(args, sample, **kwargs): ...
def dynamic_sampling_filter_path(args, group, **kwargs): ...
def rollout_sample_filter_path(args, data): ...
def rollout_all_samples_process_path(args, all_groups, data_source): ...
def custom_reward_post_process_path(args, samples): ...
def custom_convert_samples_to_train_data_path(args, samples): ...
def custom_rollout_log_function_path(rollout_id, args, samples, rollout_extra_metrics, rollout_time): ...
def custom_eval_rollout_log_function_path(rollout_id, args, data, extra_metrics): ...
def rollout_data_postprocess_path(args, rollout_id, rollout_data): ...
def custom_advantage_function_path(args, rollout_data): ...
def custom_loss_function_path(args, batch, logits, sum_of_sample_mean): ...
def custom_tis_function_path(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs): ...
def custom_pg_loss_reducer_function_path(total_lengths, response_lengths, loss_masks, calculate_per_token_loss): ...
def custom_megatron_init_path(args): ...
def custom_megatron_before_log_prob_hook_path(args, model_chunks, store_prefix): ...
def custom_megatron_before_train_step_hook_path(args, rollout_id, step_id, model, optimizer, opt_param_scheduler): ...
def custom_model_provider_path(pre_process, post_process, vp_stage=None): ...
def spec(args, config, vp_stage): ...
async def slime_router_middleware_paths(request, handler): ...
def custom_update_weight_post_write_path(args, version_dir, rollout_engines): ...


class data_source_path:
    def __init__(self, args): ...
    def get_samples(self, num_groups): ...
    def add_samples(self, groups): ...
    def save(self, rollout_id): ...
    def load(self, rollout_id=None): ...
    def __len__(self): ...


def takes_nothing(): ...
async def takes_nothing_async(): ...


not_callable = 3


@pytest.fixture(autouse=True)
def importable() -> Iterator[None]:
    """This module under a name that paths can use, whatever pytest calls it."""
    module = types.ModuleType("hooks_under_test")
    vars(module).update(globals())
    sys.modules["hooks_under_test"] = module
    yield
    del sys.modules["hooks_under_test"]


def problems(dest: str, name: str) -> list[str]:
    return hook_problems(HOOK[dest], f"--{dest.replace('_', '-')}", f"hooks_under_test.{name}")


@pytest.mark.parametrize("dest", HOOK)
def test_right_signature(dest: str) -> None:
    assert problems(dest, dest) == []


@pytest.mark.parametrize("dest", HOOK)
def test_wrong_signature_shows_the_right_one(dest: str) -> None:
    name = "takes_nothing_async" if HOOK[dest].is_async else "takes_nothing"
    (problem,) = problems(dest, name)
    assert problem.startswith(f"--{dest.replace('_', '-')} hooks_under_test.{name}: ")
    assert problem.endswith(f"expected {HOOK[dest].signature}")


@pytest.mark.parametrize("dest", [hook.dest for hook in HOOKS if hook.is_async])
def test_async_is_needed(dest: str) -> None:
    (problem,) = problems(dest, "rollout_function_path" if "generate" in dest else "rollout_sample_filter_path")
    assert "is not an async function" in problem


def test_every_path_flag_is_a_hook() -> None:
    """A flag that names a function of the user's is in the table, so that it is checked."""
    not_hooks = {"megatron_config_path", "custom_config_path"}
    paths = {
        entry.dest
        for entry in flag_table()
        if entry.dest.endswith("_path") and not entry.is_switch and not entry.group.startswith("SGLang")
    }
    assert paths - not_hooks == set(HOOK) - {"spec", "slime_router_middleware_paths"}


def test_spec_is_a_layer_spec_or_a_provider() -> None:
    assert problems("spec", "spec") == problems("spec", "custom_model_provider_path") == []


def test_assert_hook_for_ones_own_tests() -> None:
    assert_hook("--custom-rm-path", "hooks_under_test.custom_rm_path")
    with pytest.raises(AssertionError, match="expected async fn"):
        assert_hook("--custom-rm-path", "hooks_under_test.takes_nothing")
    with pytest.raises(AssertionError, match=r"names no function \(did you mean --custom-rm-path"):
        assert_hook("--custom-rm-pat", "hooks_under_test.custom_rm_path")


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("nodots", "is not a path of the form package.module.attribute"),
        ("nowhere.fn", "can't be imported (No module named 'nowhere')"),
        ("hooks_under_test.nothing", "has no attribute 'nothing'"),
        ("hooks_under_test.not_callable", "is a int, which can't be called"),
    ],
)
def test_not_found(path: str, part: str) -> None:
    (problem,) = hook_problems(HOOK["custom_rm_path"], "--custom-rm-path", path)
    assert part in problem


def test_module_that_fails_while_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_hook.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = hook_problems(HOOK["custom_rm_path"], "--custom-rm-path", "broken_hook.fn")
    assert "can't be imported (ZeroDivisionError: division by zero)" in problem


def test_data_source_without_methods() -> None:
    (problem,) = problems("data_source_path", "HOOK")
    assert "can't be called" in problem
    (problem,) = problems("data_source_path", "takes_nothing")
    assert "is not a class" in problem


def test_callable_object_and_wrapped_function() -> None:
    import functools

    class Reward:
        async def __call__(self, args, sample): ...

    def logged(fn):
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            return fn(*args, **kwargs)

        return inner

    module = sys.modules["hooks_under_test"]
    module.reward_object = Reward()  # type: ignore[attr-defined]
    module.wrapped = logged(custom_rm_path)  # type: ignore[attr-defined]
    assert problems("custom_rm_path", "reward_object") == []
    assert problems("custom_rm_path", "wrapped") == []
