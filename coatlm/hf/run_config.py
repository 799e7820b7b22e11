"""Load a run's configuration whose model is that of a Hugging Face directory, here or at a URL.

With `checkpoint.resume: hf:DIR`, keys of `model` that neither the file nor an override gives have
the values of DIR/config.json, and so has `data.tokenizer` if DIR has a tokenizer. Keys that are
given must agree with config.json, which is checked when the run starts (`source.HfSource.check`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coatlm.config import Config, ConfigError, Data, Model, make_config, override, read_mapping
from coatlm.config.fields import expand_user
from coatlm.config.urls import is_url
from coatlm.files import read_json
from coatlm.hf.config import read_model
from coatlm.hf.download import fetched, named

PREFIX = "hf:"  # of checkpoint.resume, before the directory


def hf_directory(resume: str) -> Path | str | None:
    """The directory that `checkpoint.resume` names as hf:DIR, or as text its URL; else None.

    hf:// in place of hf:hf:// begins the URL of a checkpoint.
    """
    if is_url(resume) or not resume.startswith(PREFIX):
        return None
    rest = resume.removeprefix(PREFIX)
    return rest if is_url(rest) else Path(rest)


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load a YAML file with overrides, completed from hf:DIR. Raises ConfigError."""
    return make_config(completed(override(read_mapping(path), overrides)))


def completed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Add the model and the tokenizer of hf:DIR to a mapping that names it; else return a copy."""
    checkpoint = mapping.get("checkpoint")
    resume = checkpoint.get("resume") if isinstance(checkpoint, Mapping) else None
    place = hf_directory(resume) if isinstance(resume, str) else None
    if place is None:
        return dict(mapping)
    model = mapping.get("model")
    if isinstance(model, Mapping) and model.keys() >= Model.model_fields.keys():
        return dict(mapping)  # the resolved file of a run, which works without the directory
    try:
        place = place if isinstance(place, str) else Path(expand_user(str(place)))
        directory = fetched(place, _cache_dir(mapping))
        with named(place, directory):
            raw = read_json(directory / "config.json")
            found = {"model": read_model(raw), "data": _data(directory, raw)}
    except ValueError as error:
        raise ConfigError(f"checkpoint.resume={resume}: {error}") from error
    result = dict(mapping)
    for section, values in found.items():
        given = mapping.get(section)
        if values and (given is None or isinstance(given, Mapping)):
            result[section] = values | dict(given or {})
    return result


def _cache_dir(mapping: Mapping[str, Any]) -> Path:
    """data.cache_dir of a mapping that is not checked yet."""
    data = mapping.get("data")
    given = data.get("cache_dir") if isinstance(data, Mapping) else None
    default: Path = Data.model_fields["cache_dir"].default
    return Path(expand_user(given)) if isinstance(given, str) else default


def _data(directory: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    from coatlm.hf.tokenizer import tokenizer_of  # imports that take a second

    spec = tokenizer_of(directory, raw)
    return {} if spec is None else {"tokenizer": spec}
