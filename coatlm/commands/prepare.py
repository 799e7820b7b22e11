"""Tokenize text files, JSON lines and parquet into the datasets that training reads.

    coatlm prepare --input 'corpus/*.jsonl.zst' --output-prefix data/corpus \\
        --tokenizer hf:tokenizer.json --workers 32

writes data/corpus.bin and data/corpus.idx (Megatron's indexed dataset), data/corpus.json (its
manifest) and data/corpus.crc32 (checksums of the tokens, which training verifies when it reads).
Train on them with `data.paths=[data/corpus] data.tokenizer=hf:tokenizer.json`.

    coatlm prepare --chat --input talks.jsonl --output-prefix data/talks \\
        --tokenizer hf:model/tokenizer.json

prepares fine-tuning. A JSON line has `messages`, a list of {role, content}, or `prompt` and
`completion`. The chat template of the tokenizer makes a text of it: that in chat_template.jinja or
tokenizer_config.json beside its tokenizer.json, or a file named by --chat-template. With
`--chat-template none`, for any tokenizer, a document is prompt, completion and end-of-document.
data/talks.mask has one byte per token, 1 for what the assistant writes, its end-of-turn token
included, and 0 for the rest; data/talks.mask.crc32 its checksums. Train with
`data.loss_mask=completion data.packing=best-fit`.

    coatlm prepare --verify data/corpus data/other

reads whole datasets and verifies their checksums, for example after a copy.

With `--pack 8192`, the last lines say what samples of 8192 tokens (data.seq_len) cost with each
value of data.packing: their number, the share of padding, and how many documents are cut, over the
whole dataset, before data.split divides it. Nothing of this is stored.

The name of a file determines its format, in letters of either case:
  *.jsonl *.ndjson *.json    one JSON object per line, with the document in --field
  *.parquet                  one document per row, in --column
  everything else            plain text, one document per file (or per --shard-mb of a larger one)
All but parquet may be compressed: *.gz, *.zst, *.zstd. Other compressions and binary formats, such
as *.bz2 and *.arrow, are an error, and so is a file whose first bytes are those of a compression or
format that its name does not say. Bytes that are not UTF-8 are replaced by U+FFFD and counted;
documents without text are skipped and counted. Memory is bounded; a file that exceeds
--max-expansion or --max-record-mb is an error.

If OUTPUT_PREFIX already has the tokens of these inputs and options, nothing is done. If it was made
from others, or is damaged, --overwrite is needed. The checksums of files of up to 1 GiB are
verified here, those of larger ones only by --verify.

An interrupted run leaves OUTPUT_PREFIX.shards; the same command resumes from it. The result is the
same, byte for byte, for any number of workers and interruptions. Exit code: 0; 2 for an error,
which one line explains; 4 if the disk is full.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import errno
import os
import time
from pathlib import Path
from typing import Any

from coatlm.console import (
    Parser,
    explain,
    fail,
    local_path,
    local_text,
    output_path,
    progress,
    tokenizer_spec,
)
from coatlm.data.chat import NONE, OWN, chat_format
from coatlm.data.indexed import open_checked, read_index
from coatlm.data.packing import packing_cost
from coatlm.data.preprocess import preprocess
from coatlm.data.streams import DEFAULT_LIMITS, Limits
from coatlm.data.token_shard import SHARD_BYTES, Options
from coatlm.data.tokenizer import SPECS, make_tokenizer

RANGES = {  # of numbers
    "workers": (0, 4096),
    "shard_mb": (1, 1 << 20),
    "max_expansion": (1, 1e9),
    "max_record_mb": (1, 1 << 20),
}
DEFAULTS: dict[str, Any] = {  # of the options of --input, which have no effect with --verify
    "tokenizer": "byte",
    "field": "text",
    "column": "text",
    "chat": False,
    "chat_template": None,
    "append_eod": True,
    "shard_mb": SHARD_BYTES >> 20,
    "max_expansion": DEFAULT_LIMITS.max_expansion,
    "max_record_mb": DEFAULT_LIMITS.max_record >> 20,
    "pack": None,
    "overwrite": False,
}


def output_prefix(text: str) -> Path:
    """The `type` of --output-prefix: the beginning of the names of files, not a directory."""
    path = output_path(text)
    if text.endswith("/"):
        example = "give the beginning of the names of files"
        raise argparse.ArgumentTypeError(f"{text}: {example}, such as {text}corpus")
    return path


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --help prints the module docstring."""
    parser = Parser(__doc__, "prepare")
    add = parser.add_argument
    add("--input", nargs="+", help="files, globs (** for any depth), URLs, python-stdlib")
    add("--output-prefix", type=output_prefix, help="PREFIX of the four files to write")
    add(
        "--verify",
        nargs="+",
        type=local_path,
        metavar="PREFIX",
        help="verify checksums of datasets",
    )
    add("--tokenizer", type=tokenizer_spec, help=f"{SPECS} (default: byte)")
    add("--field", help="of a JSON line (default: text)")
    add("--column", help="of parquet (default: text)")
    add(
        "--chat",
        action="store_true",
        default=None,
        help="JSON lines are conversations; write a loss mask",
    )
    add(
        "--chat-template",
        type=local_text,
        metavar="TEMPLATE",
        help=f"of --chat: {OWN} (the tokenizer's, default), {NONE}, or a jinja file",
    )
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        help="end every document with the tokenizer's end-of-document id (default: yes)",
    )
    add("--workers", type=int, default=0, help="processes; 0: one per core (default)")
    add(
        "--shard-mb",
        type=int,
        help=f"MiB of input that one process takes at a time (default: {DEFAULTS['shard_mb']})",
    )
    add(
        "--max-expansion",
        type=float,
        help="bytes of text that a compressed file may hold per byte (default: "
        f"{DEFAULTS['max_expansion']:g})",
    )
    add(
        "--max-record-mb",
        type=int,
        help="MiB of a JSON line, parquet value or zstd window (default: "
        f"{DEFAULTS['max_record_mb']})",
    )
    add(
        "--pack",
        type=int,
        metavar="SEQ_LEN",
        help="print what packing into samples of SEQ_LEN tokens would cost",
    )
    add(
        "--overwrite",
        action="store_true",
        default=None,
        help="prepare again and replace the dataset that exists, whatever it was made from",
    )
    parsed = parser.parse(arguments)
    if bool(parsed.verify) == bool(parsed.input or parsed.output_prefix) or bool(
        parsed.input
    ) != bool(parsed.output_prefix):
        parser.error("give either --input and --output-prefix, or --verify")
    for prefix in parsed.verify or [parsed.output_prefix]:
        if not prefix.name:
            option = "--verify" if parsed.verify else "--output-prefix"
            example = "give the beginning of the names of files, such as data/corpus"
            parser.error(f"{option} {prefix}: {example}")
    _refuse_ignored(parser, parsed)
    if parsed.chat_template is not None and not parsed.chat:
        parser.error("--chat-template is an option of --chat")
    for name, (least, most) in RANGES.items():
        value = getattr(parsed, name)
        if not least <= value <= most:
            option = name.replace("_", "-")
            parser.error(f"--{option} {value}: must be in {least}..{most:.0f}")
    if parsed.pack is not None:
        shortest, longest = sample_lengths()
        if not shortest <= parsed.pack <= longest:
            parser.error(f"--pack {parsed.pack}: must be in {shortest}..{longest}, as data.seq_len")
    return parsed


def _refuse_ignored(parser: Parser, parsed: argparse.Namespace) -> None:
    """End with an error if an option has no effect; the others that are not given get DEFAULTS."""
    for ignored, with_ in ((DEFAULTS, "verify"), (("field", "column"), "chat")):
        given = [name for name in ignored if getattr(parsed, name) is not None]
        if getattr(parsed, with_) and given:
            parser.error(f"--{given[0].replace('_', '-')} has no effect with --{with_}")
    for name, value in DEFAULTS.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def sample_lengths() -> tuple[int, int]:
    """The range of data.seq_len."""
    from coatlm.config import Data  # slow, and processes that tokenize import this module

    limits = Data.model_json_schema()["properties"]["seq_len"]
    return limits["minimum"], limits["maximum"]


def verify(prefixes: list[Path], workers: int) -> int:
    """Verify the checksums of datasets, with one line of output each; returns the exit code."""
    code = 0
    for prefix in prefixes:
        try:
            files = open_checked(prefix)
            with progress(f"verify {prefix}", sum(file.nbytes for file in files)) as advance:
                for file in files:
                    for nbytes in file.verify(workers or len(os.sched_getaffinity(0))):
                        advance(nbytes)
            masks = f", {files[1].nbytes:,} of masks" if len(files) > 1 else ""
            print(f"{prefix}: intact, {files[0].nbytes:,} bytes of tokens{masks}")
        except (ValueError, OSError) as error:
            code = fail(error)
    return code


def prepare(arguments: argparse.Namespace) -> str:
    """Write the dataset; returns what it holds. Raises ValueError, and OSError from writing."""
    begin = time.monotonic()
    prefix, spec = arguments.output_prefix, arguments.tokenizer
    template = arguments.chat_template or OWN
    options = Options(
        tokenizer=spec,
        field=arguments.field,
        column=arguments.column,
        append_eod=arguments.append_eod,
        shard_bytes=arguments.shard_mb << 20,
        chat=chat_format(make_tokenizer(spec), template) if arguments.chat else None,
    )
    manifest = preprocess(
        arguments.input,
        prefix,
        options,
        limits=Limits(arguments.max_expansion, arguments.max_record_mb << 20),
        workers=arguments.workers,
        overwrite=arguments.overwrite,
    )
    learned = f", of which {manifest.learned_tokens:,} are learned," if manifest.masked else ""
    lines = [
        f"{prefix}: {manifest.documents:,} documents, {manifest.tokens:,} tokens"
        f"{learned} ({manifest.dtype}, vocabulary {manifest.vocab_size:,}) in "
        f"{time.monotonic() - begin:.1f} s; {manifest.replaced_utf8:,} characters were not UTF-8, "
        f"{manifest.empty_documents:,} documents had no text"
    ]
    if arguments.pack is not None:
        _, bounds_D1 = read_index(prefix, manifest)
        for packing, cost in packing_cost(bounds_D1, arguments.pack).items():
            lines.append(
                f"{prefix}: data.seq_len={arguments.pack} data.packing={packing}: "
                f"{cost.samples:,} samples, {100 * cost.padded:.2f} % padding, "
                f"{cost.cut:,} documents cut"
            )
    return "\n".join(lines)


def main() -> int:
    """Run the command line and return the exit code."""
    arguments = parse_arguments()
    if arguments.verify:
        return verify(arguments.verify, arguments.workers)
    try:
        text = prepare(arguments)
    except OSError as error:  # from writing; errors of reading are ValueErrors with the file's name
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return fail(ValueError(f"{arguments.output_prefix}: {explain(error)}"), 4 if full else 2)
    except ValueError as error:
        return fail(error)
    print(text)
    return 0


if __name__ == "__main__":
    process.run(main, hint="the same command resumes")
