"""Convert a Hugging Face folder to INT4 in compressed-tensors' packed format, as SGLang and transformers load it.

    python tools/convert_hf_to_int4.py --model-dir HF --save-dir HF-INT4 [--group-size 128]

Weights are rounded to the nearest of 15 multiples of their group's scale; there is no calibration. Embeddings, output
layer and routers keep their precision. One file's weights are in memory at a time.
"""

from __future__ import annotations

import argparse

LEFT_OUT = ["lm_head", "re:.*mlp\\.gate$", "re:.*shared_expert_gate$", "re:.*visual.*"]


def main() -> None:
    options = _parse_args()
    from slime.backends.megatron_utils.low_precision import scheme_from_config
    from slime.backends.megatron_utils.low_precision.convert_folder import convert_folder

    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": options.group_size,
        "dynamic": False,
        "observer": "minmax",
        "actorder": None,
        "block_structure": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": [*LEFT_OUT, *options.ignore],
    }
    convert_folder(options, scheme_from_config(config), config)


def _parse_args() -> argparse.Namespace:
    from slime.backends.megatron_utils.low_precision.convert_folder import parser

    options = parser(__doc__)
    options.add_argument(
        "--group-size", type=int, choices=(32, 64, 128), default=32, help="columns that share a scale"
    )
    options.add_argument("--ignore", nargs="*", default=[], help="more modules that keep their precision")
    return options.parse_args()


if __name__ == "__main__":
    main()
