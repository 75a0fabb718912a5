"""``python -m ratchet_hooks.probe``."""

from ratchet_hooks.manage.probe import main

if __name__ == "__main__":
    main()
