"""The control plane's use cases, independent of HTTP. One module per subject; each write is one transaction."""
