"""Imported last by the server of tests/distributed.py, of which ranks are forks.

What the server holds stays. Without it, a collection of garbage in a rank takes a tenth of the
time, and writes to none of the pages that the rank shares with the server.
"""

import gc

gc.collect()
gc.freeze()
