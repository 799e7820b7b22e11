"""The command `coatlm`: it starts a module of coatlm/commands/, and imports nothing else."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import os
import runpy
import sys
from collections.abc import Mapping, Sequence

COMMANDS = {
    "train": "train a model, or plan a run with --dry-run",
    "prepare": "tokenize text into datasets, or verify them",
    "convert": "convert checkpoints between Hugging Face, Megatron and coatlm",
    "inspect": "show, verify or compare checkpoints",
    "evaluate": "compute perplexity and scores of a checkpoint, also in FP8",
    "plot": "plot the curves of runs, and tabulate their losses",
    "compare": "find the first difference between two runs",
    "report": "write a run as one HTML page",
    "estimate": "estimate the device memory of a run",
    "plan": "rank the layouts of a run by predicted speed",
    "submit": "write a batch script for SLURM and submit it",
}
EXAMPLES = """
    coatlm train quickstart                       a first run, on any machine
    coatlm train llama3-8b --dry-run --ranks 64   what a run would need
    coatlm train --keys optim                     every key of a section
    coatlm report runs/quickstart                 what came out of it

`coatlm COMMAND --help` has the options of a command, with examples. Completion in bash or zsh:

    eval "$(register-python-argcomplete coatlm)"
"""


def main() -> None:
    """Run the command line."""
    words = typed(sys.argv, os.environ)
    if words and words[0] in COMMANDS:
        if len(sys.argv) > 1:
            sys.argv = [f"coatlm {words[0]}", *words[1:]]
        else:
            os.environ["_ARGCOMPLETE"] = "2"  # the second word is the program to argcomplete
        module = "launch" if words[0] == "train" and launches(words[1:], os.environ) else words[0]
        runpy.run_module(f"coatlm.commands.{module}", run_name="__main__")
        return
    parser = argparse.ArgumentParser(
        "coatlm",
        description="Pretrain language models in FP8: commands are\n\n"
        + "\n".join(f"    {name:<10}{purpose}" for name, purpose in COMMANDS.items()),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="coatlm COMMAND ...",
    )
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=importlib.metadata.version("coatlm"))
    if not sys.argv[1:] and "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    if words and not words[0].startswith("-"):
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        known = f"do you mean {near[0]}?" if near else f"one of {', '.join(COMMANDS)}"
        parser.exit(2, f"error: no command {words[0]!r}; {known}\n")
    parser.parse_args(words or ["--help"])


def typed(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The words after `coatlm`; while a shell completes one, those before the cursor's word."""
    if "_ARGCOMPLETE" not in environment:
        return list(argv[1:])
    line = environment["COMP_LINE"][: int(environment["COMP_POINT"])]
    return line.rpartition(" ")[0].split()[1:]


def launches(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether `coatlm train` starts the ranks, and is not one of them, started by torchrun or srun.

    A command line with another option than --preset does not train.
    """
    is_rank = {"RANK", "WORLD_SIZE"} & environment.keys()
    is_task = {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environment.keys()
    options = [word for word in words if word.startswith("-")]
    asks = not words or any(not option.startswith("--preset") for option in options)
    return not (is_rank or is_task or asks or "_ARGCOMPLETE" in environment)


if __name__ == "__main__":
    main()
