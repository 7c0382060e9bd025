"""Contract of the reference application: it serves the bus only; its state is in its heartbeats."""
