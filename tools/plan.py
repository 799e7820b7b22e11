"""Rank the layouts of a run: the code is in coatlm/commands/plan.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.plan", run_name="__main__")
