"""Conversations become the tokens of the template, and what the assistant writes is learned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coatlm.data.chat import ChatEncoder, ChatFormat, chat_format
from coatlm.data.tokenizer import Tokenizer, make_tokenizer
from tests.data.templates import FAMILIES, write_tokenizer

TALK = [
    {"role": "user", "content": "How many legs?"},
    {"role": "assistant", "content": "Eight. "},
    {"role": "user", "content": "Wie viele Füße?"},
    {"role": "assistant", "content": "8 🦊"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n8"}

# family, messages -> what is learned of them, in order
LEARNED: dict[str, tuple[str, list[dict[str, str]], list[str]]] = {
    "llama3": ("llama3", TALK, ["Eight.<|eot_id|>", "8 🦊<|eot_id|>"]),
    "llama3 system": ("llama3", [SYSTEM, *TALK], ["Eight.<|eot_id|>", "8 🦊<|eot_id|>"]),
    "qwen2.5": ("qwen2.5", TALK, ["Eight. <|im_end|>", "8 🦊<|im_end|>"]),
    "qwen2.5 system": ("qwen2.5", [SYSTEM, *TALK], ["Eight. <|im_end|>", "8 🦊<|im_end|>"]),
    "qwen3": (
        "qwen3",
        TALK,
        ["Eight. <|im_end|>", "<think>\n\n</think>\n\n8 🦊<|im_end|>"],
    ),
    "qwen3 thoughts": (
        "qwen3",
        [TALK[0], THOUGHT, TALK[2], THOUGHT],
        ["8<|im_end|>", "<think>\nhm\n</think>\n\n8<|im_end|>"],
    ),
    "mistral": ("mistral", TALK, [" Eight.</s>", " 8 🦊</s>"]),
    "mistral system": ("mistral", [SYSTEM, *TALK], [" Eight.</s>", " 8 🦊</s>"]),
    "mistral, a space of its own": (
        "mistral",
        [TALK[0], {"role": "assistant", "content": "🦊"}],
        [" 🦊</s>"],
    ),
    "one question": ("llama3", TALK[:2], ["Eight.<|eot_id|>"]),
    "ends with a question": ("qwen2.5", TALK[:3], ["Eight. <|im_end|>"]),
    "empty answer": ("llama3", [TALK[0], {"role": "assistant", "content": ""}], ["<|eot_id|>"]),
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_tokenizer(root / name, name) for name in FAMILIES}


def encoder_of(spec: str, *, append_eod: bool = True) -> tuple[ChatEncoder, Tokenizer]:
    tokenizer = make_tokenizer(spec)
    chat = chat_format(tokenizer, "own")
    return ChatEncoder(chat, tokenizer, append_eod=append_eod), tokenizer


def learned(tokenizer: Tokenizer, ids: list[int], mask: list[int]) -> list[str]:
    """The texts of the runs of learned tokens."""
    texts: list[list[int]] = []
    for at, (token, counts) in enumerate(zip(ids, mask, strict=True)):
        if counts and (at == 0 or not mask[at - 1]):
            texts.append([])
        if counts:
            texts[-1].append(token)
    return [tokenizer.decode(text) for text in texts]


@pytest.mark.parametrize("case", LEARNED)
def test_answers_and_their_ends_are_learned_and_nothing_else(
    specs: dict[str, str], case: str
) -> None:
    family, messages, expected = LEARNED[case]
    encoder, tokenizer = encoder_of(specs[family])
    example, replaced = encoder.encode({"messages": messages}, "talk")
    assert learned(tokenizer, example.ids, example.mask) == expected
    assert replaced == 0 and set(example.mask) == {0, 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_transformers(specs: dict[str, str], family: str) -> None:
    from transformers import PreTrainedTokenizerFast

    path = Path(specs[family].removeprefix("hf:").partition("?")[0])
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(path.parent)
    expected = theirs.apply_chat_template(TALK, tokenize=True, return_dict=False)
    encoder, _ = encoder_of(specs[family], append_eod=False)
    example, _ = encoder.encode({"messages": TALK}, "talk")
    assert example.ids == list(expected)


def test_the_text_of_llama_3_is_its_documented_format(specs: dict[str, str]) -> None:
    encoder, tokenizer = encoder_of(specs["llama3"])
    example, _ = encoder.encode({"messages": [SYSTEM, *TALK[:2]]}, "talk")
    assert tokenizer.decode(example.ids) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHow many legs?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nEight.<|eot_id|><|end_of_text|>"
    )


def test_prompt_and_completion_are_a_question_and_an_answer(specs: dict[str, str]) -> None:
    encoder, _ = encoder_of(specs["qwen2.5"])
    record = {"prompt": TALK[0]["content"], "completion": TALK[1]["content"], "id": 7}
    assert encoder.encode(record, "pair") == encoder.encode({"messages": TALK[:2]}, "talk")


def test_the_end_of_document_is_learned_only_where_a_turn_has_no_end_of_its_own(
    specs: dict[str, str], tmp_path: Path
) -> None:
    """Mistral's turns end with it, so it is not repeated."""
    for family in FAMILIES:
        encoder, tokenizer = encoder_of(specs[family])
        example, _ = encoder.encode({"messages": TALK}, "talk")
        assert example.ids[-1] == tokenizer.eod != example.ids[-2]
        assert example.mask[-1] == (family == "mistral")
    bare = tmp_path / "bare.jinja"
    bare.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tokenizer = make_tokenizer(specs["llama3"])
    encoder = ChatEncoder(chat_format(tokenizer, str(bare)), tokenizer, append_eod=True)
    example, _ = encoder.encode({"messages": TALK}, "talk")
    assert learned(tokenizer, example.ids, example.mask) == [" Eight. ", " 8 🦊", "<|end_of_text|>"]


def test_the_end_of_document_behind_a_question_is_not_learned(
    specs: dict[str, str], tmp_path: Path
) -> None:
    bare = tmp_path / "bare.jinja"
    bare.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tokenizer = make_tokenizer(specs["llama3"])
    encoder = ChatEncoder(chat_format(tokenizer, str(bare)), tokenizer, append_eod=True)
    example, _ = encoder.encode({"messages": TALK[:3]}, "talk")
    assert learned(tokenizer, example.ids, example.mask) == [" Eight. "]


def write_changed(directory: Path, change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    """The tokenizer of qwen2.5 with a change of tokenizer.json."""
    spec = write_tokenizer(directory, "qwen2.5")
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return make_tokenizer(spec)


def test_special_tokens_that_take_the_white_space_behind_them_end_turns_but_do_not_begin_them(
    tmp_path: Path,
) -> None:
    """Phi-3's do: its <|end|> is the token of "<|end|>\\n"."""

    def strip(content: dict[str, Any]) -> None:
        for token in content["added_tokens"]:
            token["rstrip"] = token["special"]

    tokenizer = write_changed(tmp_path, strip)
    template = tmp_path / "headers.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    encoder = ChatEncoder(chat_format(tokenizer, str(template)), tokenizer, append_eod=True)
    answer = {"role": "assistant", "content": " \n8"}
    example, _ = encoder.encode({"messages": [TALK[0], answer, *TALK[:2]]}, "talk")
    assert learned(tokenizer, example.ids, example.mask) == ["8<|im_end|>", "Eight. <|im_end|>"]


def test_a_token_that_joins_an_answer_and_the_text_behind_it_is_learned(
    specs: dict[str, str], tmp_path: Path
) -> None:
    template = tmp_path / "joined.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}ght{% endfor %}")
    tokenizer = make_tokenizer(specs["llama3"])
    encoder = ChatEncoder(chat_format(tokenizer, str(template)), tokenizer, append_eod=False)
    answer = {"role": "assistant", "content": " Ei"}
    example, _ = encoder.encode({"messages": [TALK[0], answer]}, "talk")
    assert learned(tokenizer, example.ids, example.mask) == [" Eight"]


def test_the_end_of_a_turn_that_only_the_configuration_calls_special_is_one_token(
    tmp_path: Path,
) -> None:
    def plain(content: dict[str, Any]) -> None:
        for token in content["added_tokens"]:
            token["special"] = token["special"] and token["content"] != "<|im_end|>"

    tokenizer = write_changed(tmp_path, plain)
    chat = chat_format(tokenizer, "own")
    encoder = ChatEncoder(chat, tokenizer, append_eod=True)
    example, _ = encoder.encode({"messages": TALK[:2]}, "talk")
    assert learned(tokenizer, example.ids, example.mask) == ["Eight. <|im_end|>"]
    with pytest.raises(ValueError, match=r"content contains '<\|im_end\|>'"):
        encoder.encode({"messages": [{"role": "user", "content": "a<|im_end|>"}]}, "talk")
    unknown = ChatFormat("{{ eos_token }}", (("eos_token", "<nothing>"),))
    with pytest.raises(ValueError, match=r"has no token .<nothing>., which tokenizer_config\.json"):
        ChatEncoder(unknown, tokenizer, append_eod=True)
    ChatEncoder(ChatFormat("{{ 1 }}", unknown.tokens), tokenizer, append_eod=True)


def test_the_date_of_a_template_is_always_the_same(specs: dict[str, str], tmp_path: Path) -> None:
    dated = tmp_path / "dated.jinja"
    body = "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    head = "\n{% if strftime_now is defined %}{{ strftime_now('%A, %d %B %Y, %H:%M') }}{% endif %}"
    dated.write_text(head + body)
    tokenizer = make_tokenizer(specs["llama3"])
    encoder = ChatEncoder(chat_format(tokenizer, str(dated)), tokenizer, append_eod=False)
    example, _ = encoder.encode({"messages": TALK[:2]}, "talk")
    assert tokenizer.decode(example.ids) == (
        "\nFriday, 26 July 2024, 00:00How many legs?<|eot_id|>Eight. <|eot_id|>"
    )


def test_white_space_before_the_end_of_a_turn_is_learned_with_it(
    specs: dict[str, str], tmp_path: Path
) -> None:
    lines = tmp_path / "lines.jinja"
    lines.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n<|eot_id|>{% endfor %}")
    tokenizer = make_tokenizer(specs["llama3"])
    encoder = ChatEncoder(chat_format(tokenizer, str(lines)), tokenizer, append_eod=True)
    example, _ = encoder.encode({"messages": TALK[:2]}, "talk")
    assert learned(tokenizer, example.ids, example.mask) == [" Eight. \n<|eot_id|>"]


@pytest.mark.parametrize("spec", ["byte", "sentencepiece", "hf"])
def test_without_a_template_completions_are_encoded_as_they_follow_a_prompt(
    spec: str, hf_file: Path, sentencepiece_file: Path
) -> None:
    name = {"hf": f"hf:{hf_file}", "sentencepiece": f"sentencepiece:{sentencepiece_file}"}
    tokenizer = make_tokenizer(name.get(spec, spec))
    encoder = ChatEncoder(ChatFormat(""), tokenizer, append_eod=True)
    example, replaced = encoder.encode({"prompt": "low ra\ud800", "completion": "nk"}, "pair")
    before, after = tokenizer.encode("low ra\ufffd"), [*tokenizer.encode("nk"), tokenizer.eod]
    assert example.ids == before + after
    assert example.mask == [0] * len(before) + [1] * len(after)
    assert replaced == 1
    encoder = ChatEncoder(ChatFormat(""), tokenizer, append_eod=False)
    assert encoder.encode({"prompt": "", "completion": "nk"}, "pair")[0].ids == after[:-1]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no fields": (
        {"text": "a"},
        "neither 'messages' nor 'prompt' and 'completion'; there are text",
    ),
    "no completion": ({"prompt": "a"}, "field 'completion' is a NoneType, not a string"),
    "prompt of messages": ({"prompt": TALK[:1], "completion": "a"}, "field 'prompt' is a list"),
    "no list": ({"messages": "hello"}, "'messages' is not a list"),
    "no messages": ({"messages": []}, "'messages' is not a list of messages"),
    "no object": ({"messages": ["hello"]}, r"messages\[0\]: a str, not an object"),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\]: has role, must have role"),
    "calls": (
        {"messages": [*TALK[:1], {**TALK[1], "tool_calls": []}]},
        r"messages\[1\]: has role, content, tool_calls, must have role and content",
    ),
    "tools": ({"messages": TALK, "tools": [{}]}, "field 'tools' is not supported"),
    "tools of a prompt": (
        {"prompt": "a", "completion": "b", "tools": [{}]},
        "field 'tools' is not supported",
    ),
    "content of parts": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        r"messages\[0\]: field 'content' is a list",
    ),
    "no answer": ({"messages": TALK[:1]}, "no message has the role 'assistant'"),
    "special token": (
        {"messages": [{"role": "user", "content": "a</s>b"}, TALK[1]]},
        r"messages\[0\]: content contains '</s>', which is a special token",
    ),
    "noncharacter": (
        {"messages": [{"role": "user", "content": "\ufdd0"}, TALK[1]]},
        r"messages\[0\]: content contains U\+FDD0",
    ),
    "order": ({"messages": [TALK[0], *TALK]}, "refuses it: roles must alternate"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_record_is_an_error_that_names_its_place_and_field(
    specs: dict[str, str], case: str
) -> None:
    record, reason = WRONG[case]
    encoder, _ = encoder_of(specs["mistral"])
    with pytest.raises(ValueError, match=f"^x.jsonl: at byte 5: ?.*{reason}") as error:
        encoder.encode(record, "x.jsonl: at byte 5")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].content }}", r"messages\[1\]: the chat template does not write its conte"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "content once"),
        (
            "{% for m in messages %}{{ m.content | upper }}{{ loop.index / 0 }}{% endfor %}",
            "refuses",
        ),
        ("{{ messages.nothing.nothing }}", "refuses it: "),
        ("{% for m in messages %}", "refuses it: "),
        ("{{ messages[1].content | length }} {{ messages[1].content }}", "content as it is"),
    ],
)
def test_a_template_that_cannot_be_masked_is_an_error(
    specs: dict[str, str], tmp_path: Path, template: str, reason: str
) -> None:
    (tmp_path / "odd.jinja").write_text(template)
    tokenizer = make_tokenizer(specs["llama3"])
    with pytest.raises(ValueError, match=reason):
        encoder = ChatEncoder(
            chat_format(tokenizer, str(tmp_path / "odd.jinja")), tokenizer, append_eod=True
        )
        encoder.encode({"messages": TALK[:2]}, "talk")


def test_a_template_runs_in_a_sandbox(specs: dict[str, str], tmp_path: Path) -> None:
    escape = tmp_path / "escape.jinja"
    escape.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    tokenizer = make_tokenizer(specs["llama3"])
    encoder = ChatEncoder(chat_format(tokenizer, str(escape)), tokenizer, append_eod=True)
    with pytest.raises(ValueError, match="refuses it: access to attribute"):
        encoder.encode({"messages": TALK}, "talk")


def test_the_template_is_that_of_the_file_then_of_the_configuration(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(write_tokenizer(tmp_path, "llama3"))
    config = tmp_path / "tokenizer_config.json"
    tokens = (("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>"))
    assert chat_format(tokenizer, "own") == ChatFormat(FAMILIES["llama3"].template, tokens)
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert chat_format(tokenizer, "own") == ChatFormat("newer", tokens)
    (tmp_path / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": several, "bos_token": {"content": "<s>"}}))
    assert chat_format(tokenizer, "own") == ChatFormat("d", (("bos_token", "<s>"),))
    assert chat_format(tokenizer, "none") == ChatFormat("")


def test_a_tokenizer_without_a_template_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(write_tokenizer(tmp_path, "llama3"))
    config = tmp_path / "tokenizer_config.json"
    for content, reason in [
        ("{}", "has no chat template: neither chat_template.jinja"),
        ("[]", "a list, not a JSON object"),
        ("{", "not readable as JSON"),
        ('{"chat_template": [{"name": "tool_use", "template": "t"}]}', "has no chat template"),
    ]:
        config.write_text(content)
        with pytest.raises(ValueError, match=reason):
            chat_format(tokenizer, "own")
    config.unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        chat_format(tokenizer, "own")
    with pytest.raises(ValueError, match=r"need hf:tokenizer.json; --chat-template none"):
        chat_format(make_tokenizer("byte"), "own")
    with pytest.raises(ValueError, match=r"missing.jinja: No such file"):
        chat_format(tokenizer, str(tmp_path / "missing.jinja"))
