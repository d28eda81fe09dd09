"""Convert a Hugging Face folder with FP8 or packed INT4 weights to bfloat16.

    python tools/convert_hf_to_bf16.py --model-dir HF-FP8 --save-dir HF

Training reads such folders without this. One file's weights are in memory at a time.
"""

from __future__ import annotations


def main() -> None:
    from slime.backends.megatron_utils.low_precision.convert_folder import convert_folder, parser

    convert_folder(parser(__doc__).parse_args(), None, None)


if __name__ == "__main__":
    main()
