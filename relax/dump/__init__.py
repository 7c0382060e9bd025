"""Recorded training steps: write and read them, compute them again, compare them.

Actor ─ Recorder watches each micro-batch's loss ─▶ StepDump ─▶ files ─▶ replay: the same trainer over the same
                                                       rows and weights, recorded by the same Recorder ─▶ StepDump
diff compares two of them, field by field in the order of the pipeline
"""
