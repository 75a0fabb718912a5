"""``python stamped_sleep.py OUT SECONDS``: a job that only waits. Its first and its last line write their times into ``OUT``."""

import sys
import time

with open(sys.argv[1], "a") as out:
    out.write(f"{time.time()}\n")
    out.flush()
    time.sleep(float(sys.argv[2]))
    out.write(f"{time.time()}\n")
