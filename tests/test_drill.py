"""The whole life of a model: text, training through a crash and a requeue, export, generation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bpe import train_bpe
from tests.distributed import ROOT, free_port, python_path
from tests.forks import Child, Forks
from tests.test_pretrain import wait_for_line

pytestmark = pytest.mark.slow

COUNTING = "zero one two three four five six seven eight nine ten eleven twelve"
WORDS = COUNTING.split()
STEPS, RANKS = 120, 2


def tool(name: str, *arguments: str | Path) -> None:
    """Run a script of tools/; it must succeed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path()},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def write_corpus(path: Path) -> None:
    """JSON lines, each counting from somewhere to twelve and on from zero."""
    texts = [" ".join((WORDS * 3)[i % 13 : i % 13 + 24]) for i in range(600)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_tokenizer(path: Path) -> None:
    """A byte-level BPE of the corpus' words."""
    train_bpe([COUNTING] * 50, vocab_size=320).save(str(path))


def write_config(path: Path, directory: Path) -> None:
    sections = {
        "run": {"dir": str(directory / "run")},
        "model": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128},
        "data": {
            "paths": [str(directory / "counting")],
            "tokenizer": f"hf:{directory / 'tokenizer.json'}",
            "seq_len": 32,
        },
        "parallel": {"tp": 2},
        "precision": {"recipe": "bf16"},
        "optim": {"recipe": "coat-lean", "lr": 3e-3, "warmup_steps": 5},
        "train": {"steps": STEPS, "micro_batch": 8, "global_batch": 16, "eval_every": 0},
        "checkpoint": {"every": 20},
        "log": {"every": 1},
    }
    path.write_text(json.dumps(sections))


def start(forks: Forks, *arguments: str) -> list[Child]:
    """The two ranks of a life."""
    common = {"WORLD_SIZE": str(RANKS), "MASTER_PORT": str(free_port())}
    each = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
    return [forks.start(*arguments, env=env) for env in each]


def losses(directory: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (directory / "metrics.jsonl").open())
    return [(line["step"], line["loss"]) for line in lines]


def train_through_faults(forks: Forks, config: str) -> None:
    """A rank is killed, the run is requeued, and a third life ends it."""
    ranks = start(forks, config)
    wait_for_line(ranks[0].output, "step 30/", timeout=240)
    ranks[1].kill(signal.SIGKILL)
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].wait() != 0

    ranks = start(forks, config)
    wait_for_line(ranks[0].output, "step 60/", timeout=240)
    ranks[0].kill(signal.SIGUSR1)
    assert [rank.wait() for rank in ranks] == [85, 85], ranks[0].text()
    assert "resumed from" in ranks[0].text()

    ranks = start(forks, config)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text()
    assert "resumed from" in ranks[0].text()


def test_from_text_through_a_crash_and_a_requeue_to_generated_text(tmp_path: Path) -> None:
    write_corpus(tmp_path / "counting.jsonl")
    write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = f"hf:{tmp_path / 'tokenizer.json'}"
    corpus = ("--input", tmp_path / "counting.jsonl", "--output-prefix", tmp_path / "counting")
    tool("preprocess_data.py", *corpus, "--tokenizer", tokenizer, "--workers", "1")
    config = tmp_path / "config.yaml"
    write_config(config, tmp_path)
    forks = Forks(tmp_path)
    train_through_faults(forks, str(config))
    undisturbed = start(forks, str(config), f"run.dir={tmp_path / 'undisturbed'}")
    assert [rank.wait() for rank in undisturbed] == [0, 0], undisturbed[0].text()
    run = losses(tmp_path / "run")
    assert run == losses(tmp_path / "undisturbed")
    assert run[-1][1] < 0.5 < 5.0 < run[0][1]

    exported = tmp_path / "exported"
    tool("convert_checkpoint.py", "--from", "coatlm", "--to", "hf", tmp_path / "run", exported)
    assert generate(exported, "five six seven", words=8) == (
        "five six seven eight nine ten eleven twelve zero one two"
    )


def generate(model_directory: Path, prompt: str, *, words: int) -> str:
    """What transformers makes of it, greedily; each word of the corpus is one or two tokens."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory)
    ids = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=2 * words, do_sample=False)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    return " ".join(text.split()[: len(prompt.split()) + words])
