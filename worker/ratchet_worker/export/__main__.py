"""``python -m ratchet_worker.export``."""

from ratchet_worker.export.main import main

if __name__ == "__main__":
    main()
