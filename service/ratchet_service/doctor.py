"""``python -m ratchet_service.doctor``."""

import sys

from ratchet_service.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
