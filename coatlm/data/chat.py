"""Conversations and prompts with completions -> token ids, and for each id whether it is learned.

    record = {"messages": [{"role": .., "content": ..}, ..]}
           | {"prompt": .., "completion": ..}     a user's and an assistant's message
    text   = the tokenizer's chat template, rendered by transformers
    ids    = tokens of the text, special tokens included
    mask   = 1 for the tokens of each assistant message up to its end-of-turn token, else 0; a
             token belongs to a message if one of its characters does

Message i is text[start:end]. The text before `start` is what the model reads when it is to write
the message: the rendering of the messages before i with the generation prompt. Where a template has
no generation prompt, or writes earlier messages in another way then (Mistral's has neither prompt
nor a fixed place for the system message), the message starts with its content and the spaces before
it. Where the content starts and ends is found by rendering once more with a mark before or behind
it, so that it does not matter how a template trims it. A special token behind the content, white
space between them or not, is the end-of-turn token.

Without a template, ids are those of the prompt, those of the completion and end-of-document, which
is learned. Behind a template's text, end-of-document is only learned if the last message is an
assistant's without an end-of-turn token, and it is not repeated if it is the end-of-turn token.

Templates of a stranger are programs: transformers renders them in the sandbox of jinja2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from coatlm.data.documents import string_in
from coatlm.data.streams import quoted, some
from coatlm.data.tokenizer import Tokenizer, library_errors

OWN, NONE = "own", "none"  # names of templates; any other name is a file
MARK = "\ufdd0"  # a noncharacter: no text may contain it
NOW = datetime(2024, 7, 26)  # what templates that write a date write, instead of today's
DIRECTIVES = ["%" + c for c in "aAbBdHIjmMpSyY"] + ["%-d", "%-m"]  # of strftime, in templates
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # that templates know by name
CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"

Message = dict[str, str]


@dataclass(frozen=True)
class ChatFormat:
    """How records become text: a chat template, or "" for a prompt followed by its completion."""

    template: str
    tokens: tuple[tuple[str, str], ...] = ()  # the template's names for special tokens: TOKENS


@dataclass(frozen=True)
class Example:
    """The token ids of a record and, for each, 1 if it is learned and 0 if not."""

    ids: list[int]
    mask: list[int]


def chat_format(tokenizer: Tokenizer, template: str) -> ChatFormat:
    """The format named by `template`: own, none, or the path of a jinja file.

    own is the template beside the tokenizer's tokenizer.json. Raises ValueError.
    """
    if template == NONE:
        return ChatFormat("")
    kind, _, rest = tokenizer.spec.partition(":")
    if kind != "hf":
        raise ValueError(
            f"--tokenizer {tokenizer.spec}: chat templates need hf:tokenizer.json; "
            f"--chat-template {NONE} joins prompt and completion without one"
        )
    directory = Path(rest.partition("?")[0]).parent
    config = _read_config(directory / CONFIG)
    names = {name: _content(config.get(name)) for name in TOKENS}
    tokens = tuple((name, token) for name, token in names.items() if token)
    if template != OWN:
        return ChatFormat(_read_text(Path(template)), tokens)
    if (directory / FILE).exists():
        return ChatFormat(_read_text(directory / FILE), tokens)
    own = config.get("chat_template")
    if isinstance(own, list):  # several with names
        named = [item for item in own if isinstance(item, dict) and item.get("name") == "default"]
        own = named[0].get("template") if named else None
    if not isinstance(own, str) or not own:
        raise ValueError(
            f"{directory}: the tokenizer has no chat template: neither {FILE} nor chat_template in "
            f"{CONFIG}; name a file with --chat-template, or {NONE}"
        )
    return ChatFormat(own, tokens)


class ChatEncoder:
    """Encodes the records of one format. Its construction imports transformers, which is slow."""

    def __init__(self, chat: ChatFormat, tokenizer: Tokenizer, *, append_eod: bool) -> None:
        self._plain = tokenizer
        self._end = [tokenizer.eod] if append_eod else []
        self._template = _Template(chat, tokenizer.spec) if chat.template else None

    def encode(self, record: dict[str, Any], where: str) -> tuple[Example, int]:
        """The example of a record, and the number of U+FFFD that replace what is no character.

        Raises ValueError that begins with `where` and names the field.
        """
        for name in ("tools", "documents"):
            if record.get(name):
                raise ValueError(f"{where}: field {name!r} is not supported")
        if self._template is None:
            return self._join(record, where)
        messages, replaced = _messages(record, where)
        ids, mask, ended = self._template.encode(messages, where)
        if self._end and ids[-1:] != self._end:
            learned = messages[-1]["role"] == "assistant" and not ended
            ids, mask = ids + self._end, [*mask, int(learned)]
        return Example(ids, mask), replaced

    def _join(self, record: dict[str, Any], where: str) -> tuple[Example, int]:
        """Prompt and completion without a template."""
        if "completion" not in record:
            raise ValueError(
                f"{where}: no field 'completion'; without a chat template a record has prompt and "
                f"completion, this one has {some(record)}"
            )
        (prompt, a), (completion, b) = (
            string_in(record, name, where) for name in ("prompt", "completion")
        )
        if not completion:
            raise ValueError(f"{where}: field 'completion' is empty: nothing is to be learned")
        before, after = (self._plain.encode(text) for text in (prompt, completion))
        after = [*after, *self._end]
        return Example([*before, *after], [0] * len(before) + [1] * len(after)), a + b


class _Template:
    """A chat template with the tokenizer that it was written for."""

    def __init__(self, chat: ChatFormat, spec: str) -> None:
        path = spec.partition(":")[2].partition("?")[0]
        try:
            import jinja2  # noqa: F401 (of transformers' renderer)
            from tokenizers import Tokenizer as FastTokenizer
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise ValueError(
                f"--chat-template: the package {error.name} is missing: pip install 'coatlm[hf]'"
            ) from None
        self._tokenizer = FastTokenizer.from_file(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = False
        with library_errors(f"{path}: cannot be used with a chat template"):
            self._renderer: Any = PreTrainedTokenizerFast(
                tokenizer_object=self._tokenizer, **dict(chat.tokens)
            )
        self._renderer.chat_template = fixed_clock(chat.template)
        special = self._special_tokens(chat, path)
        self._ids = {self._tokenizer.token_to_id(token) for token in special}
        ordered = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._turn_end = re.compile(rf"\s*(?:{self._special.pattern})")

    def _special_tokens(self, chat: ChatFormat, path: str) -> set[str]:
        """The tokens that text must not contain: those of tokenizer.json, and those of TOKENS.

        As in transformers, a token of TOKENS is one id, also where tokenizer.json does not say so.
        """
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        for name, token in chat.tokens:
            if self._tokenizer.token_to_id(token) is not None:
                special.add(token)
                self._tokenizer.add_special_tokens([token])
            elif name in chat.template:
                raise ValueError(
                    f"{path}: has no token {token!r}, which {CONFIG} names as {name} and the chat "
                    "template writes"
                )
        return special

    def encode(self, messages: Sequence[Message], where: str) -> tuple[list[int], list[int], bool]:
        """ids, mask, and whether an end-of-turn token follows the last assistant message."""
        for number, message in enumerate(messages):
            self._check(message, f"{where}: messages[{number}]")
        text = self._render(messages, where)
        spans: list[tuple[int, int]] = []
        ended = False
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end, ended = self._span(text, messages, number, where)
                spans.append((start, end))
        if not spans:
            raise ValueError(f"{where}: no message has the role 'assistant': nothing is learned")
        with library_errors(f"{where}: cannot be encoded"):
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = zip(encoded.ids, encoded.offsets, strict=True)
        mask = [int(self._inside(number, *at, spans)) for number, at in tokens]
        return list(encoded.ids), mask, ended

    def _inside(self, number: int, begin: int, stop: int, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether the token of the characters [begin, stop) belongs to one of the spans.

        A special token may take the white space behind it (Phi-3's do). One in front of a message
        is not part of it because of that, and the message's end of turn still is.
        """
        found = next(((a, b) for a, b in spans if begin < b and stop > a), None)
        return found is not None and (begin >= found[0] or number not in self._ids)

    def _check(self, message: Message, where: str) -> None:
        """Raise ValueError for text that would become a special token, or that has the mark."""
        for name, value in message.items():
            found = self._special.search(value)
            if found is not None:
                raise ValueError(
                    f"{where}: {name} contains {found[0]!r}, which is a special token of the "
                    "tokenizer; remove it, or the model would learn to end turns inside of text"
                )
            if MARK in value:
                raise ValueError(f"{where}: {name} contains U+FDD0, which is not a character")

    def _render(self, messages: Sequence[Message], where: str, *, prompt: bool = False) -> str:
        """The text of messages; `prompt` adds the generation prompt."""
        date = NOW.strftime("%d %b %Y")
        with library_errors(f"{where}: the chat template refuses it"):  # a program: any error
            text: str = self._renderer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, date_string=date
            )
        return text

    def _span(
        self, text: str, messages: Sequence[Message], number: int, where: str
    ) -> tuple[int, int, bool]:
        """[start, end) of message `number` in `text`, and whether it has an end-of-turn token."""
        content = messages[number]["content"]
        name = f"{where}: messages[{number}]"
        behind = self._marked(messages, number, content + MARK, name)[1]
        if not text.endswith(behind):
            raise ValueError(f"{name}: the chat template does not write its content as it is")
        end = len(text) - len(behind)
        start = self._prompt_length(text, messages[:number], name)
        if start is None:
            before = self._marked(messages, number, MARK + content, name)[0]
            if not text.startswith(before):
                raise ValueError(f"{name}: the chat template does not write its content as it is")
            start = len(before.rstrip(" "))
        if start > end:
            raise ValueError(f"{name}: the chat template writes it before the message ahead of it")
        closing = self._turn_end.match(text, end)
        return start, closing.end() if closing else end, closing is not None

    def _marked(
        self, messages: Sequence[Message], number: int, content: str, where: str
    ) -> tuple[str, str]:
        """The rendering before and behind the mark in `content` of message `number`."""
        changed = [*messages]
        changed[number] = {**messages[number], "content": content}
        before, mark, behind = self._render(changed, where).partition(MARK)
        if not mark or MARK in behind:
            raise ValueError(f"{where}: the chat template does not write its content once")
        return before, behind

    def _prompt_length(self, text: str, before: Sequence[Message], where: str) -> int | None:
        """The length of the prompt of the next message.

        None if `text` does not begin with it, or if there is no generation prompt.
        """
        try:
            prompt, bare = (self._render(before, where, prompt=asks) for asks in (True, False))
        except ValueError:  # a template may refuse a conversation without messages, or a part of it
            return None
        return len(prompt) if prompt != bare and text.startswith(prompt) else None


def fixed_clock(template: str) -> str:
    """The template with a macro in place of transformers' `strftime_now`, which gives NOW."""
    if "strftime_now" not in template:
        return template
    values = "".join(f"|replace('{d}', '{NOW.strftime(d)}')" for d in DIRECTIVES)
    # {{ '' }}: jinja removes a line end behind a block, and this one would be the template's
    macro = f"{{% macro strftime_now(form) %}}{{{{ form{values} }}}}{{% endmacro %}}{{{{ '' }}}}"
    return macro + template


def _messages(record: dict[str, Any], where: str) -> tuple[list[Message], int]:
    """The messages of a record, and the number of U+FFFD put into them."""
    if "messages" in record:
        raw = record["messages"]
        if not isinstance(raw, list) or not raw:
            raise ValueError(f"{where}: field 'messages' is not a list of messages")
    elif "prompt" in record or "completion" in record:
        (user, a), (assistant, b) = (
            string_in(record, name, where) for name in ("prompt", "completion")
        )
        messages = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ]
        return messages, a + b
    else:
        raise ValueError(
            f"{where}: neither 'messages' nor 'prompt' and 'completion'; there are {some(record)}"
        )
    messages, replaced = [], 0
    for number, message in enumerate(raw):
        place = f"{where}: messages[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{place}: a {type(message).__name__}, not an object")
        if set(message) != {"role", "content"}:
            raise ValueError(f"{place}: has {some(message)}, must have role and content alone")
        (role, a), (content, b) = (string_in(message, n, place) for n in ("role", "content"))
        messages.append({"role": role, "content": content})
        replaced += a + b
    return messages, replaced


def _content(token: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty if there is none."""
    if not path.exists():
        return {}
    try:
        config = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON: {quoted(error)}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a {type(config).__name__}, not a JSON object")
    return config


def _read_text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a regular file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
