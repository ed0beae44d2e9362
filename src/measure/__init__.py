"""One training step, on a simulated GPU or a real one: build it, run it, read its memory."""
