"""Contract of the actor application: it serves the bus and DCS; its state is in its heartbeats."""
