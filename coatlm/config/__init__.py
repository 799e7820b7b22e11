"""The configuration of a run: frozen, strict, and checked before anything is allocated.

A run is described by one YAML file and dotted overrides (`optim.lr=3e-4`). They are merged with the
precedence defaults < preset < file < command line, then validated. `ConfigError` reports every
mistake in one line, `path=value: reason`.

    recipes                the table of FP8 recipes: GEMM operands and tensors saved for backward
    run, model, parallel   the sections: each field with its range and the docstring for --keys
    combined               Config, and checks that involve several sections
    presets                number formats of a whole run under one name
    load, yaml_text        file and overrides -> Config
    keys, hints            the table of --keys; suggestions for unknown keys
    urls                   which URLs are taken

Checks that need the number of processes are in `Config.data_parallel_size`.
"""

from coatlm.config.combined import LAYOUT, Config
from coatlm.config.errors import ConfigError, shortened
from coatlm.config.fields import MOST_RANKS
from coatlm.config.keys import keys_table
from coatlm.config.load import dotted, load_config, make_config, override, read_mapping
from coatlm.config.log import Log
from coatlm.config.model import Model, Precision, PrecisionRecipe
from coatlm.config.optim import FP32_RECIPES, Optim, OptimRecipe
from coatlm.config.parallel import ONLY_ABOVE_1, CpCommKv, GradComm, Parallel, TpCommReduce
from coatlm.config.presets import PRESETS
from coatlm.config.rope import RopeScaling
from coatlm.config.run import Checkpoint, Data, DataSource, Eval, Run, Train
from coatlm.config.window import Window
from coatlm.config.yaml_text import dump_yaml

__all__ = [
    "FP32_RECIPES",
    "LAYOUT",
    "MOST_RANKS",
    "ONLY_ABOVE_1",
    "PRESETS",
    "Checkpoint",
    "Config",
    "ConfigError",
    "CpCommKv",
    "Data",
    "DataSource",
    "Eval",
    "GradComm",
    "Log",
    "Model",
    "Optim",
    "OptimRecipe",
    "Parallel",
    "Precision",
    "PrecisionRecipe",
    "RopeScaling",
    "Run",
    "TpCommReduce",
    "Train",
    "Window",
    "dotted",
    "dump_yaml",
    "keys_table",
    "load_config",
    "make_config",
    "override",
    "read_mapping",
    "shortened",
]
