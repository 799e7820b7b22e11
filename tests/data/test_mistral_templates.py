"""Conversations become the tokens that Mistral's own package makes of them; answers are learned.

mistral-common ships the tokenizers of Mistral's models and encodes conversations without templates.
Here the same SentencePiece model becomes a tokenizer.json, and a template writes the text. The
package writes such templates itself since version 1.10; where it does, those are used too.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from tests.data.templates import MISTRAL, MISTRAL_V1, MISTRAL_V7
from tests.data.test_chat import SYSTEM, TALK, encoder_of

FILES = {  # version of the tokenizer -> its file in mistral-common
    "v1": "tokenizer.model.v1",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
}
TEMPLATES = {"v1": MISTRAL_V1, "v3": MISTRAL, "v7": MISTRAL_V7}
GENERATOR = "mistral_common.integrations.chat_templates.chat_templates"
TALKS = {
    "talk": TALK,
    "one question": TALK[:2],
    "system": [SYSTEM, *TALK],
    "system, one question": [SYSTEM, *TALK[:2]],
    "spaces": [
        {"role": "user", "content": "  x =\n\t1 "},
        {"role": "assistant", "content": "  def f(x):\n    return x\n"},
    ],
}


def file_of(version: str) -> Path:
    found = find_spec("mistral_common")
    assert found is not None and found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0], "data", FILES[version])


@cache
def official(version: str) -> Any:
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer.from_file(str(file_of(version)), mode=ValidationMode.finetuning)


def fast(file: Path) -> FastTokenizer:
    """The BPE of a SentencePiece model, whose spaces the template writes.

    SentencePiece joins the two neighbors whose union is the piece with the best score, so these are
    the merges, by the score of their results. Runs of spaces come last.
    """
    pieces = SentencePieceProcessor(model_file=str(file))
    vocab = {pieces.id_to_piece(i): i for i in range(len(pieces))}
    merges = [
        (piece[:at], piece[at:])
        for piece, i in sorted(vocab.items(), key=lambda item: -pieces.get_score(item[1]))
        if not (pieces.is_control(i) or pieces.is_byte(i) or pieces.is_unknown(i))
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    bpe = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = FastTokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    control = [piece for piece, i in vocab.items() if pieces.is_control(i)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    return tokenizer


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of each version: the spec of a tokenizer with its special tokens, without a template."""
    root = tmp_path_factory.mktemp("mistral")
    for version in FILES:
        (root / version).mkdir()
        fast(file_of(version)).save(str(root / version / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>"}
        (root / version / "tokenizer_config.json").write_text(json.dumps(config))
    return {version: f"hf:{root / version / 'tokenizer.json'}?eod=</s>" for version in FILES}


def generated(version: str) -> str:
    """The template that mistral-common writes for a version."""
    if find_spec(GENERATOR.split(".chat_templates")[0]) is None:
        pytest.skip("mistral-common 1.10 and later, which need numpy < 2.4 before Python 3.13")
    from importlib import import_module

    convert = import_module(GENERATOR).convert_tokenizer_to_chat_template
    template: str = convert(file_of(version))
    return template


def expected(version: str, talk: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """The ids of mistral-common, and 1 for those of the answers with their ends, else 0."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    tokenizer = official(version)
    ids = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=talk)).tokens
    mask, at = [0] * len(ids), 0
    for message in talk:
        if message["role"] == "assistant":
            text = message["content"] if version == "v1" else message["content"].rstrip(" ")
            answer = tokenizer.instruct_tokenizer.tokenizer.encode(text, bos=False, eos=True)
            at = next(i for i in range(at, len(ids)) if ids[i : i + len(answer)] == answer)
            mask[at : at + len(answer)] = [1] * len(answer)
            at += len(answer)
    return ids, mask


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("source", ["own", "generated"])
def test_ids_and_what_is_learned_are_those_of_mistral_common(
    specs: dict[str, str], version: str, source: str
) -> None:
    template = TEMPLATES[version] if source == "own" else generated(version)
    directory = Path(specs[version].removeprefix("hf:").partition("?")[0]).parent
    (directory / "chat_template.jinja").write_text(template)
    encoder, tokenizer = encoder_of(specs[version])
    for name, talk in TALKS.items():
        if source == "generated":  # those templates keep spaces that the encoders of v3 and v7 drop
            talk = [{**message, "content": message["content"].rstrip(" ")} for message in talk]
        example, _ = encoder.encode({"messages": talk}, "talk")
        assert (example.ids, example.mask) == expected(version, talk), name
        assert example.ids[-1] == tokenizer.eod
