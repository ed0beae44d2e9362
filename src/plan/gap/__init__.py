"""Why an estimate and a measurement differ: settings first, then parts of what these leave."""
