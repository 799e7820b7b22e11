"""Compare two runs: the code is in coatlm/commands/compare.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.compare", run_name="__main__")
