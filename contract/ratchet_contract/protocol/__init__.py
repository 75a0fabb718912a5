"""What agents, ranks and the service exchange, and the rules by which they read it."""
