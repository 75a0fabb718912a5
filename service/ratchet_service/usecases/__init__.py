"""The control plane's use cases, independent of HTTP. One module per subject. A write is one transaction, except for
``prune_checkpoints``, which needs several."""
