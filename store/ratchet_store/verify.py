"""``python -m ratchet_store.verify``."""

import sys

from ratchet_store.read.verify import main

if __name__ == "__main__":
    sys.exit(main())
