"""Convert tokenizers between a Hugging Face directory and a checkpoint of coatlm.

Files of a Hugging Face directory are copied unchanged. `data.tokenizer` of coatlm's own runs is
exported for transformers' AutoTokenizer: a tokenizer.json is copied, a sentencepiece model becomes
tokenizer.model, and bytes become a byte-level BPE without merges that has the same ids. A tiktoken
encoding has no such form.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coatlm.data.tokenizer import EOD_NAMES, ByteTokenizer, Tokenizer, make_tokenizer
from coatlm.files import read_json
from coatlm.hf.config import check_token_ids
from coatlm.hf.files import write_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION = "generation_config.json"


def check_files(source: Path, names: tuple[str, ...], rows: int) -> None:
    """Raise ValueError with the file's name if one of `names` is not valid.

    `rows` is the number of embedding rows, the limit for token ids in generation_config.json.
    """
    for path in (source / name for name in names if name.endswith(".json")):
        if path.is_file():
            content = read_json(path)
            if path.name == GENERATION:
                check_token_ids(str(path), content, rows)


def copy_files(source: Path, destination: Path, names: tuple[str, ...]) -> list[str]:
    """Copy those of `names` that exist; returns them."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, destination / name)
    return found


def spec_in(directory: Path, eos: int | None) -> str | None:
    """The `data.tokenizer` for a Hugging Face directory; None if coatlm cannot use its tokenizer.

    `eos` is the end-of-text id of its config.json.
    """
    fast = directory / "tokenizer.json"
    if fast.exists():
        token = _token(fast, eos) if eos is not None else None
        return f"hf:{fast}" + (f"?eod={token}" if token else "")
    slow = directory / "tokenizer.model"
    return f"sentencepiece:{slow}" if slow.exists() else None


def tokenizer_of(directory: Path, raw: Mapping[str, Any]) -> str | None:
    """The `data.tokenizer` of a directory with this config.json; None without a tokenizer.

    Raises ValueError for an end-of-text id that is not a row of the embedding.
    """
    check_token_ids(str(directory / "config.json"), raw, raw["vocab_size"])
    eos = first_eos(raw)
    if eos is None and (directory / GENERATION).exists():
        generation = read_json(directory / GENERATION)
        check_token_ids(str(directory / GENERATION), generation, raw["vocab_size"])
        eos = first_eos(generation)
    return spec_in(directory, eos)


def moved(spec: str, source: Path, destination: Path) -> str:
    """The spec for a tokenizer file that moved from one directory to another."""
    return spec.replace(f":{source}/", f":{destination}/", 1)


def export_tokenizer(spec: str, fingerprint: str, destination: Path) -> tuple[int | None, str]:
    """Write the files for AutoTokenizer.

    Returns the end-of-document id, and a note if the tokenizer could not be exported. Raises
    ValueError if the files of `spec` do not have this `fingerprint`.
    """
    try:
        tokenizer = make_tokenizer(spec)
    except ValueError as error:
        return None, f"no tokenizer was written: {error}"
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"data.tokenizer={spec}: not the file that this checkpoint trained with")
    kind, _, rest = spec.partition(":")
    path = Path(rest.partition("?")[0])
    if kind == "byte":
        _write_byte_tokenizer(destination)
    elif kind == "hf":
        shutil.copyfile(path, destination / "tokenizer.json")
        if path.name == "tokenizer.json":  # then the files beside it belong to it
            others = tuple(n for n in TOKENIZER_FILES if n not in ("tokenizer.json", "vocab.json"))
            copy_files(path.parent, destination, others)
        if not (destination / "tokenizer_config.json").exists():
            _write_fast_config(destination, _token(path, tokenizer.eod))
    elif kind == "sentencepiece":
        shutil.copyfile(path, destination / "tokenizer.model")
        if not _is_like_llama(path):
            return tokenizer.eod, (
                "tokenizer.model was copied, but transformers has no tokenizer for it: its "
                "LlamaTokenizer is for BPE models that leave the text as it is"
            )
        _write_sentencepiece_config(destination)
    else:
        return tokenizer.eod, f"no tokenizer was written: {spec} has no Hugging Face form"
    return tokenizer.eod, ""


def can_export(spec: str) -> bool:
    """Whether the tokenizer of `data.tokenizer` is there and has a Hugging Face form."""
    try:
        make_tokenizer(spec)
    except ValueError:
        return False
    return not spec.startswith("tiktoken:")


def first_eos(raw: Mapping[str, Any]) -> int | None:
    """The end-of-text id of a config.json; the first one of a list."""
    eos = next(iter(eos_ids(raw)), None)
    return eos if isinstance(eos, int) else None


def token_ids(directory: Path, tokens: Sequence[str], rows: int) -> list[int]:
    """The ids of special tokens in the tokenizer.json of a directory.

    Raises ValueError if it has no such token, or the embedding, which has `rows` rows, no such row.
    """
    if not tokens:
        return []
    path, ids = directory / "tokenizer.json", []
    if not path.exists():
        raise ValueError(f"stop_tokens={tokens[0]}: needs a tokenizer.json, and none is exported")
    model = _loaded(path)
    for token in tokens:
        index = model.token_to_id(token)
        if index is None or index >= rows:
            raise ValueError(f"stop_tokens={token}: the exported tokenizer has no such token")
        ids.append(int(index))
    return ids


def eos_ids(raw: Mapping[str, Any]) -> list[int]:
    """The eos_token_id of a config.json or generation_config.json, which may be one or several."""
    eos = raw.get("eos_token_id")
    return [] if eos is None else eos if isinstance(eos, list) else [eos]


def add_eos(raw: dict[str, Any], ids: Sequence[int]) -> None:
    """Append `ids` to the eos_token_id of a config.json or generation_config.json."""
    before = eos_ids(raw)
    if added := [index for index in dict.fromkeys(ids) if index not in before]:
        raw["eos_token_id"] = [*before, *added]


def check_rows(tokenizer: Tokenizer, rows: int, *, hint: str = "") -> None:
    """Raise ValueError if the tokenizer has more ids than the embedding has rows.

    `hint` follows the message, such as how to add rows.
    """
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"tokenizer {tokenizer.spec}: has ids up to {tokenizer.vocab_size - 1}, "
            f"the embedding {rows} rows{hint}"
        )


def has_other_tokenizer(
    directory: Path, raw: Mapping[str, Any], spec: str, fingerprint: str
) -> bool:
    """Whether a Hugging Face directory has a tokenizer, and not that of this `data.tokenizer`.

    `raw` is the directory's config.json, and `fingerprint` that of `spec`, whose file may be gone.
    The directory may name another end-of-text token, and have its tokenizer in two formats.
    """
    files = {"hf": directory / "tokenizer.json", "sentencepiece": directory / "tokenizer.model"}
    own = [f"{kind}:{path}" for kind, path in files.items() if path.exists()]
    if not own:
        return False
    _, mark, eod = spec.partition("?eod=")
    own += [f"{each}{mark}{eod}" for each in own if mark]
    with suppress(ValueError):
        own.append(tokenizer_of(directory, raw) or own[0])
    for each in own:
        with suppress(ValueError):
            if make_tokenizer(each).fingerprint == fingerprint:
                return False
    return True


def _token(path: Path, index: int) -> str | None:
    token: str | None = _loaded(path).id_to_token(index)
    return token


def _loaded(path: Path) -> Any:
    """The tokenizers.Tokenizer of a file. Raises ValueError."""
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer.json: {error}") from None


def _write_byte_tokenizer(destination: Path) -> None:
    """Write a BPE over the 256 characters that represent bytes, in the order of the bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([EOD_NAMES[0]])
    assert model.token_to_id(EOD_NAMES[0]) == ByteTokenizer.eod
    # `save` of the library raises a bare Exception on a full disk
    (destination / "tokenizer.json").write_text(model.to_str(pretty=True), encoding="utf-8")
    _write_fast_config(destination, EOD_NAMES[0])


def _byte_characters() -> list[str]:
    """The character that represents each byte in byte-level BPE.

    Printable Latin-1 characters represent themselves, the other bytes characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _write_fast_config(destination: Path, end: str | None) -> None:
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    write_json(destination / "tokenizer_config.json", content)


def _is_like_llama(path: Path) -> bool:
    """Whether transformers' LlamaTokenizer splits text as this sentencepiece model does."""
    try:
        protocol: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise ValueError(f"{path}: reading it needs {error.name}: pip install protobuf") from None
    model = protocol.ModelProto()
    model.ParseFromString(path.read_bytes())
    trained, text = model.trainer_spec, model.normalizer_spec
    return bool(
        trained.model_type == trained.BPE
        and text.name == "identity"
        and text.add_dummy_prefix
        and not text.remove_extra_whitespaces
    )


def _write_sentencepiece_config(destination: Path) -> None:
    content = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,
        "add_eos_token": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
    }
    write_json(destination / "tokenizer_config.json", content)
