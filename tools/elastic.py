"""torchrun for batch systems: the code is in coatlm/commands/elastic.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.elastic", run_name="__main__")
