"""The name under which the user started coatlm, for help and errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

SCRIPTS = {  # command -> the script of a checkout that starts the same code
    "train": "pretrain.py",
    "prepare": "tools/preprocess_data.py",
    "convert": "tools/convert_checkpoint.py",
    "inspect": "tools/inspect_checkpoint.py",
    "evaluate": "tools/evaluate.py",
    "plot": "tools/plot_run.py",
    "compare": "tools/compare_runs.py",
    "estimate": "tools/estimate_memory.py",
    "plan": "tools/plan.py",
    "submit": "tools/submit_slurm.py",
}
EXAMPLE = re.compile(rf"^    coatlm (?={'|'.join(SCRIPTS)})", re.MULTILINE)
COMMAND = re.compile(rf"\bcoatlm ({'|'.join(SCRIPTS)})\b")


def as_typed(text: str) -> str:
    """`text` with scripts in the place of `coatlm COMMAND` if a script was started.

    A line that begins with four spaces and a command is an example; it gets `python` as well.
    """
    if Path(sys.argv[0]).name not in {Path(script).name for script in SCRIPTS.values()}:
        return text
    text = EXAMPLE.sub("    python coatlm ", text)
    return COMMAND.sub(lambda found: SCRIPTS[found[1]], text)
