"""Advantages, losses and what they are compared with."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, off_switch, positive_int, switch

_ESTIMATORS = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
_LEVELS = ("token", "sequence", "geometric")

FLAGS = in_group(
    "Algorithm",
    [
        flag(
            "--advantage-estimator",
            str,
            "grpo",
            "how advantages come from rewards; ppo trains a critic too",
            choices=_ESTIMATORS,
        ),
        flag(
            "--loss-type",
            str,
            "policy_loss",
            "the loss",
            choices=("policy_loss", "sft_loss", "custom_loss"),
        ),
        flag("--custom-loss-function-path", str, None, "loss function of --loss-type custom_loss"),
        off_switch(
            "--disable-compute-advantages-and-returns",
            "compute_advantages_and_returns",
            "skip the reference's and old log-probs and the advantages (supervised training)",
        ),
        flag("--custom-advantage-function-path", str, None, "function that sets advantages and returns"),
        flag("--eps-clip", float, 0.2, "clip distance below 1"),
        flag("--eps-clip-high", float, None, "clip distance above 1; unset: --eps-clip"),
        flag("--eps-clip-c", float, None, "dual-clip constant, above 1"),
        flag("--value-clip", float, 0.2, "clip distance of values"),
        flag("--kl-coef", float, 0.0, "weight of the KL penalty inside rewards"),
        flag("--kl-loss-type", str, "k1", "KL estimator", choices=("k1", "k2", "k3", "low_var_kl")),
        switch("--use-kl-loss", "add a KL term to the loss"),
        flag("--kl-loss-coef", float, 0.0, "weight of that term"),
        switch("--use-unbiased-kl", "multiply the KL by the importance ratio"),
        flag(
            "--ref-update-interval",
            positive_int,
            None,
            "copy the actor into the reference every N rollouts",
        ),
        flag("--entropy-coef", float, 0.0, "weight of the entropy bonus"),
        flag("--gamma", float, 1.0, "discount"),
        flag("--lambd", float, 1.0, "lambda of generalised advantage estimation"),
        switch("--normalize-advantages", "whiten advantages over the data- and context-parallel ranks"),
        off_switch(
            "--disable-grpo-std-normalization",
            "grpo_std_normalization",
            "don't divide centred rewards by the group's standard deviation",
        ),
        off_switch("--disable-rewards-normalization", "rewards_normalization", "leave rewards as they are"),
        switch("--use-rollout-entropy", "compute the entropy in the log-prob passes"),
        switch("--get-mismatch-metrics", "measure how the engine's log-probs differ"),
        switch("--reset-optimizer-states", "zero Adam's moments and step count at each rollout"),
        switch("--use-stateless-adam", "Adam that keeps no moments: each step is Adam's first"),
        switch("--use-rollout-logprobs", "take the engine's log-probs as the old policy's"),
        switch("--use-tis", "importance weights between trainer and engine"),
        flag("--tis-clip", float, 2.0, "their upper bound"),
        flag("--tis-clip-low", float, 0.0, "their lower bound"),
        flag("--custom-tis-function-path", str, None, "function that computes them"),
        flag("--tis-level", str, "token", "MIS: what has one weight; geometric: mean log-ratio", choices=_LEVELS),
        flag("--tis-mode", str, "truncate", "MIS: what bounds do to weights", choices=("truncate", "clip", "mask")),
        flag("--tis-lower-bound", float, None, "MIS: lower bound of weights; unset: 1 / --tis-upper-bound"),
        flag("--tis-upper-bound", float, 2.0, "MIS: upper bound of weights"),
        switch("--tis-batch-normalize", "MIS: divide weights by their mean over the optimiser step"),
        switch("--use-rs", "MIS: reject tokens or sequences by their weights"),
        flag("--rs-level", str, "token", "MIS: what is rejected together", choices=_LEVELS),
        flag("--rs-lower-bound", float, None, "MIS: reject below; unset: as --tis-lower-bound"),
        flag("--rs-upper-bound", float, None, "MIS: reject above; unset: --tis-upper-bound"),
        flag("--rs-veto-threshold", float, None, "MIS: reject sequences with a token ratio below it"),
        flag(
            "--custom-pg-loss-reducer-function-path",
            str,
            None,
            "function that makes the reduction of the policy loss",
        ),
        switch("--use-routing-replay", "train with the expert choices of the own log-prob pass"),
        switch("--use-rollout-routing-replay", "train with the engine's expert choices, which come with each sample"),
        switch("--use-opsm", "off-policy sequence masking"),
        flag("--opsm-delta", float, 1e-4, "its KL threshold"),
        flag("--num-critic-only-steps", int, 0, "rollouts in which only the critic trains"),
        flag("--megatron-config-path", str, None, "YAML file of settings per role (actor, critic)"),
        flag(
            "--constant-loss-denominator",
            positive_int,
            None,
            "divide each rollout's summed token losses by this number, not by its number of loss tokens (Dr. GRPO)",
        ),
    ],
)
