"""The types of the fields in state.json, checked before a run resumes from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from coatlm.config import Optim, OptimRecipe
from coatlm.model.bf16_tensors import JOINT
from coatlm.model.numerics import TENSORS
from coatlm.train.checkpoint import CheckpointError, read_state
from coatlm.train.manifest import STATE

TENSOR_KEY = rf"^[1-9]\d{{0,8}}/({'|'.join((*TENSORS, JOINT))})$"  # LAYER/TENSOR


class SavedSpikes(BaseModel):
    """The state of the spike guard, as `train.spikes.SpikeGuard.state` returns it."""

    model_config = ConfigDict(strict=True)

    values: list[list[float]]
    count: NonNegativeInt


class SavedGuard(BaseModel):
    """The state of precision.guard, as `train.guard.PrecisionGuard.state` returns it."""

    model_config = ConfigDict(strict=True)

    mode: str
    in_bf16: list[PositiveInt]
    tensors: list[Annotated[str, Field(pattern=TENSOR_KEY)]] = []
    suspected: list[str]
    reported: list[str]


class SavedData(BaseModel):
    """The fields of the saved configuration's section `data` that a resumed run reads."""

    model_config = ConfigDict(strict=True)

    seq_len: PositiveInt
    tokenizer: str
    reset_attention_mask: bool = False  # before there was this key, samples had no documents
    reset_position_ids: bool = False


class SavedOptim(BaseModel):
    """The field of the saved configuration's section `optim` that a resumed run reads."""

    model_config = ConfigDict(strict=True)

    recipe: OptimRecipe = Optim().recipe


class SavedTrain(BaseModel):
    """The field of the saved configuration's section `train` that a resumed run reads."""

    model_config = ConfigDict(strict=True)

    global_batch: PositiveInt


class SavedSource(BaseModel):
    """The identity of one source of the blend: see `data.identity.SourceIdentity`."""

    model_config = ConfigDict(strict=True)

    documents: NonNegativeInt
    tokens: NonNegativeInt
    weight: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    sha256: str


class SavedConfig(BaseModel):
    """The parts of the saved configuration that a resumed run reads; others are only compared."""

    model_config = ConfigDict(strict=True)

    model: dict[str, Any]
    optim: SavedOptim
    data: SavedData
    train: SavedTrain
    checkpoint: dict[str, Any]


class RunState(BaseModel):
    """The content of state.json, which may have more keys."""

    model_config = ConfigDict(strict=True)

    step: NonNegativeInt
    tokens: NonNegativeInt
    samples: NonNegativeInt | None = None
    updates: NonNegativeInt
    skipped: NonNegativeInt
    tokenizer: str
    data: list[SavedSource] | None = None
    window: list[float] = []
    config: SavedConfig
    skipped_in_row: NonNegativeInt = 0
    left_out: list[Annotated[list[NonNegativeInt], Len(2, 2)]] = []
    inherited: NonNegativeInt = 0
    flat_groups: dict[str, list[list[dict[str, Any]]]] | None = None
    automatic_scales: dict[str, float] = {}
    summed_ranks: PositiveInt | None = None
    gradient_amaxes: dict[str, dict[str, list[float]]] = {}
    reduction_amaxes: dict[str, list[float]] = {}
    clip_norm: NonNegativeFloat | None = None
    spikes: SavedSpikes | None = None
    guard: SavedGuard | None = None


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """Read and validate the state of a run's checkpoint. Raises CheckpointError in one line."""
    state = read_state(checkpoint)
    try:
        RunState.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{checkpoint / STATE} is damaged ({where}: {first['msg'][:100]})"
        ) from error
    return state
