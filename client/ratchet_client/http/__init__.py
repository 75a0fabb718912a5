"""HTTP transport of the client, discovery of the service, configuration file."""
