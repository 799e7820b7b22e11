"""Plot runs: the code is in coatlm/commands/plot.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.plot", run_name="__main__")
