"""The client's API by resource."""
