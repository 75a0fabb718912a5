"""``python -m ratchet_worker.agent``."""

from ratchet_worker.agent.checkpoint_upload import exit_process
from ratchet_worker.agent.main import main

if __name__ == "__main__":
    exit_process(main())
