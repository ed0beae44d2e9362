"""peakcast: how much GPU memory a fine-tuning job needs, before it is queued."""
