"""Turn text files, JSON lines and parquet into the token files that training reads.

    python tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --output-prefix data/corpus \\
        --tokenizer hf:tokenizer.json --workers 32

writes data/corpus.bin and data/corpus.idx (Megatron's indexed dataset) and data/corpus.json (what
made them). Train on them with `data.paths=[data/corpus] data.tokenizer=hf:tokenizer.json`.

What a file holds follows from its name:
  *.jsonl *.ndjson *.json    one JSON object a line; --field is the document
  *.parquet                  one document a row, in --column
  everything else            plain text, one document a file (or a --shard-mb piece of a larger one)
Each but parquet may be compressed: *.gz, *.zst. Text that is not UTF-8 is replaced by U+FFFD and
counted; documents without text are skipped and counted.

A run that was interrupted leaves OUTPUT_PREFIX.shards behind; the same command goes on from there.
The result is the same, byte for byte, for any number of workers and of interruptions. Exit code: 0,
or 2 with one line that says what is wrong.

coatlm must be installed (`pip install -e .` in the checkout, or `make`).
"""

from __future__ import annotations

from coatlm import console

if __name__ == "__main__":  # before the imports that take seconds
    console.listen()

import argparse
import sys
import time
from pathlib import Path

from coatlm.data.preprocess import preprocess
from coatlm.data.shards import SHARD_BYTES, Options
from coatlm.data.tokenizer import SPECS


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; --help shows the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, globs (** for any depth), python-stdlib")
    add("--output-prefix", type=Path, required=True, help="PREFIX of the three files to write")
    add("--tokenizer", default="byte", help=f"{SPECS} (default: byte)")
    add("--field", default="text", help="of a JSON line (default: text)")
    add("--column", default="text", help="of parquet (default: text)")
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the tokenizer's end-of-document id (default: yes)",
    )
    add("--workers", type=int, default=0, help="processes; 0: one a core (default)")
    add(
        "--shard-mb",
        type=int,
        default=SHARD_BYTES >> 20,
        help="MiB of input that one process takes at a time (default: %(default)s)",
    )
    add("--overwrite", action="store_true", help="replace a dataset made from something else")
    parsed = parser.parse_args(arguments)
    if parsed.workers < 0 or parsed.shard_mb < 1:
        parser.error("--workers is >= 0 and --shard-mb is >= 1")
    return parsed


def main() -> int:
    """Run the command line; the exit code."""
    arguments = parse_arguments()
    options = Options(
        tokenizer=arguments.tokenizer,
        field=arguments.field,
        column=arguments.column,
        append_eod=arguments.append_eod,
        shard_bytes=arguments.shard_mb << 20,
    )
    begin = time.monotonic()
    try:
        manifest = preprocess(
            arguments.input,
            arguments.output_prefix,
            options,
            workers=arguments.workers,
            overwrite=arguments.overwrite,
        )
    except (ValueError, OSError) as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return 2
    print(
        f"{arguments.output_prefix}: {manifest.documents:,} documents, {manifest.tokens:,} tokens "
        f"({manifest.dtype}, vocabulary {manifest.vocab_size:,}) in "
        f"{time.monotonic() - begin:.1f} s; {manifest.replaced_utf8:,} characters were not UTF-8, "
        f"{manifest.empty_documents:,} documents had no text"
    )
    return 0


if __name__ == "__main__":
    console.run(main, hint="the same command goes on from here")
