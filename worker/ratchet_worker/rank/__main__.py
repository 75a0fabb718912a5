"""``python -m ratchet_worker.rank``."""

import sys

from ratchet_worker.rank.main import main

if __name__ == "__main__":
    sys.exit(main())
