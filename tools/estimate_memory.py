"""Estimate the memory of a run: the code is in coatlm/commands/estimate.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.estimate", run_name="__main__")
