"""Messages between agents, ranks and the service, and their time limits."""
