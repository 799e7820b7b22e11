"""The good files that the fuzz damages: a tiny run of two steps, and what tools make of it.

`build(root)` fills `root`/good with one directory for each target. The run is made where inputs
are tried, in `root`/case, because the data cache knows texts by their absolute paths.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import os
import shutil
import sys
import warnings
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

from tests.bpe import train_bpe
from tests.data.templates import write_tokenizer

TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(400))
SECTIONS: dict[str, Any] = {
    "run": {"dir": "run", "name": "tiny"},
    "model": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 64, "vocab": 272},
    "data": {"text": ["text.txt"], "seq_len": 16, "cache_dir": "cache", "workers": 1},
    "precision": {"recipe": "coat", "guard": "fallback", "guard_every": 1},
    "optim": {"recipe": "coat-lean", "warmup_steps": 1},
    "train": {"steps": 2, "micro_batch": 2, "global_batch": 4, "eval_every": 1, "eval_batches": 1},
    "checkpoint": {"every": 1, "keep": 2},
    "log": {"every": 1, "states_every": 1, "numerics_every": 1},
}
PATTERN = r"\p{L}+|\p{N}+|\s+|[^\s\p{L}\p{N}]+"
SPECS = {
    "tokenizer.json": "hf:tokenizer.json",
    "tokenizer.model": "sentencepiece:tokenizer.model",
    "ranks.tiktoken": f"tiktoken:ranks.tiktoken?pattern={PATTERN}",
}


def build(root: str) -> None:
    """Make `root`/good. Runs in a process of its own."""
    warnings.simplefilter("ignore")
    case, good = Path(root) / "case", Path(root) / "good"
    case.mkdir(parents=True)
    with chdir(case):
        train()
    keep = shutil.copytree
    keep(case, good / "start")
    keep(case / "run", good / "inspect/run", ignore=shutil.ignore_patterns("step_00000001"))
    keep(good / "inspect/run", good / "inspect/whole")
    keep(good / "inspect/run", good / "export/run")
    keep(good / "inspect/run", good / "evaluate/run")
    (good / "evaluate/text.txt").write_text(TEXT[:500])
    logs = shutil.ignore_patterns("checkpoints", "loss.png")
    for name in ("plots", "comparison"):
        keep(case / "run", good / name / "run", ignore=logs)
        keep(case / "run", good / name / "whole", ignore=logs)
    formats = ("huggingface", "megatron", "tokenizers", "indexed", "texts", "masked")
    for name in ("config", "launch", *formats):
        (good / name).mkdir()
    (good / "config/config.yaml").write_text(json.dumps(SECTIONS, indent=1))
    (good / "config/options.json").write_text(json.dumps({"overrides": [], "ranks": [1]}))
    (good / "launch/environment.json").write_text("{}")
    with chdir(good / "huggingface"):
        models(case / "run")
    keep(good / "huggingface/model", good / "remote_model/model")
    with chdir(good / "megatron"):
        megatron(case / "run")
    with chdir(good / "tokenizers"):
        tokenizer_files()
    with chdir(good / "indexed"):
        preprocess("data", TEXT)
    with chdir(good / "texts"):
        texts()
    with chdir(good / "masked"):
        conversations("data")
    write_tokenizer(good / "conversations", "llama3")
    shutil.copy(good / "masked/talks.jsonl", good / "conversations")
    (good / "interrupted").mkdir()
    with chdir(case):  # the names of shards depend on the absolute path of the text
        shards(good / "interrupted")
    shutil.rmtree(case)
    os._exit(0)  # without the groups' own ends, which wait


def train() -> None:
    """The run itself."""
    from coatlm.commands import train as pretrain

    Path("text.txt").write_text(TEXT)
    Path("config.yaml").write_text(json.dumps(SECTIONS, indent=1))
    assert pretrain.main(["config.yaml"]) == 0


def models(run: Path) -> None:
    """model: one safetensors file, and an index that names it, as larger models have."""
    from coatlm.commands.convert import main

    words = ["--from", "coatlm", "--to", "hf", str(run), "model"]
    assert main([*words, "--max-shard-size=40KB"]) == 0
    Path("model/generation_config.json").write_text('{"eos_token_id": [256], "do_sample": false}')


def megatron(run: Path) -> None:
    """model: a torch_dist checkpoint. ranks: the same weights as the pickle of a single rank.

    bridge: what Megatron-Bridge writes beside a torch_dist checkpoint.
    """
    import argparse

    import torch

    from coatlm.commands.convert import main
    from coatlm.train.shards import read_tensors

    assert main(["--from", "coatlm", "--to", "megatron", str(run), "model"]) == 0
    Path("ranks/mp_rank_00").mkdir(parents=True)
    newest = max((run / "checkpoints").glob("step_*"))
    weights = {k: v for k, v in read_tensors(newest) if not k.startswith("optimizer.")}
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64}
    args = argparse.Namespace(**sizes, seq_length=16)
    content = {"model": weights, "args": args, "iteration": 2}
    torch.save(content, "ranks/mp_rank_00/model_optim_rng.pt")
    (iteration,) = Path(shutil.copytree("model", "bridge")).glob("iter_*")
    Path("bridge/latest_checkpointed_iteration.txt").unlink()
    counters = {"step": torch.tensor(2), "consumed_train_samples": torch.tensor(4)}
    torch.save(counters, "bridge/latest_train_state.pt")
    torch.save(counters, iteration / "train_state.pt")
    transformer = {**sizes, "activation_func": "silu", "gated_linear_unit": True}
    sections = {
        "model": {"transformer": transformer, "rope_scaling": True, "rope_scaling_factor": 4.0},
        "optimizer": {"lr": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0},
        "scheduler": {"lr_decay_style": "cosine", "end_weight_decay": 0.1, "lr_warmup_iters": 1},
        "train": {"train_iters": 4, "global_batch_size": 2, "micro_batch_size": 1},
        "dataset": {"seq_length": 16},
    }
    (iteration / "run_config.yaml").write_text(json.dumps(sections, indent=1))


def tokenizer_files() -> None:
    """A file of each kind, and the spec of the first."""
    import sentencepiece

    lines = TEXT.splitlines()
    train_bpe(lines, vocab_size=280).save("tokenizer.json")
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=trained,
        model_type="bpe",
        vocab_size=290,
        byte_fallback=True,
        normalization_rule_name="identity",  # any other takes 240 kB
        minloglevel=2,
        eos_id=2,
    )
    Path("tokenizer.model").write_bytes(trained.getvalue())
    tokens = [bytes([b]) for b in range(256)] + [b"ti", b"is"]
    ranks = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)]
    Path("ranks.tiktoken").write_bytes(b"".join(ranks))
    Path("spec.txt").write_text(SPECS["tokenizer.json"])


def preprocess(prefix: str, text: str) -> None:
    """An indexed dataset of several documents."""
    from coatlm.data.preprocess import preprocess as make
    from coatlm.data.token_shard import Options

    Path("lines.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in text.splitlines())
    )
    make(["lines.jsonl"], Path(prefix), Options(), workers=1)
    Path("lines.jsonl").unlink()


def conversations(prefix: str) -> None:
    """talks.jsonl, and a dataset of it with a loss mask."""
    from coatlm.data.chat import ChatFormat
    from coatlm.data.preprocess import preprocess as make
    from coatlm.data.token_shard import Options

    pairs = [{"prompt": f"{i} times {i} is ", "completion": str(i * i)} for i in range(60)]
    Path("talks.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    make(["talks.jsonl"], Path(prefix), Options(chat=ChatFormat("")), workers=1)


def texts() -> None:
    """A few lines in every format."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    lines = TEXT.splitlines()[:20]
    plain = "\n".join(lines).encode()
    objects = b"".join(json.dumps({"text": line}).encode() + b"\n" for line in lines)
    Path("text.txt").write_bytes(plain)
    Path("text.jsonl").write_bytes(objects)
    Path("text.txt.gz").write_bytes(gzip.compress(plain, mtime=0))
    Path("text.jsonl.gz").write_bytes(gzip.compress(objects, mtime=0))
    Path("text.txt.zst").write_bytes(zstandard.compress(plain))
    Path("text.jsonl.zst").write_bytes(zstandard.compress(objects))
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), "text.parquet", row_group_size=8)


def shards(destination: Path) -> None:
    """out: what a call that was interrupted before it joined its shards leaves behind."""
    from coatlm.data.preprocess import preprocess as make
    from coatlm.data.token_shard import Options

    class Interrupted(Exception):
        pass

    with (
        mock.patch("coatlm.data.preprocess._join", side_effect=Interrupted),
        contextlib.suppress(Interrupted),
    ):
        make(["text.txt"], Path("out/data"), Options(), workers=1)
    shutil.copytree("out", destination / "out")
    shutil.copy2("text.txt", destination / "text.txt")


if __name__ == "__main__":
    build(sys.argv[1])
