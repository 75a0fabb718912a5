"""The launcher that runs jobs as processes of this machine."""
