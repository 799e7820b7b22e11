"""Show, verify or compare checkpoints: the code is in coatlm/commands/inspect.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("coatlm.commands.inspect", run_name="__main__")
