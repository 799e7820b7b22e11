"""Evaluate a checkpoint: perplexity on text, also with casts to FP8, and metrics of tasks.

    coatlm evaluate runs/mine --data valid.txt --out perplexity.json
    coatlm evaluate runs/mine --data 'valid/*.jsonl' --window 1024 --stride 512 \\
        --cast e4m3 e5m2 --scales tensor channel --what gemm residual
    coatlm evaluate runs/mine --tasks python-lines lambada_openai my-task.yaml --limit 500

The checkpoint is one of any layout, a run (its newest one is used), or a Hugging Face model
converted by `coatlm convert`. One process computes, on a GPU if there is one. A text file is
one document; JSON lines (.gz, .zst) and parquet have documents in --field. Every token of a
document but the first is scored once, with at least window - stride + 1 tokens of context where the
document has so many.

--cast adds a row per format, --scales and --what: values are rounded to FP8 and converted back.
--scales tensor has one scale per weight matrix and per batch of activations, channel one per output
channel and per token, biasN (bias7 ...) only a fixed exponent bias N. --what gemm casts weights and
inputs of every linear layer and q, k, v; residual also casts both inputs of residual additions.

--tasks takes what eval.tasks takes: names of tasks of lm-evaluation-harness, which may download
their data sets, names of shipped ones (python-lines, python-words), and YAML files, whose Python
functions are run. It needs coatlm[eval].

--out replaces an earlier result of this command, and no other file.

Exit code: 0; 2 with one line for invalid input; 4 for a damaged checkpoint.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import itertools
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coatlm.config import Config, Eval, make_config
from coatlm.console import (
    Parser,
    fail,
    ignore_library_warnings,
    local_path,
    local_text,
    output_path,
    tokenizer_spec,
)
from coatlm.files import check_output, check_replaced, whole_file

if TYPE_CHECKING:
    from coatlm.evaluation.cast import Cast
    from coatlm.evaluation.perplexity import Document

NEEDED = {  # option -> the option without which it has no effect
    **dict.fromkeys(("scales", "what"), "cast"),
    **dict.fromkeys(("field", "prefix", "stride"), "data"),
    **dict.fromkeys(("limit", "shots", "new_tokens"), "tasks"),
}
RESULT = '{\n "checkpoint": '  # begins the file that --out names
WINDOW = 2048  # tokens, unless the model was trained with shorter samples


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --help prints the module docstring."""
    parser = Parser(__doc__, "evaluate")
    add = parser.add_argument
    add("checkpoint", type=local_path)
    add("--data", nargs="+", default=[], help="files, globs and URLs, for perplexity")
    add("--field", help="field of JSON lines or column of parquet (default: text)")
    add(
        "--tokenizer",
        type=tokenizer_spec,
        help="a spec as in data.tokenizer, if the tokenizer's file has moved",
    )
    add(
        "--prefix",
        type=int,
        metavar="ID",
        help="id of a token to put before each document (default: none)",
    )
    add("--window", type=int, help=f"tokens (default: data.seq_len, at most {WINDOW})")
    add("--stride", type=int, help="tokens between windows (default: half a window)")
    add("--batch", type=int, default=8, help="windows at a time (default: %(default)s)")
    add("--precision", choices=["fp32", "bf16"], help="default: bf16 on a GPU, fp32 without")
    add("--cast", nargs="+", default=[], metavar="FORMAT", help="e4m3, e5m2")
    add("--scales", nargs="+", help="tensor, channel, biasN (default: tensor)")
    add("--what", nargs="+", help="gemm, residual (default: gemm)")
    add("--tasks", type=local_text, nargs="+", default=[], help="names and YAML files")
    add("--limit", type=int, help="examples per task (default: all)")
    add("--shots", type=int, help="solved examples per prompt (default: the task's)")
    add(
        "--new-tokens",
        type=int,
        help=f"most tokens of a generated answer (default: {Eval().tasks_new_tokens})",
    )
    add("--out", type=output_path, help="write the results as JSON")
    parsed = parser.parse(arguments)
    for name, needed in NEEDED.items():
        if getattr(parsed, name) is not None and not getattr(parsed, needed):
            parser.error(f"--{name.replace('_', '-')} has no effect without --{needed}")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Evaluate; errors of the user become one line and an exit code."""
    args = parse_arguments(arguments)
    ignore_library_warnings()
    from coatlm.train.checkpoint import CheckpointError

    try:
        if args.out is not None:
            check_output(args.out)
            check_replaced(args.out, RESULT, "result of coatlm evaluate")
            process.outlive_streams()
        result = evaluate(args)
        if args.out is not None:
            with whole_file(args.out) as file:
                file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except CheckpointError as error:
        return fail(error, 4)
    except (ValueError, OSError) as error:
        return fail(error)
    return 0


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table row by row, then the metrics; returns the content of the JSON file."""
    import torch

    from coatlm.data.tokenizer import make_tokenizer
    from coatlm.evaluation.cast import Cast
    from coatlm.evaluation.perplexity import check_windows, read_documents
    from coatlm.train.checkpoint import named_checkpoint, saved_config
    from coatlm.train.phases import open_tasks
    from coatlm.train.setup import quiet_megatron
    from coatlm.train.state import read_run_state

    quiet_megatron()
    ways = itertools.product(args.cast, args.scales or ["tensor"], args.what or ["gemm"])
    casts = [Cast(*names) for names in ways]
    path = named_checkpoint(args.checkpoint, logging.getLogger("coatlm"))
    state = read_run_state(path)
    saved = saved_config(path, state)
    data = saved.data
    tokenizer = make_tokenizer(args.tokenizer or data.tokenizer)
    if not state["tokenizer"] and args.tokenizer is None:
        raise ValueError(f"{path}: was converted without a tokenizer; give --tokenizer")
    if state["tokenizer"] and tokenizer.fingerprint != state["tokenizer"]:
        raise ValueError(f"tokenizer {tokenizer.spec}: {path} was trained with another one")
    window = min(data.seq_len, WINDOW) if args.window is None else args.window
    stride = max(window // 2, 1) if args.stride is None else args.stride
    check_windows(window, stride, args.batch)
    precision = args.precision or ("bf16" if torch.cuda.is_available() else "fp32")
    if args.prefix is not None and not 0 <= args.prefix < tokenizer.vocab_size:
        raise ValueError(f"--prefix {args.prefix}: an id of 0 to {tokenizer.vocab_size - 1}")
    if not args.data and (args.cast or not args.tasks):
        raise ValueError("--data is missing: --cast needs it, and so does a call without --tasks")
    chosen = {
        "tasks": args.tasks,
        "tasks_limit": args.limit,
        "tasks_shots": args.shots,
    }
    if args.new_tokens is not None:
        chosen["tasks_new_tokens"] = args.new_tokens
    tasks = open_tasks(make_config({"eval": chosen}).eval, tokenizer, window)
    documents = []
    if args.data:
        field = args.field or "text"
        documents = read_documents(args.data, tokenizer, field=field, prefix=args.prefix)
    settings = {"window": window, "stride": stride, "batch": args.batch, "precision": precision}
    print(
        f"{path}, step {state.get('step')}: " + ", ".join(f"{k} {v}" for k, v in settings.items())
    )
    if note := frequencies_note(saved, window):
        print(note)
    config = saved.model_dump(mode="json")
    result = {
        "checkpoint": str(path),
        "step": state.get("step"),
        "data": args.data,
        "prefix": args.prefix,
        **settings,
        "documents": len(documents),
        **(measure(path, config, documents, casts, settings) if documents else {}),
    }
    if tasks is not None:
        from coatlm.evaluation.tasks import score_tasks

        sizes = {"batch": args.batch, "precision": precision}
        result["tasks"] = score_tasks(tasks, path, config, **sizes)
        for name, value in result["tasks"].items():
            print(f"{name:<40}{value:>10.4f}")
    return result


def frequencies_note(config: Config, window: int) -> str:
    """That windows have other rotary frequencies than the samples of the run; "" if they do not.

    LongRoPE has two sets; like transformers, an evaluation chooses by the length of its windows.
    """
    limit, trained = longrope_limit(config.model.model_dump(mode="json")), config.data.seq_len
    if limit is None or (window > limit) == (trained > limit):
        return ""
    used, other = ("long", "short") if window > limit else ("short", "long")
    return (
        f"note: windows of {window} tokens have the rotary frequencies of {used}_factor, as in "
        f"transformers; data.seq_len={trained}, in training, has those of {other}_factor"
    )


def shortest_with_the_frequencies_of(window: int, model: dict[str, Any]) -> int:
    """The fewest tokens of which a sequence has the rotary frequencies of one of `window`."""
    limit = longrope_limit(model)
    return 1 if limit is None or window <= limit else limit + 1


def longrope_limit(model: dict[str, Any]) -> int | None:
    """The most tokens of a sequence with LongRoPE's short_factor; None without LongRoPE."""
    scaling = model["rope_scaling"]
    if scaling is None or scaling["type"] != "longrope":
        return None
    limit: int = scaling["original_max_position_embeddings"]
    return limit


def measure(
    path: Path, saved: Any, documents: list[Document], casts: list[Cast], settings: dict[str, Any]
) -> dict[str, Any]:
    """Measure and print the rows of the table: one without a cast and one per cast."""
    from coatlm.evaluation.cast import casting
    from coatlm.evaluation.model import load_weights, open_model
    from coatlm.evaluation.perplexity import score
    from coatlm.platform import device

    rows: list[dict[str, Any]] = []
    # a window longer than every document would only add padding
    width = max(min(settings["window"], max(len(document.ids) for document in documents)), 2)
    stride = min(settings["stride"], width)
    sizes = {"window": width, "stride": stride, "batch": settings["batch"]}
    length = max(width, shortest_with_the_frequencies_of(settings["window"], saved["model"]))
    chosen = {"window": length, "precision": settings["precision"]}
    print(f"{'cast':<24}{'loss':>10}{'perplexity':>14}{'bits/byte':>12}{'':>4}vs as trained")
    with open_model(path, saved, **chosen) as model:
        for how in [None, *casts]:
            if how is None:
                found = score(model, documents, **sizes, device=device())
            else:
                load_weights(model, path)
                with casting(model, how):
                    found = score(model, documents, **sizes, device=device(), what=how.name)
            rows.append(
                {
                    "cast": how.name if how else "as trained",
                    "loss": found.loss,
                    "perplexity": found.perplexity,
                    "bits_per_byte": found.bits_per_byte,
                }
            )
            print(_line(rows), flush=True)
    print(
        f"{found.tokens:,} tokens predicted of {found.nbytes:,} bytes in {len(documents)} documents"
    )
    return {"tokens": found.tokens, "bytes": found.nbytes, "results": rows}


def _line(rows: list[dict[str, Any]]) -> str:
    """The last row of the table, with its change of perplexity relative to the first."""
    first, last = rows[0]["perplexity"], rows[-1]
    change = f"{100 * (last['perplexity'] / first - 1):+.2f} %" if len(rows) > 1 else ""
    return (
        f"{last['cast']:<24}{last['loss']:>10.4f}{last['perplexity']:>14.4f}"
        f"{last['bits_per_byte']:>12.4f}{'':>4}{change}"
    )


if __name__ == "__main__":
    process.run(main)
