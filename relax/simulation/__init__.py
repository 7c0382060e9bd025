"""Time models of engines and trainer: what `relax simulate` and the simulated backends take how long for. Pure."""
