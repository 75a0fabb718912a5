"""What the control plane does, free of HTTP. One module per subject; each write is one transaction."""
