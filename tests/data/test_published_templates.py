"""Chat templates as models were published with them: the tokens, and what is learned of them.

The package trl ships the templates as files; nothing of it is imported. Tokenizers are small ones
with the special tokens of the model. Mistral's templates are not among these files:
test_mistral_templates.py tests them.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.data.templates import FAMILIES, Family, write_family
from tests.data.test_chat import SYSTEM, TALK, THOUGHT, encoder_of, learned

LLAMA, QWEN = FAMILIES["llama3"], FAMILIES["qwen3"]
PHI = Family(
    "",
    ("<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    config=(("bos_token", "<s>"), ("eos_token", "<|endoftext|>")),
    strips=True,
)
GEMMA = Family(
    "",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    config=(("bos_token", "<bos>"), ("eos_token", "<eos>")),
    eod="<eos>",
)
PUBLISHED = {  # name of the file -> the tokens that its tokenizer has
    "llama3": LLAMA,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "qwen2_5": QWEN,
    "qwen3": QWEN,
    "qwen3_instruct_2507": QWEN,
    "phi3": PHI,
    "phi3_5": PHI,
    "gemma": GEMMA,
    "gemma3": GEMMA,
}
TURN_ENDS = {
    "llama": "<|eot_id|>",
    "qwen": "<|im_end|>",
    "phi": "<|end|>",
    "gemma": "<end_of_turn>",
}
TRIMMED = ("llama", "gemma")  # these remove spaces at the ends of a message
WITHOUT_SYSTEM = "gemma"  # refuses messages of the system
TALKS = {
    "talk": TALK,
    "one question": TALK[:2],
    "ends with a question": TALK[:3],
    "system": [SYSTEM, *TALK],
    "thoughts": [TALK[0], THOUGHT, TALK[2], THOUGHT],
}
# Qwen3 leaves thoughts of earlier answers out, and writes empty ones into the last answer.
THINKING = {
    "talk": ["Eight. <|im_end|>", "<think>\n\n</think>\n\n8 🦊<|im_end|>"],
    "one question": ["<think>\n\n</think>\n\nEight. <|im_end|>"],
    "ends with a question": ["Eight. <|im_end|>"],
    "system": ["Eight. <|im_end|>", "<think>\n\n</think>\n\n8 🦊<|im_end|>"],
    "thoughts": ["8<|im_end|>", "<think>\nhm\n</think>\n\n8<|im_end|>"],
}
TODAY = "26 Jul 2024"  # of every template that writes a date


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = find_spec("trl")
    assert found is not None and found.submodule_search_locations is not None
    templates = Path(found.submodule_search_locations[0], "chat_templates")
    root = tmp_path_factory.mktemp("published")
    return {
        name: write_family(
            root / name, replace(family, template=(templates / f"{name}.jinja").read_text())
        )
        for name, family in PUBLISHED.items()
    }


def expected(name: str, talk: str) -> list[str]:
    """The answers of a conversation as the template writes them, each with its end of turn."""
    if name == "qwen3":
        return THINKING[talk]
    (end,) = [token for family, token in TURN_ENDS.items() if name.startswith(family)]
    answers = [message["content"] for message in TALKS[talk] if message["role"] == "assistant"]
    return [(text.strip() if name.startswith(TRIMMED) else text) + end for text in answers]


CASES = [
    pytest.param(name, talk, id=f"{name}: {talk}")
    for name in PUBLISHED
    for talk in TALKS
    if (name, talk) != (WITHOUT_SYSTEM, "system")
]


@pytest.mark.parametrize(("name", "talk"), CASES)
def test_answers_and_their_ends_are_learned_and_nothing_else(
    specs: dict[str, str], name: str, talk: str
) -> None:
    encoder, tokenizer = encoder_of(specs[name])
    example, _ = encoder.encode({"messages": TALKS[talk]}, "talk")
    assert learned(tokenizer, example.ids, example.mask) == expected(name, talk)


@pytest.mark.parametrize(("name", "talk"), CASES)
def test_ids_are_those_of_transformers(specs: dict[str, str], name: str, talk: str) -> None:
    from transformers import PreTrainedTokenizerFast

    path = Path(specs[name].removeprefix("hf:").partition("?")[0])
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(path.parent)
    ids = theirs.apply_chat_template(
        TALKS[talk], tokenize=True, return_dict=False, date_string=TODAY
    )
    encoder, _ = encoder_of(specs[name], append_eod=False)
    example, _ = encoder.encode({"messages": TALKS[talk]}, "talk")
    assert example.ids == list(ids)


def test_a_template_that_refuses_messages_of_the_system_says_so(specs: dict[str, str]) -> None:
    encoder, _ = encoder_of(specs[WITHOUT_SYSTEM])
    with pytest.raises(ValueError, match=r"^talk: the chat template refuses it: System role"):
        encoder.encode({"messages": TALKS["system"]}, "talk")
