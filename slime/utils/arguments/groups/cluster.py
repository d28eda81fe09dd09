"""Where the run lives: nodes, devices, colocation, process groups."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, json_value, positive_int, switch

FLAGS = in_group(
    "Cluster",
    [
        flag("--actor-num-nodes", positive_int, 1, "nodes used by the training actor"),
        flag("--actor-num-gpus-per-node", positive_int, 8, "training devices on each of those nodes"),
        flag(
            "--rollout-num-gpus",
            int,
            None,
            "devices for SGLang; colocated and unset: all training devices; 0: a router without engines",
        ),
        flag("--rollout-num-gpus-per-engine", positive_int, 1, "devices of one engine (tensor x pipeline parallel)"),
        flag("--num-gpus-per-node", positive_int, 8, "devices of a node; set it where nodes have fewer than 8"),
        switch("--colocate", "training and engines share devices and take turns; switches offloading on"),
        switch("--offload", "short for --offload-train --offload-rollout"),
        switch("--offload-train", "put the trainer to sleep between train calls", default=None),
        switch("--offload-rollout", "release the engines' memory while training", default=None),
        flag(
            "--distributed-backend",
            str,
            None,
            "torch.distributed backend; unset: the device's own (nccl, hccl, gloo)",
            choices=("nccl", "hccl", "gloo"),
        ),
        flag("--distributed-timeout-minutes", positive_int, 10, "deadline of a collective"),
        flag(
            "--engine-start-timeout",
            float,
            600.0,
            "seconds that an engine may take from its start until it answers",
        ),
        flag(
            "--train-env-vars",
            json_value,
            {},
            'JSON object of environment variables for the training actors, such as \'{"NCCL_DEBUG": "WARN"}\'',
        ),
    ],
)
