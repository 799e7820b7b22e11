"""Text <-> token ids: one interface over four kinds of tokenizers.

    spec = byte
         | hf:tokenizer.json               [?eod=TOKEN]
         | sentencepiece:FILE.model        [?eod=TOKEN]
         | tiktoken:NAME
         | tiktoken:FILE.tiktoken?pattern=REGEX

Special tokens in text have no effect: a document that contains `<|endoftext|>` gets the ids of
those characters, not the end-of-document id, also where a vocabulary has that token as an ordinary
piece. Nothing is added, truncated or padded. `TOKEN` is
needed if a vocabulary has none of `EOD_NAMES`. A .tiktoken rank file does not define how text is
split into words; `pattern` (the rest of the spec, taken literally) does. Text that the pattern does
not match is lost, and the end-of-document id follows the last rank.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from coatlm.data.streams import quoted

if TYPE_CHECKING:
    import tiktoken

EOD_NAMES = (  # names of end-of-document tokens in published vocabularies
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eod|>",
    "<eod>",
    "<eos>",  # before </s>, which Gemma has as the HTML tag
    "</s>",
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
SPECS = "byte, hf:tokenizer.json, sentencepiece:FILE.model, tiktoken:NAME, tiktoken:FILE?pattern=.."
MAX_IDS = 1 << 31  # ids are stored as signed 32-bit integers
_OPTIONS = re.compile(r"(?:eod=(?P<eod>[^&]+))?&?(?:pattern=(?P<pattern>.+))?", re.DOTALL)


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    spec: str  # the argument of `make_tokenizer`
    vocab_size: int  # ids are in [0, vocab_size)
    eod: int  # the id that ends a document
    fingerprint: str  # SHA-256 of what defines the ids; does not depend on the file's path

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without end-of-document. `text` has no lone surrogates."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and end-of-document, which decodes to nothing."""

    spec = "byte"
    vocab_size = 257
    eod = 256
    fingerprint = hashlib.sha256(b"byte").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the tokenizers library."""

    def __init__(self, spec: str, path: Path, eod: str | None) -> None:
        import tokenizers

        # texts are encoded one by one, and threads of the library would not survive a fork
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        content = _read(spec, path)
        with library_errors(f"{path}: not a tokenizer.json"), _silent():
            self._model = tokenizers.Tokenizer.from_buffer(content)
        self._model.no_truncation()  # files for serving may turn on truncation and padding
        self._model.no_padding()
        self._model.encode_special_tokens = True
        vocab = self._model.get_vocab(with_added_tokens=True)
        self.spec = spec
        self.vocab_size = max(vocab.values(), default=-1) + 1  # some ids may be unused
        self.eod = _find_eod(spec, vocab, eod)
        self._spelled = _spelled(self.eod, vocab)
        self.fingerprint = _fingerprint("hf", content, self.eod)

    def encode(self, text: str) -> list[int]:
        with library_errors(f"data.tokenizer={self.spec}: cannot encode a document"):
            # not `encode`, which also finds the characters of each token: a sixth of the time
            (found,) = self._model.encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = found.ids
        return _without_eod(self, ids, self._spelled)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode(list(ids), skip_special_tokens=False)
        return text


class SentencePieceTokenizer:
    """A sentencepiece model file."""

    def __init__(self, spec: str, path: Path, eod: str | None) -> None:
        import sentencepiece

        content = _read(spec, path)
        self._model = sentencepiece.SentencePieceProcessor()
        with library_errors(f"{path}: not a sentencepiece model"), _silent():
            self._model.LoadFromSerializedProto(content)
        self.spec = spec
        self.vocab_size = int(self._model.vocab_size())
        pieces: dict[str, int] = {}
        for number in range(self.vocab_size):
            with contextlib.suppress(UnicodeDecodeError):  # a piece that is not UTF-8
                pieces[self._model.id_to_piece(number)] = number
        if eod is None and self._model.eos_id() >= 0:
            self.eod = int(self._model.eos_id())
        else:
            self.eod = _find_eod(spec, pieces, eod)
        self._spelled = _spelled(self.eod, pieces)
        self.fingerprint = _fingerprint("sentencepiece", content, self.eod)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return _without_eod(self, ids, self._spelled)

    def decode(self, ids: Sequence[int]) -> str:
        content: bytes = self._model.decode(list(ids), return_type=bytes)
        return content.decode("utf-8", errors="replace")


class TiktokenTokenizer:
    """A tiktoken encoding: one of the library's own by name, or a rank file with a pattern."""

    def __init__(self, spec: str, target: str, pattern: str | None) -> None:
        import tiktoken

        if target in tiktoken.list_encoding_names():
            if pattern is not None:
                raise ValueError(f"data.tokenizer={spec!r}: {target} brings its own pattern")
            self._model = _named_encoding(spec, target)
            content = target.encode()  # tiktoken itself verifies a hash of the ranks
        else:
            content, ranks = _read_ranks(spec, Path(target))
            if pattern is None:
                raise ValueError(
                    f"data.tokenizer={spec!r}: a rank file needs the regex that cuts text into "
                    "words: tiktoken:FILE?pattern=REGEX"
                )
            content += b"\0" + pattern.encode()
            end = {EOD_NAMES[0]: max(ranks.values()) + 1}
            with library_errors(f"data.tokenizer={spec!r}"), _silent():
                self._model = tiktoken.Encoding(
                    spec, pat_str=pattern, mergeable_ranks=ranks, special_tokens=end
                )
        self.spec = spec
        self.vocab_size = self._model.n_vocab
        self.eod = self._model.eot_token
        self.fingerprint = _fingerprint("tiktoken", content, self.eod)

    def encode(self, text: str) -> list[int]:
        with library_errors(f"data.tokenizer={self.spec}: cannot encode a document"):
            return self._model.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._piece, ids)).decode("utf-8", errors="replace")

    def _piece(self, number: int) -> bytes:
        try:
            return self._model.decode_single_token_bytes(number)
        except KeyError:  # some ranks may be unused
            return "\ufffd".encode()


def make_tokenizer(spec: str) -> Tokenizer:
    """Create the tokenizer of a spec (see the module docstring). Raises a one-line ValueError."""
    kind, _, rest = spec.partition(":")
    target, _, tail = rest.partition("?")
    options = _OPTIONS.fullmatch(tail)
    if options is None or (kind != "byte" and not target) or (kind == "byte" and spec != "byte"):
        raise ValueError(f"data.tokenizer={spec!r}: allowed are {SPECS}")
    eod, pattern = options["eod"], options["pattern"]
    if eod if kind == "tiktoken" else pattern:
        raise ValueError(
            f"data.tokenizer={spec!r}: eod= is for hf and sentencepiece, pattern= for tiktoken"
        )
    tokenizer: Tokenizer
    try:
        if kind == "byte":
            tokenizer = ByteTokenizer()
        elif kind == "hf":
            tokenizer = HuggingFaceTokenizer(spec, Path(target), eod)
        elif kind == "sentencepiece":
            tokenizer = SentencePieceTokenizer(spec, Path(target), eod)
        elif kind == "tiktoken":
            tokenizer = TiktokenTokenizer(spec, target, pattern)
        else:
            raise ValueError(f"data.tokenizer={spec!r}: allowed are {SPECS}")
    except ImportError as error:
        raise ValueError(
            f"data.tokenizer={spec!r}: its package is missing: pip install {error.name}"
        ) from None
    if tokenizer.vocab_size > MAX_IDS:
        raise ValueError(
            f"data.tokenizer={spec!r}: has ids up to {tokenizer.vocab_size - 1}; "
            f"they must be below {MAX_IDS}"
        )
    return tokenizer


def _read(spec: str, path: Path) -> bytes:
    """Read a tokenizer file. Raises ValueError if it is empty or not readable."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"data.tokenizer={spec!r}: {path}: is not a regular file")
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"data.tokenizer={spec!r}: {path}: {error.strerror}") from None
    if not content:
        raise ValueError(f"data.tokenizer={spec!r}: {path}: the file is empty")
    return content


def _find_eod(spec: str, vocab: dict[str, int], name: str | None) -> int:
    """The id of token `name`, or of the first of EOD_NAMES in the vocabulary."""
    for candidate in EOD_NAMES if name is None else (name,):
        if candidate in vocab:
            return vocab[candidate]
    if name is not None:
        raise ValueError(f"data.tokenizer={spec!r}: the vocabulary has no token {name!r}")
    raise ValueError(
        f"data.tokenizer={spec!r}: the vocabulary has none of {', '.join(EOD_NAMES)}; "
        "name its end-of-document token with ?eod=TOKEN"
    )


def _spelled(token: int, vocab: dict[str, int]) -> list[int] | None:
    """The ids of the characters of a token's name; None if it or one of them is not in `vocab`."""
    name = next((name for name, number in vocab.items() if number == token), "")
    found = [vocab[character] for character in name if character in vocab]
    return found if name and len(found) == len(name) else None


def _without_eod(tokenizer: Tokenizer, ids: list[int], spelled: list[int] | None) -> list[int]:
    """The ids of a text with `spelled` in place of the end-of-document id, if that is among them.

    It is where end-of-document is an ordinary piece of the vocabulary and the text has its name.
    Raises ValueError if the vocabulary cannot spell that name, which `spelled` of None means.
    """
    if tokenizer.eod not in ids:
        return ids
    if spelled is None or tokenizer.eod in spelled:
        raise ValueError(
            f"data.tokenizer={tokenizer.spec}: a document has the name of the end-of-document "
            f"token, {tokenizer.decode([tokenizer.eod])!r}, which this vocabulary cannot spell by "
            "single characters; remove it from the text, or name another token with ?eod=TOKEN"
        )
    return [i for one in ids for i in (spelled if one == tokenizer.eod else [one])]


def _named_encoding(spec: str, name: str) -> tiktoken.Encoding:
    """One of tiktoken's own encodings; tiktoken downloads it if its cache does not have it."""
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # errors of the network are OSErrors
        raise ValueError(
            f"data.tokenizer={spec!r}: its rank file is neither in tiktoken's cache "
            f"(TIKTOKEN_CACHE_DIR) nor could it be fetched: {quoted(error)}"
        ) from None


def _read_ranks(spec: str, path: Path) -> tuple[bytes, dict[bytes, int]]:
    """The content and ranks of a .tiktoken file, whose lines are base64(token), space, rank."""
    content = _read(spec, path)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            number_of = int(rank)
            if not 0 <= number_of < MAX_IDS - 1:  # the last id is for end-of-document
                raise ValueError
            ranks[base64.b64decode(token, validate=True)] = number_of
        except ValueError:
            raise ValueError(
                f"{path}: line {number} is not `base64 rank` of a .tiktoken file"
            ) from None
    if len(set(ranks.values())) < len(ranks) or any(bytes([b]) not in ranks for b in range(256)):
        raise ValueError(f"{path}: ranks must be unique and cover each of the 256 bytes")
    return content, ranks


def _fingerprint(kind: str, content: bytes, eod: int) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + content + b"\0" + str(eod).encode()).hexdigest()


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any exception of a tokenizer library into a one-line ValueError, `what: reason`.

    A Rust panic is a BaseException of pyo3, whose class no module exports.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {quoted(error) or type(error).__name__}") from None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discard what native code writes to stderr, such as 50 lines for a Rust panic."""
    try:
        saved = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
