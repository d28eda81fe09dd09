"""What is loaded and saved."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, positive_int, switch

FLAGS = in_group(
    "Checkpoints",
    [
        flag("--load", str, None, "folder to resume from: Megatron checkpoint or Hugging Face model"),
        flag(
            "--ref-load",
            str,
            None,
            "reference model, and the first weights where --load has no checkpoint; unset: --hf-checkpoint",
        ),
        flag("--ref-ckpt-step", int, None, "iteration of the reference checkpoint"),
        flag("--ckpt-step", int, None, "iteration to load from --load; unset: the latest"),
        flag("--save", str, None, "folder to save checkpoints in"),
        flag("--save-interval", positive_int, None, "rollouts between saves"),
        flag(
            "--keep-checkpoints",
            positive_int,
            None,
            "checkpoints to keep, the newest ones; older ones go, with their data state. Unset: all",
        ),
        switch("--async-save", "write checkpoints in the background while training goes on"),
        switch("--no-save-optim", "don't save the optimiser's state"),
        switch("--no-save-rng", "don't save the random number generators' state"),
        switch("--no-load-optim", "don't load the optimiser's state", default=None),
        switch("--no-load-rng", "don't load the random number generators' state", default=None),
        switch("--finetune", "take only the weights from --load and start at rollout 0", default=None),
        flag("--save-hf", str, None, "also export a Hugging Face model there at each save; {rollout_id} is filled in"),
        flag("--start-rollout-id", int, None, "index of the first rollout; unset: one after the checkpoint's"),
    ],
)
