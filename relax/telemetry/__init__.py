"""Telemetry: the metric table, the run folder, the summary of a run and its report."""
