"""The database: engine, tables, migrations, leases, transitions, tokens."""
