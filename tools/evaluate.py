"""Compute the perplexity of a checkpoint: the code is in coatlm/commands/evaluate.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.evaluate", run_name="__main__")
