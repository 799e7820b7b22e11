"""What the guides take as given, small: texts, tokenizers, models and checkpoints."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from coatlm.data.tokenizer import make_tokenizer
from tests.bpe import train_bpe
from tests.data.templates import write_tokenizer
from tests.distributed import ROOT, run_ranks
from tests.forks import pretrain
from tests.guide_runs import SMALL, VOCAB, finish, small

CHECKOUT = ("coatlm", "configs", "tools", "pretrain.py", "README.md")
TEXTS = [f"{i} squared is {i * i}, and cubed it is {i**3}." for i in range(4000)]
TOKENS = 384  # of a tokenizer: as many as the model of tests/convert/megatron_writer.py has
STEPS = 3  # that this model is trained


def common(directory: Path) -> None:
    """A corpus, tokenizers of both kinds and a text for training, for every page."""
    import sentencepiece
    import zstandard

    for name in ("corpus", "data"):
        (directory / name).mkdir()
    functions = "".join(f"def f{i}():\n    return {i * i}\n" for i in range(2000))
    (directory / "text.py").write_text(functions)
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in TEXTS).encode()
    (directory / "corpus/a.jsonl").write_bytes(lines)
    (directory / "corpus/a.jsonl.zst").write_bytes(zstandard.compress(lines))
    train_bpe(TEXTS, vocab_size=TOKENS).save(str(directory / "data/tokenizer.json"))
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:1000]),
        model_writer=trained,
        model_type="bpe",
        vocab_size=TOKENS,
        byte_fallback=True,
        minloglevel=2,
    )
    (directory / "data/tokenizer.model").write_bytes(trained.getvalue())


def given(page: Path, materials: Path, directory: Path) -> None:
    """Create `directory`, the working directory, as a reader of the page has it."""
    shutil.copytree(materials, directory, dirs_exist_ok=True)
    for name in CHECKOUT:
        (directory / name).symlink_to(ROOT / name)
    GIVEN.get(page.stem, lambda _: None)(directory)


def studies(directory: Path) -> None:
    """The studies without what needs a GPU: CUDA graphs and recipes of TransformerEngine."""
    configs = directory / "configs"
    configs.unlink()
    shutil.copytree(ROOT / "configs", configs)
    for path in (configs / "studies").glob("*.yaml"):
        text = re.sub(r"train\.cuda_graphs=true(, )?", "", path.read_text())
        path.write_text(re.sub(r"^  te-.*\n", "", text, flags=re.MULTILINE))


def save_model(family: str, directory: Path, **more: object) -> None:
    """A Hugging Face model of SMALL sizes, of one of transformers' families."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = AutoConfig.for_model(
        family,
        hidden_size=SMALL["model.hidden"],
        num_hidden_layers=SMALL["model.layers"],
        num_attention_heads=SMALL["model.heads"],
        head_dim=SMALL["model.head_dim"],
        intermediate_size=SMALL["model.ffn"],
        vocab_size=VOCAB,
        **more,
    )
    AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16).save_pretrained(directory)


def fine_tuning(directory: Path) -> None:
    """A model of Hugging Face in the place of Qwen2.5 0.5B, conversations, and a run on bytes."""
    studies(directory)
    model = directory / "models/qwen2.5-0.5b"
    write_tokenizer(model, "qwen2.5")
    save_model(
        "qwen2",
        model,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    with (directory / "talks.jsonl").open("w") as talks:
        for i in range(200):
            question = {"role": "user", "content": f"{i} + 1?"}
            answer = {"role": "assistant", "content": str(i + 1)}
            print(json.dumps({"messages": [question, answer]}), file=talks)
            print(json.dumps({"prompt": f"{i} + 2?", "completion": str(i + 2)}), file=talks)
    finish("trunk", pretrain, small(["configs/quickstart.yaml", "run.dir=runs/trunk"]))


def save_llama_3(model: Path, **more: object) -> None:
    """A model in the place of Llama 3 8B."""
    save_model(
        "llama",
        model,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **more,
    )


def own_model(directory: Path) -> None:
    """A model of Hugging Face in the place of Llama 3 8B, and its instruction-tuned sibling.

    As with the published ones, only the tokenizer of the sibling has a chat template and calls the
    end of a turn the end of a text.
    """
    model = directory / "models/llama3-8b"
    write_tokenizer(directory / "models/llama3-8b-instruct", "llama3")
    write_tokenizer(model, "llama3")
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(tokens))
    save_llama_3(model, eos_token_id=make_tokenizer(f"hf:{model}/tokenizer.json").eod)


def from_megatron_lm(directory: Path) -> None:
    """A checkpoint that megatron-core has written, with states of its optimizer."""
    run = directory / "megatron/run"
    job = {"layers": "stacked", "optimizer": "plain", "save": str(run / f"iter_{STEPS:07d}")}
    run_ranks(1, "tests.convert.megatron_writer:run_all", [job])
    (run / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


GIVEN: dict[str, Callable[[Path], None]] = {
    "fine-tuning": fine_tuning,
    "from-megatron-lm": from_megatron_lm,
    "own-model": own_model,
    "recipes": studies,
}
