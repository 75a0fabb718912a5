"""The control plane's use cases, independent of HTTP; one module per subject. Most writes are one transaction."""
