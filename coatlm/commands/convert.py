"""Convert checkpoints between Hugging Face, Megatron and coatlm, one tensor in memory at a time.

    coatlm convert --from hf --to coatlm models/llama checkpoints/llama
    coatlm convert --from coatlm --to hf runs/mine exported --dtype bf16
    coatlm convert --from megatron --to coatlm megatron/run checkpoints/run
    coatlm convert --from coatlm --to megatron runs/mine megatron/mine

    hf          a directory with config.json and safetensors of Llama 1 to 3, Mistral, Qwen2, 2.5 or
                3, Phi-3 or 4, OLMo-2 or 3, Granite 3, or Gemma 2 or 3
    megatron    a directory of Megatron-LM or Megatron-Bridge, whose newest iteration is read
    coatlm      a checkpoint of any layout, or a run, whose newest checkpoint is read

What coatlm does not support is an error; docs/guides/huggingface.md and
docs/guides/from-megatron-lm.md have the details.

Exit code: 0; 2 with one line that says what does not fit or why DESTINATION cannot be written (for
example a full disk, after which nothing of it is left); 4 if the checkpoint to read is damaged.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
from typing import TYPE_CHECKING

from coatlm.console import (
    Parser,
    fail,
    ignore_library_warnings,
    local_path,
    output_path,
    tokenizer_spec,
)

if TYPE_CHECKING:
    from coatlm.hf.files import Report

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
KINDS = ("hf", "megatron", "coatlm")
OPTIONS = {  # (from, to) -> the options that apply, besides --dtype
    ("hf", "coatlm"): ("tokenizer", "vocab_multiple", "seq_len"),
    ("megatron", "coatlm"): ("tokenizer", "vocab_multiple", "seq_len", "config", "weights_only"),
    ("coatlm", "megatron"): ("vocab_multiple", "weights_only"),
    ("coatlm", "hf"): (
        *("like", "vocab_size", "stop_tokens", "max_shard_size"),
        *("format", "fp8_scales", "fp8_activations"),
    ),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --help prints the module docstring."""
    parser = Parser(__doc__, "convert")
    add = parser.add_argument
    add("--from", dest="source_kind", choices=KINDS, required=True)
    add("--to", dest="target_kind", choices=KINDS, required=True)
    add("source", type=local_path)
    add("destination", type=output_path, help="a new directory")
    add("--dtype", choices=["bf16", "fp32", "fp16"], help="of the result; default: as stored")
    add(
        "--tokenizer",
        type=tokenizer_spec,
        help="to coatlm: a spec in place of the directory's, or none",
    )
    add("--vocab-multiple", type=int, help="pad the vocabulary to a multiple of this; not to hf")
    add("--seq-len", type=int, help="to coatlm: data.seq_len; default: that of the model")
    add(
        "--config",
        type=local_path,
        help="from megatron: YAML of coatlm whose model, optim, train and data.seq_len replace the "
        "checkpoint's",
    )
    add(
        "--weights-only",
        action="store_true",
        default=None,
        help="from and to megatron: leave out optimizer states",
    )
    add("--like", type=local_path, help="to hf: directory that gives family, tokenizer and so on")
    add(
        "--vocab-size",
        type=int,
        help="to hf: rows of the embedding to write; default: see the guide",
    )
    add(
        "--stop-token",
        dest="stop_tokens",
        action="append",
        metavar="TOKEN",
        help="to hf: a token at which generation ends too, such as '<|im_end|>', is added to "
        "eos_token_id; may be repeated",
    )
    add("--max-shard-size", type=_bytes, help="to hf: largest file, for example 2GB; default: 5GB")
    add("--format", choices=["plain", "fp8"], help="to hf: fp8 is E4M3 with scales")
    add(
        "--fp8-scales",
        choices=["channel", "tensor", "block"],
        help="of fp8 weights; block is 128 x 128, as DeepSeek's; default: channel",
    )
    add("--fp8-activations", choices=["dynamic", "none"], help="default: dynamic")
    parsed = parser.parse(arguments)
    kinds = parsed.source_kind, parsed.target_kind
    if kinds not in OPTIONS:
        known = ", ".join(f"{a} to {b}" for a, b in OPTIONS)
        parser.error(f"--from {kinds[0]} --to {kinds[1]}: one of {known}")
    for name in sorted({option for options in OPTIONS.values() for option in options}):
        if getattr(parsed, name) is not None and name not in OPTIONS[kinds]:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} does not apply to --from {kinds[0]} --to {kinds[1]}")
    if parsed.format != "fp8" and (parsed.fp8_scales or parsed.fp8_activations):
        parser.error("--fp8-scales and --fp8-activations need --format fp8")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Convert; errors of the user become one line and an exit code."""
    args = parse_arguments(arguments)
    ignore_library_warnings()
    from coatlm.train.checkpoint import CheckpointError

    try:
        report = convert(args)
    except CheckpointError as error:
        return fail(error, 4)
    except (ValueError, OSError) as error:
        return fail(error)
    for note in report.notes:
        print(f"note: {note}")
    print(f"{args.destination}: {report.tensors} tensors, {report.bytes / 1e6:,.1f} MB")
    return 0


def convert(args: argparse.Namespace) -> Report:
    """Call the conversion that the command line asks for."""
    from coatlm.convert.from_hf import from_huggingface
    from coatlm.convert.from_megatron import from_megatron
    from coatlm.convert.to_hf import SHARD_BYTES, to_huggingface
    from coatlm.convert.to_megatron import to_megatron
    from coatlm.hf.fp8 import Fp8Export

    paths, multiple = (args.source, args.destination), args.vocab_multiple
    multiple = 1 if multiple is None else multiple
    common = {"dtype": args.dtype, "vocab_multiple": multiple}
    kinds = args.source_kind, args.target_kind
    if kinds == ("hf", "coatlm"):
        return from_huggingface(*paths, **common, tokenizer=args.tokenizer, seq_len=args.seq_len)
    if kinds == ("coatlm", "megatron"):
        return to_megatron(*paths, **common, weights_only=bool(args.weights_only))
    if kinds == ("megatron", "coatlm"):
        return from_megatron(
            *paths,
            **common,
            tokenizer=args.tokenizer or "none",
            seq_len=args.seq_len,
            config=args.config,
            weights_only=bool(args.weights_only),
        )
    fp8 = None
    if args.format == "fp8":
        fp8 = Fp8Export(args.fp8_scales or "channel", args.fp8_activations != "none")
    return to_huggingface(
        *paths,
        dtype=args.dtype,
        like=args.like,
        vocab_size=args.vocab_size,
        stop_tokens=args.stop_tokens or (),
        shard_bytes=SHARD_BYTES if args.max_shard_size is None else args.max_shard_size,
        fp8=fp8,
    )


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
