"""Load a run's configuration whose model is that of a Hugging Face directory.

With `checkpoint.resume: hf:DIR`, keys of `model` that neither the file nor an override gives have
the values of DIR/config.json, and so has `data.tokenizer` if DIR has a tokenizer. Keys that are
given must agree with config.json, which is checked when the run starts (`source.HfSource.check`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coatlm.config import Config, ConfigError, Model, make_config, override, read_mapping
from coatlm.config.fields import expand_user
from coatlm.config.urls import is_url
from coatlm.files import read_json
from coatlm.hf.config import read_model

PREFIX = "hf:"  # of checkpoint.resume, before the directory


def hf_directory(resume: str) -> Path | None:
    """The directory that `checkpoint.resume` names as hf:DIR, else None; hf:// begins a URL."""
    named = resume.startswith(PREFIX) and not is_url(resume)
    return Path(resume.removeprefix(PREFIX)) if named else None


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load a YAML file with overrides, completed from hf:DIR. Raises ConfigError."""
    return make_config(completed(override(read_mapping(path), overrides)))


def completed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Add the model and the tokenizer of hf:DIR to a mapping that names it; else return a copy."""
    checkpoint = mapping.get("checkpoint")
    resume = checkpoint.get("resume") if isinstance(checkpoint, Mapping) else None
    if not isinstance(resume, str) or hf_directory(resume) is None:
        return dict(mapping)
    model = mapping.get("model")
    if isinstance(model, Mapping) and model.keys() >= Model.model_fields.keys():
        return dict(mapping)  # the resolved file of a run, which works without the directory
    try:
        directory = Path(expand_user(resume.removeprefix(PREFIX)))
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


def _data(directory: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    from coatlm.hf.tokenizer import tokenizer_of  # imports that take a second

    spec = tokenizer_of(directory, raw)
    return {} if spec is None else {"tokenizer": spec}
