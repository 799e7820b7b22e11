"""Imported last by the server of tests/distributed.py, of which ranks are forks.

What the server holds stays. A collection of garbage that skips it takes a tenth of the time in a
rank, and writes to none of the pages that the rank shares with the server.
"""

import gc

gc.collect()
gc.freeze()
