"""Convert a Megatron torch_dist checkpoint into a Hugging Face directory.

    python tools/convert_torch_dist_to_hf.py --input-dir CHECKPOINT[/iter_0000012] --output-dir OUT --origin-hf-dir HF

One process, no devices. Config and tokenizer come from `--origin-hf-dir`; weights keep the dtype they are stored in.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    args = _parse_args()
    output = Path(args.output_dir)
    if output.exists() and not args.force:
        raise SystemExit(f"{output} exists; --force replaces it")

    from slime.backends.megatron_utils.checkpoint import is_megatron_checkpoint, resolve_iteration
    from slime.backends.megatron_utils.families import ModelShape, family_of_checkpoint, read_hf_config
    from slime.backends.megatron_utils.hf_checkpoint_saver import HfWriter
    from slime.backends.megatron_utils.megatron_to_hf.torch_dist import read_hf_tensors

    if not is_megatron_checkpoint(args.input_dir):
        raise SystemExit(f"{args.input_dir} is no Megatron checkpoint")
    iteration = resolve_iteration(Path(args.input_dir), args.ckpt_step)
    shape = ModelShape.from_hf(read_hf_config(args.origin_hf_dir))
    writer = HfWriter(output, Path(args.origin_hf_dir))
    for chunk in read_hf_tensors(iteration, family_of_checkpoint(args.origin_hf_dir), shape, args.chunk_size):
        writer.write(chunk)
    writer.finish()
    print(f"{iteration} -> {output}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", required=True, help="checkpoint directory, or one iter_* directory of it")
    parser.add_argument("--output-dir", required=True, help="Hugging Face directory to write")
    parser.add_argument("--origin-hf-dir", required=True, help="Hugging Face directory of the same model")
    parser.add_argument("--ckpt-step", type=int, help="iteration to convert; default: the newest")
    parser.add_argument("--chunk-size", type=int, default=5 << 30, help="bytes per safetensors file, about")
    parser.add_argument("-f", "--force", action="store_true", help="replace the output directory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
