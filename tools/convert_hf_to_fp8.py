"""Convert a Hugging Face folder to FP8 (e4m3), as SGLang and transformers load it.

    python tools/convert_hf_to_fp8.py --model-dir HF --save-dir HF-FP8 [--strategy tensor] [--scale-fmt ue8m0]

`block` stores one scale per 128 x 128 numbers, `tensor` one per weight. Embeddings, output layer, norms and routers
keep their precision. One file's weights are in memory at a time. The source may be in low precision itself.
"""

from __future__ import annotations

import argparse
from typing import Any


def main() -> None:
    options = _parse_args()
    from slime.backends.megatron_utils.low_precision import scheme_from_config
    from slime.backends.megatron_utils.low_precision.convert_folder import convert_folder

    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": options.ignore,
    }
    if options.strategy == "block":
        config["weight_block_size"] = options.block_size
    if options.scale_fmt is not None:
        config["scale_fmt"] = options.scale_fmt
    convert_folder(options, scheme_from_config(config), config)


def _parse_args() -> argparse.Namespace:
    from slime.backends.megatron_utils.low_precision.convert_folder import parser

    options = parser(__doc__)
    options.add_argument("--strategy", choices=("block", "tensor"), default="block", help="what shares a scale")
    options.add_argument("--block-size", type=int, nargs=2, default=[128, 128], help="rows and columns of a block")
    options.add_argument("--scale-fmt", choices=("ue8m0",), help="scales that are powers of two")
    options.add_argument("--ignore", nargs="*", default=[], help="more modules that keep their precision")
    parsed = options.parse_args()
    if parsed.scale_fmt is not None and parsed.strategy != "block":
        options.error("--scale-fmt ue8m0 is for --strategy block")
    return parsed


if __name__ == "__main__":
    main()
