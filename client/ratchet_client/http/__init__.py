"""HTTP transport and event streams of the client, its errors, discovery of the service, configuration file."""
