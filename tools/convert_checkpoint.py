"""Convert checkpoints between Hugging Face and coatlm, with one tensor in memory at a time.

    python tools/convert_checkpoint.py --from hf --to coatlm models/llama checkpoints/llama
    python tools/convert_checkpoint.py --from coatlm --to hf runs/mine exported --dtype bf16

Hugging Face stands for a directory with config.json and safetensors of Llama 1 to 3, Mistral,
Qwen2, 2.5 or 3; coatlm for a checkpoint of any layout, or a run, whose newest checkpoint is used. A
field of config.json that coatlm does not support is an error. docs/guides/huggingface.md has the
details.

Exit code: 0; 2 with one line that says what does not fit or why DESTINATION cannot be written (for
example a full disk, after which nothing of it is left); 4 if the checkpoint to read is damaged.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import warnings
from pathlib import Path

from coatlm.console import Parser, fail

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
IMPORT_ONLY = ("tokenizer", "vocab_multiple", "seq_len")
EXPORT_ONLY = ("like", "vocab_size", "max_shard_size", "format", "fp8_scales", "fp8_activations")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --help prints the module docstring."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--from", dest="source_kind", choices=["hf", "coatlm"], required=True)
    add("--to", dest="target_kind", choices=["hf", "coatlm"], required=True)
    add("source", type=Path)
    add("destination", type=Path, help="a new directory")
    add("--dtype", choices=["bf16", "fp32", "fp16"], help="of the result; default: as stored")
    add("--tokenizer", help="to coatlm: a spec of data.tokenizer in place of the directory's")
    add("--vocab-multiple", type=int, help="to coatlm: pad the vocabulary to a multiple of this")
    add("--seq-len", type=int, help="to coatlm: data.seq_len; default: max_position_embeddings")
    add("--like", type=Path, help="to hf: directory that gives family, tokenizer and so on")
    add(
        "--vocab-size",
        type=int,
        help="to hf: rows of the embedding to write; default: see the guide",
    )
    add("--max-shard-size", type=_bytes, help="to hf: largest file, for example 2GB; default: 5GB")
    add("--format", choices=["plain", "fp8"], help="to hf: fp8 is E4M3 as compressed-tensors")
    add("--fp8-scales", choices=["channel", "tensor"], help="of fp8 weights; default: channel")
    add("--fp8-activations", choices=["dynamic", "none"], help="default: dynamic")
    parsed = parser.parse_args(arguments)
    if parsed.source_kind == parsed.target_kind:
        parser.error(f"--from {parsed.source_kind} --to {parsed.target_kind}: nothing to convert")
    foreign = IMPORT_ONLY if parsed.target_kind == "hf" else EXPORT_ONLY
    for name in foreign:
        if getattr(parsed, name) is not None:
            parser.error(f"--{name.replace('_', '-')} does not apply to --to {parsed.target_kind}")
    if parsed.format != "fp8" and (parsed.fp8_scales or parsed.fp8_activations):
        parser.error("--fp8-scales and --fp8-activations need --format fp8")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Convert; errors of the user become one line and an exit code."""
    args = parse_arguments(arguments)
    for module in (r"megatron\.", r"torch\.distributed\.checkpoint\."):
        warnings.filterwarnings("ignore", category=UserWarning, module=module)
    from coatlm.hf.files import Report
    from coatlm.hf.fp8 import Fp8Export
    from coatlm.hf.from_hf import from_huggingface
    from coatlm.hf.to_hf import SHARD_BYTES, to_huggingface
    from coatlm.train.checkpoint import CheckpointError

    def convert() -> Report:
        if args.target_kind == "coatlm":
            return from_huggingface(
                args.source,
                args.destination,
                dtype=args.dtype,
                tokenizer=args.tokenizer,
                vocab_multiple=1 if args.vocab_multiple is None else args.vocab_multiple,
                seq_len=args.seq_len,
            )
        fp8 = Fp8Export(args.fp8_scales or "channel", args.fp8_activations != "none")
        return to_huggingface(
            args.source,
            args.destination,
            dtype=args.dtype,
            like=args.like,
            vocab_size=args.vocab_size,
            shard_bytes=SHARD_BYTES if args.max_shard_size is None else args.max_shard_size,
            fp8=fp8 if args.format == "fp8" else None,
        )

    try:
        report = convert()
    except CheckpointError as error:
        return fail(error, 4)
    except (ValueError, OSError) as error:
        return fail(error)
    for note in report.notes:
        print(f"note: {note}")
    print(f"{args.destination}: {report.tensors} tensors, {report.bytes / 1e6:,.1f} MB")
    return 0


def _bytes(text: str) -> int:
    """Parse a size: `2GB` -> 2 * 10^9."""
    number = text.rstrip("KMGB")
    unit = text[len(number) :]
    if not number.isdigit() or unit not in UNITS or int(number) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a number with {', '.join(filter(None, UNITS))}"
        )
    return int(number) * UNITS[unit]


if __name__ == "__main__":
    process.run(main)
