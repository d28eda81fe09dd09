"""Convert a Megatron torch_dist checkpoint into a Hugging Face directory.

    python tools/convert_torch_dist_to_hf.py --input-dir CHECKPOINT[/iter_0000012] --output-dir OUT --origin-hf-dir HF

One process, no devices. Config and tokenizer come from `--origin-hf-dir`; weights keep the dtype they are stored in,
or get the low precision that they have there. In memory at a time: one file's weights, and one stored tensor.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    options = _parse_args()
    output, origin = Path(options.output_dir), Path(options.origin_hf_dir)
    if output.exists() and not options.force:
        raise SystemExit(f"{output} exists; --force replaces it")

    from tqdm import tqdm

    from slime.backends.megatron_utils.checkpoint import is_megatron_checkpoint, resolve_iteration
    from slime.backends.megatron_utils.families import ModelShape, family_of_checkpoint, read_hf_config
    from slime.backends.megatron_utils.hf_checkpoint_saver import HfWriter
    from slime.backends.megatron_utils.low_precision import scheme_of_checkpoint
    from slime.backends.megatron_utils.megatron_to_hf.torch_dist import read_hf_tensors, stored_weights, total_bytes

    if not is_megatron_checkpoint(options.input_dir):
        raise SystemExit(f"{options.input_dir} is no Megatron checkpoint")
    iteration = resolve_iteration(Path(options.input_dir), options.ckpt_step)
    family, shape = family_of_checkpoint(origin), ModelShape.from_hf(read_hf_config(origin))
    scheme = scheme_of_checkpoint(origin)
    stored = stored_weights(iteration)
    size = total_bytes(stored)
    print(f"{iteration} -> {output}: {len(stored)} stored tensors, {size / (1 << 30):.2f} GiB")
    if options.dry_run:
        return
    writer = HfWriter(output, origin)
    with tqdm(total=size, unit="B", unit_scale=True, desc="converting") as progress:
        for chunk in read_hf_tensors(iteration, family, shape, options.chunk_size):
            progress.update(sum(tensor.numel() * tensor.element_size() for _, tensor in chunk))
            if scheme is not None:
                chunk = [part for name, tensor in chunk for part in scheme.quantize(name, tensor)]
            writer.write(chunk)
    writer.copy_kept()
    writer.finish()
    print(f"written: {output}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", required=True, help="checkpoint directory, or one iter_* directory of it")
    parser.add_argument("--output-dir", required=True, help="Hugging Face directory to write")
    parser.add_argument("--origin-hf-dir", required=True, help="Hugging Face directory of the same model")
    parser.add_argument("--ckpt-step", type=int, help="iteration to convert; default: the newest")
    parser.add_argument("--chunk-size", type=int, default=5 << 30, help="bytes per safetensors file, about")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    parser.add_argument("-f", "--force", action="store_true", help="replace the output directory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
